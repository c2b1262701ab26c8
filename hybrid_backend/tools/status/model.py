"""The JSON of the status page. Ratios are 0..1, times are Unix seconds, rates are per second of wall clock.

``null`` means "not measured": a layer that attended nothing, or a metric that the engine does not have.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Number = Annotated[float, AfterValidator(lambda value: round(value, 5))]
PerLayer = tuple[Number | None, ...]
Level = Literal["good", "fair", "bad", "unknown"]
State = Literal["starting", "silent", "idle", "prompts", "decoding"]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Rates(_Model):
    """Means over a window that ends at a reading, all layers together. Shares are shares of time.

    Attributes:
        seconds: length of the window: 15, or one interval if that is longer; less after a start.
        prompt_per_second: prompt tokens. SGLang's figure excludes tokens from the prefix cache.
        first_token_seconds: time from a request's arrival to its first token (TTFT).
        token_seconds: time between two tokens of one request (TPOT).
        wait_share: the device tier waits for CPU partials.
        attention_share: attention of decode rows, where the CPU attends in place.
    """

    seconds: Number
    running: Number | None
    most_running: Number | None
    generated_per_second: Number | None
    prompt_per_second: Number | None
    prefix_hit_ratio: Number | None
    first_token_seconds: Number | None
    token_seconds: Number | None
    recalled_per_second: Number
    copied_bytes_per_second: Number | None
    wait_share: Number
    attention_share: Number | None

    @property
    def request_speed(self) -> float | None:
        """Tokens per second of one request that decodes.

        While prompts are read, this is one token per TPOT, because some running requests have no token yet. Otherwise
        the generated tokens are shared by the running requests.
        """
        generated, running = self.generated_per_second, self.running
        if generated and self.prompt_per_second and self.token_seconds:
            return 1 / self.token_seconds
        return generated / max(running, 1.0) if generated and running else None


class Column(_Model):
    """The interval between two readings, drawn as one column of the heat maps.

    Attributes:
        time: end of the interval, at which requests, host pool and frames were read.
        attended: share of the contexts' tokens that were attended in the interval.
        residency: share of the selected pages that were resident.
        cpu_ratio: share of the attended tokens that the CPU workers attended.
    """

    time: Number
    seconds: Number
    running: Number | None
    waiting: Number | None
    pool_fill: Number | None
    frames_in_use: Number | None
    rates: Rates
    attended: PerLayer
    residency: PerLayer
    cpu_ratio: PerLayer


class Layer(_Model):
    """A layer over the last 15 seconds; ``query_cosine`` and ``mass_recall`` are means since the server's start.

    Attributes:
        mass_samples: samples that ``mass_recall`` is the mean of; None for a layer that has attended every token since
            the start, which is not sampled.
    """

    layer: int
    attended: Number | None
    residency: Number | None
    cpu_ratio: Number | None
    attended_tokens_per_second: Number
    recalled_per_second: Number
    wait_share: Number
    attention_share: Number | None
    query_cosine: Number | None
    mass_recall: Number | None
    mass_samples: int | None = None


class Headline(_Model):
    """The server's state in one line. In the state ``silent`` all other figures are as old as the last reading."""

    state: State
    level: Level
    title: str
    detail: str


class Answer(_Model):
    """The answer to a question about the server.

    The verdict has a few words, and ``text`` the numbers behind it. ``change`` names the keys or flags that would
    help, empty if none is known.
    """

    question: str
    verdict: str
    text: str
    level: Level
    change: str = ""


class Status(_Model):
    """The whole page.

    Attributes:
        started: begin of this history. If it changes, the client drops the columns that it has.
        max_columns: number of columns that the history holds at most.
        stale_seconds: age of the last reading if the server gives no newer one; None while readings are fresh.
        problem: reason for which there is no fresh reading, or what the reading lacks, in one line.
        in_place: True if the CPU attends all tokens in the host pool: no frames, no copies, no CPU workers.
        figures: the last reading: the plugin's gauges without ``hybrid_``, and the engine's figures.
        glance: the three answers; empty before the first interval, and while the server is silent.
        columns: the columns later than the ``after`` of the request, oldest first.
    """

    version: str
    source: str
    started: Number
    current_time: Number = Field(alias="now")
    interval: float
    max_columns: int = Field(alias="kept")
    read: Number | None
    stale_seconds: Number | None
    problem: str | None
    engine: str | None
    model: str | None
    in_place: bool
    figures: dict[str, Number]
    headline: Headline
    glance: tuple[Answer, ...]
    layers: tuple[Layer, ...]
    columns: tuple[Column, ...]

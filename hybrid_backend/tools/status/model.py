"""The JSON of the status page. All ratios are 0..1, all times Unix seconds, all rates per second of wall clock.

``null`` stands for "nothing was measured": a layer that attended nothing, a metric that the engine does not have.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Rates(_Part):
    """Means over the last ``seconds`` before a reading, of all layers together."""

    seconds: float
    """At most 15, or one interval where that is longer; less after a start."""
    running: float | None
    """Requests in the engine's batch, mean of the readings."""
    most_running: float | None
    """The most of them at any reading."""
    generated_per_second: float | None
    prompt_per_second: float | None
    """Prompt tokens; SGLang's without those found in its prefix cache."""
    prefix_hit_ratio: float | None
    """Share of the prompts' tokens that the engine found in its prefix cache."""
    first_token_seconds: float | None
    """From a request's arrival to its first token (TTFT), mean of the first tokens of this time."""
    token_seconds: float | None
    """Between two tokens of one request (TPOT), mean of the tokens of this time."""
    recalled_per_second: float
    """Pages recalled into frames."""
    copied_bytes_per_second: float | None
    """From the host pool to the device tier."""
    wait_share: float
    """Share of the time in which the device tier waited for CPU partials."""
    attention_share: float | None
    """Share of the time that decoding rows' attention took, where the CPU attends in place."""
    attention_bytes_per_second: float | None
    """K and V that were read per second of that attention."""

    @property
    def request_speed(self) -> float | None:
        """Tokens per second of one running request, those whose prompts are read included."""
        generated, running = self.generated_per_second, self.running
        return generated / max(running, 1.0) if generated and running else None


class Column(_Part):
    """An interval between two readings, which is a column of the heat maps."""

    time: float
    """End of the interval."""
    seconds: float
    """Its length."""
    running: float | None
    """Requests in the engine's batch at its end."""
    waiting: float | None
    """Requests in the engine's queue at its end."""
    pool_fill: float | None
    """Share of the host pool in use at its end."""
    frames_in_use: float | None
    resident_requests: float | None
    rates: Rates
    attended: tuple[float | None, ...]
    """Per layer: share of the contexts' tokens that were attended in the interval."""
    residency: tuple[float | None, ...]
    """Per layer: share of the selected pages that were resident."""
    cpu_ratio: tuple[float | None, ...]
    """Per layer: share of the attended tokens that the CPU workers attended."""


class Layer(_Part):
    """A layer over the last 15 seconds; ratios are of the last 15 in which it attended, quality is since start."""

    layer: int
    attended: float | None
    residency: float | None
    cpu_ratio: float | None
    attended_tokens_per_second: float
    recalled_per_second: float
    wait_share: float
    lead_share: float
    """Seconds per second by which CPU partials started before they were needed."""
    attention_share: float | None
    query_cosine: float | None
    mass_recall: float | None


Level = Literal["good", "fair", "bad", "unknown"]


State = Literal["starting", "silent", "idle", "prompts", "decoding"]


class Headline(_Part):
    """The server's state in one line."""

    state: State
    """silent: the server gives no readings any more, and everything else is as old as the last one."""
    level: Level
    title: str
    detail: str


class Answer(_Part):
    """A judged question of the glance."""

    question: str
    verdict: str
    """A few words."""
    text: str
    """The numbers behind the verdict."""
    level: Level


class Change(_Part):
    """Something to change, the most pressing first."""

    problem: str
    """A word or two."""
    change: str
    """A key as ``--set`` takes it, or a flag, each with its value; or the command that reckons one."""
    others: tuple[str, ...]
    """Other ways out of the same problem."""


class Tile(_Part):
    """A number in words."""

    name: str
    value: str
    unit: str
    share: float | None = None
    """0..1, where the number is a share of a whole that can be drawn as a bar."""


class TileGroup(_Part):
    """Tiles of one span of time."""

    window: str
    """The time that the numbers are of, such as "mean of the last 15 s"."""
    tiles: tuple[Tile, ...]


class Status(_Part):
    """Everything that the page shows. ``columns`` are those after the ``after`` of the request, oldest first."""

    version: str
    """Version of hybrid_backend."""
    source: str
    """Address or name of the numbers' source."""
    started: float
    """Begin of this history; another value means that the client's columns are void."""
    now: float
    interval: float
    """Seconds between readings, at least."""
    kept: int
    """Columns that are kept."""
    read: float | None
    """Time of the last reading."""
    stale_seconds: float | None
    """Age of the last reading where the server gives no newer one; None: the numbers are fresh."""
    problem: str | None
    """Reason for which there is no fresh reading, or what the reading lacks, in one line."""
    engine: str | None
    model: str | None
    preemptions: float | None
    """Since the server's start."""
    in_place: bool
    """True if everything attended since start lay where it was attended: no frames, no copies, no CPU workers."""
    host_pool_pages: float | None
    device_bytes: float | None
    digest_bytes: float | None
    frame_bytes: float | None
    context_cache_bytes: float | None
    headline: Headline
    glance: tuple[Answer, ...]
    """The answers, in a user's order; empty before the first interval, and while the server is silent."""
    changes: tuple[Change, ...]
    """Empty: nothing should be changed, as far as is measured."""
    tiles: tuple[TileGroup, ...]
    layers: tuple[Layer, ...]
    columns: tuple[Column, ...]

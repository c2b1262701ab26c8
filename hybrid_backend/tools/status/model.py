"""The JSON of the status page. All ratios are 0..1, all times Unix seconds, all rates per second of wall clock.

``null`` stands for "nothing was measured": a layer that attended nothing, a metric that the engine does not have.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Column(_Part):
    """One interval between two readings; one column of the heat maps."""

    time: float
    """End of the interval."""
    seconds: float
    """Its length."""
    running: float | None
    """Requests in the engine's batch."""
    waiting: float | None
    """Requests in the engine's queue."""
    pool_fill: float | None
    """Share of the host pool in use."""
    generated_per_second: float | None
    prompt_per_second: float | None
    recalled_per_second: float
    """Pages recalled into frames, all layers."""
    copied_bytes_per_second: float | None
    """From the host pool to the device tier."""
    wait_share: float
    """Share of the interval in which the device tier waited for CPU partials, all layers."""
    attention_share: float | None
    """Share of the interval that decoding rows' attention took, all layers, where the CPU attends in place."""
    frames_in_use: float | None
    resident_requests: float | None
    attended: tuple[float | None, ...]
    """Per layer: share of the contexts' tokens that were attended."""
    residency: tuple[float | None, ...]
    """Per layer: share of the selected pages that were resident."""
    cpu_ratio: tuple[float | None, ...]
    """Per layer: share of the attended tokens that the CPU workers attended."""


class Layer(_Part):
    """One layer over the last 15 seconds, its ratios over the last in which it attended; quality since start."""

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


class Answer(_Part):
    """One line at the top of the page."""

    question: str
    text: str
    level: Level


class Status(_Part):
    """Everything that the page shows. ``columns`` are those after the ``after`` of the request, oldest first."""

    version: str
    """Of hybrid_backend."""
    source: str
    """Where the numbers come from."""
    started: float
    """When this history began; another value means that the client's columns are void."""
    now: float
    interval: float
    """Seconds between readings, at least."""
    kept: int
    """Columns that are kept."""
    problem: str | None
    """Why there is no fresh reading, in one line."""
    engine: str | None
    model: str | None
    preemptions: float | None
    """Since the server's start."""
    in_place: bool
    """Whether everything attended since start lay where it was attended: no frames, no copies, no CPU workers."""
    host_pool_pages: float | None
    device_bytes: float | None
    digest_bytes: float | None
    frame_bytes: float | None
    context_cache_bytes: float | None
    glance: tuple[Answer, ...]
    """What the numbers mean together; empty before the first reading."""
    layers: tuple[Layer, ...]
    columns: tuple[Column, ...]

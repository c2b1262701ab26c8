"""What carries decode steps out."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from hybrid_backend.batch import PrefillRow, Step, StepFailure


class Executor(Protocol):
    """Decode steps of one rank (`StepDriver`, `in_place.step.InPlaceStep`)."""

    def begin(self, step: Step) -> None:
        """Open a step that has decoding rows; one that was open is forgotten."""

    def abandon(self) -> None:
        """The open step's forward raised: nothing stays under way for it."""

    def layer_input(self, layer: int, step: Step, hidden: Tensor, residual: Tensor | None) -> None:
        """What decoder layer ``layer`` is about to compute with: ``[tokens, hidden]`` of the batch. Rows that go on
        from an earlier step get what they had there."""

    def idle(self) -> None:
        """What is computed from here on, until a step begins, is of nobody."""

    def unfinished(self, step: Step) -> list[str]:
        """Requests of a step, all layers of which were launched, that yield no token yet. Waits for the device where
        there may be any."""

    def wants_lookahead(self, layer: int, step: Step) -> bool: ...

    def lookahead(self, layer: int, step: Step, q: Tensor) -> None:
        """``q``: ``[decode rows, heads, head_dim]``, the predicted query of ``layer``. Returns at once."""

    def decode(self, layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Store and attend the decoding rows' tokens of the batch; only theirs are touched."""

    def failure(self, step: Step) -> StepFailure | None:
        """What went wrong in a step that the device has passed, where it goes on by itself."""

    def saw_prompt(self, layer: int, row: PrefillRow, q: Tensor) -> None:
        """A prompt chunk was attended in ``layer`` with ``q`` ``[chunk, heads, head_dim]``."""

    def holds(self, request_id: str) -> bool:
        """Whether what the request has here is that of its earlier decode steps: nothing is copied when one begins."""

    def release(self, request_id: str) -> None:
        """The request is gone, or its pages are about to be others. Unknown ids are ignored."""

    def count(self) -> None:
        """Bring the counters up to date, without waiting for the device."""

    def gauges(self) -> dict[str, float]:
        """What else is in use now, by the name of a metric (`observe.metrics`)."""

    @property
    def resident_pages(self) -> int: ...

    @property
    def device_bytes(self) -> int: ...

    @property
    def host_bytes(self) -> int: ...

    def close(self) -> None: ...

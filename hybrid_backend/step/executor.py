"""The interface of an object that runs decode steps."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from hybrid_backend.batch import Step, StepFailure
from hybrid_backend.step.residency import Residency


class Executor(Protocol):
    """Runs the decode steps of one rank; `StepDriver` and `in_place.step.InPlaceStep` implement it."""

    @property
    def residency(self) -> Residency | None:
        """Frames of prompts and of decoding requests; None if nothing lies in frames."""

    def begin(self, step: Step) -> None:
        """Open a step that has decode rows, after abandoning a step that is still open."""

    def abandon(self) -> None:
        """Cancel the work of the open step, whose forward pass raised an error."""

    def layer_input(self, layer: int, step: Step, hidden: Tensor, residual: Tensor | None) -> None:
        """Save or restore, in place, the layer input ``[tokens, hidden]`` of rows that wait between steps."""

    def idle(self) -> None:
        """Make all rows padding rows until the next step begins."""

    def unfinished(self, step: Step) -> list[str]:
        """Return the requests of a launched step that yield no token yet. The call may wait for the device."""

    def wants_lookahead(self, layer: int, step: Step) -> bool:
        """Tell whether ``layer`` needs a predicted query in this step."""

    def lookahead(self, layer: int, step: Step, q: Tensor) -> None:
        """Start the selection of ``layer`` with its predicted query ``q`` ``[rows, heads, head_dim]``."""

    def decode(self, layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Store K and V of the decode rows and write the attention of these rows; prompt tokens stay as they are.

        Args:
            layer: index of a layer with full attention.
            step: the open step.
            q: queries of the batch, ``[tokens, heads, head_dim]``.
            k: keys of the batch, ``[tokens, kv_heads, head_dim]``.
            v: values of the batch, shaped like ``k``.
            out: output of the batch, shaped like ``q``.
        """

    def failure(self, step: Step) -> StepFailure | None:
        """Return the error of a step that the device has finished, if the step did not raise the error itself."""

    def holds(self, request_id: str) -> bool:
        """Tell whether the request has decoded before, so that its next step copies nothing to the device tier."""

    def release(self, request_id: str) -> None:
        """Forget a request that ended or whose pages are about to change. Unknown ids are ignored."""

    def count(self) -> None:
        """Bring the counters up to date, without waiting for the device."""

    def gauges(self) -> dict[str, float]:
        """Return gauges by the name of a metric (`observe.metrics`)."""

    @property
    def resident_pages(self) -> int:
        """Pages in frames, summed over requests and layers."""

    @property
    def device_bytes(self) -> int:
        """Device memory of the decode steps' buffers, in bytes."""

    @property
    def host_bytes(self) -> int:
        """Host memory of the decode steps' buffers, in bytes."""

    def close(self) -> None:
        """Stop threads and free native memory."""

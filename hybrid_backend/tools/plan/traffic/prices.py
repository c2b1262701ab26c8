"""Seconds of a server's step, which may have decode rows, chunks of prompts, and requests that begin to decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hybrid_backend.tools.plan.simulate import decode_step
from hybrid_backend.tools.plan.simulate.costs import Costs
from hybrid_backend.tools.plan.traffic.prompts import KERNEL_SHARE, Chunk, PromptPath, PromptTimes
from hybrid_backend.tools.plan.traffic.server import Server

BUCKETS = 64
"""Contexts between two powers of two for which a step is simulated; others are rounded up to these."""


class StepParts(NamedTuple):
    """Seconds of a step by what they are spent on.

    Attributes:
        prompts: matrices and attention of prompts.
        bus: what prompts and admissions wait or work for because KV is in host memory.
        decode: the device's work on decode rows.
        workers: waiting for CPU workers or copies of the decode rows.
        engine: the engine's own time between two steps.
    """

    prompts: float
    bus: float
    decode: float
    workers: float
    engine: float

    @property
    def seconds(self) -> float:
        """Length of the step."""
        return sum(self)


class DecodeParts(NamedTuple):
    """Seconds of a decode step: the device's work without matrices, matrices, waits, and the engine."""

    work: float
    matrices: float
    waits: float
    engine: float


def bucket_end(context: int) -> int:
    """Return the context that stands for ``context`` in simulated steps: the next of `BUCKETS` per power of two."""
    width = max(1, (1 << max(0, context.bit_length() - 1)) // BUCKETS)
    return -(-context // width) * width


class StepPrices:
    """Prices of the steps of one server, by the simulated decode step and `PromptTimes`."""

    def __init__(self, server: Server, path: PromptPath, kernel_share: float = KERNEL_SHARE) -> None:
        """Begin without prices; each is computed once. The arguments are those of `PromptTimes`."""
        self.server, self.prompt_times = server, PromptTimes(server, path, kernel_share)
        costs_of_one, self._layers = self._costs(1), server.shape.layers
        self._products = 2.0 * server.shape.layer_params / server.hardware.flops_achieved
        # The engine's small kernels and the logits of a step without decode rows.
        self._without_rows = self._layers * costs_of_one.kernels + costs_of_one.head
        self._prompt_steps: dict[tuple[int, int, tuple[Chunk, ...]], StepParts] = {}
        self._decode_steps: dict[tuple[int, int], DecodeParts] = {}
        self._matrix_seconds: dict[int, float] = {}

    def step(self, rows: int, context: int, chunks: Sequence[Chunk] = (), admission_seconds: float = 0.0) -> StepParts:
        """Return the parts of a step, which has rows or chunks.

        Args:
            rows: decode rows.
            context: mean tokens that a decode row attends.
            chunks: chunks of prompts.
            admission_seconds: time of the requests that begin to decode in this step.
        """
        if not chunks:
            decode = self._decode(rows, bucket_end(context))
            return StepParts(0.0, admission_seconds, decode.work + decode.matrices, decode.waits, decode.engine)
        key = rows, bucket_end(context) if rows else 0, tuple(chunks)
        if key not in self._prompt_steps:
            self._prompt_steps[key] = self._with_prompts(*key)
        step = self._prompt_steps[key]
        return step._replace(bus=step.bus + admission_seconds) if admission_seconds else step

    def _with_prompts(self, rows: int, context: int, chunks: Sequence[Chunk]) -> StepParts:
        """Return the parts of a step with chunks, without admissions."""
        layers, matrices = self._layers, self.matrices(rows + sum(chunk.tokens for chunk in chunks))
        times = [self.prompt_times.chunk(chunk, matrices) for chunk in chunks]
        prompts = layers * matrices + sum(seconds.attention for seconds in times)
        bus = sum(seconds.path for seconds in times)
        if not rows:
            prompts += self._without_rows
            return StepParts(prompts, bus, 0.0, 0.0, self.server.hardware.step_overhead_s.value)
        decode = self._decode(rows, context)
        return StepParts(prompts - decode.matrices, bus, decode.work + decode.matrices, decode.waits, decode.engine)

    def matrices(self, tokens: int) -> float:
        """Return the seconds of one layer's matrices for ``tokens`` tokens, of prompts and decode rows together."""
        if tokens not in self._matrix_seconds:
            step_costs = self._costs(tokens)
            layer = step_costs.projections + step_costs.after_attention
            # A measured curve of rates ends at some number of rows. Beyond, products take longer than the curve says.
            self._matrix_seconds[tokens] = max(layer, self._products * tokens)
        return self._matrix_seconds[tokens]

    def _decode(self, rows: int, context: int) -> DecodeParts:
        """Return a decode step. Beside prompts it costs the same, because decode rows look ahead there too."""
        key = rows, context
        if key not in self._decode_steps:
            server = self.server
            gpus = server.hardware.gpus
            step = decode_step(server.hardware, server.shape, server.config, server.method, context, rows * gpus)
            waits, engine = step.part_seconds["waits"], step.part_seconds["engine"]
            matrices = self._layers * self.matrices(rows)
            work = max(0.0, step.seconds - waits - engine - matrices)
            self._decode_steps[key] = DecodeParts(work, matrices, waits, engine)
        return self._decode_steps[key]

    def _costs(self, rows: int) -> Costs:
        return Costs(self.server.hardware, self.server.shape, self.server.config, 1, rows)

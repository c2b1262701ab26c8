"""vLLM's CPU worker with our runtime.

The class has a file of its own, because importing vLLM's worker (vllm/v1/worker/cpu/shm.py) turns torch.cuda's streams
and events, pinning and the model runner's UVA buffers into dummies in the whole process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.v1.worker.cpu_worker import CPUWorker

from hybrid_backend.engines.vllm import CPU_WORKER
from hybrid_backend.engines.vllm.generators import without_generators_of_chunks
from hybrid_backend.engines.vllm.worker import HybridWorker

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput


class HybridCPUWorker(HybridWorker, CPUWorker):
    """vLLM's CPU worker, whose KV memory already is host memory."""

    worker_cls = CPU_WORKER

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        return super().execute_model(self._with_pages_to_zero(scheduler_output))

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        with without_generators_of_chunks(self.model_runner):
            return super().sample_tokens(grammar_output)

    def _with_pages_to_zero(self, output: SchedulerOutput) -> SchedulerOutput:
        """Replace the blocks to zero by their pages.

        vLLM's ``CPUModelRunner._zero_block_ids`` (v1/worker/cpu_model_runner.py) takes the scheduler's blocks for
        kernel blocks, and our kernel blocks are pages.
        """
        blocks, ratio = output.new_block_ids_to_zero, 1 if self.session is None else self.session.pages_per_block
        if not blocks or ratio == 1:
            return output
        pages = [block * ratio + page for block in blocks for page in range(ratio)]
        return replace(output, new_block_ids_to_zero=pages)

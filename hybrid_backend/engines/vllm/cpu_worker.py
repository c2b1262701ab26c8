"""vLLM's CPU worker with our runtime.

In a file of its own: importing vLLM's (vllm/v1/worker/cpu/shm.py) turns torch.cuda's streams and events, pinning and
the model runner's UVA buffers into nothing, in the whole process.
"""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from hybrid_backend.engines.vllm.worker import HybridWorker


class HybridCPUWorker(HybridWorker, CPUWorker):
    """Its KV memory already is host memory."""

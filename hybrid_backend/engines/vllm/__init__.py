"""vLLM 0.32: platform, worker, attention backend, lookahead hooks."""

VLLM_VERSION = "0.32"
BACKEND = "CUSTOM"
CPU_WORKER = "hybrid_backend.engines.vllm.cpu_worker.HybridCPUWorker"
GPU_WORKER = "hybrid_backend.engines.vllm.gpu_worker.HybridGPUWorker"
SCHEDULER = "hybrid_backend.engines.vllm.scheduler.RecomputingScheduler"
ASYNC_SCHEDULER = "hybrid_backend.engines.vllm.scheduler.RecomputingAsyncScheduler"
ADDITIONAL_CONFIG_KEY = "hybrid"

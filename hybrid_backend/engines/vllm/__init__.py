"""vLLM: platform, worker, attention backend, lookahead hooks."""

BACKEND = "CUSTOM"
CPU_WORKER = "hybrid_backend.engines.vllm.cpu_worker.HybridCPUWorker"
GPU_WORKER = "hybrid_backend.engines.vllm.gpu_worker.HybridGPUWorker"
SCHEDULER = "hybrid_backend.engines.vllm.scheduler.RecomputingScheduler"
ASYNC_SCHEDULER = "hybrid_backend.engines.vllm.scheduler.RecomputingAsyncScheduler"
PARKING_SCHEDULER = "hybrid_backend.engines.vllm.scheduler.ParkingScheduler"
ADDITIONAL_CONFIG_KEY = "hybrid"
CONNECTOR_MODULE = "hybrid_backend.engines.vllm.connectors"
CONNECTORS = ("ExampleConnector", "NixlConnector", "NixlPullConnector")  # of vLLM's, those in it

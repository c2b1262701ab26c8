"""vLLM: platform, worker, attention backend, lookahead hooks."""

BACKEND = "CUSTOM"  # vLLM's one name for attention backends of plugins
ALIAS = "HYBRID"  # our own name for it, which --attention-backend takes in any case
OWN_BACKEND = "use vLLM's own attention backend for this model (`vllm serve MODEL`)"  # the way out, in errors
CPU_WORKER = "hybrid_backend.engines.vllm.cpu_worker.HybridCPUWorker"
GPU_WORKER = "hybrid_backend.engines.vllm.gpu_worker.HybridGPUWorker"
SCHEDULER = "hybrid_backend.engines.vllm.scheduler.RecomputingScheduler"
ASYNC_SCHEDULER = "hybrid_backend.engines.vllm.scheduler.RecomputingAsyncScheduler"
PARKING_SCHEDULER = "hybrid_backend.engines.vllm.scheduler.ParkingScheduler"
ADDITIONAL_CONFIG_KEY = "hybrid"
CONNECTOR_MODULE = "hybrid_backend.engines.vllm.connectors"
CONNECTORS = ("ExampleConnector", "NixlConnector", "NixlPullConnector")  # of vLLM's, those in it

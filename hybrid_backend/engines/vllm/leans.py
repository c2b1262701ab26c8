"""All of vLLM that this adapter leans on, checked at start by `compat.check_engine` before anything is allocated.

A test keeps the table complete: every name that this folder imports from vLLM and every method that it overrides is
here (tests/unit/test_engine_leans.py, tests/engines/test_leans.py).
"""

from __future__ import annotations

from hybrid_backend.engines.probe import Lean

_BACKEND = "vllm.v1.attention.backend"
_CONFIG = "vllm.config"
_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_V1_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_V2_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"

PLUGIN = (
    Lean(
        "vllm.v1.attention.backends.registry:register_backend",
        "registers --attention-backend CUSTOM",
        passes=("backend", "class_path"),
    ),
    Lean(
        "vllm.v1.attention.backends.registry:AttentionBackendEnum",
        "the name CUSTOM",
        has=("CUSTOM", "get_path"),
    ),
    Lean("vllm.platforms:cpu_platform_plugin", "finds the CPU platform", passes=()),
    Lean("vllm.platforms:cuda_platform_plugin", "finds the CUDA platform", passes=()),
    Lean("vllm.platforms:current_platform", "the platform that was found"),
)
"""Looked at wherever vLLM loads plugins: without these the plugin cannot even be registered."""

_PLATFORMS = (
    Lean(
        "vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls",
        "our backend on the CPU",
        takes=("selected_backend", "attn_selector_config", "num_heads"),
    ),
    Lean("vllm.v1.attention.selector:AttentionSelectorConfig", "type of an argument"),
    Lean("vllm.platforms.interface:Platform", "budgets of requests", has=("validate_request",)),
    Lean("vllm.platforms.interface:Platform.pre_register_and_update", "budgets of requests", takes=("parser",)),
    Lean("vllm.sampling_params:SamplingParams", "budgets of requests", has=("extra_args",)),
    Lean("vllm.exceptions:VLLMValidationError", "a refusal with status 400", passes=("message", "parameter")),
    Lean("vllm.platforms.cpu:CpuPlatform.check_and_update_config", "where we refuse", takes=("vllm_config",)),
    Lean("vllm.platforms.cuda:CudaPlatform | vllm.platforms.cuda:NvmlCudaPlatform", "the CUDA platform"),
    Lean("vllm.platforms.cuda:CudaPlatformBase.check_and_update_config", "where we refuse", takes=("vllm_config",)),
    Lean("vllm.platforms.cuda:CudaPlatformBase", "the GPU's memory", has=("get_device_total_memory",)),
    Lean("vllm.logger:init_logger", "messages", passes=("name",)),
)

_SETTINGS = (
    Lean(
        f"{_CONFIG}:VllmConfig",
        "settings and refusals",
        has=(
            "additional_config", "attention_config", "cache_config", "compilation_config", "device_config",
            "kv_transfer_config", "lora_config", "model_config", "parallel_config", "scheduler_config",
            "speculative_config", "use_v2_model_runner",
        ),
    ),
    Lean(f"{_CONFIG}.attention:AttentionConfig", "the backend that was asked for", has=("backend",)),
    Lean(f"{_CONFIG}.device:DeviceConfig", "the device", has=("device_type",)),
    Lean(
        f"{_CONFIG}.cache:CacheConfig",
        "page size and host pool",
        has=(
            "block_size", "cache_dtype", "gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override",
            "user_specified_block_size",
        ),
    ),
    Lean(
        f"{_CONFIG}.scheduler:SchedulerConfig",
        "our schedulers; how many requests run",
        has=("async_scheduling", "max_num_batched_tokens", "max_num_seqs", "scheduler_cls"),
    ),
    Lean(
        f"{_CONFIG}:ParallelConfig",
        "our worker; ranks; refusals",
        has=(
            "data_parallel_backend", "data_parallel_index", "data_parallel_rank_local", "data_parallel_size_local",
            "decode_context_parallel_size", "distributed_executor_backend", "local_world_size",
            "pipeline_parallel_size", "rank", "tensor_parallel_size", "use_ubatching", "worker_cls", "world_size",
        ),
    ),
    Lean(
        f"{_CONFIG}.model:ModelConfig",
        "shapes of the model; refusals",
        has=(
            "dtype", "get_head_size", "get_hidden_size", "get_num_attention_heads", "get_num_kv_heads",
            "get_num_layers_by_block_type", "get_sliding_window", "hf_config", "hf_text_config", "is_attention_free",
            "is_encoder_decoder", "is_hybrid", "max_model_len", "model", "original_max_model_len", "quantization",
            "revision", "runner_type", "served_model_name", "use_mla", "using_transformers_backend",
        ),
    ),
    Lean(
        f"{_CONFIG}.compilation:CompilationConfig",
        "hooks in compiled graphs; how `hybrid serve` compiles on a CPU",
        has=("inductor_compile_config", "splitting_ops", "splitting_ops_contain_attention", "static_forward_context"),
    ),
    Lean("vllm.envs:environment_variables", "how `hybrid serve` compiles on a CPU"),
    Lean(
        f"{_CONFIG}:KVTransferConfig",
        "KV connectors",
        has=("kv_connector", "kv_connector_extra_config", "kv_connector_module_path", "kv_role"),
    ),
    Lean(
        "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.get_connector_class",
        "refuses KV connectors",
        passes=("kv_transfer_config",),
    ),
    Lean(f"{_CONFIG}:get_current_vllm_config_or_none", "the page size as block size", passes=()),
)  # fmt: skip

_ATTENTION = (
    Lean(
        f"{_BACKEND}:AttentionBackend",
        "our backend",
        has=("forward_includes_kv_cache_update", "supported_dtypes", "supported_kv_cache_dtypes"),
        defines=(
            "get_name", "get_impl_cls", "get_builder_cls", "get_supported_kernel_block_sizes",
            "get_supported_head_sizes", "supported_kv_cache_layouts", "supports_sliding_window", "supports_sink",
        ),
    ),
    Lean(f"{_BACKEND}:AttentionBackend.get_name", "our backend", takes=()),
    Lean(f"{_BACKEND}:AttentionBackend.get_impl_cls", "our backend", takes=()),
    Lean(f"{_BACKEND}:AttentionBackend.get_builder_cls", "our backend", takes=()),
    Lean(
        f"{_BACKEND}:AttentionBackend.get_supported_kernel_block_sizes",
        "the page size as block size",
        takes=("kv_cache_spec",),
    ),
    Lean(f"{_BACKEND}:AttentionBackend.get_supported_head_sizes", "our backend", takes=()),
    Lean(f"{_BACKEND}:AttentionBackend.supported_kv_cache_layouts", "the layout of pages", takes=()),
    Lean(f"{_BACKEND}:AttentionBackend.supports_sliding_window", "our backend", takes=()),
    Lean(f"{_BACKEND}:AttentionBackend.supports_sink", "our backend", takes=()),
    Lean("vllm.v1.kv_cache_interface:KVCacheLayout", "the layout of pages", has=("LBHNC",)),
    Lean(f"{_BACKEND}:MultipleOf", "the page size as block size", has=("base",)),
    Lean(f"{_BACKEND}:AttentionCGSupport", "CUDA graphs", has=("NEVER", "UNIFORM_SINGLE_TOKEN_DECODE")),
    Lean(f"{_BACKEND}:AttentionType", "refuses encoders", has=("DECODER",)),
    Lean(
        f"{_BACKEND}:AttentionMetadataBuilder",
        "batches become steps",
        defines=("__init__", "get_cudagraph_support", "build", "build_for_cudagraph_capture"),
    ),
    Lean(
        f"{_BACKEND}:AttentionMetadataBuilder.__init__",
        "batches become steps",
        passes=("kv_cache_spec", "layer_names", "vllm_config", "device"),
        takes=("kv_cache_spec", "layer_names", "vllm_config", "device"),
    ),
    Lean(
        f"{_BACKEND}:AttentionMetadataBuilder.build",
        "batches become steps",
        takes=("common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    Lean(
        f"{_BACKEND}:AttentionMetadataBuilder.build_for_cudagraph_capture",
        "CUDA graphs",
        takes=("common_attn_metadata",),
    ),
    Lean(
        f"{_BACKEND}:AttentionMetadataBuilder.get_cudagraph_support",
        "CUDA graphs",
        takes=("vllm_config", "kv_cache_spec"),
    ),
    Lean(
        f"{_BACKEND}:CommonAttentionMetadata",
        "rows of a batch",
        has=(
            "block_table_tensor", "is_prefilling", "num_actual_tokens", "num_reqs", "query_start_loc_cpu",
            "seq_lens", "seq_lens_cpu_upper_bound", "slot_mapping",
        ),
    ),
    Lean(f"{_BACKEND}:AttentionImpl", "a layer", defines=("__init__", "forward")),
    Lean(
        f"{_BACKEND}:AttentionImpl.__init__",
        "a layer",
        takes=(
            "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype",
            "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name", "sinks",
        ),
    ),
    Lean(
        f"{_BACKEND}:AttentionImpl.forward",
        "a layer",
        takes=(
            "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale",
            "output_block_scale",
        ),
    ),
    Lean(
        "vllm.model_executor.layers.attention:Attention",
        "the layers of a model",
        has=(
            "head_size", "impl", "kv_cache", "kv_cache_torch_dtype", "layer_name", "num_heads", "num_kv_heads",
            "sliding_window",
        ),
    ),
    Lean("vllm.model_executor.layers.linear:QKVParallelLinear", "the lookahead"),
    Lean(
        "vllm.utils.torch_utils:direct_register_custom_op",
        "hooks in compiled graphs",
        passes=("op_name", "op_func", "mutates_args", "fake_impl", "target_lib", "dispatch_key"),
    ),
    Lean("vllm.compilation.breakable_cudagraph:eager_break_during_capture", "hooks in graphs", passes=("fn",)),
    Lean("vllm.forward_context:get_forward_context", "the running step", passes=()),
    Lean("vllm.forward_context:ForwardContext", "the running step", has=("attn_metadata", "no_compile_layers")),
)  # fmt: skip

_WORKERS = (
    Lean(
        "vllm.v1.worker.worker_base:WorkerBase",
        "our workers",
        has=("device", "load_model", "model_runner", "rank", "vllm_config"),
    ),
    Lean("vllm.v1.worker.cpu_worker:CPUWorker.init_device", "where the final configuration is checked", takes=()),
    Lean("vllm.v1.worker.gpu_worker:Worker.init_device", "where the final configuration is checked", takes=()),
    Lean("vllm.v1.worker.cpu_worker:CPUWorker.execute_model", "releases, opens a step", takes=("scheduler_output",)),
    Lean("vllm.v1.worker.cpu_worker:CPUWorker.initialize_from_config", "builds it", takes=("kv_cache_config",)),
    Lean("vllm.v1.worker.cpu_worker:CPUWorker.sample_tokens", "may output be used", takes=("grammar_output",)),
    Lean("vllm.v1.worker.cpu_worker:CPUWorker.shutdown", "ends the workers", takes=()),
    Lean("vllm.v1.worker.gpu_worker:Worker.execute_model", "releases, opens a step", takes=("scheduler_output",)),
    Lean("vllm.v1.worker.gpu_worker:Worker.execute_dummy_batch", "of nobody", takes=()),
    Lean("vllm.v1.worker.gpu_worker:Worker.initialize_from_config", "builds it", takes=("kv_cache_config",)),
    Lean("vllm.v1.worker.gpu_worker:Worker.sample_tokens", "may output be used", takes=("grammar_output",)),
    Lean("vllm.v1.worker.gpu_worker:Worker.shutdown", "ends the workers", takes=()),
    Lean("vllm.v1.worker.gpu_worker:Worker._maybe_get_memory_pool_context", "the host pool", takes=("tag",)),
    Lean(
        "vllm.v1.worker.gpu_worker",
        "the host pool",
        reads=('self._maybe_get_memory_pool_context(tag="kv_cache")',),
    ),
    Lean("vllm.v1.worker.utils", "the host pool", reads=("torch.zeros(buf_size, dtype=torch.int8, device=device)",)),
    Lean(
        "vllm.utils.torch_utils:get_accelerator_view_from_cpu_tensor", "the host pool", passes=("cpu_tensor",)
    ),
    Lean(
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner", "tells of pages that need zeros", has=("_zero_block_ids",)
    ),
    Lean(
        _V1_RUNNER,
        "requests of rows; rows that yield no token",
        has=("attn_groups", "compilation_config", "discard_request_mask", "get_model", "input_batch",
             "num_prompt_logprobs"),
    ),
    Lean(f"{_V1_RUNNER}._bookkeeping_sync", "rows that yield no token", reads=("self.discard_request_mask.np",)),
    Lean(
        "vllm.v1.worker.gpu_input_batch:InputBatch",
        "requests of rows; rows that yield no token",
        has=("generators", "req_id_to_index", "req_ids"),
    ),
    Lean(
        _V2_RUNNER,
        "requests of rows",
        has=("compilation_config", "get_model", "model_state"),
        reads=("self.attn_groups",),
    ),
    Lean("vllm.v1.worker.gpu.input_batch:InputBatch", "requests of rows", has=("req_ids",)),
    Lean("vllm.v1.worker.gpu.model_states.interface:ModelState", "requests of rows", has=("prepare_attn",)),
)  # fmt: skip

_OF_A_KIND = "vllm.v1.core.single_type_kv_cache_manager"
_INTERFACE = "vllm.v1.kv_cache_interface"
_ON_THE_GPU = "layers that stay on a GPU"
_GROUPS = (
    Lean(f"{_INTERFACE}:KVCacheConfig", _ON_THE_GPU, has=("kv_cache_groups", "kv_cache_tensors", "num_blocks")),
    Lean(f"{_INTERFACE}:KVCacheTensor", _ON_THE_GPU, has=("layer_stride", "layers", "offset", "size")),
    Lean(f"{_INTERFACE}:KVCacheSpec", _ON_THE_GPU, has=("block_size",)),
    Lean(f"{_INTERFACE}:FullAttentionSpec", _ON_THE_GPU),
    Lean(f"{_INTERFACE}:SlidingWindowSpec", _ON_THE_GPU, has=("sliding_window",)),
    Lean(f"{_INTERFACE}:SlidingWindowSpec.max_memory_usage_bytes", _ON_THE_GPU, takes=("vllm_config",)),
    Lean(f"{_INTERFACE}:MambaSpec", _ON_THE_GPU, has=("max_memory_usage_bytes", "page_size_bytes")),
    Lean(
        "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register",
        _ON_THE_GPU,
        passes=("kvcache_spec_cls", "manager_class"),
    ),
    Lean(
        "vllm.platforms.interface:Platform.register_custom_kv_cache_specs", _ON_THE_GPU, takes=("vllm_config",)
    ),
    Lean("vllm.platforms.cuda:CudaPlatformBase.get_attn_backend_cls", _ON_THE_GPU,
         takes=("selected_backend", "attn_selector_config", "num_heads")),
    Lean("vllm.v1.attention.selector:AttentionSelectorConfig", _ON_THE_GPU, has=("has_sliding_window",)),
    Lean(
        f"{_OF_A_KIND}:SingleTypeKVCacheManager",
        _ON_THE_GPU,
        has=("_record_new_block_ids", "block_pool", "get_num_blocks_to_allocate", "req_to_blocks"),
    ),
    Lean(f"{_OF_A_KIND}:SlidingWindowManager", _ON_THE_GPU),
    Lean(f"{_OF_A_KIND}:MambaManager", _ON_THE_GPU),
    Lean(
        "vllm.v1.core.block_pool:BlockPool",
        _ON_THE_GPU,
        has=("evict_blocks", "get_num_free_blocks", "hash_block_size", "num_gpu_blocks"),
    ),
    Lean("vllm.v1.worker.gpu_worker:Worker.get_kv_cache_spec", _ON_THE_GPU, takes=()),
    Lean("vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model", _ON_THE_GPU, takes=()),
    Lean("vllm.v1.worker.worker_base:CompilationTimes", "type of a result"),
    Lean("vllm.v1.core.sched.output:NewRequestData", "blocks, budgets", has=("block_ids", "sampling_params")),
    Lean("vllm.v1.core.sched.output:CachedRequestData", _ON_THE_GPU, has=("new_block_ids",)),
    Lean(
        "vllm.v1.worker.utils:allocate_kv_cache",
        _ON_THE_GPU,
        passes=("kv_cache_config", "device", "layout", "kernel_block_sizes"),
    ),
    Lean("vllm.v1.worker.gpu_model_runner", _ON_THE_GPU, reads=("kv_caches = allocate_kv_cache(",)),
    Lean("vllm.v1.worker.gpu.attn_utils", _ON_THE_GPU, reads=("kv_caches = allocate_kv_cache(",)),
)  # fmt: skip

_STEPS = (
    Lean(
        "vllm.v1.core.sched.output:SchedulerOutput",
        "which requests own what",
        has=("finished_req_ids", "new_block_ids_to_zero", "num_scheduled_tokens", "preempted_req_ids",
             "scheduled_cached_reqs", "scheduled_new_reqs"),
    ),
    Lean("vllm.v1.core.sched.output:GrammarOutput", "type of an argument"),
    Lean("vllm.v1.outputs:ModelRunnerOutput", "what a worker tells the scheduler", has=("req_ids",)),
    Lean(
        "vllm.v1.outputs:AsyncModelRunnerOutput",
        "whether output may be used",
        defines=("get_kv_connector_output", "get_output"),
    ),
    Lean("vllm.v1.outputs:AsyncModelRunnerOutput.get_output", "whether output may be used", takes=()),
    Lean("vllm.v1.engine:EngineCoreOutputs", "type of a result"),
    Lean("vllm.v1.core.sched.async_scheduler:AsyncScheduler", "our schedulers"),
    Lean(
        _SCHEDULER,
        "computes failed steps again",
        has=(
            "grammar_compile_error_reqs: set[str] | dict[str, RequestError]", "kv_cache_manager",
            "prev_step_scheduled_req_ids: set[str]", "requests", "running",
        ),
    ),
    Lean(
        f"{_SCHEDULER}.update_from_output",
        "computes failed steps again",
        takes=("scheduler_output", "model_runner_output"),
    ),
    Lean(
        f"{_SCHEDULER}._preempt_request",
        "computes failed steps again",
        passes=("request", "timestamp", "drop_stale_output"),
    ),
    Lean(f"{_SCHEDULER}.schedule", "delays what is cached", reads=("self.kv_cache_manager.allocate_slots(",)),
    Lean(f"{_MANAGER}.allocate_slots", "delays what is cached", has=(), reads=("delay_cache_blocks",)),
    Lean(f"{_MANAGER}.cache_blocks", "delays what is cached", passes=("request", "num_computed_tokens")),
    Lean(f"{_MANAGER}.evict_blocks", "computes failed steps again", passes=("block_ids",)),
    Lean(f"{_MANAGER}.get_block_ids", "computes failed steps again", passes=("request_id",)),
    Lean(
        "vllm.v1.request:Request",
        "computes failed steps again",
        has=("drop_stale_output", "is_finished", "num_computed_tokens", "num_stale_output_tokens", "num_tokens",
             "request_id", "status"),
    ),
    Lean("vllm.v1.request:RequestStatus", "computes failed steps again", has=("RUNNING",)),
)  # fmt: skip

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"

_TRANSFERS = (
    Lean(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend",
        "vLLM's own pages",
        has=("get_supported_head_sizes",),
    ),
    Lean("vllm.distributed.kv_transfer.kv_transfer_state:get_kv_transfer_group", "KV connectors", passes=()),
    Lean("vllm.distributed.kv_transfer.kv_transfer_state:has_kv_transfer_group", "KV connectors", passes=()),
    Lean(
        f"{_CONNECTOR}.base:KVConnectorBase_V1",
        "KV connectors",
        has=("_get_connector_metadata", "_vllm_config"),
    ),
    Lean(
        f"{_CONNECTOR}.example_connector:ExampleConnector",
        "KV through files",
        has=("_block_size", "_storage_path", "save_kv_layer", "start_load_kv"),
    ),
    Lean(f"{_CONNECTOR}.example_connector:ReqMeta", "KV through files", has=("is_store", "slot_mapping")),
    Lean(
        f"{_CONNECTOR}.nixl.connector:NixlPullConnector",
        "KV through NIXL",
        has=("start_load_kv",),
    ),
    *(
        Lean(f"{_CONNECTOR}.{of}.{method}", "KV connectors", takes=takes)
        for of, method, takes in (
            ("base:KVConnectorBase_V1", "get_block_ids_with_load_errors", ()),
            ("example_connector:ExampleConnector", "get_num_new_matched_tokens", ("request", "num_computed_tokens")),
            (
                "nixl.connector:NixlPullConnector",
                "update_state_after_alloc",
                ("request", "blocks", "num_external_tokens"),
            ),
            ("nixl.connector:NixlPullConnector", "build_connector_meta", ("scheduler_output",)),
            ("nixl.connector:NixlPullConnector", "get_transfer_results", ("finished_req_ids",)),
        )
    ),
    Lean(
        f"{_CONNECTOR}.nixl.base_worker:NixlBaseConnectorWorker",
        "KV through NIXL",
        has=("backend_name",),
    ),
    Lean(f"{_CONNECTOR}.nixl.metadata:ReqMeta", "KV through NIXL", has=("local_physical_block_ids",)),
    Lean(
        "vllm.v1.attention.backends.cpu_attn:_get_attn_isa",
        "vLLM's own pages",
        passes=("dtype", "block_size", "head_size"),
    ),
    Lean(
        "vllm._custom_ops:cpu_attn_reshape_and_cache",
        "vLLM's own pages",
        passes=("key", "value", "key_cache", "value_cache", "slot_mapping", "isa"),
    ),
)

_SERVER = (
    Lean(
        "vllm.entrypoints.launchers.api_server.entry:run_server_worker",
        "`hybrid serve`",
        passes=("listen_address", "sock", "args"),
    ),
    Lean("vllm.entrypoints.launchers.launcher:setup_server", "`hybrid serve`", passes=("args", "reuse_port")),
    Lean(
        "vllm.entrypoints.common.startup:cli_env_setup | vllm.entrypoints.serve.utils.api_utils:cli_env_setup",
        "`hybrid serve`",
        passes=(),
    ),
    Lean(
        "vllm.entrypoints.common.cli_args:make_arg_parser | vllm.entrypoints.launchers.cli_args:make_arg_parser",
        "`hybrid serve`",
        passes=("parser",),
    ),
    Lean(
        "vllm.entrypoints.common.cli_args:validate_parsed_serve_args | "
        "vllm.entrypoints.launchers.cli_args:validate_parsed_serve_args",
        "`hybrid serve`",
        passes=("args",),
    ),
    Lean("vllm.utils.argparse_utils:FlexibleArgumentParser", "`hybrid serve`", has=("load_config_file",)),
    Lean("vllm.utils.system_utils:decorate_logs", "`hybrid serve`", passes=("process_name",)),
    Lean(
        "vllm.engine.arg_utils:AsyncEngineArgs",
        "`hybrid serve`",
        has=("create_engine_config", "create_model_config", "from_cli_args", "shutdown_timeout"),
    ),
    Lean(
        "vllm.entrypoints.launchers.launcher:serve_http",
        "the end of `hybrid serve`",
        reads=("loop.add_signal_handler(signal.SIGTERM",),
    ),
)

LEANS = (*PLUGIN, *_PLATFORMS, *_SETTINGS, *_ATTENTION, *_WORKERS, *_GROUPS, *_STEPS, *_TRANSFERS, *_SERVER)

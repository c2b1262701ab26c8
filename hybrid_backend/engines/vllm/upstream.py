"""Symbols of vLLM that this adapter uses besides its imports and overrides, checked at start (`engines.upstream`)."""

from __future__ import annotations

from hybrid_backend.engines.upstream import Table

PLUGIN: Table = {
    "plugin": {
        "vllm.v1.attention.backends.registry:register_backend": "(backend class_path)",
        "vllm.v1.attention.backends.registry:AttentionBackendEnum": "CUSTOM get_path",
        "vllm.platforms:cpu_platform_plugin": "()",
        "vllm.platforms:cuda_platform_plugin": "()",
    },
}
"""Symbols without which the plugin cannot even be registered."""

SYMBOLS: Table = {
    "platform": {
        "vllm.platforms.interface:Platform": (
            "check_and_update_config get_attn_backend_cls pre_register_and_update register_custom_kv_cache_specs "
            "validate_request"
        ),
        "vllm.platforms.cuda:CudaPlatformBase": "get_device_total_memory",
    },
    "budgets of requests": {
        "vllm.sampling_params:SamplingParams": "extra_args",
        "vllm.exceptions:VLLMValidationError": "(message parameter)",
    },
    "settings and refusals": {
        "vllm.config:VllmConfig": (
            "additional_config attention_config cache_config compilation_config device_config kv_transfer_config "
            "lora_config max_in_flight_tokens model_config parallel_config scheduler_config speculative_config "
            "use_v2_model_runner"
        ),
        "vllm.config.attention:AttentionConfig": "backend",
        "vllm.config.device:DeviceConfig": "device_type",
        "vllm.config.cache:CacheConfig": (
            "block_size cache_dtype gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override "
            "user_specified_block_size"
        ),
        "vllm.config.scheduler:SchedulerConfig": "async_scheduling max_num_batched_tokens max_num_seqs scheduler_cls",
        "vllm.config:ParallelConfig": (
            "data_parallel_backend data_parallel_index data_parallel_rank_local data_parallel_size_local "
            "decode_context_parallel_size distributed_executor_backend local_world_size pipeline_parallel_size rank "
            "tensor_parallel_size use_ubatching worker_cls world_size"
        ),
        "vllm.config.model:ModelConfig": (
            "attention_chunk_size dtype get_head_size get_hidden_size get_num_attention_heads get_num_kv_heads "
            "get_num_layers_by_block_type get_sliding_window hf_config hf_text_config is_attention_free "
            "is_encoder_decoder is_hybrid max_model_len model model_arch_config original_max_model_len quantization "
            "revision runner_type served_model_name use_mla using_transformers_backend"
        ),
        "vllm.config.compilation:CompilationConfig": (
            "inductor_compile_config splitting_ops splitting_ops_contain_attention static_forward_context"
        ),
    },
    "KV connectors": {
        "vllm.config:KVTransferConfig": "kv_connector kv_connector_extra_config kv_connector_module_path kv_role",
        "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": (
            "_get_connector_metadata _vllm_config get_block_ids_with_load_errors save_kv_layer"
        ),
        "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.get_connector_class": (
            "(kv_transfer_config)"
        ),
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend": "get_supported_head_sizes",
        "vllm.v1.attention.backends.cpu_attn:_get_attn_isa": "(dtype block_size head_size)",
        "vllm._custom_ops:cpu_attn_reshape_and_cache": "(key value key_cache value_cache slot_mapping isa)",
        "vllm.distributed.kv_transfer.kv_connector.v1.example_connector:ExampleConnector": (
            "_block_size _storage_path get_num_new_matched_tokens save_kv_layer start_load_kv"
        ),
        "vllm.distributed.kv_transfer.kv_connector.v1.example_connector:ReqMeta": "is_store slot_mapping",
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector:NixlPullConnector": (
            "build_connector_meta get_transfer_results start_load_kv update_state_after_alloc"
        ),
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker:NixlBaseConnectorWorker": "backend_name",
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata:ReqMeta": "local_physical_block_ids",
    },
    "attention backend": {
        "vllm.v1.attention.backend:AttentionBackend": (
            "forward_includes_kv_cache_update get_builder_cls get_impl_cls get_name get_supported_head_sizes "
            "get_supported_kernel_block_sizes supported_dtypes supported_kv_cache_dtypes supported_kv_cache_layouts "
            "supports_sink supports_sliding_window"
        ),
        "vllm.v1.kv_cache_interface:KVCacheLayout": "LBHNC",
        "vllm.v1.attention.backend:AttentionCGSupport": "NEVER UNIFORM_SINGLE_TOKEN_DECODE",
        "vllm.v1.attention.backend:AttentionType": "DECODER",
        "vllm.v1.attention.backend:AttentionMetadataBuilder": "build build_for_cudagraph_capture get_cudagraph_support",
        "vllm.v1.attention.backend:AttentionMetadataBuilder.__init__": "(kv_cache_spec layer_names vllm_config device)",
        "vllm.v1.attention.backend:CommonAttentionMetadata": (
            "block_table_tensor is_prefilling num_actual_tokens num_reqs query_start_loc_cpu seq_lens "
            "seq_lens_cpu_upper_bound slot_mapping"
        ),
    },
    "layers and their hooks": {
        "vllm.model_executor.layers.attention:Attention": (
            "head_size impl kv_cache kv_cache_torch_dtype layer_name num_heads num_kv_heads sliding_window"
        ),
        "vllm.model_executor.layers.attention.chunked_local_attention:ChunkedLocalAttention": "attention_chunk_size",
        "vllm.utils.torch_utils:direct_register_custom_op": (
            "(op_name op_func mutates_args fake_impl target_lib dispatch_key)"
        ),
        "vllm.compilation.breakable_cudagraph:eager_break_during_capture": "(fn)",
        "vllm.forward_context:ForwardContext": "attn_metadata no_compile_layers",
    },
    "workers": {
        "vllm.v1.worker.worker_base:WorkerBase": (
            "compile_or_warm_up_model device execute_model init_device load_model model_runner rank sample_tokens "
            "shutdown vllm_config"
        ),
        "vllm.v1.worker.cpu_worker:CPUWorker": "initialize_from_config",
        "vllm.v1.worker.gpu_worker:Worker": (
            "_maybe_get_memory_pool_context execute_dummy_batch get_kv_cache_spec initialize_from_config"
        ),
        "vllm.v1.worker.gpu_worker": '`self._maybe_get_memory_pool_context(tag="kv_cache")`',
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner": "_zero_block_ids",
    },
    "the host pool": {
        "vllm.v1.worker.utils:allocate_kv_cache": "(kv_cache_config device layout kernel_block_sizes)",
        "vllm.utils.torch_utils:get_accelerator_view_from_cpu_tensor": "(cpu_tensor)",
        "vllm.v1.worker.gpu_model_runner": "`kv_caches = allocate_kv_cache(`",
        "vllm.v1.worker.gpu.attn_utils": "`kv_caches = allocate_kv_cache(`",
        "vllm.v1.worker.utils": "`torch.zeros(buf_size, dtype=torch.int8, device=device)`",
    },
    "requests of rows": {
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": (
            "_bookkeeping_sync attn_groups compilation_config discard_request_mask get_model input_batch "
            "num_prompt_logprobs"
        ),
        "vllm.v1.worker.gpu_model_runner": "`self.discard_request_mask.np`",
        "vllm.v1.worker.gpu_input_batch:InputBatch": "generators req_id_to_index req_ids",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner": "compilation_config get_model model_state",
        "vllm.v1.worker.gpu.input_batch:InputBatch": "req_ids",
        "vllm.v1.worker.gpu.model_states.interface:ModelState": "prepare_attn",
        "vllm.v1.worker.gpu.model_runner": "`self.attn_groups`",
    },
    "layers that stay on a GPU": {
        "vllm.v1.kv_cache_interface:KVCacheConfig": "kv_cache_groups kv_cache_tensors num_blocks",
        "vllm.v1.kv_cache_interface:KVCacheTensor": "layer_stride layers offset size",
        "vllm.v1.kv_cache_interface:SlidingWindowSpec": "block_size max_memory_usage_bytes sliding_window",
        "vllm.v1.kv_cache_interface:MambaSpec": "max_memory_usage_bytes page_size_bytes",
        "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register": "(kvcache_spec_cls manager_class)",
        "vllm.v1.attention.selector:AttentionSelectorConfig": "has_sliding_window",
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": (
            "_record_new_block_ids block_pool get_num_blocks_to_allocate req_to_blocks"
        ),
        "vllm.v1.core.block_pool:BlockPool": "evict_blocks get_num_free_blocks hash_block_size num_gpu_blocks",
        "vllm.v1.core.sched.output:CachedRequestData": "new_block_ids",
    },
    "which requests own what": {
        "vllm.v1.core.sched.output:NewRequestData": "block_ids sampling_params",
        "vllm.v1.core.sched.output:SchedulerOutput": (
            "finished_req_ids new_block_ids_to_zero num_scheduled_tokens preempted_req_ids scheduled_cached_reqs "
            "scheduled_new_reqs"
        ),
        "vllm.v1.outputs:AsyncModelRunnerOutput": "get_output",
    },
    "recomputation of failed steps": {
        "vllm.v1.core.sched.scheduler:Scheduler": (
            "grammar_compile_error_reqs kv_cache_manager requests running update_from_output"
        ),
        "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": "(request timestamp drop_stale_output)",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.evict_blocks": "(block_ids)",
        "vllm.v1.request:Request": (
            "drop_stale_output is_finished num_computed_tokens num_stale_output_tokens num_tokens request_id status"
        ),
        "vllm.v1.request:RequestStatus": "RUNNING",
        "vllm.v1.core.sched.scheduler": "`prev_step_scheduled_req_ids: set[str]`",
    },
    "late prefix caching": {
        "vllm.v1.core.sched.scheduler": "`self.kv_cache_manager.allocate_slots(`",
        "vllm.v1.core.kv_cache_manager": "`delay_cache_blocks`",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.cache_blocks": "(request num_computed_tokens)",
    },
    "`hybrid serve`": {
        "vllm.envs:environment_variables": "",
        "vllm.entrypoints.launchers.api_server.entry:run_server_worker": "(listen_address sock args)",
        "vllm.entrypoints.launchers.launcher:setup_server": "(args reuse_port)",
        "vllm.entrypoints.common.startup:cli_env_setup | vllm.entrypoints.serve.utils.api_utils:cli_env_setup": "()",
        "vllm.entrypoints.common.cli_args:make_arg_parser | vllm.entrypoints.launchers.cli_args:make_arg_parser": (
            "(parser)"
        ),
        "vllm.entrypoints.common.cli_args:validate_parsed_serve_args | "
        "vllm.entrypoints.launchers.cli_args:validate_parsed_serve_args": "(args)",
        "vllm.utils.argparse_utils:FlexibleArgumentParser": "load_config_file",
        "vllm.utils.system_utils:decorate_logs": "(process_name)",
        "vllm.engine.arg_utils:AsyncEngineArgs": (
            "create_engine_config create_model_config from_cli_args shutdown_timeout"
        ),
        "vllm.entrypoints.launchers.launcher": "`loop.add_signal_handler(signal.SIGTERM`",
    },
}

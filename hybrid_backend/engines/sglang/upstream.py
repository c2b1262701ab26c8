"""Symbols of SGLang that this adapter uses besides its imports and overrides, checked at start (`engines.upstream`)."""

from __future__ import annotations

from hybrid_backend.engines.upstream import Table

PLUGIN: Table = {
    "plugin": {
        "sglang.srt.arg_groups.choices:ATTENTION_BACKEND_CHOICES": "",
        "sglang.srt.arg_groups.choices:add_attention_backend_choices": "",
        "sglang.srt.layers.attention.attention_registry:register_attention_backend": "(name)",
    },
}
"""Symbols without which the plugin cannot even be registered."""

SYMBOLS: Table = {
    "our hooks": {
        "sglang.srt.plugins.hook_registry:HookRegistry.register": "(target hook hook_type)",
        "sglang.srt.plugins.hook_registry:HookType": "AFTER AROUND",
    },
    "`hybrid serve`": {
        "sglang.srt.plugins:load_plugins": "()",
        "sglang.launch_server:run_server": "(server_args)",
        "sglang.srt.utils.server_args_config_parser:ConfigArgumentMerger.merge_config_with_args": "(cli_args)",
        "sglang.srt.server_args:prepare_server_args": "(argv)",
        "sglang.srt.server_args:ServerArgs": "add_cli_args check_server_args resolve_once",
        "sglang.srt.entrypoints.http_server": "`server = uvicorn.Server(` `server.run()`",
        "sglang.srt.managers.tokenizer_manager:TokenizerManager.auto_create_handle_loop": "()",
        "sglang.srt.managers.tokenizer_manager:TokenizerManager.sigterm_watchdog": "()",
        "sglang.srt.managers.tokenizer_manager": (
            "`self.event_loop = loop` `while not self.gracefully_exit:` `remain_num_req = len(self.rid_to_state)`"
        ),
    },
    "platform and settings": {
        "sglang.srt.platforms.device_mixin:PlatformEnum": "OOT",
        "sglang.srt.platforms.cpu:CpuDeviceMixin": "get_device is_pin_memory_available",
        "sglang.srt.platforms.interface:SRTPlatform": (
            "apply_server_args_defaults get_compile_backend get_default_attention_backend get_dispatch_key_name "
            "get_kv_pool_cls"
        ),
        "sglang.srt.runtime_context:get_observability": "()",
        "sglang.srt.arg_groups.overrides:attention_backends_of": "(cfg)",
        "sglang.srt.arg_groups.overrides:resolved_view": "(server_args)",
        "sglang.srt.arg_groups.overrides:model_config_of": "(server_args)",
    },
    "the host pool": {
        "sglang.srt.runtime_context:get_exec": "()",
        "sglang.srt.mem_cache.kv_cache_configurator": "`get_kv_pool_cls(` `self._profile_available_bytes(`",
        "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool": (
            "_create_buffers _kv_buffer_descs dtype get_cpu_copy get_key_buffer get_kv_buffer get_value_buffer "
            "head_dim head_num k_buffer layer_num load_cpu_copy move_kv_cache page_size set_kv_buffer size "
            "store_dtype v_buffer v_head_dim"
        ),
        "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator": "_profile_available_bytes server_args",
    },
    "requests of rows": {
        "sglang.srt.mem_cache.memory_pool:ReqToTokenPool": "req_generation req_to_token size",
        "sglang.srt.mem_cache.memory_pool:ReqToTokenPool.free_rows": "(indices)",
        "sglang.srt.mem_cache.memory_pool:ReqToTokenPool.clear": "()",
        "sglang.srt.model_executor.forward_batch_info:ForwardMode": "DECODE is_decode",
        "sglang.srt.model_executor.forward_batch_info:ForwardBatch": (
            "batch_size extend_seq_lens_cpu forward_mode orig_seq_lens out_cache_loc req_pool_indices "
            "residual_stream seq_lens seq_lens_cpu"
        ),
    },
    "attention backend": {
        "sglang.srt.layers.attention.base_attn_backend:AttentionBackend": (
            "forward_decode forward_extend get_cuda_graph_seq_len_fill_value init_cuda_graph_state "
            "init_forward_metadata init_forward_metadata_out_graph support_triton"
        ),
        "sglang.srt.layers.radix_attention:RadixAttention": (
            "attn_type is_cross_attention k_scale layer_id logit_cap qk_head_dim quant_method scaling "
            "sliding_window_size tp_k_head_num tp_q_head_num use_irope v_head_dim xai_temperature_len"
        ),
    },
    "the lookahead": {
        "sglang.srt.layers.layer_boundary.residual.batch:start": "(forward_batch)",
        "sglang.srt.layers.layer_boundary.residual.stream:ResidualStream": "snapshot",
        "sglang.srt.model_executor.forward_context:ForwardContext": "attn_backend",
        "sglang.srt.model_executor.forward_context:forward_context": "(ctx)",
    },
}

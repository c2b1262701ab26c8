"""Everything of SGLang that this adapter leans on, checked at start by `compat.check_engine`.

A test keeps the table complete, as vLLM's (tests/unit/test_engine_leans.py, tests/engines/test_leans.py).
"""

from __future__ import annotations

from hybrid_backend.engines.probe import Lean

_POOL = "sglang.srt.mem_cache.memory_pool"
_PLATFORM = "sglang.srt.platforms.interface:SRTPlatform"
_MANAGER = "sglang.srt.managers.tokenizer_manager:TokenizerManager"

PLUGIN = (
    Lean("sglang.srt.arg_groups.choices:ATTENTION_BACKEND_CHOICES", "the name hybrid"),
    Lean("sglang.srt.arg_groups.choices:add_attention_backend_choices", "the name hybrid"),
    Lean(
        "sglang.srt.layers.attention.attention_registry:register_attention_backend",
        "the name hybrid",
        passes=("name",),
    ),
)
"""Without these the plugin cannot even be registered."""

LEANS = (
    *PLUGIN,
    Lean(
        "sglang.srt.plugins.hook_registry:HookRegistry.register",
        "our hooks",
        passes=("target", "hook", "hook_type"),
    ),
    Lean("sglang.srt.plugins.hook_registry:HookType", "our hooks", has=("AFTER", "AROUND")),
    Lean("sglang.srt.plugins:load_plugins", "`hybrid serve`", passes=()),
    Lean("sglang.srt.platforms.cpu:CpuDeviceMixin", "our platform"),
    Lean("sglang.srt.platforms.device_mixin:PlatformEnum", "our platform", has=("OOT",)),
    Lean(f"{_PLATFORM}.apply_server_args_defaults", "where we refuse", takes=("server_args",)),
    Lean("sglang.srt.platforms.cpu:CpuDeviceMixin.get_device", "our platform", takes=("device_id",)),
    Lean("sglang.srt.platforms.cpu:CpuDeviceMixin.is_pin_memory_available", "our platform", takes=("device",)),
    Lean(f"{_PLATFORM}.get_default_attention_backend", "our platform", takes=()),
    Lean(f"{_PLATFORM}.get_compile_backend", "our platform", takes=("mode",)),
    Lean(f"{_PLATFORM}.get_dispatch_key_name", "our platform", takes=()),
    Lean(f"{_PLATFORM}.get_kv_pool_cls", "the host pool", takes=("kind",)),
    Lean("sglang.srt.runtime_context:get_exec", "the host pool", passes=()),
    Lean("sglang.srt.runtime_context:get_observability", "metrics", passes=()),
    Lean("sglang.srt.arg_groups.overrides:attention_backends_of", "the backend that was asked for", passes=("cfg",)),
    Lean("sglang.srt.arg_groups.overrides:resolved_view", "the arguments", passes=("server_args",)),
    Lean("sglang.srt.arg_groups.overrides:model_config_of", "the model", passes=("server_args",)),
    Lean(
        "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._profile_available_bytes",
        "the pool's size",
    ),
    Lean("sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator", "the pool's size", has=("server_args",)),
    Lean(
        "sglang.srt.mem_cache.kv_cache_configurator",
        "the host pool",
        reads=("get_kv_pool_cls(", "self._profile_available_bytes("),
    ),
    Lean(f"{_POOL}:ReqToTokenPool.free_rows", "requests that are gone", passes=("indices",)),
    Lean(f"{_POOL}:ReqToTokenPool.clear", "requests that are gone", passes=()),
    Lean(
        f"{_POOL}:ReqToTokenPool",
        "which request a row is",
        has=("req_generation", "req_to_token", "size"),
    ),
    Lean(
        f"{_POOL}:MHATokenToKVPool",
        "the host pool",
        has=(
            "_create_buffers", "_kv_buffer_descs", "dtype", "get_cpu_copy", "get_key_buffer", "get_kv_buffer",
            "get_value_buffer", "head_dim", "head_num", "k_buffer", "layer_num", "load_cpu_copy", "move_kv_cache",
            "page_size", "set_kv_buffer", "size", "store_dtype", "v_buffer", "v_head_dim",
        ),
        defines=(
            "_create_buffers", "get_cpu_copy", "get_key_buffer", "get_kv_buffer", "get_value_buffer", "load_cpu_copy",
            "move_kv_cache", "set_kv_buffer",
        ),
    ),
    Lean(f"{_POOL}:MHATokenToKVPool._create_buffers", "the host pool", takes=()),
    Lean(f"{_POOL}:MHATokenToKVPool.get_key_buffer", "the host pool", takes=("layer_id",)),
    Lean(f"{_POOL}:MHATokenToKVPool.get_value_buffer", "the host pool", takes=("layer_id",)),
    Lean(f"{_POOL}:MHATokenToKVPool.get_kv_buffer", "the host pool", takes=("layer_id",)),
    Lean(
        "sglang.srt.layers.attention.base_attn_backend:AttentionBackend",
        "our backend",
        defines=(
            "forward_decode", "forward_extend", "get_cuda_graph_seq_len_fill_value", "init_cuda_graph_state",
            "init_forward_metadata", "init_forward_metadata_out_graph", "support_triton",
        ),
    ),
    Lean(
        "sglang.srt.layers.attention.base_attn_backend:AttentionBackend.init_forward_metadata",
        "begins a step",
        takes=("forward_batch",),
    ),
    Lean(
        "sglang.srt.layers.attention.base_attn_backend:AttentionBackend.init_forward_metadata_out_graph",
        "begins a step of a graph",
        takes=("forward_batch", "in_capture"),
    ),
    Lean(
        "sglang.srt.layers.attention.base_attn_backend:AttentionBackend.init_cuda_graph_state",
        "graphs",
        takes=("max_bs", "max_num_tokens"),
    ),
    Lean(
        "sglang.srt.layers.attention.base_attn_backend:AttentionBackend.get_cuda_graph_seq_len_fill_value",
        "graphs",
        takes=(),
    ),
    Lean("sglang.srt.layers.attention.base_attn_backend:AttentionBackend.support_triton", "our backend", takes=()),
    Lean(
        "sglang.srt.layers.radix_attention:RadixAttention",
        "the layers of a model",
        has=(
            "attn_type", "is_cross_attention", "k_scale", "layer_id", "logit_cap", "qk_head_dim", "quant_method",
            "scaling", "sliding_window_size", "tp_k_head_num", "tp_q_head_num", "use_irope", "v_head_dim",
            "xai_temperature_len",
        ),
    ),
    Lean("sglang.srt.layers.linear:QKVParallelLinear", "the lookahead"),
    Lean("sglang.srt.layers.layer_boundary.residual.batch:start", "the lookahead", passes=("forward_batch",)),
    Lean("sglang.srt.layers.layer_boundary.residual.stream:ResidualStream", "the lookahead", has=("snapshot",)),
    Lean("sglang.srt.model_executor.forward_context:ForwardContext", "the lookahead", has=("attn_backend",)),
    Lean("sglang.srt.model_executor.forward_context:forward_context", "the lookahead", passes=("ctx",)),
    Lean("sglang.srt.model_executor.forward_batch_info:ForwardMode", "rows of a batch", has=("DECODE", "is_decode")),
    Lean(
        "sglang.srt.model_executor.forward_batch_info:ForwardBatch",
        "rows of a batch",
        has=(
            "batch_size", "extend_seq_lens_cpu", "forward_mode", "orig_seq_lens", "out_cache_loc", "req_pool_indices",
            "residual_stream", "seq_lens", "seq_lens_cpu",
        ),
    ),
    Lean("sglang.launch_server:run_server", "`hybrid serve`", passes=("server_args",)),
    Lean("sglang.srt.entrypoints.http_server", "its address", reads=("server = uvicorn.Server(", "server.run()")),
    Lean(f"{_MANAGER}.auto_create_handle_loop", "signals", passes=()),
    Lean(f"{_MANAGER}.sigterm_watchdog", "signals", passes=()),
    Lean(
        _MANAGER,
        "signals",
        reads=("self.event_loop = loop", "while not self.gracefully_exit:", "remain_num_req = len(self.rid_to_state)"),
    ),
    Lean(
        "sglang.srt.utils.server_args_config_parser:ConfigArgumentMerger.merge_config_with_args",
        "`hybrid serve`",
        passes=("cli_args",),
    ),
    Lean("sglang.srt.server_args:prepare_server_args", "`hybrid serve`", passes=("argv",)),
    Lean(
        "sglang.srt.server_args:ServerArgs",
        "`hybrid serve`",
        has=("add_cli_args", "check_server_args", "resolve_once"),
    ),
)  # fmt: skip

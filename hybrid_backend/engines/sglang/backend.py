"""SGLang's attention backend contract, carried out by the runtime."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import Tensor

from hybrid_backend.engines.sglang import OWN_BACKEND, patches
from hybrid_backend.engines.sglang.compat import check_engine
from hybrid_backend.engines.sglang.hooks import attach_lookahead
from hybrid_backend.engines.sglang.session import Session, attention_layers
from hybrid_backend.engines.sglang.settings import config_of
from hybrid_backend.errors import EngineError


class HybridBackend(AttentionBackend):
    """The backend of ``--attention-backend hybrid``, built when the model and the KV pool are allocated."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        check_engine()
        if runner.device != "cpu":
            raise EngineError(f"the hybrid backend of this version runs on SGLang's CPU device, not on {runner.device}")
        patches.verify()
        # Models read the pools from their backend (forward_context.py), if only to ask whether they fit a fused kernel.
        self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool
        config = config_of(resolved_view(runner.server_args))
        layers = attention_layers(runner.model)
        self.session = Session(runner, config, layers)
        stream = torch.empty(0, runner.model_config.hidden_size, dtype=runner.model_config.dtype)
        with forward_context(ForwardContext(attn_backend=self)):
            attach_lookahead(self.session, layers, config, stream)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.session.begin_step(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate nothing: graphs have at most ``--max-running-requests`` rows, for which the runtime has buffers."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the sequence length of a padding row, which `Session` leaves out."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Begin a step without requests for a capture, or the real step for a replay."""
        if in_capture:
            self.session.capture_step(forward_batch.batch_size)
        else:
            self.session.begin_step(forward_batch)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Store the new tokens and attend; return a tensor like ``q``.

        ``q`` is ``[tokens, heads * dim]``, ``k`` and ``v`` are ``[tokens, kv_heads, dim]``. Tokens that the model has
        stored itself (``save_kv_cache=False``) and further kinds of attention (``kwargs``) are refused.
        """
        unknown = sorted(name for name, value in kwargs.items() if value is not None)
        if k is None or v is None or not save_kv_cache or unknown:
            what = f"attention with {', '.join(unknown)}" if unknown else "a model that writes its KV by itself"
            raise EngineError(f"the hybrid backend does not support {what}; {OWN_BACKEND}")
        heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = torch.empty_like(heads, memory_format=torch.contiguous_format)
        self.session.forward(layer.layer_id, heads, k, v, out)
        return out.view(out.shape[0], -1)

    # Prefill and decode share one entry point, because the step records which rows decode.
    forward_decode = forward_extend

    def support_triton(self) -> bool:
        return False

"""Gated delta nets in fp32 for vLLM's CPU engine, whose own kernel takes bf16 only ("CPU GDN attention requires BF16",
model_executor/layers/mamba/ops/cpu/gdn_attention.py of 0.32).

With it Qwen3-Next's and Qwen3.5's tokens can be compared in fp32, where two backends agree to the last token. It serves
the stock backend and ours alike, token by token, over vLLM's own states; all else of these layers is vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name


def install() -> None:
    """Call before a model is built: vLLM registers its operator with the first layer."""
    gdn_attention.cpu_gdn_attention_core = attend


# vLLM's wrapper, which reads these annotations, knows no others.
def attend(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: LayerNameType
) -> None:
    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if not isinstance(context.attn_metadata, dict):  # profiling
        return
    metadata = context.attn_metadata[layer.prefix]
    starts, slots = metadata.non_spec_query_start_loc, metadata.non_spec_state_indices_tensor
    known = metadata.has_initial_state
    for row in range(metadata.num_decodes + metadata.num_prefills):
        tokens = slice(int(starts[row]), int(starts[row + 1]))
        goes_on = row < metadata.num_decodes or bool(known[row])
        core_attn_out[tokens] = sequence(layer, int(slots[row]), goes_on, mixed_qkv[tokens], b[tokens], a[tokens])


def sequence(layer: Any, slot: int, goes_on: bool, mixed: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """``[tokens, value heads, value dim]``. Gated Delta Networks (arXiv 2412.06464), equation 10, as in Transformers'
    ``torch_recurrent_gated_delta_rule``."""
    carried = layer.kv_cache[0][slot]  # what the convolution saw last
    carried = carried if is_conv_state_dim_first() else carried.T
    state = layer.kv_cache[1][slot].view(-1, layer.head_k_dim, layer.head_v_dim)
    if not goes_on:
        carried.zero_()
        state.zero_()
    seen = torch.cat([carried, mixed.T], 1)
    carried.copy_(seen[:, -carried.shape[1] :])
    weight = gdn_attention._unpacked_conv_weight(layer)
    mixed = F.silu(F.conv1d(seen[None], weight[:, None], layer.conv1d.bias, groups=len(weight))[0].T)
    widths = [layer.key_dim // layer.tp_size] * 2 + [layer.value_dim // layer.tp_size]
    q, k, v = (
        part.unflatten(1, (-1, dim))
        for part, dim in zip(
            mixed.split(widths, 1), (layer.head_k_dim, layer.head_k_dim, layer.head_v_dim), strict=True
        )
    )
    each = v.shape[1] // k.shape[1]
    q, k = (F.normalize(x, dim=-1, eps=1e-6).repeat_interleave(each, 1) for x in (q, k))
    q = q * layer.head_k_dim**-0.5
    decay = torch.exp(-layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias.float()))
    gain = b.sigmoid()
    out = torch.empty_like(v)
    for t in range(len(out)):
        state.mul_(decay[t, :, None, None])
        change = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * gain[t, :, None]
        state.add_(torch.einsum("hk,hv->hkv", k[t], change))
        out[t] = torch.einsum("hkv,hk->hv", state, q[t])
    return out

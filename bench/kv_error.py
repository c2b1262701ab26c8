"""Error of decode attention over a real prompt's K and V, by the encodings that take 8 bits a number.

    python -m bench.kv_error [--model smollm2-135m-instruct] [--tokens 4096] [--queries 64]

The model computes a prompt in fp32. Each encoding stores K and V of all layers; the last queries of the prompt attend
all earlier tokens, and outputs are compared with those over fp32. Encodings:

    int8                  `kv_dtype: int8`: a scale per token and KV head
    int8, blocks of 32    a scale per 32 channels (llama.cpp's ``q8_0``)
    int8 less means       the same of what differs from each channel's mean over the prompt
    fp8 per token, head   e4m3 with such scales (vLLM's ``fp8_per_token_head``)
    fp8                   e4m3 with one scale of 1 (vLLM's ``fp8`` without calibrated scales)

Printed are the root mean squares over layers, heads and queries of |error| / |output|, and the worst layer's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.tools.hub import fetch
from tests.engines.texts import tokens_of_prose

Encoding = Callable[[Tensor], Tensor]
"""Stores K or V ``[tokens, kv_heads, head_dim]`` and reads it again."""
FP8 = torch.float8_e4m3fn
FP8_LARGEST = torch.finfo(FP8).max


def int8(x: Tensor) -> Tensor:
    return KvFormat(x.shape[1], 16, x.shape[2], torch.int8).stored(x)


def int8_blocks(x: Tensor) -> Tensor:
    return int8(x.unflatten(-1, (-1, 32)).flatten(1, 2)).view(x.shape)


def int8_centred(x: Tensor) -> Tensor:
    mean = x.mean(0)
    return int8(x - mean) + mean


def fp8_scaled(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / FP8_LARGEST
    return (x / scale).to(FP8).float() * scale


def fp8(x: Tensor) -> Tensor:
    return x.clamp(-FP8_LARGEST, FP8_LARGEST).to(FP8).float()


ENCODINGS: dict[str, Encoding] = {
    "int8": int8,
    "int8, blocks of 32": int8_blocks,
    "int8 less means": int8_centred,
    "fp8 per token, head": fp8_scaled,
    "fp8": fp8,
}


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return outputs ``[heads, queries, head_dim]`` of the last queries over all tokens, causally."""
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.transpose(0, 1).repeat_interleave(groups, 0) for x in (k, v))
    queries, tokens = len(q), len(k)
    mask = torch.arange(tokens) <= torch.arange(tokens - queries, tokens)[:, None]
    return torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=mask)


def captured(model_name: str, tokens: int, queries: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return each layer's last queries, and K and V of a prompt, after the rotation: ``[tokens, heads, head_dim]``."""
    model = AutoModelForCausalLM.from_pretrained(fetch(model_name), dtype=torch.float32)
    last: list[Tensor] = []

    def attention(
        module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, **_: object
    ) -> tuple[Tensor, None]:
        last.append(q[0, :, -queries:].transpose(0, 1).clone())
        groups = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(groups, 1) for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True)
        return out.transpose(1, 2).contiguous(), None

    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("captured", attention)
    model.set_attn_implementation("captured")
    ids = torch.tensor([tokens_of_prose(tokens, 0, model_name)])
    cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    stored = [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in cache.layers]
    return [(q, k, v) for q, (k, v) in zip(last, stored, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m bench.kv_error", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--queries", type=int, default=64)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    layers = captured(given.model, given.tokens, given.queries)
    exact = [attended(*layer) for layer in layers]
    for name, encoding in ENCODINGS.items():
        squares = []
        for (q, k, v), right in zip(layers, exact, strict=True):
            error = attended(q, encoding(k), encoding(v)) - right
            squares.append(((error.norm(dim=-1) / right.norm(dim=-1)) ** 2).mean())
        mean, worst = torch.stack(squares).mean() ** 0.5, max(squares) ** 0.5
        print(f"{given.model:28} {given.tokens:6} tokens  {name:20} error {mean:.4f}  worst layer {worst:.4f}")


if __name__ == "__main__":
    main()

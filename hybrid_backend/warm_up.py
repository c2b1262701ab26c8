"""Warm-up of a GPU: made-up requests launch every kernel once, before real requests come.

Triton compiles a kernel at its first launch, which takes seconds.
"""

from __future__ import annotations

import logging
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch

from hybrid_backend.batch import Batch, Step

if TYPE_CHECKING:
    from hybrid_backend.runtime import HybridRuntime

_REQUEST = "warm-up of the hybrid backend"


def warm_up(runtime: HybridRuntime, page: int) -> None:
    """Run a short request and a long one through all layers with full attention, then release both.

    The long request exceeds its frames and the staging buffers. The request has two prefill chunks, a decode step that
    fills a page, and a decode step that begins a page. `HybridRuntime.forget_counts` resets what the steps counted.

    Not launched are kernels that park decode rows, which need inputs of decoder layers, and kernels that merge partials
    of larger batches, which the capture of CUDA graphs launches.

    Args:
        runtime: the runtime of this rank.
        page: host page that no request uses. The requests' tokens are all written to this page.
    """
    model, tiers, size = runtime.model, runtime.tiers, runtime.config.page_size
    staged = 0 if tiers.stream is None else 2 * tiers.stream.capacity // model.num_kv_heads
    pages = max(tiers.frames.size, staged, *tiers.layout.layer_frames.values()) + 2
    if model.max_tokens is not None:
        pages = min(pages, model.max_tokens // size - 1)
    if pages < 2 or model.parks:
        return
    with torch.inference_mode():
        _serve(runtime, page, [(size + 1, size + 1, False), (size + 2, 1, True)])
        tokens = pages * size
        _serve(runtime, page, [(tokens - 1, size, False), (tokens, 1, True), (tokens + 1, 1, True)])


def _serve(runtime: HybridRuntime, page: int, steps: list[tuple[int, int, bool]]) -> None:
    """Run one request, then release it.

    ``steps``: per step the sequence length, the number of query tokens, and whether the row is a decode row.
    """
    finished = [_step(runtime, page, *arguments) for arguments in steps]
    for error in filter(None, (step.error for step in finished)):
        logging.getLogger(__name__).warning("the warm-up was not served to its end, so requests may be: %s", error)
    runtime.release([_REQUEST])


def _step(runtime: HybridRuntime, page: int, seq_len: int, count: int, is_decode: bool) -> Step:
    """Run one step, for the last ``count`` of ``seq_len`` tokens, in all layers with full attention."""
    model, device, size = runtime.model, runtime.tiers.device, runtime.config.page_size
    table = torch.full((1, -(-seq_len // size)), page, dtype=torch.int32, device=device)
    slots = page * size + torch.arange(seq_len - count, seq_len, device=device) % size
    step = runtime.begin_step(Batch([_REQUEST], [0, count], [seq_len], [is_decode], table, slots))
    q = torch.zeros(count, model.num_heads, model.head_dim, dtype=model.dtype, device=device)
    kv = torch.zeros(count, model.num_kv_heads, model.head_dim, dtype=model.dtype, device=device)
    layers = [layer for layer in range(model.num_layers) if model.window(layer) is None]
    for layer, next_layer in zip_longest(layers, layers[1:]):
        if next_layer is not None and runtime.wants_lookahead(next_layer, step):
            runtime.lookahead(next_layer, step, q)
        runtime.forward(layer, step, q, kv, kv, torch.empty_like(q))
    runtime.end_step(step)
    return step

"""What a GPU would do for the first time while somebody waits: Triton compiles a kernel when it is first launched.
That takes seconds."""

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
    """Serve requests that nobody made: a short one, and a prompt in two chunks, longer than its frames and than both
    staging buffers, with a decode step that fills a page and one that begins the next. Nothing of them is left; what
    they counted is, until `HybridRuntime.forget_counts`.

    Not launched: what parks rows (the decoder layers' inputs are not known here), and merges of other numbers of parts
    than one row has; graphs are captured with theirs.

    Args:
        page: host page that no request reads. All that the requests have lies there.
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
        long = pages * size
        _serve(runtime, page, [(long - 1, size, False), (long, 1, True), (long + 1, 1, True)])


def _serve(runtime: HybridRuntime, page: int, steps: list[tuple[int, int, bool]]) -> None:
    """One request. Of each step: tokens of the sequence, those of them that it computes, whether it decodes."""
    done = [_step(runtime, page, *each) for each in steps]
    for error in filter(None, (step.error for step in done)):
        logging.getLogger(__name__).warning("the warm-up was not served to its end, so requests may be: %s", error)
    runtime.release([_REQUEST])


def _step(runtime: HybridRuntime, page: int, seq_len: int, count: int, decodes: bool) -> Step:
    """The last ``count`` of ``seq_len`` tokens, in all layers with full attention."""
    model, device, size = runtime.model, runtime.tiers.device, runtime.config.page_size
    table = torch.full((1, -(-seq_len // size)), page, dtype=torch.int32, device=device)
    slots = page * size + torch.arange(seq_len - count, seq_len, device=device) % size
    step = runtime.begin_step(Batch([_REQUEST], [0, count], [seq_len], [decodes], table, slots))
    q = torch.zeros(count, model.num_heads, model.head_dim, dtype=model.dtype, device=device)
    new = torch.zeros(count, model.num_kv_heads, model.head_dim, dtype=model.dtype, device=device)
    layers = [layer for layer in range(model.num_layers) if model.window(layer) is None]
    for layer, ahead in zip_longest(layers, layers[1:]):
        if ahead is not None and runtime.wants_lookahead(ahead, step):
            runtime.lookahead(ahead, step, q)
        runtime.forward(layer, step, q, new, new, torch.empty_like(q))
    runtime.end_step(step)
    return step

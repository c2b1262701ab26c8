"""What a GPU would do for the first time while somebody waits: Triton compiles a kernel when it is first launched.
That takes seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybrid_backend.step import Batch

if TYPE_CHECKING:
    from hybrid_backend.runtime import HybridRuntime

_REQUEST = "warm-up of the hybrid backend"


def warm_up(runtime: HybridRuntime, page: int) -> None:
    """Serve a request that nobody made: a prompt in two chunks, longer than its frames, a decode step that fills a page
    and one that begins the next. Nothing of it is left or counted.

    Args:
        page: host page that no request reads. All that the request has lies there.
    """
    size, model = runtime.config.page_size, runtime.model
    pages = max(runtime.tiers.frames.size, 1) + 2
    if model.max_tokens is not None:
        pages = min(pages, model.max_tokens // size - 1)
    if pages < 2 or model.parks:  # whose rows need the decoder layers' inputs
        return
    chunks = (size + 1, size + 1, False), (pages * size - 1, size, False), (pages * size, 1, True)
    for seq_len, count, decodes in (*chunks, (pages * size + 1, 1, True)):
        _step(runtime, page, seq_len, count, decodes)
    runtime.release([_REQUEST])
    if runtime.tiers.device.type == "cuda":
        torch.cuda.current_stream(runtime.tiers.device).synchronize()
    runtime.forget_counts()


def _step(runtime: HybridRuntime, page: int, seq_len: int, count: int, decodes: bool) -> None:
    """The last ``count`` of ``seq_len`` tokens, in all layers with full attention."""
    model, device, size = runtime.model, runtime.tiers.device, runtime.config.page_size
    table = torch.full((1, -(-seq_len // size)), page, dtype=torch.int32, device=device)
    slots = page * size + torch.arange(seq_len - count, seq_len, device=device) % size
    step = runtime.begin_step(Batch([_REQUEST], [0, count], [seq_len], [decodes], table, slots))
    q = torch.zeros(count, model.num_heads, model.head_dim, dtype=model.dtype, device=device)
    new = torch.zeros(count, model.num_kv_heads, model.head_dim, dtype=model.dtype, device=device)
    layers = [layer for layer in range(model.num_layers) if model.window(layer) is None]
    for i, layer in enumerate(layers):
        for ahead in layers[i + 1 : i + 2] if i else layers[:2]:
            if runtime.wants_lookahead(ahead, step):
                runtime.lookahead(ahead, step, q)
        runtime.forward(layer, step, q, new, new, torch.empty_like(q))
    runtime.end_step(step)

"""Attention of layers with a sliding window, whose pages lie in the host pool alone; natively or with torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_backend.attention.partial import Partial, with_sinks
from hybrid_backend.attention.prefill import flash, windowed
from hybrid_backend.batch import ModelSpec, Step, WindowRows, whole_tokens, window_rows
from hybrid_backend.in_place.prompts import InPlacePrompts
from hybrid_backend.kernels import cpu
from hybrid_backend.kernels.kv_format import gather_head_pages
from hybrid_backend.kernels.operations import Operations
from hybrid_backend.tiers.host_pool import HostPool


class SlidingLayers:
    """The layers of a model that have a sliding window: all rows of a step, prompt chunks and decode rows."""

    def __init__(
        self, model: ModelSpec, host: HostPool, operations: Operations, prompts: InPlacePrompts | None, is_native: bool
    ) -> None:
        """Choose the kernels.

        Args:
            model: the rank's model.
            host: the pool in which these layers' pages lie.
            operations: appends tokens where torch attends.
            prompts: native attention of prompt chunks. None: torch attends them.
            is_native: decode rows may be attended by the native kernels.
        """
        self._model, self._host, self._operations, self._prompts = model, host, operations, prompts
        self._native = LocalLayers.of(model, host.layers) if is_native else None

    def forward(self, layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Store the step's new tokens and attend all rows.

        Args:
            layer: a layer with a sliding window.
            step: the open step, with the pages of these layers.
            q: ``[tokens, heads, head_dim]`` of the batch.
            k: ``[tokens, kv_heads, head_dim]``.
            v: like ``k``.
            out: like ``q``.
        """
        model, rows, blocks = self._model, step.decode, self._host.blocks(layer)
        window, sinks, shape = model.window(layer), model.sink(layer), model.shape(layer)
        assert window is not None
        if step.prefill or self._native is None:
            new_k, new_v = whole_tokens(k[: step.num_tokens]), whole_tokens(v[: step.num_tokens])
            view = self._host.views[layer]
            self._operations.append_tokens(new_k, new_v, view, step.write_pages, step.write_offsets)
        for row in step.prefill:
            if self._prompts is not None:
                self._prompts.attend(layer, row, q, new_k, new_v, out)
                continue
            chunk = slice(row.start, row.end)
            new = new_k[chunk], new_v[chunk]
            out[chunk] = windowed(q[chunk], new, blocks, row.pages, row.seq_len, shape.scale, window, sinks)
        if rows is None:
            return
        if self._native is not None:
            self._native.decode(layer, step, q, k, v, out)
            return
        attended = window_rows(step, window, blocks.shape[1])
        result = decode_windows(rows.gather(q), blocks, attended, shape.num_kv_heads, shape.scale, sinks)
        out.index_copy_(0, rows.tokens.to(out.device), result.to(out.dtype))

    def close(self) -> None:
        if self._native is not None:
            self._native.close()


class LocalLayers:
    """Native decoding of the layers with a sliding window: one native call per layer appends and attends."""

    def __init__(self, model: ModelSpec, layers: Sequence[Tensor]) -> None:
        """``layers``: `HostPool.layers`, of which those with a window are taken. All of these have one shape."""
        self._windows = model.windows
        heads, _, _, scale = model.window_shape or model.full_shape
        self._decoders: dict[int, cpu.Decoder] = {}  # Keyed by page size, which all layers of a decoder share.
        for size in {layer.shape[3] for layer, window in zip(layers, model.windows, strict=True) if window is not None}:
            own_layers = [
                layer if window is not None and layer.shape[3] == size else None
                for layer, window in zip(layers, model.windows, strict=True)
            ]
            self._decoders[size] = cpu.Decoder(
                own_layers, {}, heads, scale, sinks=model.sinks_by_layer, dtype=model.dtype
            )
        self._page_sizes = [layer.shape[3] for layer in layers]
        self._begun: dict[int, WindowRows] = {}  # Keyed by page size: rows of the step that the decoder has begun.

    @classmethod
    def of(cls, model: ModelSpec, layers: Sequence[Tensor]) -> LocalLayers | None:
        """Return the native decoding of sliding windows; None if no layer has one or the kernels lack the shape."""
        sizes = {x.shape[3] for x, window in zip(layers, model.windows, strict=False) if window is not None}
        heads, kv_heads, head_dim, _ = model.window_shape or model.full_shape
        if not sizes or not cpu.available() or not all(cpu.decodes(heads, kv_heads, head_dim, x) for x in sizes):
            return None
        return cls(model, layers)

    def decode(self, layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Append and attend the tokens of the decode rows.

        Args:
            layer: layer of the model, which has a sliding window.
            step: the open step.
            q: ``[tokens, heads, head_dim]`` of the batch.
            k: ``[tokens, kv_heads, head_dim]``.
            v: like ``k``.
            out: like ``q``; only tokens of decode rows are written.
        """
        rows, window, page_size = step.decode, self._windows[layer], self._page_sizes[layer]
        assert rows is not None and window is not None
        decoder, attended = self._decoders[page_size], window_rows(step, window, page_size)
        if self._begun.get(page_size) is not attended:
            tokens = None if rows.whole_batch else rows.tokens
            everything = torch.full_like(attended.tokens, -1)
            decoder.begin(attended.pages, attended.tokens, everything, tokens=tokens, skips=attended.skips)
            self._begun[page_size] = attended
        decoder.layer(layer, q, k, v, out)

    def close(self) -> None:
        for decoder in self._decoders.values():
            decoder.close()


def decode_windows(
    q: Tensor, blocks: Tensor, attended: WindowRows, kv_heads: int, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Sliding-window attention of one query token per row, with torch.

    Args:
        q: ``[rows, heads, head_dim]``.
        blocks: one layer of the host pool (`HostPool.blocks`); the rows' tokens are in it already.
        attended: tokens and pages of each row's window.
        kv_heads: KV heads of the layer.
        scale: factor of the logits.
        sinks: ``[heads]`` fp32 (`with_sinks`).

    Returns:
        ``[rows, heads, head_dim]`` fp32.
    """
    rows, heads, dim = q.shape
    head_pages = (attended.pages[:, None] * kv_heads + torch.arange(kv_heads, device=q.device)[:, None]).flatten()
    gathered = gather_head_pages(blocks, head_pages, q.dtype)
    key = torch.arange(attended.pages.shape[1] * blocks.shape[1])
    mask = ((key >= attended.skips[:, None]) & (key < attended.tokens[:, None])).to(q.device)
    # Slots that were never written may hold NaN, and a weight of 0 times NaN is NaN.
    k, v = (x.view(rows, kv_heads, -1, dim).masked_fill_(~mask[:, None, :, None], 0.0) for x in gathered)
    # One item per row and KV head, of as many queries as it has query heads.
    items, group = rows * kv_heads, heads // kv_heads
    mask = mask[:, None, None].expand(-1, kv_heads, group, -1).flatten(0, 1)
    out, lse = flash(q.reshape(items, group, dim), k.flatten(0, 1), v.flatten(0, 1), False, scale, mask)
    return with_sinks(Partial(out.reshape(rows, heads, dim).float(), lse.reshape(rows, heads)), sinks).out

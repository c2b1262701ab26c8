"""Attention of prompts over host pages in place, natively: one call per layer and row, windows and sinks included."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_backend.batch import ModelSpec, PrefillRow
from hybrid_backend.kernels import cpu


class InPlacePrompts:
    """Prompts where the host is the device tier."""

    def __init__(self, model: ModelSpec, layers: Sequence[Tensor]) -> None:
        """``layers``: `HostPool.layers`."""
        self._model, self._layers = model, layers

    @classmethod
    def of(cls, model: ModelSpec, layers: Sequence[Tensor]) -> InPlacePrompts | None:
        """Return the native attention of prompts; None if the kernels lack the shape or PyTorch is faster.

        PyTorch's products of bf16 matrices take AMX for any head_dim, the native ones for multiples of 32. Every CPU
        with AMX has AVX512_BF16, too.
        """
        if not cpu.available():
            return None
        has_amx = model.dtype == torch.bfloat16 and model.kv_dtype is None and "amx" in cpu.isas()
        for index, layer in enumerate(layers):
            heads, kv_heads, head_dim, _ = model.shape(index)
            if not cpu.decodes(heads, kv_heads, head_dim, layer.shape[3]) or (has_amx and head_dim % 32):
                return None
        return cls(model, layers)

    def attend(self, layer: int, row: PrefillRow, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Attend a prompt chunk, whose keys and values are in the row's pages already.

        With pages in 8 bits the chunk attends itself as the model computed it; earlier tokens are read in 8 bits.

        Args:
            layer: layer of the model.
            row: the request's chunk.
            q: ``[tokens, heads, head_dim]`` of the batch.
            k: ``[tokens, kv_heads, head_dim]`` of the batch, each token contiguous.
            v: like ``k``.
            out: as ``q``; the row's tokens are written.
        """
        chunk, model = slice(row.start, row.end), self._model
        cpu.attend_prompt(
            q[chunk], self._layers[layer], row.pages.int(), row.seq_len, model.shape(layer).scale,
            model.window(layer), model.sink(layer), out[chunk],
            new=None if model.kv_dtype is None else (k[chunk], v[chunk]),
        )  # fmt: skip

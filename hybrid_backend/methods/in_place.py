"""Decoding where the device tier is the host itself: one native call per layer appends, selects and attends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_backend.config import HybridConfig
from hybrid_backend.kernels import cpu
from hybrid_backend.kernels.cpu.library import byte_row
from hybrid_backend.observe.stats import Stats
from hybrid_backend.step import DecodeRows, ModelSpec, Step
from hybrid_backend.tiers import Tiers


@dataclass(frozen=True)
class _Plan:
    dense_tokens: int
    dense_pages: int
    unattended_pages: int  # of layers that select
    selecting: Tensor  # [rows] bool: rows that attend fewer pages than they have


def span_bytes(model: ModelSpec, pages: int, layers: int) -> int:
    """Memory of the second level of digests of a sequence of ``pages`` pages, at most: a row of bytes for every 8 whole
    pages, in arrays that double when they grow (kernels/cpu/src/digest.h, `SpanDigests`)."""
    spans = max(0, pages - 1) // 8
    return layers * byte_row(model.num_kv_heads, model.head_dim) * (2 ** (spans - 1).bit_length() if spans else 0)


class InPlace:
    """All decoding rows of a step over host pages in place; no slots, no copies, no waiting, the true query selects.

    Layers without digests are exact. Written for `Decoder`, so that what ten torch operations per layer would cost is
    paid once.
    """

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers, stats: Stats) -> None:
        self._per_head = config.selection.granularity == "kv_head"
        self._config = config
        self._model = model
        self._tiers = tiers
        self._stats = stats
        digests, in_bytes = (tiers.digests.layers, tiers.digests.in_bytes) if tiers.digests else ({}, {})
        self._sparse_layers = set(digests)
        self._sequences: dict[str, int] = {}  # the decoder's name of each request it keeps spans of
        self._next_sequence = 0
        layers = [layer if model.window(index) is None else None for index, layer in enumerate(tiers.host.layers)]
        bound = config.selection.bound
        self._decoder = cpu.Decoder(layers, digests, model.num_heads, model.scale, quantized=in_bytes, bound=bound)

    @staticmethod
    def supports(model: ModelSpec, page_size: int, device: torch.device) -> bool:
        """Whether the native decoder can serve this model on this machine."""
        return (
            device.type == "cpu"
            and cpu.available()
            and cpu.decodes(model.num_heads, model.num_kv_heads, model.head_dim, page_size)
        )

    def begin_step(self, step: Step, sparse: Tensor) -> None:
        """``sparse``: ``[rows]`` bool, rows under the budget."""
        rows = step.decode
        assert rows is not None
        config = self._config
        budgets = torch.where(sparse, config.budget_pages, -1)
        self._decoder.begin(
            rows.page_table,
            rows.seq_lens,
            budgets,
            sinks=config.sinks,
            recent=config.recent,
            tokens=None if rows.whole_batch else rows.tokens,
            per_head=self._per_head,
            aggregate=config.selection.aggregate,
            sequences=torch.tensor([self._sequence(request_id) for request_id in rows.request_ids]),
            candidates=config.selection.candidates,
        )
        unattended = (rows.num_pages - config.budget_pages).clamp(min=0)
        step.plan = _Plan(
            dense_tokens=int(rows.seq_lens.sum()),
            dense_pages=int(rows.num_pages.sum()),
            unattended_pages=int((unattended * sparse).sum()),
            selecting=sparse & (rows.num_pages > config.budget_pages),
        )

    def decode(self, layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Append, select, attend. ``q``, ``out``: ``[tokens, heads, head_dim]``; only the rows' tokens are touched."""
        plan: _Plan = step.plan
        self._decoder.layer(layer, q, k, v, out)
        is_sparse = layer in self._sparse_layers
        left_out = plan.unattended_pages if is_sparse else 0  # whole pages: the growing one is always attended
        self._stats.attended(layer, plan.dense_tokens - left_out * self._config.page_size, 0)
        self._stats.looked_up(layer, plan.dense_pages - left_out, plan.dense_pages - left_out)
        if is_sparse and step.decode is not None and self._config.is_sampled(step.number, layer):
            self._sample(layer, step.decode, step.decode.gather(q), plan.selecting.nonzero().flatten(), step.number)

    def failure(self, step: Step) -> None:
        return None  # `decode` raises

    def release(self, request_id: str) -> None:
        """The request is gone, or its pages are about to be others."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._decoder.forget(sequence)

    def wants_lookahead(self, layer: int) -> bool:
        return False

    def count(self) -> None:
        """Each layer counts when it is called."""

    def lookahead(self, layer: int, q: Tensor) -> None:
        raise NotImplementedError("the true query selects")

    @property
    def resident_pages(self) -> int:
        return 0

    @property
    def device_bytes(self) -> int:
        return 0

    @property
    def host_bytes(self) -> int:
        """Host memory of the second level of digests."""
        return self._decoder.span_bytes

    def close(self) -> None:
        self._decoder.close()

    def _sequence(self, request_id: str) -> int:
        if request_id not in self._sequences:
            self._sequences[request_id] = self._next_sequence
            self._next_sequence += 1
        return self._sequences[request_id]

    def _sample(self, layer: int, rows: DecodeRows, q: Tensor, selecting: Tensor, turn: int) -> None:
        """Attention mass that one of the selecting rows covers, by what the kernels say of the sums: a head's share is
        ``exp(lse of the selected pages - lse of all)``."""
        if not len(selecting):
            return
        r = int(selecting[turn % len(selecting)])
        heads = range(self._model.num_kv_heads if self._per_head else 1)
        chosen = torch.stack([self._decoder.selected(r, head).long() for head in heads])  # [lists, k]
        pages = rows.page_table[r, : int(rows.num_pages[r])]
        valid = torch.full_like(pages, self._config.page_size)
        valid[-1] = int(rows.seq_lens[r]) - (len(pages) - 1) * self._config.page_size
        kv = self._tiers.host.layers[layer]
        selected, every = (
            cpu.partial(q[r : r + 1], kv, pages[which][None], valid[which][None], self._model.scale)[1]
            for which in (chosen, torch.arange(len(pages))[None])
        )
        stats = self._stats.layers[layer]
        stats.mass_sum += float((selected - every).exp().mean())
        stats.mass_samples += 1

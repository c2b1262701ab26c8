"""Method ``headinfer``: exact head-wise streaming (HeadInfer, arXiv 2502.12574).

The device holds two staging buffers. While the heads in one are attended, the next group of KV heads is copied into the
other, through all rows, groups and layers of a step. A context longer than a buffer is cut into more groups and, when
one head alone does not fit, along its tokens. The step's own K and V never come from the host; they are written to the
host pool by the runtime as everywhere else. Prompts stream the same way, chunk by chunk.

Optional (``headinfer.resident_heads``): heads whose KV also stays on the device, for every page of the host pool.
Optional (``headinfer.streaming_heads``): heads that attend sink and recent pages only, as in DuoAttention (arXiv
2410.10819); this alone is not exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain, islice
from math import prod

import torch
from torch import Tensor

from hybrid_backend.attention.prefill import KVBlock, attend_chunk, gather_tokens
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.methods.base import Method, OwnMemory, decodes_in_place, is_separate, staging_tokens
from hybrid_backend.methods.in_place import InPlace
from hybrid_backend.observe.stats import Stats
from hybrid_backend.step import ModelSpec, PrefillRow, Step
from hybrid_backend.tiers import TierLayout, Tiers
from hybrid_backend.tiers.stream import Piece
from hybrid_backend.workers import WorkerPool


class HeadInfer(Method):
    """All attention on the device, all KV in host memory."""

    @classmethod
    def check(cls, config: HybridConfig, device: torch.device, num_layers: int, num_kv_heads: int) -> None:
        keys = config.headinfer
        resident = _by_layer("headinfer.resident_heads", keys.resident_heads, num_layers, num_kv_heads)
        _by_layer("headinfer.streaming_heads", keys.streaming_heads, num_layers, num_kv_heads)
        both = [name for name in keys.resident_heads if name in keys.streaming_heads]
        if resident and both:
            raise ConfigError(f"headinfer.resident_heads: {both[0]} is in headinfer.streaming_heads too; remove one")

    @classmethod
    def runs_on(cls, config: HybridConfig, device: torch.device) -> bool:
        return True  # planned on the host; tensors go where they are needed

    @classmethod
    def layout(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> TierLayout:
        """A buffer holds all heads of the longest context that is not yet cut into groups."""
        separate = is_separate(config, device)
        automatic = config.headinfer.group_thresholds[0]
        return TierLayout(separate=separate, staging_tokens=staging_tokens(config, automatic) if separate else 0)

    @classmethod
    def own_memory(
        cls, config: HybridConfig, model: ModelSpec, device: torch.device, pages: int, max_requests: int
    ) -> OwnMemory:
        if not is_separate(config, device):
            return OwnMemory()
        names, shape = config.headinfer.resident_heads, (model.num_layers, model.num_kv_heads)
        resident = _by_layer("headinfer.resident_heads", names, *shape)
        stores = [
            prod(_store_shape(model, config.page_size, pages, len(heads)))
            for layer, heads in resident.items()
            if model.window(layer) is None
        ]
        return OwnMemory(device=sum(stores) * model.dtype.itemsize)

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers, workers: WorkerPool, stats: Stats) -> None:
        super().__init__(config, model, tiers, workers, stats)
        self._full = tiers.residency.layers
        keys, shape = config.headinfer, (model.num_layers, model.num_kv_heads)
        resident = _by_layer("headinfer.resident_heads", keys.resident_heads, *shape)
        self._sinks_only = _by_layer("headinfer.streaming_heads", keys.streaming_heads, *shape)
        # [pages, heads, 2, page_size, head_dim], indexed by host page id as digests are: a prefix hit finds it ready.
        self._resident = {
            layer: (
                heads,
                torch.zeros(
                    _store_shape(model, config.page_size, len(tiers.host.layers[layer]), len(heads)),
                    dtype=model.dtype,
                    device=tiers.device,
                ),
            )
            for layer, heads in resident.items()
            if tiers.stream is not None and layer in self._full
        }
        self._new: Tensor | None = None  # [rows, kv_heads, 2, head_dim]: the decoding rows' own K and V of this layer
        if tiers.stream is None and not self._sinks_only and decodes_in_place(config, model, tiers.device):
            self.in_place = InPlace(config, model, tiers, stats)

    @property
    def device_bytes(self) -> int:
        return sum(store.nbytes for _, store in self._resident.values())

    def groups(self, tokens: int) -> int:
        """Groups of KV heads for a context of ``tokens`` tokens: 1, then twice as many beyond each threshold."""
        return int(2 ** sum(tokens > threshold for threshold in self.config.headinfer.group_thresholds))

    # --- the step ---

    def begin_step(self, step: Step) -> None:
        if step.decode is None:
            return
        if self.in_place is not None:
            self.in_place.begin_step(step, torch.zeros(step.decode.count, dtype=torch.bool))
        else:
            step.plan = {}  # layer kind -> pieces; made once, for all layers that stream the same heads

    def append(self, layer: int, step: Step, kv: Tensor) -> None:
        if layer in self._resident:
            heads, store = self._resident[layer]
            store[step.write_pages, :, :, step.write_offsets] = kv[:, list(heads)].to(store.device)
        self._new = step.decode.gather(kv) if step.decode is not None else None

    def prefill(self, layer: int, row: PrefillRow, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens = row.seq_len - len(q)
        pieces = self._pieces(layer, 0, row.pages, tokens)
        stream = self.tiers.stream
        streamed = stream.blocks(layer, pieces) if stream else self._in_place_blocks(layer, pieces)
        return attend_chunk(q, k, v, chain(self._resident_blocks(layer, row.pages, tokens), streamed), self.model.scale)

    def attend(self, layer: int, step: Step, q: Tensor) -> Tensor:
        rows, new, stream = step.decode, self._new, self.tiers.stream
        assert rows is not None and new is not None
        before = (rows.seq_lens - 1).tolist()
        pieces = self._step_pieces(layer, step)
        following = self._full[self._full.index(layer) + 1 :][:1]
        same = following and self._step_pieces(following[0], step) is pieces
        if stream is not None:
            blocks = iter(stream.blocks(layer, pieces, following[0] if same else None))
        else:
            blocks = iter(self._in_place_blocks(layer, pieces))
        counts = Counter(piece.row for piece in pieces)
        outs = []
        for r in range(rows.count):
            mine = chain(self._resident_blocks(layer, rows.page_table[r], before[r]), islice(blocks, counts[r]))
            k, v = new[r : r + 1].unbind(2)
            outs.append(attend_chunk(q[r : r + 1], k, v, mine, self.model.scale))
        self._count(layer, before)
        return torch.cat(outs)

    def end_step(self, step: Step) -> None:
        self._new = None
        if self.tiers.stream is not None:
            self.tiers.stream.drop()

    def abandon(self, step: Step) -> None:
        self.end_step(step)

    # --- pieces ---

    def _step_pieces(self, layer: int, step: Step) -> list[Piece]:
        """All rows' pieces; layers that stream the same heads share the list, so that one can be fetched ahead."""
        rows = step.decode
        assert rows is not None
        kind = (self._streamed_heads(layer), self._sinks_only.get(layer, ()))
        if kind not in step.plan:
            step.plan[kind] = [
                piece
                for r in range(rows.count)
                for piece in self._pieces(layer, r, rows.page_table[r], int(rows.seq_lens[r]) - 1)
            ]
        pieces: list[Piece] = step.plan[kind]
        return pieces

    def _pieces(self, layer: int, row: int, pages: Tensor, tokens: int) -> list[Piece]:
        """What streams of the first ``tokens`` tokens of one sequence."""
        page_size, config = self.config.page_size, self.config
        used = -(-tokens // page_size)
        cut = self.tiers.stream.pieces if self.tiers.stream else _whole
        found = cut(row, self._streamed_heads(layer), self.groups(tokens), pages, tokens)
        few = self._sinks_only.get(layer, ())
        first, last = min(config.sinks, used), max(min(config.sinks, used), used - config.recent)
        found += cut(row, few, 1, pages[:first], min(tokens, first * page_size))
        return found + cut(row, few, 1, pages[last:used], max(0, tokens - last * page_size))

    def _streamed_heads(self, layer: int) -> tuple[int, ...]:
        elsewhere = {*self._resident.get(layer, ((), None))[0], *self._sinks_only.get(layer, ())}
        return tuple(head for head in range(self.model.num_kv_heads) if head not in elsewhere)

    def _resident_blocks(self, layer: int, pages: Tensor, tokens: int) -> list[KVBlock]:
        if layer not in self._resident or not tokens:
            return []
        heads, store = self._resident[layer]
        return [KVBlock(heads, *gather_tokens(store.flatten(0, 2), pages, len(heads), 0, tokens))]

    def _in_place_blocks(self, layer: int, pieces: list[Piece]) -> Iterable[KVBlock]:
        """Unified tiers: the same pieces, read from the host pool."""
        for piece in pieces:
            k, v = gather_tokens(self.tiers.host.blocks(layer), piece.pages, self.model.num_kv_heads, 0, piece.tokens)
            yield KVBlock(piece.heads, k[list(piece.heads)], v[list(piece.heads)])

    def _count(self, layer: int, before: list[int]) -> None:
        """What the rows attended, the mean over KV heads: every head the step's token, most heads all ``before`` it."""
        page, heads, stream = self.config.page_size, self.model.num_kv_heads, self.tiers.stream
        few, held = len(self._sinks_only.get(layer, ())), len(self._resident.get(layer, ((), None))[0])
        tokens = pages = away = 0
        for count in before:
            used = -(-count // page)
            ends = min(used, self.config.sinks + self.config.recent)  # pages that a streaming head attends
            tokens += heads + (heads - few) * count + few * (count - (used - ends) * page)
            pages += (heads - few) * used + few * ends + (heads if count % page == 0 else 0)
            away += (heads - few - held) * used + few * ends
        self.stats.attended(layer, tokens / heads, 0)
        self.stats.looked_up(layer, pages / heads, (pages - (away if stream is not None else 0)) / heads)


def _whole(row: int, heads: tuple[int, ...], groups: int, pages: Tensor, tokens: int) -> list[Piece]:
    return [Piece(row, heads, pages, tokens)] if tokens and heads else []


def _store_shape(model: ModelSpec, page_size: int, pages: int, heads: int) -> tuple[int, ...]:
    """Of the heads of one layer that stay on the device."""
    return (pages, heads, 2, page_size, model.head_dim)


def _by_layer(key: str, names: tuple[str, ...], layers: int, kv_heads: int) -> dict[int, tuple[int, ...]]:
    """``layer:head`` names by layer; sliding-window layers are not ours, and what is said of them has no effect."""
    found: dict[int, tuple[int, ...]] = {}
    for name in names:
        layer, head = map(int, name.split(":"))
        if layer >= layers or head >= kv_heads:
            raise ConfigError(
                f"{key}: {name} is no layer:head of the model, which has layers 0..{layers - 1} and KV heads "
                f"0..{kv_heads - 1} on this rank; remove it"
            )
        found[layer] = (*found.get(layer, ()), head)
    return found

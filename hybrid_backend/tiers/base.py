"""Host pool and device tier of one rank, allocated for the `TierLayout` that the method returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybrid_backend.attention.flashinfer import FlashInfer, PagedDecode, device_bytes
from hybrid_backend.attention.prefill import KVBlock, gather_tokens
from hybrid_backend.attention.prompts import Prompts, TorchPrompts
from hybrid_backend.batch import ModelSpec, PrefillRow, Step
from hybrid_backend.config import HybridConfig
from hybrid_backend.kernels.operations import Operations
from hybrid_backend.tiers.context_cache import ContextCache
from hybrid_backend.tiers.digests import Digests
from hybrid_backend.tiers.frame_supply import IndexedFrames, SharedFrames
from hybrid_backend.tiers.frames import FramePool, device_zeros
from hybrid_backend.tiers.heads import ResidentHeads
from hybrid_backend.tiers.host_pool import HostPool
from hybrid_backend.tiers.prompt_fills import PromptFills
from hybrid_backend.tiers.prompt_frames import ChunkPages, PromptFrames
from hybrid_backend.tiers.sizes import TierLayout, pages_of_a_sequence
from hybrid_backend.tiers.stream import HeadStream
from hybrid_backend.tiers.write_back import WriteBack


@dataclass
class Tiers:
    """Host pool, digests, frames and staging buffers of the layers with full attention, and the operations on them."""

    device: torch.device
    dtype: torch.dtype  # of queries, and of K and V that are read out of pages in 8 bits
    layout: TierLayout
    operations: Operations
    is_async: bool  # operations are launches on a device, which itself writes its requests to the CPU workers
    page_bytes: int
    head_page_bytes: int  # one KV head of a page
    host: HostPool
    digests: Digests | None
    frames: FramePool
    prompt_frames: PromptFrames  # frames of running prompts, if the method's residency fills them
    prompt_fills: PromptFills  # copies pages of prefix-cache hits to these frames
    stream: HeadStream | None
    whole: ResidentHeads  # all KV heads of `TierLayout.whole_layers`
    cache: ContextCache  # context caches of `TierLayout.cached_layers`
    prompts: Prompts
    decode: PagedDecode | None  # FlashInfer decode outside CUDA graphs, if the host knows all lengths; None: not used
    write_back: WriteBack  # copies new K and V of prompt chunks to the host pool
    kernel_bytes: int  # device memory of FlashInfer in `prompts` and `decode`
    resident_heads: list[ResidentHeads] = field(default_factory=list)
    """Copies of single KV heads that the method keeps on the device tier (`keep_heads`)."""
    copied_pages: int = 0  # pages copied into frames since start
    copied_head_pages: int = 0  # pages of a single KV head copied into frames since start

    @classmethod
    def build(
        cls,
        layout: TierLayout,
        config: HybridConfig,
        model: ModelSpec,
        host: HostPool,
        max_requests: int,
        device: torch.device,
        operations: Operations,
        is_async: bool,
        flashinfer: FlashInfer | None = None,
    ) -> Tiers:
        """Allocate the tiers for ``max_requests`` running requests. If ``flashinfer`` is None, `operations` attend."""
        layers, kv = layout.full_layers(model), model.kv_format(config.page_size)
        digests = None
        if layout.digests is not None:
            digests = Digests(
                host, layout.digest_layers(config, model), operations, layout.digests, device, model.dtype
            )
        all_heads = tuple(range(model.num_kv_heads))
        counts = {layer: layout.frames(max_requests, layer) for layer in layout.framed_layers(model)}
        frames = {layer: device_zeros(kv.shape(count), kv.dtype, device) for layer, count in counts.items() if count}
        pool = FramePool(frames, max_requests, layout.frames_of(max_requests), device)
        supply = SharedFrames(layout.shared_pages(max_requests)) if layout.shares_frames else IndexedFrames(pool)
        stream = None
        if layout.separate:
            tokens = layout.buffer_tokens(config.page_size, host.layers[layers[0]].shape[0])
            stream = HeadStream(host, kv, model.dtype, tokens, operations, device)
        sequence_pages = pages_of_a_sequence(config, model, len(host.layers[layers[0]]))
        cached = {layer: host.layers[layer] for layer in layout.cached_layers(config, model)}
        return cls(
            device=device,
            dtype=model.dtype,
            layout=layout,
            operations=operations,
            is_async=is_async,
            page_bytes=kv.page_bytes,
            head_page_bytes=kv.with_heads(1).page_bytes,
            host=host,
            digests=digests,
            frames=pool,
            prompt_frames=PromptFrames(supply, config.page_size, config.sinks, device),
            prompt_fills=PromptFills(host, pool, operations, device),
            stream=stream,
            whole=ResidentHeads(dict.fromkeys(layout.whole_layers, all_heads), host, operations, device),
            cache=ContextCache(cached, max_requests, sequence_pages, is_pinned=device.type == "cuda"),
            prompts=TorchPrompts(operations, model) if flashinfer is None else flashinfer.prompts,
            decode=None if flashinfer is None or kv.is_int8 else flashinfer.decode,  # It reads pages as they lie.
            write_back=WriteBack(host, operations, device),
            kernel_bytes=0 if flashinfer is None else device_bytes(),
        )

    def has_digests(self, layer: int) -> bool:
        """Tell whether a layer has digests; an exact layer and a method without digests have none."""
        return self.digests is not None and layer in self.digests.layers

    def digest_layer(self, layer: int) -> Tensor | None:
        """Return the digests of a layer as operations read them; None for a layer without digests."""
        return None if self.digests is None else self.digests.layers.get(layer)

    def keep_heads(self, heads: Mapping[int, tuple[int, ...]]) -> ResidentHeads:
        """Keep all pages of the KV heads ``heads[layer]`` on the device tier; return the memory that holds them."""
        store = ResidentHeads(heads, self.host, self.operations, self.device)
        self.resident_heads.append(store)
        return store

    def append_heads(self, layer: int, pages: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Write new tokens to all `resident_heads`. Arguments are those of `ResidentHeads.append`."""
        for store in self.resident_heads:
            store.append(layer, pages, positions, k, v)

    def import_pages(self, pages: Tensor) -> None:
        """Copy host pages (``[n]`` int64 ids) that a KV connector has written to resident heads and whole layers."""
        for store in (self.whole, *self.resident_heads):
            store.copy(pages)

    def begin_prompts(self, step: Step) -> None:
        """Give frames to the prefill chunks of a step, and prepare to copy the earlier pages that get a frame."""
        self.prompt_frames.begin(step)
        self.prompt_fills.begin(self.prompt_frames.fills)

    def store_prompts(self, layer: int, k: Tensor, v: Tensor, pages: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Write the K and V of a step's prompt tokens to the host pool and to every copy on the device tier.

        Arguments and result are those of `WriteBack.store`.
        """
        k, v = self.write_back.store(layer, k, v, pages, offsets)
        self.whole.append(layer, pages, offsets, k, v)
        self.append_heads(layer, pages, offsets, k, v)
        frames, store = self.prompt_frames.token_frames, self.frames.layers.get(layer)
        if frames is not None and store is not None:
            self.operations.append_tokens(k, v, store, frames, offsets)
        return k, v

    def chunk_pages(self, layer: int, row: PrefillRow) -> tuple[Tensor, ChunkPages] | None:
        """Return the store of a layer that has pages of a chunk's sequence on the device, and these pages.

        None means that the chunk's whole prefix is read from the host pool.
        """
        store = self.whole.stores.get(layer)
        if store is not None:
            ids = row.pages.int()
            return store, ChunkPages(ids, row.earlier_tokens, row.seq_len, row.pages[:0], missing_tokens=0)
        chunk, store = self.prompt_frames.chunk(row.request_id), self.frames.layers.get(layer)
        return None if chunk is None or store is None else (store, chunk)

    def begun_page(self, layer: int, row: PrefillRow) -> Tensor | None:
        """Return the frame ``[kv_heads, 2, page_size, width]`` of the page that a chunk goes on with, if any."""
        chunk, store = self.prompt_frames.chunk(row.request_id), self.frames.layers.get(layer)
        return None if chunk is None or store is None or chunk.first_frame < 0 else store[chunk.first_frame]

    def reads_host(self, layer: int, row: PrefillRow) -> bool:
        """Tell whether a layer reads earlier tokens of a chunk from the host pool."""
        if self.prompt_fills.is_waiting(layer):
            return True
        resident = self.chunk_pages(layer, row)
        return row.earlier_tokens > 0 if resident is None else resident[1].missing_tokens > 0

    def before(self, layer: int, row: PrefillRow, next_layer: int | None = None) -> Iterator[KVBlock]:
        """Yield K and V of the tokens before a chunk in blocks: gathered on the device, then streamed from the host.

        ``next_layer`` is that of `HeadStream.blocks`.
        """
        resident, pages, tokens = self.chunk_pages(layer, row), row.pages, row.earlier_tokens
        if resident is not None:
            store, chunk = resident
            pages, tokens, step = chunk.missing, chunk.missing_tokens, max(self.layout.staging_tokens, 1)
            heads, blocks, ids = tuple(range(store.shape[1])), store.flatten(0, 2), chunk.ids.long()
            for start in range(0, chunk.earlier, step):
                end = min(chunk.earlier, start + step)
                yield KVBlock(heads, *gather_tokens(blocks, ids, len(heads), start, end, self.dtype))
        yield from self.prefix(layer, pages, tokens, next_layer=next_layer)

    def prefix(
        self,
        layer: int,
        pages: Tensor,
        tokens: int,
        heads: tuple[int, ...] | None = None,
        groups: int = 1,
        next_layer: int | None = None,
    ) -> Iterable[KVBlock]:
        """Return K and V of the first ``tokens`` tokens of a sequence of host pages on the device tier, in blocks.

        The pages pass through the staging buffers; if the device tier is the host, they are read in place.

        Args:
            layer: index of the layer.
            pages: ``[n]`` int64 host pages of the sequence.
            tokens: number of tokens.
            heads: KV heads; None: all.
            groups: least number of head groups, which pass through the staging buffers one after the other.
            next_layer: layer that streams the same pages next (`HeadStream.blocks`).
        """
        heads = tuple(range(self.host.layers[layer].shape[1])) if heads is None else heads
        if not heads or not tokens:
            return []
        if self.stream is not None:
            return self.stream.blocks(layer, heads, groups, pages, tokens, next_layer)
        kv_heads = self.host.layers[layer].shape[1]
        blocks = self.host.blocks(layer)
        return [KVBlock(heads, *gather_tokens(blocks, pages, kv_heads, 0, tokens, self.dtype, heads))]

    @property
    def persistent_heads(self) -> int:
        """Number of KV heads in `resident_heads`, summed over layers. Whole layers are not counted."""
        return sum(store.count for store in self.resident_heads)

    @property
    def device_bytes(self) -> int:
        """Device memory in bytes of all tiers and of FlashInfer; 0 if the device tier is the host pool itself."""
        if self.stream is None:
            return 0
        digests = self.digests.nbytes if self.digests else 0
        heads = sum(store.nbytes for store in self.resident_heads)
        return self.frames.nbytes + self.stream.nbytes + digests + self.whole.nbytes + heads + self.kernel_bytes

    @property
    def copied_bytes(self) -> int:
        """Bytes copied from the host pool to the device tier since start."""
        pages = self.copied_pages + self.prompt_fills.copied_pages
        copied = pages * self.page_bytes + self.copied_head_pages * self.head_page_bytes
        return copied + (self.stream.copied_bytes if self.stream else 0)

    def reset_copied(self) -> None:
        self.copied_pages = self.copied_head_pages = self.prompt_fills.copied_pages = 0
        if self.stream is not None:
            self.stream.copied_bytes = 0

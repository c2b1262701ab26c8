"""Sizes of frames, digests, staging buffers and of the other tensors of a decode step on the device tier.

The planner, the allocators and the start-up checks all use this module, so that planned and allocated sizes agree. The
module allocates nothing and needs neither Triton nor an engine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import prod

import torch

from hybrid_backend.batch import ModelSpec
from hybrid_backend.config import HybridConfig
from hybrid_backend.kernels.cpu.mailbox import mailbox_bytes
from hybrid_backend.kernels.digest_format import DigestFormat
from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.tiers.state import StepState, sample_boxes


@dataclass(frozen=True)
class TierLayout:
    """Memory that a method needs in addition to the host pool.

    Attributes:
        separate: the device tier has memory of its own; false if the device tier is the host pool, attended in place.
        frames_per_request: frames of a running request in each layer; 0 for a method without frames.
        layer_frames: frames per request of the layers that have more than ``frames_per_request``.
        digests: format of the digests; None for a method without digests.
        staging_tokens: tokens of all KV heads that each of the two staging buffers holds. If the tiers are separate,
            prompt chunks attend earlier pages that have no frame through the staging buffers.
        whole_layers: layers that have every page of the host pool on the device tier, and so have no frames.
        context_caches: layers that are not exact keep the tokens that the CPU attends in a context cache.
        shares_frames: all requests share the frames, and each request is on the device tier whole or not at all.
        device_pages: number of shared frames per layer; 0 for ``max_requests * frames_per_request``. If the tiers are
            not separate, the number limits the requests of the device, and no frames are allocated.
        swap_in: largest share of the shared frames that is in use after a request has returned to the device.
        recalls: pages are copied into frames while a request decodes.
        selection_steps: decode steps of a request that attend one selection of a layer.
    """

    separate: bool
    frames_per_request: int = 0
    layer_frames: Mapping[int, int] = field(default_factory=dict)
    digests: DigestFormat | None = None
    staging_tokens: int = 0
    whole_layers: tuple[int, ...] = ()
    context_caches: bool = False
    shares_frames: bool = False
    device_pages: int = 0
    swap_in: float = 1.0
    recalls: bool = False
    selection_steps: int = 1

    def shared_pages(self, max_requests: int) -> int:
        """Return the shared frames of one layer; meaningful if ``shares_frames`` is true."""
        return self.device_pages or max_requests * self.frames_per_request

    def frames(self, max_requests: int, layer: int | None = None) -> int:
        """Return the frames of all requests in a layer; None for a layer that is not in ``layer_frames``."""
        if self.shares_frames:
            return self.shared_pages(max_requests) if self.separate else 0
        default = self.frames_per_request
        return max_requests * (default if layer is None else self.layer_frames.get(layer, default))

    def frames_of(self, max_requests: int) -> int:
        """Return the frames of a request in a layer that is not in ``layer_frames``; a rounded-up mean if shared."""
        return -(-self.frames(max_requests) // max_requests)

    def full_layers(self, model: ModelSpec) -> list[int]:
        """Return the layers with full attention. Layers with a sliding window use no tiers."""
        return [layer for layer in range(model.num_layers) if model.window(layer) is None]

    def framed_layers(self, model: ModelSpec) -> list[int]:
        """Return the layers with frames. The CPU workers may attend the pages of these layers that are not resident."""
        return [layer for layer in self.full_layers(model) if layer not in self.whole_layers]

    def digest_layers(self, config: HybridConfig, model: ModelSpec) -> list[int]:
        """Return the layers with digests: those with full attention that are not exact."""
        if self.digests is None:
            return []
        return [layer for layer in self.full_layers(model) if not config.is_exact(layer)]

    def selecting_layers(self, config: HybridConfig, model: ModelSpec) -> list[int]:
        """Return the layers that have frames and attend a budget of pages."""
        with_digests = self.digest_layers(config, model)
        return [layer for layer in self.framed_layers(model) if layer in with_digests]

    def cached_layers(self, config: HybridConfig, model: ModelSpec) -> list[int]:
        """Return the layers with context caches."""
        if not self.context_caches or config.sparse == "never":
            return []
        return [layer for layer in self.full_layers(model) if not config.is_exact(layer)]

    def buffer_tokens(self, page_size: int, pages: int) -> int:
        """Return the tokens of a staging buffer for a host pool of ``pages`` pages; 0 if the tiers are not separate."""
        return min(self.staging_tokens, pages * page_size) if self.separate else 0

    def memory(self, config: HybridConfig, model: ModelSpec, pages: int, max_requests: int) -> TierBytes:
        """Return the sizes of the tensors that `Tiers.build` allocates for a host pool of ``pages`` pages."""
        kv, with_digests = model.kv_format(config.page_size), len(self.digest_layers(config, model))
        digests = 0
        if self.digests is not None:
            page_bytes = self.digests.page_bytes(model.dtype, model.num_kv_heads, model.head_dim)
            digests = with_digests * pages * page_bytes
        frames = sum(self.frames(max_requests, layer) for layer in self.framed_layers(model))
        buffers = prod(staging_shape(kv, self.buffer_tokens(config.page_size, pages))) * kv.dtype.itemsize
        whole = len(self.whole_layers) * pages * kv.page_bytes
        return TierBytes(self.separate, digests, frames * kv.page_bytes, buffers, whole)


@dataclass(frozen=True)
class TierBytes:
    """Bytes of the tiers, without the host pool: device memory if the tiers are ``separate``, else host memory."""

    separate: bool
    digests: int
    frames: int
    staging: int
    whole_layers: int

    @property
    def total(self) -> int:
        return self.digests + self.frames + self.staging + self.whole_layers


def pages_of_a_sequence(config: HybridConfig, model: ModelSpec, pages: int) -> int:
    """Return the most pages that a sequence can have with a host pool of ``pages`` pages."""
    return pages if model.max_tokens is None else min(pages, -(-model.max_tokens // config.page_size))


def staging_shape(kv: KvFormat, tokens: int) -> tuple[int, ...]:
    """Return the shape of both staging buffers. Each buffer has head pages for ``tokens`` tokens of all KV heads."""
    return (2, *kv.with_heads(1).shape(tokens // kv.page_size * kv.kv_heads))


@dataclass(frozen=True)
class StepShape:
    """Sizes that all decode steps share, and that are fixed when a CUDA graph is captured."""

    rows: int  # most rows of a step
    columns: int  # most pages of a sequence
    frames: int  # frames of a request in most layers (`TierLayout.frames_of`); 0: the device tier is the host pool
    max_frames: int  # frames of a request in the layer that has the most frames
    budget: int  # largest configured budget of a layer, in pages
    min_budget: int  # smallest configured budget of a layer, in pages
    has_equal_budgets: bool  # all layers have the same budget
    max_budget: int  # pages to which a row's budget may grow: what its frames hold, so that most pages are resident
    has_promise: bool  # budgets follow the sampled attention mass (`config.quality`), up to all pages of a row
    lists: int  # selections of a row in a layer with digests: 1, or one per KV head
    recalls: int  # most pages that a row recalls in one layer and step
    selection_steps: int  # decode steps of a request that attend one selection of a layer

    @property
    def max_list_pages(self) -> int:
        """Most pages that one list of a layer with digests may have."""
        if not self.frames or self.has_promise:
            return self.columns
        return min(self.columns, max(self.budget, self.max_frames))

    @classmethod
    def of(
        cls,
        config: HybridConfig,
        model: ModelSpec,
        layout: TierLayout,
        pages: int,
        max_requests: int,
        factors: Collection[float] = (),
    ) -> StepShape:
        """Return the sizes for a host pool of ``pages`` pages.

        ``factors`` are the budgets of the selecting layers relative to the mean budget; empty if all are equal.
        """
        columns = pages_of_a_sequence(config, model, pages)
        lists = model.num_kv_heads if config.selection.granularity == "kv_head" else 1
        frames, has_promise = layout.frames_of(max_requests), bool(config.quality.promise)
        mean = columns if config.sparse == "never" else config.budget_pages
        budgets = [round(mean * factor) for factor in factors or [1]]
        max_frames = max([frames, *layout.layer_frames.values()])
        return cls(
            rows=max_requests,
            columns=columns,
            frames=frames,
            max_frames=max_frames,
            budget=max(budgets),
            min_budget=min(budgets),
            has_equal_budgets=not factors,
            max_budget=max(mean, frames) if frames else columns,
            lists=lists,
            has_promise=has_promise,
            recalls=max_frames if layout.recalls else 0,  # A request may set a budget of so many pages.
            selection_steps=layout.selection_steps,
        )

    def list_shape(self, has_digests: bool) -> tuple[int, int]:
        """Return ``(lists, most pages of a list)`` of a row in a layer. A layer without digests attends every page."""
        return (self.lists, self.max_list_pages) if has_digests else (1, self.columns)

    @property
    def reused(self) -> tuple[int, int]:
        """Lists of a row that later steps attend again, and the most pages of a list; zeros if each step selects."""
        return self.list_shape(True) if self.selection_steps > 1 else (0, 0)

    def state_bytes(self, layers: int) -> int:
        """Return the bytes that `StepState.make` allocates for so many layers."""
        meta, budgets = torch.device("meta"), 0 if self.has_equal_budgets else layers
        state = StepState.make(
            self.rows, self.columns, self.max_frames, self.recalls, layers, meta, budgets, self.reused
        )
        return state.nbytes

    def mailbox_bytes(self, config: HybridConfig, model: ModelSpec, layout: TierLayout) -> int:
        """Return the bytes of pinned host memory through which a GPU sends requests to the CPU workers, all layers."""
        with_digests, cached = layout.digest_layers(config, model), layout.cached_layers(config, model)
        vector = model.num_heads, model.head_dim, model.dtype.itemsize
        paged = [layer for layer in layout.framed_layers(model) if layer not in cached]
        # A request to a layer with context caches names no pages, because the cache has the token lists.
        lists = [(0, 0)] * len(cached) + [self.list_shape(layer in with_digests) for layer in paged]
        return mailbox_bytes(self.rows, lists, *vector)

    def sample_bytes(self, model: ModelSpec, layers: int) -> int:
        """Return the bytes of pinned host memory to which a GPU writes the samples of so many layers."""
        return sample_boxes(model, layers, self.rows, self.columns, *self.list_shape(True), device="meta").nbytes

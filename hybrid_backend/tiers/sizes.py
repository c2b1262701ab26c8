"""All sizes: of frames, digests, staging buffers, and of what a decode step keeps on the device tier.

The planner, the allocators and the start-up checks use this module, so that what is planned is what is allocated. It
allocates nothing and needs neither Triton nor an engine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import torch

from hybrid_backend.batch import ModelSpec
from hybrid_backend.config import HybridConfig
from hybrid_backend.kernels import byte_digests
from hybrid_backend.kernels.cpu.library import byte_row
from hybrid_backend.kernels.cpu.mailbox import mailbox_bytes
from hybrid_backend.tiers.state import StepState, sample_boxes

DigestKind = Literal["none", "minmax", "minmax_int8", "minmax_and_int8", "codes"]
"""``minmax_and_int8``: in the cache's type, and in bytes beside it as the native decoder reads them."""


@dataclass(frozen=True)
class TierLayout:
    """What a method needs beside the host pool.

    ``separate``: the device tier holds copies; else it is the host itself and reads pages in place.
    ``frames_per_request``: pages of each layer that a running request may have on the device tier; 0: none are copied.
    ``layer_frames``: of layers that have more.
    ``staging_tokens``: tokens of all KV heads that each of the two staging buffers holds. Separate tiers have them,
    because prompts attend their cached prefix through them.
    ``whole_layers``: layers that lie on the device tier whole, for every page of the host pool, and have no frames.
    ``context_caches``: layers that leave tokens out keep those that they attend in a context cache.
    ``shares_frames``: requests are on the device tier whole or not at all, and share all frames: ``device_pages`` of
    them, 0: ``frames_per_request`` for each request. Without separate tiers they are a number that is kept to. A
    request comes back to the device while this is then at most ``swap_in`` full.
    ``recalls``: pages are copied into frames while a request decodes.
    """

    separate: bool
    frames_per_request: int = 0
    layer_frames: Mapping[int, int] = field(default_factory=dict)
    digests: DigestKind = "none"
    staging_tokens: int = 0
    whole_layers: tuple[int, ...] = ()
    context_caches: bool = False
    shares_frames: bool = False
    device_pages: int = 0
    swap_in: float = 1.0
    recalls: bool = False

    def shared_pages(self, max_requests: int) -> int:
        """Pages of one layer that all requests together may have on the device tier, where they share frames."""
        return self.device_pages or max_requests * self.frames_per_request

    def frames(self, max_requests: int, layer: int | None = None) -> int:
        """Of one layer; None: of those that have the fewest."""
        if self.shares_frames:
            return self.shared_pages(max_requests) if self.separate else 0
        given = self.frames_per_request
        return max_requests * (given if layer is None else self.layer_frames.get(layer, given))

    def frames_of(self, max_requests: int) -> int:
        """Frames of a request, in the layers that have the fewest; where they are shared, on average and rounded up."""
        return -(-self.frames(max_requests) // max_requests)

    def full_layers(self, model: ModelSpec) -> list[int]:
        """Layers with full attention: the only ones that tiers are for."""
        return [layer for layer in range(model.num_layers) if model.window(layer) is None]

    def framed_layers(self, model: ModelSpec) -> list[int]:
        """Layers whose pages take turns on the device tier; the CPU workers may attend what it lacks."""
        return [layer for layer in self.full_layers(model) if layer not in self.whole_layers]

    def digest_layers(self, config: HybridConfig, model: ModelSpec) -> list[int]:
        if self.digests == "none":
            return []
        return [layer for layer in self.full_layers(model) if not config.is_exact(layer)]

    def selecting_layers(self, config: HybridConfig, model: ModelSpec) -> list[int]:
        """Layers that attend a budget of pages."""
        with_digests = self.digest_layers(config, model)
        return [layer for layer in self.framed_layers(model) if layer in with_digests]

    def cached_layers(self, config: HybridConfig, model: ModelSpec) -> list[int]:
        if not self.context_caches or config.sparse == "never":
            return []
        return [layer for layer in self.full_layers(model) if not config.is_exact(layer)]

    def buffer_tokens(self, page_size: int, pages: int) -> int:
        """Tokens of a staging buffer over a host pool of so many pages; 0 where there is none."""
        return min(self.staging_tokens, pages * page_size) if self.separate else 0

    def memory(self, config: HybridConfig, model: ModelSpec, pages: int, max_requests: int) -> TierBytes:
        """What `Tiers.build` allocates over a host pool of ``pages`` pages."""
        size, with_digests = model.dtype.itemsize, len(self.digest_layers(config, model))
        shape, kind = digest_store(self.digests, model.dtype, pages, model.num_kv_heads, model.head_dim)
        digests = with_digests * prod(shape) * kind.itemsize
        if self.digests == "minmax_and_int8":
            digests += with_digests * pages * byte_row(model.num_kv_heads, model.head_dim)
        frames = sum(self.frames(max_requests, layer) for layer in self.framed_layers(model))
        buffers = prod(staging_shape(model, config.page_size, self.buffer_tokens(config.page_size, pages))) * size
        whole = len(self.whole_layers) * pages * model.page_bytes(config.page_size)
        held = prod(frame_shape(model, config.page_size, frames)) * size
        return TierBytes(self.separate, digests, held, buffers, whole)


@dataclass(frozen=True)
class TierBytes:
    """Bytes of the tiers beside the host pool. They are device memory where the tiers are ``separate``."""

    separate: bool
    digests: int
    frames: int
    staging: int
    whole_layers: int

    @property
    def total(self) -> int:
        return self.digests + self.frames + self.staging + self.whole_layers


def pages_of_a_sequence(config: HybridConfig, model: ModelSpec, pages: int) -> int:
    """Pages of a sequence at most, over a host pool of ``pages`` pages."""
    return pages if model.max_tokens is None else min(pages, -(-model.max_tokens // config.page_size))


def digest_store(
    kind: DigestKind, dtype: torch.dtype, pages: int, kv_heads: int, head_dim: int
) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and type of one layer's digests, where K has ``dtype``."""
    if kind == "codes":
        return (pages, kv_heads, 4 * head_dim), torch.uint8
    if kind == "minmax_int8":
        return (pages, kv_heads, byte_digests.row(head_dim)), torch.uint8
    return (pages, kv_heads, 2, head_dim), dtype


def frame_shape(model: ModelSpec, page_size: int, frames: int) -> tuple[int, ...]:
    """Of one layer's frames."""
    return (frames, model.num_kv_heads, 2, page_size, model.head_dim)


def staging_shape(model: ModelSpec, page_size: int, tokens: int) -> tuple[int, ...]:
    """Of both staging buffers, when each holds ``tokens`` tokens of all KV heads of one layer: pages of one head."""
    return (2, tokens // page_size * model.num_kv_heads, 1, 2, page_size, model.head_dim)


@dataclass(frozen=True)
class StepShape:
    """What all decode steps have in common, fixed when a graph is captured."""

    rows: int  # of a step, at most
    columns: int  # pages of a sequence, at most
    frames: int  # of a request; 0: the device tier reads the host pool itself
    most_frames: int  # the same, in the layer that has most
    budget: int  # pages that a layer attends of a row under pressure, to begin with, at most
    least_budget: int  # the same at least: layers may have budgets of their own
    are_alike: bool  # they do not
    most_budget: int  # pages that a row's budget may grow to: what frames hold, so that the device tier attends most
    promises: bool  # the budget follows what is sampled (`config.quality`): a row may come to attend all of its pages
    lists: int  # selections of a row in a layer with digests: 1, or one per KV head
    recalls: int  # pages that a row recalls in one layer and step, at most

    @property
    def most(self) -> int:
        """Pages that a list of a layer with digests may hold."""
        if not self.frames or self.promises:
            return self.columns
        return min(self.columns, max(self.budget, self.most_frames))

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
        """Return the shape over a host pool of ``pages`` pages.

        ``factors``: budgets of the selecting layers relative to their mean, if they differ (`layer_factors`).
        """
        columns = pages_of_a_sequence(config, model, pages)
        lists = model.num_kv_heads if config.selection.granularity == "kv_head" else 1
        frames, promises = layout.frames_of(max_requests), bool(config.quality.promise)
        mean = columns if config.sparse == "never" else config.budget_pages
        budgets = [round(mean * each) for each in factors or [1]]
        most_frames = max([frames, *layout.layer_frames.values()])
        return cls(
            rows=max_requests,
            columns=columns,
            frames=frames,
            most_frames=most_frames,
            budget=max(budgets),
            least_budget=min(budgets),
            are_alike=not factors,
            most_budget=max(mean, frames) if frames else columns,
            lists=lists,
            promises=promises,
            recalls=most_frames if layout.recalls else 0,  # a request may ask for a budget of as many pages
        )

    def listed(self, has_digests: bool) -> tuple[int, int]:
        """``(lists, pages of each, at most)`` of a row in one layer; without digests a layer attends every page."""
        return (self.lists, self.most) if has_digests else (1, self.columns)

    def state_bytes(self, layers: int) -> int:
        """What `StepState.make` allocates."""
        meta, budgets = torch.device("meta"), 0 if self.are_alike else layers
        return StepState.make(self.rows, self.columns, self.most_frames, self.recalls, layers, meta, budgets).nbytes

    def mailbox_bytes(self, config: HybridConfig, model: ModelSpec, layout: TierLayout) -> int:
        """Pinned host memory through which a GPU asks the CPU workers, of all layers of which they may have a part."""
        with_digests, cached = layout.digest_layers(config, model), layout.cached_layers(config, model)
        vector = model.num_heads, model.head_dim, model.dtype.itemsize
        asked = [layer for layer in layout.framed_layers(model) if layer not in cached]
        # What a context cache holds is listed there.
        lists = [(0, 0)] * len(cached) + [self.listed(layer in with_digests) for layer in asked]
        return mailbox_bytes(self.rows, lists, *vector)

    def sample_bytes(self, model: ModelSpec, layers: int) -> int:
        """Pinned host memory through which a GPU hands the samples of so many layers over."""
        return sample_boxes(model, layers, self.rows, self.columns, *self.listed(True), device="meta").nbytes

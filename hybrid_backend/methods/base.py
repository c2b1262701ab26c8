"""The Method interface: a policy over operations. What runs, and over which buffers, is `execution`'s."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

import torch
from torch import Tensor

from hybrid_backend.attention.partial import Partial
from hybrid_backend.attention.prefill import KVBlock, gather_tokens
from hybrid_backend.batch import DecodeRows, ModelSpec, PrefillRow, Step
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.observe.stats import Stats
from hybrid_backend.step import DecodeStep, Executor
from hybrid_backend.step.operations import are_launches, check_operations, flashinfer_bytes
from hybrid_backend.step.samples import sampled_layers
from hybrid_backend.tiers import TierLayout, Tiers
from hybrid_backend.tiers.sizes import StepShape
from hybrid_backend.workers import WorkerPool


@dataclass(frozen=True)
class OwnMemory:
    """Bytes that are allocated at start beside the tiers and the host pool."""

    device: int = 0
    host: int = 0


class Method(ABC):
    """Says what is resident, what is selected, who attends what is not resident, what is copied and when.

    The runtime calls `begin_step` for every step and `prefill` for each prompt chunk and layer. For decoding rows
    `execution` calls `begin_decode`, then per layer `lookahead` (with a predicted query, one layer earlier, where the
    method looks ahead), `append` and `attend`; both are sequences of the operations that `DecodeStep` offers, the same
    in every step, and read nothing of the device's on the host.
    """

    uses_workers: ClassVar[bool] = False  # the CPU workers attend what is not resident
    budgets_vary: ClassVar[bool] = False  # from layer to layer and step to step, up to all pages of a row
    attends_selection: ClassVar[bool] = True  # layers that leave pages out attend what the step selects in them
    has_fixed_frames: ClassVar[bool] = False  # each page belongs in one frame, which `frame_of` says; else in any

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers) -> None:
        self.config = config
        self.model = model
        self.tiers = tiers

    # --- before anything is allocated ---

    @classmethod
    def check(cls, config: HybridConfig, device: torch.device, num_layers: int, num_kv_heads: int) -> None:
        """Raise ConfigError for a combination of keys that this method cannot serve on this device tier."""
        check_operations(config, device)
        if config.quality.promise and not cls.budgets_vary:
            raise ConfigError(
                f"quality.min_mass: {config.method} has no budget that could follow it; write method: scout, or none"
            )
        if config.quality.max_kl != "none" and not config.quality.promise:
            most = f"{config.quality.max_kl:g}"
            raise ConfigError(
                f"quality.max_kl: {most} says nothing to a server without the attention mass that keeps it; run "
                f"hybrid profile MODEL --set quality.max_kl={most} and serve with its YAML, or write none"
            )

    @classmethod
    def looks_ahead(cls, config: HybridConfig, device: torch.device) -> bool:
        """Whether the method wants predicted queries on this device tier."""
        return False

    @classmethod
    def may_park(cls, config: HybridConfig, device: torch.device) -> bool:
        """Whether rows may wait from one step to the next, where the engine lets them (`ModelSpec.parks`)."""
        return False

    @classmethod
    def needs_parking(cls, config: HybridConfig) -> bool:
        """Whether the configuration makes no sense on an engine that does not."""
        return False

    @classmethod
    def is_capturable(cls, config: HybridConfig, device: torch.device) -> bool:
        """Whether a CUDA graph can hold the method's decode step."""
        return are_launches(config, device)

    @classmethod
    @abstractmethod
    def layout(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> TierLayout:
        """The tiers it needs."""

    @classmethod
    def filled(cls, config: HybridConfig, device_pages: int, requests: int) -> HybridConfig:
        """The configuration with so many pages on the device, of as many requests as run at once, where their number is
        left to us; else as it is."""
        return config

    @classmethod
    def factors(cls, config: HybridConfig, layers: Collection[int]) -> dict[int, float]:
        """Of a row's budget, what each of the ``layers`` that select attends, in the mean 1; empty: all alike."""
        given = config.budget_factors
        if not given or not layers or not cls.budgets_vary or config.sparse == "never":
            return {}
        mean = fmean(given[layer] for layer in layers)
        return {layer: given[layer] / mean for layer in layers}

    @classmethod
    def recalls(cls, config: HybridConfig) -> bool:
        """Whether pages are copied into frames while it decodes."""
        return False

    @classmethod
    def own_memory(
        cls, config: HybridConfig, model: ModelSpec, device: torch.device, pages: int, max_requests: int
    ) -> OwnMemory:
        """Bytes beside the tiers, over a host pool of ``pages`` pages: what a decode step keeps. Allocates nothing."""
        layout = cls.layout(config, model, device)
        factors = cls.factors(config, layout.selecting_layers(config, model))
        shape = StepShape.of(config, model, layout, pages, max_requests, cls.recalls(config), factors.values())
        host = 0
        if are_launches(config, device):
            sampled = sampled_layers(config, model, layout) if cls.attends_selection else []
            host = shape.sample_bytes(model, len(sampled))
            host += shape.mailbox_bytes(config, model, layout) if cls.uses_workers else 0
        state = shape.state_bytes(len(layout.framed_layers(model)))
        return OwnMemory(device=state + flashinfer_bytes(config, model, device), host=host)

    @classmethod
    def grown_bytes(cls, config: HybridConfig, model: ModelSpec, device: torch.device, tokens: int) -> int:
        """Host memory that a running request of ``tokens`` tokens takes beside the host pool, at most."""
        return 0

    # --- the step ---

    def executor(self, workers: WorkerPool, stats: Stats) -> Executor:
        """Return what carries this method's decode steps out.

        Args:
            workers: CPU workers of this rank.
            stats: counters that the steps add to.
        """
        return DecodeStep(self, self.config, self.model, self.tiers, workers, stats)

    # --- prompts ---

    def begin_step(self, step: Step) -> None:
        """A step of the engine begins, before its decoding rows are planned. Requests with prompt tokens still have the
        index that they may have decoded with."""

    def prefill(self, layer: int, row: PrefillRow, q: Tensor, own: Partial) -> Tensor:
        """Exact attention of a prompt chunk that is not attended in place: ``[chunk, heads, head_dim]`` in, the same
        shape out. ``own``: what it attends of itself (`Prompts.own`)."""
        before = self.prefix(layer, row.pages, row.seq_len - len(q))
        return self.tiers.prompts.attend(q, own, before, self.model.sink(layer))

    def saw_prompt(self, layer: int, row: PrefillRow, q: Tensor) -> None:
        """A prompt chunk was attended in a layer, with ``q`` ``[chunk, heads, head_dim]``."""

    def append(self, layer: int, pages: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """New tokens are in the host pool. ``pages``, ``positions``: ``[tokens]`` host page (int32, -1: none) and
        position in the sequence (modulo the page size) of each; ``k``, ``v``: ``[tokens, kv_heads, head_dim]``."""

    def imported(self, pages: Tensor) -> None:
        """Whole pages (``[n]`` int64 host page ids, all layers) were written by somebody else."""

    # --- frames, where they are fixed ---

    def frame_of(self, pages: Tensor) -> Tensor:
        """Of ``frames_per_request`` frames the one in which each logical page (``[n]`` int32) belongs, in all
        layers."""
        raise NotImplementedError

    def held_pages(self, num_pages: int) -> Tensor:
        """``[n]`` int64: which of its pages are copied to their frames when a request begins to decode."""
        raise NotImplementedError

    # --- decoding rows ---

    @abstractmethod
    def budgets(self, rows: DecodeRows) -> Tensor:
        """``[rows]`` int64 pages that a layer attends of each row; as many as the row has: all."""

    def begin_decode(self, step: DecodeStep, rows: DecodeRows) -> None:
        """The step is open: requests are admitted, its inputs are written, what was copied is visible."""

    @property
    def pages_per_load(self) -> int:
        """Pages of one KV head that are copied where its cache is looked up and misses."""
        return 0

    def predicts(self, layer: int) -> bool:
        """Whether this layer wants a predicted query, where the method looks ahead at all."""
        return True

    def lookahead(self, step: DecodeStep, layer: int, q: Tensor) -> None:
        """Before layer ``layer - 1`` runs. ``q``: ``[rows, heads, head_dim]``, predicted for ``layer``."""

    @abstractmethod
    def attend(self, step: DecodeStep, layer: int, q: Tensor) -> Tensor:
        """``[rows, heads, head_dim]`` in, the same out; the step's tokens are stored."""

    def covered(self, step: DecodeStep, layer: int, rows: DecodeRows, r: int) -> Tensor | None:
        """``[1 | kv_heads, tokens]`` bool: what row ``r`` attended in ``layer``, which has just run; None: the layer
        leaves nothing out. For samples where the device tier is the host; a GPU hands over what the step selected
        (`attends_selection`)."""
        return step.covered(layer, rows, r)

    def abandon(self, step: Step) -> None:
        """The step failed half-way: drop what is in flight for it."""

    # --- requests and the end ---

    def release(self, request_id: str) -> None:
        """The request ended, was aborted or was preempted: nothing of it may stay."""

    def close(self) -> None:
        """Stop threads, give native memory back."""

    @property
    def device_bytes(self) -> int:
        """Device memory that the method holds beside the tiers and the step's buffers."""
        return 0

    @property
    def host_bytes(self) -> int:
        """Host memory that the method holds beside the host pool and the digests."""
        return 0

    @property
    def persistent_heads(self) -> int:
        """KV heads whose whole KV is on the device, summed over layers."""
        return 0

    def gauges(self) -> dict[str, float]:
        """What is true of it now, by the name of a metric (`observe.metrics`)."""
        return {}

    # --- for methods ---

    def prefix(
        self, layer: int, pages: Tensor, tokens: int, heads: tuple[int, ...] | None = None, groups: int = 1
    ) -> Iterable[KVBlock]:
        """The first ``tokens`` tokens of a sequence on the device tier, of some KV heads (None: all): in place where
        that is the host or has the whole layer, else streamed through the staging buffers, ``groups`` groups of heads
        (or more) one after the other."""
        every = self.model.num_kv_heads
        heads = tuple(range(every)) if heads is None else heads
        store = self.tiers.whole.stores.get(layer)
        if store is not None:
            step = staging_tokens(self.config)
            cuts = [(start, min(tokens, start + step)) for start in range(0, tokens, step)]
            return (KVBlock(heads, *gather_tokens(store.flatten(0, 2), pages, every, *cut, heads)) for cut in cuts)
        if self.tiers.stream is not None:
            return self.tiers.stream.blocks(layer, heads, groups, pages, tokens)
        if not heads or not tokens:
            return []
        return [KVBlock(heads, *gather_tokens(self.tiers.host.blocks(layer), pages, every, 0, tokens, heads))]


def staging_tokens(config: HybridConfig, automatic: int = 4096) -> int:
    """Tokens of a staging buffer, in whole pages."""
    wanted = automatic if config.staging_tokens == "auto" else config.staging_tokens
    return -(-wanted // config.page_size) * config.page_size


def frames_per_request(config: HybridConfig) -> int:
    """Pages that a request may keep on the device tier; a longer one is under pressure."""
    return config.automatic_frames if config.frames_per_request == "auto" else config.frames_per_request


def named_heads(key: str, names: Iterable[str], layers: int, kv_heads: int) -> list[tuple[int, int]]:
    """``(layer, KV head)`` of names such as 3:1, in their order.

    Raises:
        ConfigError: the model has no such head; ``key`` is where it was named.
    """
    found = []
    for name in names:
        layer, head = map(int, name.split(":"))
        if layer >= layers or head >= kv_heads:
            raise ConfigError(
                f"{key}: {name} is no layer:head of the model, which has layers 0..{layers - 1} and KV heads "
                f"0..{kv_heads - 1} on this rank; remove it"
            )
        found.append((layer, head))
    return found


def by_layer(heads: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    """The heads of each layer, in their order."""
    found: dict[int, tuple[int, ...]] = {}
    for layer, head in heads:
        found[layer] = (*found.get(layer, ()), head)
    return found

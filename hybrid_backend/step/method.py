"""The interface of a method: a policy that decides what is resident, selected, attended and copied.

A method decides; `step.driver.StepDriver` runs the step and `step.toolbox.Toolbox` is what a method may call. Needs of
single methods are not part of `Method`. They are the protocols below, which a method adds by implementing them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from hybrid_backend.attention.partial import Partial
from hybrid_backend.batch import DecodeRows, ModelSpec, PrefillRow, Step
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError, WorkerError
from hybrid_backend.step.budgets import layer_factors
from hybrid_backend.step.buffers import StepBuffers
from hybrid_backend.step.operations import are_launches, check_operations, flashinfer_bytes
from hybrid_backend.step.residency import Residency
from hybrid_backend.step.samples import sampled_layers
from hybrid_backend.step.toolbox import Toolbox
from hybrid_backend.tiers import TierLayout, Tiers
from hybrid_backend.tiers.sizes import StepShape
from hybrid_backend.workers import WorkerPool


@dataclass(frozen=True)
class OwnMemory:
    """Bytes that are allocated at start beside the tiers and the host pool."""

    device: int = 0
    host: int = 0


class Method(ABC):
    """A published way to place KV, to select pages and to share attention between the device and the CPU.

    The runtime calls `begin_step` for every step. For decode rows the driver calls `begin_decode`, then for each layer
    `lookahead` (one layer early, with a predicted query, if `predicts_queries`) and `attend`. Both run the same
    operations in every step and read nothing from the device, so that a CUDA graph can hold them.
    """

    name: ClassVar[str]
    """Value of the key ``method`` that chooses it."""
    uses_workers: ClassVar[bool] = False
    """CPU workers attend pages that are not resident."""
    predicts_queries: ClassVar[bool] = False
    """`lookahead` is called with the predicted query of the next layer."""
    budgets_vary: ClassVar[bool] = False
    """The budget may differ from layer to layer and from step to step, up to all pages of a row."""
    attends_selection: ClassVar[bool] = True
    """A layer that leaves pages out attends the pages that `Toolbox.select` chose."""
    attends_in_place: bool = False
    """Decode steps run in `in_place.step.InPlaceStep`, which calls neither `lookahead` nor `attend`."""

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
                f"quality.min_mass: {config.method} has no budget that could follow it; write method: auto, or none"
            )
        if config.quality.max_kl != "none" and not config.quality.promise:
            limit = f"{config.quality.max_kl:g}"
            raise ConfigError(
                f"quality.max_kl: {limit} says nothing to a server without the attention mass that keeps it; run "
                f"hybrid profile MODEL --set quality.max_kl={limit} and serve with its YAML, or write none"
            )

    @classmethod
    @abstractmethod
    def layout(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> TierLayout:
        """Return the tiers that the method needs."""

    @classmethod
    def filled(cls, config: HybridConfig, device_pages: int, requests: int) -> HybridConfig:
        """Return the configuration with the sizes that its ``auto`` values get on a GPU.

        Args:
            config: sizes that are numbers stay as they are.
            device_pages: frames of one layer that the device has room for.
            requests: requests that may run at once.
        """
        return config

    @classmethod
    def own_memory(
        cls, config: HybridConfig, model: ModelSpec, device: torch.device, pages: int, max_requests: int
    ) -> OwnMemory:
        """Return the bytes of a decode step's buffers over a host pool of ``pages`` pages; allocates nothing."""
        layout = cls.layout(config, model, device)
        shape = step_shape(cls, config, model, layout, pages, max_requests)
        host = 0
        if are_launches(config, device):
            sampled = sampled_layers(config, model, layout) if cls.attends_selection else []
            host = shape.sample_bytes(model, len(sampled))
            host += shape.mailbox_bytes(config, model, layout) if cls.uses_workers else 0
        state = shape.state_bytes(len(layout.framed_layers(model)))
        return OwnMemory(device=state + flashinfer_bytes(config, model, device), host=host)

    @classmethod
    def grown_bytes(cls, config: HybridConfig, model: ModelSpec, device: torch.device, tokens: int) -> int:
        """Return the host memory that a running request of ``tokens`` tokens takes beside the host pool, at most."""
        return 0

    # --- the step ---

    def begin_step(self, step: Step) -> None:
        """Prepare for a step of the engine. Requests with prompt tokens still have the index of earlier decode rows."""

    @abstractmethod
    def budgets(self, rows: DecodeRows) -> Tensor:
        """Return ``[rows]`` int64: pages that a layer attends of each row; all pages of a row mean exact attention."""

    def begin_decode(self, step: Toolbox, rows: DecodeRows) -> None:
        """Prepare for the decode rows, whose requests are admitted and whose step inputs are written."""

    def lookahead(self, step: Toolbox, layer: int, q: Tensor) -> None:
        """Start the work of ``layer`` before the layer before it runs.

        Args:
            step: operations of the open step.
            layer: index of the layer whose query is predicted.
            q: ``[rows, heads, head_dim]``, the predicted query.
        """

    def attend(self, step: Toolbox, layer: int, q: Tensor) -> Tensor:
        """Return ``[rows, heads, head_dim]``, the attention of ``q`` of the same shape; the new tokens are stored."""
        raise NotImplementedError(f"{type(self).__name__} attends in place")

    def abandon(self, step: Step) -> None:
        """Drop what is in flight for a step that failed half-way."""

    def release(self, request_id: str) -> None:
        """Forget a request that ended, was aborted or was preempted."""

    # --- what it holds ---

    @property
    def device_bytes(self) -> int:
        """Device memory that the method holds beside the tiers and the step's buffers."""
        return 0

    def gauges(self) -> dict[str, float]:
        """Return what is true of the method now, by the name of a metric (`observe.metrics`)."""
        return {}


class WaitingRows(Protocol):
    """Decode rows whose attention the CPU computes whole, perhaps over several steps (`methods.apex.parking`)."""

    may_park: bool
    """A row of the open step may wait for a later step, or waits already."""

    def layer_input(self, layer: int, rows: DecodeRows, hidden: Tensor, residual: Tensor | None) -> None:
        """Save or restore rows at the input of a decoder layer; ``hidden``, ``residual``: ``[tokens, hidden]``."""

    def stored(self, pages: Tensor) -> Tensor:
        """Return ``[rows]`` int32 host pages of the new tokens, -1 in rows whose tokens must not be stored."""

    def end(self, number: Tensor) -> None:
        """Publish where the rows are after the last layer. ``number``: `StepInputs.number`."""

    def unfinished(self, number: int, rows: DecodeRows, indices: list[int]) -> list[int]:
        """Return the rows of step ``number`` that yield no token yet."""

    def failures(self, number: int, indices: list[int | None]) -> dict[int, WorkerError]:
        """Return the rows of step ``number`` that failed, with the reason."""

    def idle(self) -> None:
        """Make all rows padding until a step begins."""

    def release(self, request: int) -> None:
        """Forget the request with this index (`FramePool.index`)."""

    def gauges(self) -> dict[str, float]:
        """Return gauges by the name of a metric."""

    @property
    def device_bytes(self) -> int: ...

    @property
    def host_bytes(self) -> int: ...

    def close(self) -> None: ...


class WaitingMethod(Method):
    """A method that places whole requests, so that rows may wait for the CPU from one step to the next."""

    @classmethod
    @abstractmethod
    def may_park(cls, config: HybridConfig) -> bool:
        """Tell whether rows may wait for a later step where the engine allows it (`ModelSpec.parks`)."""

    @classmethod
    @abstractmethod
    def needs_parking(cls, config: HybridConfig) -> bool:
        """Tell whether the configuration makes no sense on an engine that does not allow it."""

    @abstractmethod
    def open_rows(self, buffers: StepBuffers, workers: WorkerPool) -> tuple[WaitingRows, Residency]:
        """Return the rows that wait, and the placement of requests. Called once, when the driver is built."""


@runtime_checkable
class FixedFrames(Protocol):
    """A method in which each page belongs in one frame of its request, the same in all layers."""

    def frame_of(self, pages: Tensor) -> Tensor:
        """Return the frame (``[n]`` int32, below ``frames_per_request``) of each logical page (``[n]`` int32)."""

    def held_pages(self, num_pages: int) -> Tensor:
        """Return ``[n]`` int64: pages that are copied to their frames when a request begins to decode."""


@runtime_checkable
class HeadLoads(Protocol):
    """A method that looks up a cache per KV head, and copies pages of single heads where the lookup misses."""

    @property
    def pages_per_load(self) -> int:
        """Pages of one KV head that are copied where its cache is looked up and misses."""


@runtime_checkable
class KnowsAttended(Protocol):
    """A method that attends other tokens than those of the selected pages."""

    def covered(self, layer: int, rows: DecodeRows, r: int) -> Tensor | None:
        """Return ``[1 | kv_heads, tokens]`` bool: tokens that row ``r`` attended in ``layer``, which has just run.

        None means that the layer leaves nothing out. Samples of the attention mass need it where the device tier is
        the host.
        """


@runtime_checkable
class AttendsPrompts(Protocol):
    """A method that attends the cached prefix of a prompt in its own way."""

    def prefill(self, layer: int, row: PrefillRow, q: Tensor, own: Partial) -> Tensor:
        """Return ``[chunk, heads, head_dim]``, the exact attention of a prompt chunk ``q`` of the same shape.

        ``own`` is the attention of the chunk over itself (`Prompts.own`).
        """


@runtime_checkable
class SeesPrompts(Protocol):
    """A method that looks at the queries of prompts."""

    def saw_prompt(self, layer: int, row: PrefillRow, q: Tensor) -> None:
        """Take note of a prompt chunk that was attended in ``layer`` with ``q`` ``[chunk, heads, head_dim]``."""


def may_park(method: type[Method], config: HybridConfig) -> bool:
    """Tell whether rows of ``method`` may wait from one step to the next."""
    return issubclass(method, WaitingMethod) and method.may_park(config)


def needs_parking(method: type[Method], config: HybridConfig) -> bool:
    """Tell whether ``method`` needs an engine that lets rows wait from one step to the next."""
    return issubclass(method, WaitingMethod) and method.needs_parking(config)


def looks_ahead(method: type[Method], config: HybridConfig) -> bool:
    """Tell whether queries are predicted. Where every page is attended, a prediction would only cost exactness."""
    return method.predicts_queries and config.lookahead.enabled and config.sparse != "never"


def factors_of(method: type[Method], config: HybridConfig, layers: Iterable[int]) -> dict[int, float]:
    """Return the share of a row's budget that each selecting layer attends, 1 on average; empty if all are alike."""
    return layer_factors(config, layers) if method.budgets_vary else {}


def step_shape(
    method: type[Method], config: HybridConfig, model: ModelSpec, layout: TierLayout, pages: int, max_requests: int
) -> StepShape:
    """Return what all decode steps of a method have in common over a host pool of ``pages`` pages."""
    factors = factors_of(method, config, layout.selecting_layers(config, model))
    return StepShape.of(config, model, layout, pages, max_requests, factors.values())


def staging_tokens(config: HybridConfig, automatic: int = 4096) -> int:
    """Return the tokens of a staging buffer, in whole pages; ``automatic``: what ``staging_tokens: auto`` means."""
    tokens = automatic if config.staging_tokens == "auto" else config.staging_tokens
    return -(-tokens // config.page_size) * config.page_size


def frames_per_request(config: HybridConfig) -> int:
    """Return the pages that a request may keep on the device tier; a longer one is under pressure."""
    return config.automatic_frames if config.frames_per_request == "auto" else config.frames_per_request


def named_heads(key: str, names: Iterable[str], layers: int, kv_heads: int) -> list[tuple[int, int]]:
    """Return ``(layer, KV head)`` of names such as 3:1, in their order.

    Raises:
        ConfigError: the model has no such head; ``key`` is where it was named.
    """
    heads = []
    for name in names:
        layer, head = map(int, name.split(":"))
        if layer >= layers or head >= kv_heads:
            raise ConfigError(
                f"{key}: {name} is no layer:head of the model, which has layers 0..{layers - 1} and KV heads "
                f"0..{kv_heads - 1} on this rank; remove it"
            )
        heads.append((layer, head))
    return heads


def by_layer(heads: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    """Return the KV heads of each layer, in their order, from ``(layer, KV head)`` pairs."""
    heads_of_layer: dict[int, tuple[int, ...]] = {}
    for layer, head in heads:
        heads_of_layer[layer] = (*heads_of_layer.get(layer, ()), head)
    return heads_of_layer

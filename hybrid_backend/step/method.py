"""The interface of a method: a policy that decides which pages are resident, selected, attended and copied.

`step.driver.StepDriver` runs the step and calls the method, which calls operations of `step.toolbox.Toolbox`. An
ability that only some methods have is a protocol in this module, which such a method also implements.
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
from hybrid_backend.step.request_room import RequestRoom
from hybrid_backend.step.residency import Residency
from hybrid_backend.step.samples import sampled_layers
from hybrid_backend.step.toolbox import Toolbox
from hybrid_backend.tiers import TierLayout, Tiers
from hybrid_backend.tiers.sizes import StepShape
from hybrid_backend.workers import IPEX, WorkerPool


@dataclass(frozen=True)
class OwnMemory:
    """Memory that is allocated at start in addition to the tiers and the host pool, in bytes."""

    device: int = 0
    """Device memory in bytes."""
    host: int = 0
    """Host memory in bytes."""


class Method(ABC):
    """A published way to place KV, to select pages and to share attention between the device and the CPU.

    The runtime calls `begin_step` for every scheduler step. The driver calls `begin_decode` for the decode rows, and
    `attend` for each layer. If the method `predicts_queries`, the driver also calls `lookahead`, one layer early.
    `lookahead` and `attend` launch the same operations in every step and read no device memory, so that a CUDA graph
    can capture them.
    """

    name: ClassVar[str]
    """Value of the configuration key ``method`` that selects the class."""
    uses_workers: ClassVar[bool] = False
    """CPU workers attend selected pages that are not resident."""
    predicts_queries: ClassVar[bool] = False
    """The driver calls `lookahead` with the predicted query of the next layer."""
    budgets_vary: ClassVar[bool] = False
    """The page budget of a row may differ between layers and between steps."""
    attends_selection: ClassVar[bool] = True
    """A layer that leaves pages out attends the pages that `Toolbox.select` has selected."""
    suits_cpu: ClassVar[bool] = False
    """On a CPU the method attends pages where they lie. Others copy pages within RAM there, which serves tests."""
    suits_gpu: ClassVar[bool] = True
    """The method is ready for the traffic of a GPU (docs/lab/cuda.md#what-is-missing)."""
    reads_int8: ClassVar[bool] = False
    """The method attends pages whose K and V are in 8 bits (`HybridConfig.kv_dtype`)."""
    attends_in_place: bool = False
    """Decode steps run in `in_place.step.InPlaceStep`, which calls neither `lookahead` nor `attend`."""

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers) -> None:
        """Keep the configuration, the shapes of the model on this rank, and the tiers."""
        self.config = config
        self.model = model
        self.tiers = tiers

    # --- called before memory is allocated ---

    @classmethod
    def check(cls, config: HybridConfig, device: torch.device, num_layers: int, num_kv_heads: int) -> None:
        """Raise ConfigError if the method cannot serve the configuration on the device tier ``device``."""
        check_operations(config, device)
        if config.kv_dtype != "auto" and not cls.reads_int8:
            raise ConfigError(
                f"kv_dtype: {config.kv_dtype} is not supported with method {config.method}; write kv_dtype: auto, or "
                "method: auto"
            )
        if config.kv_dtype != "auto" and config.workers.kernel == IPEX:
            raise ConfigError(
                f"workers.kernel: {IPEX} does not attend pages of kv_dtype: {config.kv_dtype}; write workers.kernel: "
                "auto, or kv_dtype: auto"
            )
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
        """Return the tiers that the method needs on the device tier ``device``."""

    @classmethod
    def filled(cls, config: HybridConfig, device_pages: int, requests: int) -> HybridConfig:
        """Replace ``auto`` sizes by the numbers that fit on a GPU.

        Args:
            config: configuration of the server. Sizes that are numbers do not change.
            device_pages: frames per layer that fit into device memory.
            requests: number of requests that may run at once.
        """
        return config

    @classmethod
    def own_memory(
        cls, config: HybridConfig, model: ModelSpec, device: torch.device, pages: int, max_requests: int
    ) -> OwnMemory:
        """Compute the memory of the decode steps' buffers for a host pool of ``pages`` pages; allocate nothing."""
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
        """Return the most host memory that a request of ``tokens`` tokens uses outside the host pool, in bytes."""
        return 0

    @classmethod
    def exact_tokens(cls, config: HybridConfig) -> float:
        """Return the longest context in tokens that a decode step attends whole; inf: any; 0: none is promised."""
        return 0

    # --- called in a step ---

    def begin_step(self, step: Step) -> None:
        """Prepare for a scheduler step. A preempted request that prefills again still has its old request index."""

    @abstractmethod
    def budgets(self, rows: DecodeRows) -> Tensor:
        """Return the page budget of each row, ``[rows]`` int64. A budget of all pages means exact attention."""

    def begin_decode(self, step: Toolbox, rows: DecodeRows) -> None:
        """Prepare for the decode rows, after requests are admitted and step inputs are written."""

    def lookahead(self, step: Toolbox, layer: int, q: Tensor) -> None:
        """Start the selection of ``layer`` before the previous layer runs.

        Args:
            step: operations of the open step.
            layer: index of the layer whose query is predicted.
            q: predicted query ``[rows, heads, head_dim]``.
        """

    def attend(self, step: Toolbox, layer: int, q: Tensor) -> Tensor:
        """Return the attention of the decode rows with query ``q``; both are ``[rows, heads, head_dim]``.

        K and V of the new tokens are stored before the call.
        """
        raise NotImplementedError(f"{type(self).__name__} attends in place")

    def abandon(self, step: Step) -> None:
        """Drop the unfinished work of a step whose forward pass raised an error."""

    def release(self, request_id: str) -> None:
        """Forget a request that ended, was aborted or was preempted."""

    # --- memory and metrics ---

    @property
    def device_bytes(self) -> int:
        """Device memory of the method's own buffers, in bytes."""
        return 0

    def gauges(self) -> dict[str, float]:
        """Return gauges of the method by the name of a metric (`observe.metrics`)."""
        return {}


class WaitingRows(Protocol):
    """Decode rows whose whole attention the CPU computes, over one or several steps (`methods.apex.parking`).

    A row whose partial is late parks: the row skips the rest of the step and goes on at the same layer in a later step.
    """

    may_park: bool
    """A row of the open step may park or is already parked."""

    def layer_input(self, layer: int, rows: DecodeRows, hidden: Tensor, residual: Tensor | None) -> None:
        """Save or restore, in place, the layer input ``[tokens, hidden]`` of rows that park or go on at this layer."""

    def stored(self, rows: int) -> Tensor:
        """Return the host pages of the new tokens of ``rows`` rows, int32; -1 for a row that stores no token."""

    def end(self, number: Tensor) -> None:
        """Publish the layer at which each row is parked, after the last layer of step ``number`` ``[1]`` int32."""

    def unfinished(self, number: int, rows: DecodeRows, indices: list[int]) -> list[int]:
        """Return the rows of step ``number`` that yield no token yet, given the request index of each row."""

    def failures(self, number: int, indices: list[int | None]) -> dict[int, WorkerError]:
        """Return the failed rows of step ``number`` with their errors, given the request index of each row."""

    def idle(self) -> None:
        """Make all rows padding rows until a step begins."""

    def release(self, request: int) -> None:
        """Forget the request with this index (`FramePool.index`)."""

    def gauges(self) -> dict[str, float]:
        """Return gauges by the name of a metric."""

    @property
    def device_bytes(self) -> int:
        """Device memory of the rows, in bytes."""

    @property
    def host_bytes(self) -> int:
        """Pinned host memory of the waiting rows' mailboxes, in bytes."""

    def close(self) -> None:
        """Free native memory."""


class WaitingMethod(Method):
    """A method that keeps the whole KV of a request on one tier, so that rows on the CPU may park (`WaitingRows`)."""

    @classmethod
    @abstractmethod
    def may_park(cls, config: HybridConfig) -> bool:
        """Tell whether rows may park if the engine supports parked rows (`ModelSpec.parks`)."""

    @classmethod
    @abstractmethod
    def needs_parking(cls, config: HybridConfig) -> bool:
        """Tell whether the configuration requires an engine that supports parked rows."""

    @abstractmethod
    def open_rows(self, buffers: StepBuffers, workers: WorkerPool) -> tuple[WaitingRows, Residency]:
        """Return the rows that may park, and the residency of requests. The driver calls this once, at start."""


@runtime_checkable
class FixedFrames(Protocol):
    """A method that fixes the frame of each page of a request, the same frame in all layers."""

    def frame_of(self, pages: Tensor) -> Tensor:
        """Return the frame (``[n]`` int32, below ``frames_per_request``) of each logical page (``[n]`` int32)."""

    def held_pages(self, num_pages: int) -> Tensor:
        """Return the logical pages that admission copies to frames, ``[n]`` int64."""


@runtime_checkable
class HeadLoads(Protocol):
    """A method with a page cache per KV head, which copies pages of single KV heads when a lookup misses."""

    @property
    def pages_per_load(self) -> int:
        """Pages of one KV head that a cache miss copies."""


@runtime_checkable
class KnowsAttended(Protocol):
    """A method that attends tokens which do not follow from the selected pages."""

    def covered(self, layer: int, rows: DecodeRows, r: int) -> Tensor | None:
        """Return the tokens that row ``r`` attended in ``layer``, ``[1 | kv_heads, tokens]`` bool; None: all tokens.

        The driver samples the attention mass of a layer that has just run, if the device tier is the host.
        """


@runtime_checkable
class LimitsRequests(Protocol):
    """A method that is slower for all requests if too many run at once."""

    def room(self) -> RequestRoom | None:
        """Return the tokens that may run in the next step; None: as many as the engine has memory for."""


@runtime_checkable
class AttendsPrompts(Protocol):
    """A method that computes the attention of a prefill chunk over earlier tokens itself."""

    def prefill(self, layer: int, row: PrefillRow, q: Tensor, own: Partial) -> Tensor:
        """Return the exact attention of a prefill chunk with queries ``q``; both are ``[chunk, heads, head_dim]``.

        ``own`` is the causal attention of the chunk over its own tokens (`Prompts.own`).
        """


@runtime_checkable
class TakesWorkers(Protocol):
    """A method that gives the worker pool jobs of its own."""

    def take_workers(self, workers: WorkerPool) -> None:
        """Keep the pool. The driver calls this once, at start."""


@runtime_checkable
class SeesPrompts(Protocol):
    """A method that uses the queries of prompts."""

    def saw_prompt(self, layer: int, row: PrefillRow, q: Tensor) -> None:
        """Take note of a prefill chunk that was attended in ``layer`` with ``q`` ``[chunk, heads, head_dim]``."""


def may_park(method: type[Method], config: HybridConfig) -> bool:
    """Tell whether rows of ``method`` may park until a later step (`WaitingRows`)."""
    return issubclass(method, WaitingMethod) and method.may_park(config)


def needs_parking(method: type[Method], config: HybridConfig) -> bool:
    """Tell whether ``method`` requires an engine that supports parked rows (`WaitingRows`)."""
    return issubclass(method, WaitingMethod) and method.needs_parking(config)


def request_room(method: Method) -> RequestRoom | None:
    """Return the tokens beyond which the engine starts no waiting request; None: no such limit."""
    return method.room() if isinstance(method, LimitsRequests) else None


def looks_ahead(method: type[Method], config: HybridConfig) -> bool:
    """Tell whether queries are predicted. With exact attention a prediction would only add an error."""
    return method.predicts_queries and config.lookahead.enabled and config.sparse != "never"


def factors_of(method: type[Method], config: HybridConfig, layers: Iterable[int]) -> dict[int, float]:
    """Return the budget of each selecting layer relative to the mean; empty if all layers have the same budget."""
    return layer_factors(config, layers) if method.budgets_vary else {}


def step_shape(
    method: type[Method], config: HybridConfig, model: ModelSpec, layout: TierLayout, pages: int, max_requests: int
) -> StepShape:
    """Return the sizes that all decode steps of a method share, for a host pool of ``pages`` pages."""
    factors = factors_of(method, config, layout.selecting_layers(config, model))
    return StepShape.of(config, model, layout, pages, max_requests, factors.values())


def staging_tokens(config: HybridConfig, automatic: int = 4096) -> int:
    """Return the size of a staging buffer in tokens, rounded up to pages; ``automatic`` is the value for ``auto``."""
    tokens = automatic if config.staging_tokens == "auto" else config.staging_tokens
    return -(-tokens // config.page_size) * config.page_size


def frames_per_request(config: HybridConfig) -> int:
    """Return the number of frames that a request has in each layer."""
    return config.automatic_frames if config.frames_per_request == "auto" else config.frames_per_request


def named_heads(key: str, names: Iterable[str], layers: int, kv_heads: int) -> list[tuple[int, int]]:
    """Parse names of KV heads such as ``3:1`` (KV head 1 of layer 3) to pairs ``(layer, KV head)``.

    Raises:
        ConfigError: the model has no KV head of that name; the message names the configuration key ``key``.
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
    """Group ``(layer, KV head)`` pairs by layer, with the KV heads of a layer in the order of the pairs."""
    heads_of_layer: dict[int, tuple[int, ...]] = {}
    for layer, head in heads:
        heads_of_layer[layer] = (*heads_of_layer.get(layer, ()), head)
    return heads_of_layer

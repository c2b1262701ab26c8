"""The Method interface: a policy over the same tiers, kernels and workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hybrid_backend.attention.prefill import KVBlock, attend_chunk, gather_tokens
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.methods.in_place import InPlace
from hybrid_backend.observe.stats import Stats
from hybrid_backend.step import ModelSpec, PrefillRow, Step, StepFailure
from hybrid_backend.tiers import TierLayout, Tiers
from hybrid_backend.workers import WorkerPool, kernel_name


class LayerDecoder(Protocol):
    """Decodes all rows of a layer by itself: appends, selects and attends (`InPlace`, `DeviceStep`)."""

    def begin_step(self, step: Step, sparse: Tensor) -> None:
        """``sparse``: ``[rows]`` bool, rows under the budget."""

    def wants_lookahead(self, layer: int) -> bool: ...

    def lookahead(self, layer: int, q: Tensor) -> None: ...

    def decode(self, layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """``q``, ``out``: ``[tokens, heads, head_dim]`` of the batch; only the decoding rows' tokens are touched."""

    def failure(self, step: Step) -> StepFailure | None:
        """What went wrong in a step that the device has passed, where it goes on by itself."""

    def release(self, request_id: str) -> None: ...

    def count(self) -> None:
        """Bring the counters up to date, without waiting for the device."""

    @property
    def resident_pages(self) -> int: ...

    @property
    def device_bytes(self) -> int: ...

    @property
    def host_bytes(self) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class OwnMemory:
    """Bytes that a method allocates at start beside the tiers and the host pool."""

    device: int = 0
    host: int = 0


class Method(ABC):
    """Says what is resident, what is selected, who computes it, what is copied and when.

    The runtime calls, per step: `begin_step`; then per layer with full attention `lookahead` (if `wants_lookahead`),
    `append`, `prefill` for each prompt chunk and `attend` for all decoding rows, or `in_place` instead of the last;
    then `end_step`.
    """

    in_place: LayerDecoder | None = None  # set by a method whose decoding is one call per layer

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers, workers: WorkerPool, stats: Stats) -> None:
        self.config = config
        self.model = model
        self.tiers = tiers
        self.workers = workers
        self.stats = stats

    # --- before anything is allocated ---

    @classmethod
    def check(cls, config: HybridConfig, device: torch.device, num_layers: int, num_kv_heads: int) -> None:
        """Raise ConfigError for a combination of keys that this method cannot serve."""

    @classmethod
    def looks_ahead(cls, config: HybridConfig, device: torch.device) -> bool:
        """Whether the method wants predicted queries on this device tier."""
        return False

    @classmethod
    def runs_kernels(cls, config: HybridConfig, device: torch.device) -> bool:
        """Whether a decode step is nothing but launches on the device, so that a CUDA graph can hold it."""
        return False

    @classmethod
    def runs_on(cls, config: HybridConfig, device: torch.device) -> bool:
        """Whether the method can use this device tier."""
        return device.type == "cpu" or cls.runs_kernels(config, device)

    @classmethod
    def check_device(cls, config: HybridConfig, device: torch.device) -> None:
        """Raise ConfigError if the method, or its tiers, cannot use this device tier."""
        if not cls.runs_on(config, device):
            raise ConfigError(
                f"method: {config.method} (device_kernels: {config.device_kernels}) does not run on a GPU in this "
                "version; write device_kernels: auto"
            )
        if device.type != "cpu" and not is_separate(config, device):
            raise ConfigError("tiers: unified needs a device tier that is the host itself, not a GPU; write auto")

    @classmethod
    @abstractmethod
    def layout(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> TierLayout:
        """The tiers it needs."""

    @classmethod
    def own_memory(
        cls, config: HybridConfig, model: ModelSpec, device: torch.device, pages: int, max_requests: int
    ) -> OwnMemory:
        """What `device_bytes` and `host_bytes` are at start, over a host pool of ``pages`` pages. Allocates nothing."""
        return OwnMemory()

    @classmethod
    def grown_bytes(cls, config: HybridConfig, model: ModelSpec, device: torch.device, tokens: int) -> int:
        """Host memory that a running request of ``tokens`` tokens takes beside the host pool, at most."""
        return 0

    # --- the step ---

    def begin_step(self, step: Step) -> None:
        """Plan the step; everything that last step copied becomes visible here."""

    def wants_lookahead(self, layer: int, step: Step) -> bool:
        """Whether a predicted query of ``layer`` is of use in this step."""
        return False

    def lookahead(self, layer: int, step: Step, predicted_q: Tensor) -> None:
        """Before layer ``layer - 1`` runs. ``predicted_q``: ``[decode rows, heads, head_dim]`` of ``layer``."""

    def append(self, layer: int, step: Step, kv: Tensor) -> None:
        """The step's new tokens, now in the host pool. ``kv``: ``[tokens, kv_heads, 2, head_dim]``."""

    def prefill(self, layer: int, row: PrefillRow, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Exact attention of a prompt chunk: ``[chunk, heads, head_dim]`` in, the same shape in fp32 out."""
        return attend_chunk(q, k, v, self.prefix(layer, row.pages, row.seq_len - len(q)), self.model.scale)

    @abstractmethod
    def attend(self, layer: int, step: Step, q: Tensor) -> Tensor:
        """Attention of the decoding rows. ``q``: ``[rows, heads, head_dim]``; returns the same shape, fp32."""

    def end_step(self, step: Step) -> None:
        """After the last layer."""

    def failure(self, step: Step) -> StepFailure | None:
        """What went wrong, unseen by the host, in a step that the device has passed."""
        return None if self.in_place is None else self.in_place.failure(step)

    # --- requests and the end ---

    def release(self, request_id: str) -> None:
        """The request ended, was aborted or was preempted: nothing of it may stay."""
        if self.in_place is not None:
            self.in_place.release(request_id)

    def abandon(self, step: Step) -> None:
        """The step failed half-way: drop what is in flight for it."""

    def close(self) -> None:
        """Give native memory back."""
        if self.in_place is not None:
            self.in_place.close()

    def count(self) -> None:
        """Bring the counters up to date, without waiting for the device."""
        if self.in_place is not None:
            self.in_place.count()

    # --- for methods ---

    @property
    def device_bytes(self) -> int:
        """Device memory that the method holds beside the tiers."""
        return 0 if self.in_place is None else self.in_place.device_bytes

    @property
    def resident_pages(self) -> int:
        """Slots that hold a page or are being filled, over all layers."""
        mine = 0 if self.in_place is None else self.in_place.resident_pages
        return self.tiers.residency.resident_pages + self.tiers.transfers.pages_in_flight + mine

    @property
    def host_bytes(self) -> int:
        """Host memory that the method holds beside the host pool and the digests."""
        return 0 if self.in_place is None else self.in_place.host_bytes

    def prefix(self, layer: int, pages: Tensor, tokens: int, groups: int = 1) -> Iterable[KVBlock]:
        """The first ``tokens`` tokens of a sequence on the device tier: in place where that is the host, else streamed
        through the staging buffers, ``groups`` groups of KV heads (or more) one after the other."""
        if not tokens:
            return []
        heads = tuple(range(self.model.num_kv_heads))
        if self.tiers.stream is None:
            return [KVBlock(heads, *gather_tokens(self.tiers.host.blocks(layer), pages, len(heads), 0, tokens))]
        return self.tiers.stream.blocks(layer, self.tiers.stream.pieces(0, heads, groups, pages, tokens))


def is_separate(config: HybridConfig, device: torch.device) -> bool:
    """Whether the device tier holds copies; a device tier that is the host itself needs none."""
    return config.tiers == "separate" or (config.tiers == "auto" and device.type != "cpu")


def decodes_in_place(config: HybridConfig, model: ModelSpec, device: torch.device) -> bool:
    """Whether `InPlace` can serve this model on this device tier, given that it attends host pages itself."""
    return kernel_name(config.workers.kernel) == "native" and InPlace.supports(model, config.page_size, device)


def staging_tokens(config: HybridConfig, automatic: int = 4096) -> int:
    """Tokens of a staging buffer, in whole pages."""
    wanted = automatic if config.staging_tokens == "auto" else config.staging_tokens
    return -(-wanted // config.page_size) * config.page_size

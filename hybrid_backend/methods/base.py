"""The Method interface: a policy over the same tiers, kernels and workers."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from hybrid_backend.config import HybridConfig
from hybrid_backend.methods.in_place import InPlace
from hybrid_backend.observe.stats import Stats
from hybrid_backend.step import ModelSpec, Step
from hybrid_backend.tiers import TierLayout, Tiers
from hybrid_backend.workers import WorkerPool


class Method(ABC):
    """Says what is resident, what is selected, who computes it, what is copied and when.

    The runtime calls, per step: `begin_step`; then per layer with full attention `lookahead` (if `wants_lookahead`),
    `append` and `attend`, or `in_place` instead of the two; then `end_step`. Only decoding rows reach a method: prompts
    are dense and the runtime's.
    """

    in_place: InPlace | None = None  # set by a method that decodes over host pages in one native call per layer

    def __init__(self, config: HybridConfig, model: ModelSpec, tiers: Tiers, workers: WorkerPool, stats: Stats) -> None:
        self.config = config
        self.model = model
        self.tiers = tiers
        self.workers = workers
        self.stats = stats

    @classmethod
    def looks_ahead(cls, config: HybridConfig, device: torch.device) -> bool:
        """Whether the method wants predicted queries on this device tier."""
        return False

    @classmethod
    @abstractmethod
    def layout(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> TierLayout:
        """The tiers it needs."""

    def begin_step(self, step: Step) -> None:
        """Plan the step; everything that last step copied becomes visible here."""

    def wants_lookahead(self, layer: int, step: Step) -> bool:
        """Whether a predicted query of ``layer`` is of use in this step."""
        return False

    def lookahead(self, layer: int, step: Step, predicted_q: Tensor) -> None:
        """Before layer ``layer - 1`` runs. ``predicted_q``: ``[decode rows, heads, head_dim]`` of ``layer``."""

    def append(self, layer: int, step: Step, kv: Tensor) -> None:
        """The decoding rows' new tokens, now in the host pool. ``kv``: ``[decode rows, kv_heads, 2, head_dim]``."""

    @abstractmethod
    def attend(self, layer: int, step: Step, q: Tensor) -> Tensor:
        """Attention of the decoding rows. ``q``: ``[rows, heads, head_dim]``; returns the same shape, fp32."""

    def close(self) -> None:
        """Give native memory back."""
        if self.in_place is not None:
            self.in_place.close()

    def end_step(self, step: Step) -> None:
        """After the last layer."""

    def release(self, request_id: str) -> None:
        """The request ended, was aborted or was preempted: nothing of it may stay."""

    def abandon(self, step: Step) -> None:
        """The step failed half-way: drop what is in flight for it."""

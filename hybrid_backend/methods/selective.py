"""What methods share that attend a budget of pages, scored by digests, some of them resident in frames."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from hybrid_backend.config import MOST_FRAMES, HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.execution.fused import kept_bytes, span_bytes
from hybrid_backend.kernels import codes
from hybrid_backend.methods.base import Method, can_fuse, frames_per_request, is_separate, staging_tokens, wants_fused
from hybrid_backend.step import DecodeRows, ModelSpec
from hybrid_backend.tiers import TierLayout
from hybrid_backend.tiers.sizes import DigestKind


class Selective(Method):
    """Placement and budgets; what becomes of selected pages that are not resident is the subclass's."""

    may_fuse = True
    """The native decoder selects as this method does."""

    @classmethod
    def check(cls, config: HybridConfig, device: torch.device, num_layers: int, num_kv_heads: int) -> None:
        super().check(config, device, num_layers, num_kv_heads)
        how = config.selection
        fused = cls.may_fuse and wants_fused(config, device) and not cls.looks_ahead(config, device)
        if how.digest == "minmax_int8" and fused and not _bytes_suffice(config):
            raise ConfigError(
                "selection.digest: minmax_int8 needs selection.aggregate softmax, or sum with granularity layer, where "
                f"the native kernels select in place, not {how.aggregate} with {how.granularity}; write auto or minmax"
            )

    @classmethod
    def looks_ahead(cls, config: HybridConfig, device: torch.device) -> bool:
        """A prediction chooses pages: where every page is attended it would only make the result inexact."""
        if config.sparse == "never":
            return False
        if config.lookahead.enabled == "auto":
            return is_separate(config, device)
        return config.lookahead.enabled

    @classmethod
    def is_fused(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> bool:
        return cls.may_fuse and can_fuse(config, model, device) and not cls.looks_ahead(config, device)

    @classmethod
    def layout(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> TierLayout:
        separate, fused = is_separate(config, device), cls.is_fused(config, model, device)
        if config.selection.interval not in ("auto", 1) and not fused:
            raise ConfigError(
                f"selection.interval: {config.selection.interval} needs pages that are attended in place by the native "
                "kernels (tiers: unified, no lookahead); write auto"
            )
        digests = digest_kind(config, model, fused, separate)
        if not separate:
            return TierLayout(separate=False, digests=digests)
        layout = TierLayout(
            separate=True,
            frames_per_request=frames_per_request(config),
            digests=digests,
            staging_tokens=staging_tokens(config),
            whole_layers=whole_layers(config, model, device),
        )
        return replace(layout, layer_frames=cls.layer_frames(config, layout.selecting_layers(config, model)))

    @classmethod
    def layer_frames(cls, config: HybridConfig, layers: Collection[int]) -> dict[int, int]:
        """Of one request, of those of the ``layers`` that select whose budgets are larger than the mean: more by as
        much as the budget is (where it is more than the frames, in proportion), so that the CPU attends no more of them
        than of others. No layer has fewer than ``frames_per_request``: whoever fits those is on the device whole."""
        frames = frames_per_request(config)
        varies, factors = min(frames, config.budget_pages), cls.factors(config, layers)
        return {layer: frames - varies + round(varies * each) for layer, each in factors.items() if each > 1}

    @classmethod
    def filled(cls, config: HybridConfig, device_pages: int, requests: int) -> HybridConfig:
        """A request that fits its frames is exact, and one that does not asks the CPU for less."""
        if config.frames_per_request != "auto" or cls.has_fixed_frames:
            return config
        selecting = [layer for layer in range(len(config.budget_factors)) if layer not in config.exact_layers]
        most = max(cls.layer_frames(config, selecting).values(), default=config.automatic_frames)
        more = most - config.automatic_frames
        frames = max(config.automatic_frames, min(device_pages // requests, MOST_FRAMES - more))
        return config.model_copy(update={"frames_per_request": frames})

    @classmethod
    def grown_bytes(cls, config: HybridConfig, model: ModelSpec, device: torch.device, tokens: int) -> int:
        layout, how = cls.layout(config, model, device), config.selection
        layers = len(layout.digest_layers(config, model))
        pages = -(-tokens // config.page_size)
        kept = kept_bytes(config, model, pages, layers) if cls.is_fused(config, model, device) else 0
        if layout.digests != "minmax_and_int8" or not how.candidates:
            return kept
        return kept + span_bytes(model, pages, layers)

    def budgets(self, rows: DecodeRows) -> Tensor:
        """A row is under pressure once it has more pages than frames; ``sparse: always``: than its budget, which is the
        configuration's, or its request's as far as the frames go."""
        config, frames = self.config, frames_per_request(self.config)
        if config.sparse == "never":
            return rows.num_pages
        budgets = torch.full_like(rows.num_pages, config.budget_pages)
        if rows.budgets is not None:
            pages = (rows.budgets + config.page_size - 1) // config.page_size
            most = max(config.budget_pages, frames) if self.tiers.frames.size else None
            asked = pages.clamp(config.sinks + config.recent + 1, most)
            budgets = torch.where(rows.budgets > 0, asked, budgets)
        limit = frames if config.sparse == "auto" else budgets.clamp(max=frames)
        return torch.where(rows.num_pages > limit, budgets.clamp(max=rows.num_pages), rows.num_pages)

    def gauges(self) -> dict[str, float]:
        """Keys that say how much is attended and held, as they are served; only those that do something."""
        config, found = self.config, dict[str, float]()
        if config.sparse != "never":
            found["hybrid_budget_tokens"] = config.budget_tokens
        if self.tiers.layout.separate:
            found["hybrid_frames_per_request"] = frames_per_request(config)
        return found


def whole_layers(config: HybridConfig, model: ModelSpec, device: torch.device) -> tuple[int, ...]:
    """What ``whole_layers`` stands for, where the device tier is separate; of layers with a window nothing."""
    automatic = config.exact_layers if device.type != "cpu" else ()
    chosen = automatic if config.whole_layers == "auto" else config.whole_layers
    return tuple(layer for layer in chosen if model.window(layer) is None)


def digest_kind(config: HybridConfig, model: ModelSpec, is_fused: bool, separate: bool) -> DigestKind:
    """What ``selection.digest`` stands for.

    Raises:
        ConfigError: a page has too many tokens for their codes.
    """
    how = config.selection
    if how.digest == "codes":
        if not codes.Layout(config.page_size, model.head_dim).planes:
            raise ConfigError(
                f"selection.digest: codes of {config.page_size} tokens do not fit {4 * model.head_dim} bytes; write "
                "minmax, or a smaller page_size"
            )
        return "codes"
    if not is_fused:
        return "minmax_int8" if how.digest == "minmax_int8" or (how.digest == "auto" and separate) else "minmax"
    return "minmax_and_int8" if how.digest != "minmax" and _bytes_suffice(config) else "minmax"


def _bytes_suffice(config: HybridConfig) -> bool:
    """Whether the native decoder can score digests in bytes as the configuration wants."""
    how = config.selection
    return how.aggregate == "softmax" or (how.aggregate == "sum" and how.granularity == "layer")

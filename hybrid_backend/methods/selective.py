"""Base of the methods that attend a budget of pages, chosen by digests, with some pages resident in frames."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from hybrid_backend.batch import DecodeRows, ModelSpec
from hybrid_backend.config import MOST_FRAMES, HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.kernels.digest_format import MINMAX_INT8, DigestFormat, format_named
from hybrid_backend.step.method import FixedFrames, Method, factors_of, frames_per_request, staging_tokens
from hybrid_backend.tiers import TierLayout


class Selective(Method):
    """Placement and budgets. A subclass decides what becomes of selected pages that are not resident."""

    predicts_queries = True

    @classmethod
    def check(cls, config: HybridConfig, device: torch.device, num_layers: int, num_kv_heads: int) -> None:
        super().check(config, device, num_layers, num_kv_heads)
        if config.selection.steps_per_selection > config.page_size:
            raise ConfigError(
                f"selection.interval: {config.selection.interval} is more than page_size {config.page_size}, and "
                f"{config.method} selects again when a page begins; write auto, or {config.page_size} or less"
            )

    @classmethod
    def layout(cls, config: HybridConfig, model: ModelSpec, device: torch.device) -> TierLayout:
        layout = TierLayout(
            separate=True,
            frames_per_request=frames_per_request(config),
            digests=digest_format(config, model),
            staging_tokens=staging_tokens(config),
            whole_layers=whole_layers(config, model, device),
            recalls=cls.recalls(config),
            selection_steps=config.selection.steps_per_selection,
        )
        return replace(layout, layer_frames=cls.layer_frames(config, layout.selecting_layers(config, model)))

    @classmethod
    def recalls(cls, config: HybridConfig) -> bool:
        """Tell whether pages are copied into frames while a request decodes."""
        return False

    @classmethod
    def layer_frames(cls, config: HybridConfig, layers: Collection[int]) -> dict[int, int]:
        """Return the frames per request of the selecting layers whose budget exceeds the mean budget.

        Such a layer gets more frames in proportion, so that the CPU's share is the same in all layers. No layer gets
        fewer than ``frames_per_request``: a request that fits as many pages is resident in all layers.

        Args:
            config: keys ``budget_tokens``, ``budget_factors`` and ``frames_per_request``.
            layers: layers that select.
        """
        frames = frames_per_request(config)
        varies, factors = min(frames, config.budget_pages), factors_of(cls, config, layers)
        return {layer: frames - varies + round(varies * factor) for layer, factor in factors.items() if factor > 1}

    @classmethod
    def filled(cls, config: HybridConfig, device_pages: int, requests: int) -> HybridConfig:
        """Return `Method.filled`: with more frames, more requests are exact, and the CPU attends less of the others."""
        if config.frames_per_request != "auto" or issubclass(cls, FixedFrames):
            return config
        selecting = [layer for layer in range(len(config.budget_factors)) if not config.is_exact(layer)]
        most = max(cls.layer_frames(config, selecting).values(), default=config.automatic_frames)
        more = most - config.automatic_frames
        frames = max(config.automatic_frames, min(device_pages // requests, MOST_FRAMES - more))
        return config.model_copy(update={"frames_per_request": frames})

    @classmethod
    def exact_tokens(cls, config: HybridConfig) -> float:
        """Return `Method.exact_tokens`: what fits the frames of a request, with ``sparse: always`` its budget too."""
        if config.sparse == "never":
            return math.inf
        frames = frames_per_request(config)
        return (frames if config.sparse == "auto" else min(frames, config.budget_pages)) * config.page_size

    def budgets(self, rows: DecodeRows) -> Tensor:
        """Return `Method.budgets`: a row with more pages than frames leaves pages out.

        With ``sparse: always`` a row with more pages than its budget does. A request's own budget counts up to the
        number of frames.
        """
        config, frames = self.config, frames_per_request(self.config)
        if config.sparse == "never":
            return rows.num_pages
        budgets = budget_pages(config, rows, max(config.budget_pages, frames))
        limit = frames if config.sparse == "auto" else budgets.clamp(max=frames)
        return torch.where(rows.num_pages > limit, budgets.clamp(max=rows.num_pages), rows.num_pages)

    def gauges(self) -> dict[str, float]:
        """Return the budget and the frames as they are served; the budget only if pages are left out."""
        config, values = self.config, dict[str, float]()
        if config.sparse != "never":
            values["hybrid_budget_tokens"] = config.budget_tokens
        values["hybrid_frames_per_request"] = frames_per_request(config)
        return values


def whole_layers(config: HybridConfig, model: ModelSpec, device: torch.device) -> tuple[int, ...]:
    """Return the layers that ``whole_layers`` stands for, without layers that have a window."""
    if config.whole_layers != "auto":
        chosen = config.whole_layers
    elif device.type == "cpu":
        chosen = ()
    else:
        chosen = tuple(layer for layer in range(model.num_layers) if config.is_exact(layer))
    return tuple(layer for layer in chosen if model.window(layer) is None)


def budget_pages(config: HybridConfig, rows: DecodeRows, most: int | None = None) -> Tensor:
    """Return the pages that each row may attend under pressure: its request's own budget, else the configuration's.

    Args:
        config: the keys ``budget_tokens``, ``sinks`` and ``recent`` are read.
        rows: decode rows of a step.
        most: limit of a request's own budget in pages; None: there is none.

    Returns:
        ``[rows]`` int64.
    """
    budgets = torch.full_like(rows.num_pages, config.budget_pages)
    if rows.budgets is None:
        return budgets
    pages = (rows.budgets + config.page_size - 1) // config.page_size
    return torch.where(rows.budgets > 0, pages.clamp(config.sinks + config.recent + 1, most), budgets)


def digest_format(config: HybridConfig, model: ModelSpec, automatic: DigestFormat = MINMAX_INT8) -> DigestFormat:
    """Return the format of digests that ``selection.digest`` stands for.

    Args:
        config: the keys ``selection.digest`` and ``page_size`` are read.
        model: shapes of the model.
        automatic: what ``auto`` stands for.

    Raises:
        ConfigError: a page has too many tokens for the format.
    """
    chosen = format_named(config.selection.digest, automatic)
    if not chosen.fits(config.page_size, model.head_dim):
        raise ConfigError(
            f"selection.digest: {chosen.name} of {config.page_size} tokens do not fit "
            f"{chosen.page_bytes(model.dtype, 1, model.head_dim)} bytes; write minmax, or a smaller page_size"
        )
    return chosen

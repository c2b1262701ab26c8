"""What methods share that attend a budget of pages, scored by digests, some of them resident in frames."""

from __future__ import annotations

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
    """Placement and budgets; what becomes of selected pages that are not resident is the subclass's."""

    predicts_queries = True

    @classmethod
    def check(cls, config: HybridConfig, device: torch.device, num_layers: int, num_kv_heads: int) -> None:
        super().check(config, device, num_layers, num_kv_heads)
        if config.selection.interval not in ("auto", 1):
            raise ConfigError(
                f"selection.interval: {config.selection.interval} is of method quest, which attends pages in place; "
                "write auto"
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
        )
        return replace(layout, layer_frames=cls.layer_frames(config, layout.selecting_layers(config, model)))

    @classmethod
    def recalls(cls, config: HybridConfig) -> bool:
        """Tell whether pages are copied into frames while a request decodes."""
        return False

    @classmethod
    def layer_frames(cls, config: HybridConfig, layers: Collection[int]) -> dict[int, int]:
        """Of one request, of those of the ``layers`` that select whose budgets are larger than the mean: more by as
        much as the budget is (where it is more than the frames, in proportion), so that the CPU attends no more of them
        than of others. No layer has fewer than ``frames_per_request``: whoever fits those is on the device whole."""
        frames = frames_per_request(config)
        varies, factors = min(frames, config.budget_pages), factors_of(cls, config, layers)
        return {layer: frames - varies + round(varies * each) for layer, each in factors.items() if each > 1}

    @classmethod
    def filled(cls, config: HybridConfig, device_pages: int, requests: int) -> HybridConfig:
        """A request that fits its frames is exact, and one that does not asks the CPU for less."""
        if config.frames_per_request != "auto" or issubclass(cls, FixedFrames):
            return config
        selecting = [layer for layer in range(len(config.budget_factors)) if layer not in config.exact_layers]
        most = max(cls.layer_frames(config, selecting).values(), default=config.automatic_frames)
        more = most - config.automatic_frames
        frames = max(config.automatic_frames, min(device_pages // requests, MOST_FRAMES - more))
        return config.model_copy(update={"frames_per_request": frames})

    def budgets(self, rows: DecodeRows) -> Tensor:
        """A row is under pressure once it has more pages than frames; ``sparse: always``: than its budget, which is the
        configuration's, or its request's as far as the frames go."""
        config, frames = self.config, frames_per_request(self.config)
        if config.sparse == "never":
            return rows.num_pages
        budgets = budget_pages(config, rows, max(config.budget_pages, frames))
        limit = frames if config.sparse == "auto" else budgets.clamp(max=frames)
        return torch.where(rows.num_pages > limit, budgets.clamp(max=rows.num_pages), rows.num_pages)

    def gauges(self) -> dict[str, float]:
        """Keys that say how much is attended and held, as they are served; only those that do something."""
        config, found = self.config, dict[str, float]()
        if config.sparse != "never":
            found["hybrid_budget_tokens"] = config.budget_tokens
        found["hybrid_frames_per_request"] = frames_per_request(config)
        return found


def whole_layers(config: HybridConfig, model: ModelSpec, device: torch.device) -> tuple[int, ...]:
    """What ``whole_layers`` stands for, where the device tier is separate; of layers with a window nothing."""
    automatic = config.exact_layers if device.type != "cpu" else ()
    chosen = automatic if config.whole_layers == "auto" else config.whole_layers
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

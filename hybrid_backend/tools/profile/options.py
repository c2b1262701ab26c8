"""Options of a profile, and checks that refuse options that cannot be measured with."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.methods import Method, resolve_method
from hybrid_backend.methods.registry import AUTO
from hybrid_backend.step.method import frames_per_request
from hybrid_backend.tools.plan.hardware.measure import torch_device
from hybrid_backend.tools.profile.gates import GateOptions

TAU = 0.12
"""Largest share of a layer's attended tokens that the CPU may compute (ScoutAttention, section 3.4)."""


@dataclass(frozen=True)
class Options:
    """Options of a profile; those of the command line have its names and are explained by its help.

    Attributes:
        outliers: make a layer exact, too, that has more than half of the KL that is left below ``max_kl``.
        gates: options of the gates' training, None for no gates.
        tau: largest share of a layer's attended tokens that the CPU may compute.
        prefetch_bytes: entry of the heads file, 0 where the hardware is not known.
    """

    contexts: tuple[int, ...] = (4096,)
    positions: int = 128
    windows: int = 2
    lookups: int = 2
    spread: bool = True
    texts: tuple[str, ...] = ()
    min_cosine: float = 0.9
    max_kl: float = 0.05
    outliers: bool = True
    gates: GateOptions | None = field(default_factory=GateOptions)
    tau: float = TAU
    prefetch_bytes: int = 0
    margin: float = 0.1
    fresh: bool = False
    device: str = "cpu"


def method_of(config: HybridConfig) -> type[Method]:
    """Return the method that is profiled. ``auto`` is profiled for `scout`, because `quest` needs less of the same."""
    return resolve_method("scout" if config.method == AUTO else config.method)


def check_options(config: HybridConfig, options: Options) -> None:
    """Refuse options that cannot be measured with, before a model is loaded.

    Raises:
        ConfigError: a number is out of range, or a context leaves nothing to select.
    """
    method = method_of(config)
    torch_device(options.device)
    gate_steps = 1 if options.gates is None else options.gates.steps
    for flag, value, is_valid, expected in (
        ("--min-cosine", options.min_cosine, -1 <= options.min_cosine <= 1, "a number from -1 to 1"),
        ("--max-kl", options.max_kl, options.max_kl >= 0, "a number >= 0"),
        ("--positions", options.positions, options.positions >= 2, "an integer >= 2"),
        ("--tau", options.tau, 0 < options.tau <= 1, "a number > 0 and <= 1"),
        ("--margin", options.margin, 0 <= options.margin < 1, "a number from 0 up to 1, without 1"),
        ("--lookups", options.lookups, options.lookups >= 0, "an integer >= 0"),
        ("--gate-steps", gate_steps, gate_steps >= 1, "an integer >= 1"),
        ("--windows", options.windows, options.windows >= 1, "an integer >= 1"),
    ):
        if not is_valid:
            raise ConfigError(f"{flag}: got {value}, expected {expected}")
    for key, is_set in (("max_kl", config.quality.max_kl != "none"), ("min_mass", config.quality.promise > 0)):
        if is_set and not method.budgets_vary:
            raise ConfigError(
                f"quality.{key}: {config.method} has no budget that could keep it; write method: auto, or none"
            )
    needed = needed_tokens(config, options)
    if min(options.contexts) <= needed:
        raise ConfigError(
            f"--context {min(options.contexts)}: everything is resident up to {needed - options.positions} tokens; "
            f"take more than {needed} tokens, or a smaller budget with --set budget_tokens=N"
        )


def needed_tokens(config: HybridConfig, options: Options) -> int:
    """Return the tokens that every window must exceed: the resident ones, and one for each decode step."""
    return max(frames_per_request(config), config.budget_pages) * config.page_size + options.positions

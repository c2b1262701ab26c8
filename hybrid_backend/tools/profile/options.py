"""Options of a profile, and checks that refuse those that cannot be."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.methods import Method, resolve_method
from hybrid_backend.methods.registry import AUTO
from hybrid_backend.step.method import frames_per_request
from hybrid_backend.tools.plan.hardware.measure import torch_device
from hybrid_backend.tools.profile.gates import GateOptions
from hybrid_backend.tools.profile.summary import Thresholds


@dataclass(frozen=True)
class Options:
    """``contexts``: tokens per window; ``windows``: per text and context; ``positions``: decode steps of a window.

    ``lookups``: prompts of the longest context in which entries are looked up. ``spread``: look for budgets per layer,
    where there are lookups and the method can have them. ``texts``, ``held_out``: files; without texts the reference
    and the source code that come with Python. ``gates``: None for none. ``tau``: with its source; None takes
    ``recall.threshold``. ``prefetch_bytes``: for the heads file, 0 where the hardware is not known.
    ``margin``: intervals are chosen this share below tau, because the next text is not the profiled one.
    ``fit_frames``: set ``frames_per_request`` to the fewest simulated frames that keep every sparse layer below tau, if
    there are such.
    """

    contexts: tuple[int, ...] = (4096,)
    positions: int = 128
    windows: int = 2
    lookups: int = 2
    spread: bool = True
    texts: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    limits: Thresholds = field(default_factory=Thresholds)
    gates: GateOptions | None = field(default_factory=GateOptions)
    tau: tuple[float, str] | None = None
    prefetch_bytes: int = 0
    margin: float = 0.1
    fit_frames: bool = False
    plots: bool = True
    fresh: bool = False
    device: str = "cpu"


def method_of(config: HybridConfig) -> type[Method]:
    """Return the method that is profiled. ``auto`` is profiled for `scout`, because `quest` needs less of the same."""
    return resolve_method("scout" if config.method == AUTO else config.method)


def check_options(config: HybridConfig, options: Options) -> None:
    """Refuse options that cannot be measured with, before a model is loaded.

    Raises:
        ConfigError: a number out of range, or a context that leaves nothing to select.
    """
    method, limits = method_of(config), options.limits
    torch_device(options.device)
    if not -1 <= limits.cosine <= 1:
        raise ConfigError(f"--min-cosine: got {limits.cosine}, expected a number from -1 to 1")
    if not 0 <= limits.mass <= 1:
        raise ConfigError(f"--min-mass: got {limits.mass}, expected a number from 0 to 1")
    if not limits.kl >= 0:
        raise ConfigError(f"--max-kl: got {limits.kl}, expected a number >= 0")
    if options.positions < 2:
        raise ConfigError(f"--positions: got {options.positions}, expected an integer >= 2")
    if not 0 <= options.margin < 1:
        raise ConfigError(f"--margin: got {options.margin}, expected a number from 0 up to 1, without 1")
    if options.lookups < 0:
        raise ConfigError(f"--lookups: got {options.lookups}, expected an integer >= 0")
    if options.gates is not None and options.gates.steps < 1:
        raise ConfigError(f"--gate-steps: got {options.gates.steps}, expected an integer >= 1, or --no-gates")
    for key, is_given in (("max_kl", config.quality.max_kl != "none"), ("min_mass", config.quality.promise > 0)):
        if is_given and not method.budgets_vary:
            raise ConfigError(
                f"quality.{key}: {config.method} has no budget that could keep it; write method: scout, or none"
            )
    if options.windows < 1 or not options.contexts:
        raise ConfigError("--windows, --context: expected at least one window of one context")
    for context in options.contexts:
        needed = needed_tokens(config, options)
        if context <= needed:
            raise ConfigError(
                f"--context {context}: everything is resident up to {needed - options.positions} tokens; take "
                f"more than {needed} tokens, or a smaller budget with --set budget_tokens=N"
            )


def needed_tokens(config: HybridConfig, options: Options) -> int:
    """Tokens that no window is shorter than: beyond what is resident, as many as decode steps."""
    return max(frames_per_request(config), config.budget_pages) * config.page_size + options.positions

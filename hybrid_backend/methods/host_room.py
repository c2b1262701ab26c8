"""Checks at start that the buffers of a configuration fit the host's memory, and names the key and the number that do.

On a GPU the engines' adapters size the device tier, so this module is for a device tier that is the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from hybrid_backend.batch import ModelSpec
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.host_memory import System, size_text
from hybrid_backend.methods.registry import resolve_method
from hybrid_backend.tiers.sizes import pages_of_a_sequence

SIZING_KEYS = ("budget_tokens", "frames_per_request", "hgca.window_tokens", "apex.device_tokens", "sinks", "recent")
"""Integer keys whose value sets the size of buffers."""


def buffer_bytes(config: HybridConfig, model: ModelSpec, pages: int, max_requests: int, device: torch.device) -> int:
    """Return the bytes that a runtime allocates beside a host pool of ``pages`` pages; allocates nothing."""
    method = resolve_method(config.method)
    own = method.own_memory(config, model, device, pages, max_requests)
    tiers = method.layout(config, model, device).memory(config, model, pages, max_requests)
    return tiers.total + own.device + own.host


def check_room(
    config: HybridConfig,
    model: ModelSpec,
    pages: int,
    max_requests: int,
    device: torch.device,
    available: int | None = None,
) -> None:
    """Refuse a configuration whose buffers the host cannot hold, before any of them is allocated.

    Args:
        config: the configuration.
        model: shapes of the model.
        pages: pages of the host pool.
        max_requests: requests that run at once, at most.
        device: device tier; on a GPU nothing is checked.
        available: bytes; None: what this process can still use.

    Raises:
        ConfigError: one line with the key, its value and the largest value that fits.
    """
    if device.type != "cpu":
        return

    def fits(candidate: HybridConfig) -> bool:
        try:
            return buffer_bytes(candidate, model, pages, max_requests, device) <= room
        except (RuntimeError, OverflowError):  # torch refuses shapes whose bytes 64 bits cannot count.
            return False

    columns = pages_of_a_sequence(config, model, pages)
    longest = columns * config.page_size  # A larger number than the longest sequence has the same effect.
    room = System().available() if available is None else available
    if fits(config):
        return
    for key, value in _sizes(config):
        largest = _largest(config, key, min(value, longest if key.endswith("_tokens") else columns), fits)
        if largest:
            raise ConfigError(
                f"{key}: {value} needs more memory than the {size_text(room)} that are available beside the host pool; "
                f"write {largest} or less"
            )
    raise ConfigError(
        f"method: the buffers of {config.method} for {max_requests} requests need more memory than the "
        f"{size_text(room)} that are available beside the host pool; lower the engine's number of running requests"
    )


def _sizes(config: HybridConfig) -> Iterator[tuple[str, int]]:
    """Yield the keys of `SIZING_KEYS` that hold a number, with it, the largest number first."""
    values = {}
    for key in SIZING_KEYS:
        section, _, name = key.rpartition(".")
        values[key] = getattr(getattr(config, section) if section else config, name)
    numbers = {key: value for key, value in values.items() if isinstance(value, int)}
    yield from sorted(numbers.items(), key=lambda item: -item[1])


def _largest(config: HybridConfig, key: str, most: int, fits: Callable[[HybridConfig], bool]) -> int:
    """Return the largest number up to ``most`` with which ``key`` fits, 0 if none does; tokens come in whole pages."""
    always, page = config.sinks + config.recent, config.page_size
    least = {"budget_tokens": (always + 1) * page, "frames_per_request": always + 1, "sinks": 0, "recent": 1}
    step = page if key.endswith("_tokens") else 1
    low, high = -(-least.get(key, page) // step), most // step + 1
    if low >= high or not fits(_changed(config, key, low * step)):
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(_changed(config, key, middle * step)) else (low, middle)
    return low * step


def _changed(config: HybridConfig, key: str, value: int) -> HybridConfig:
    """Return the configuration with another number under ``key``."""
    section, _, name = key.rpartition(".")
    if not section:
        return config.model_copy(update={name: value})
    return config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})

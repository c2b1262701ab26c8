"""The file of measured kernel orders, by which all servers of one machine choose the same kernels (`variants`).

A measurement beside other processes can be wrong, because they share the cores' units and the memory bus. Such a
measurement is kept only until a start on a quiet machine replaces it.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

BUSY = 0.25
"""Share of all CPUs' time that other processes may use during a measurement that is kept for ever."""

Result = TypeVar("Result")
Orders = dict[str, tuple[str, ...]]
"""Variants in the order in which they are tried, by the name of a case."""


class MeasuredOrders(NamedTuple):
    """A measurement, and the share of all CPUs' time that other processes used meanwhile."""

    orders: Orders
    busy_share: float

    @property
    def is_final(self) -> bool:
        """True if the machine was quiet, so that no later start measures again."""
        return self.busy_share <= BUSY


def measure_orders(measure: Callable[[], Orders], stat: Path = Path("/proc/stat")) -> MeasuredOrders:
    """Run a measurement, and count the CPU time of other processes meanwhile.

    Args:
        measure: times all cases.
        stat: the kernel's file. Where Linux does not have it, the machine counts as quiet.
    """
    return MeasuredOrders(*beside_others(measure, stat))


def beside_others(measure: Callable[[], Result], stat: Path = Path("/proc/stat")) -> tuple[Result, float]:
    """Run a measurement; return its result, and the share of all CPUs' time that other processes used meanwhile."""
    start_seconds, start_busy, start_own = time.monotonic(), _busy_seconds(stat), time.process_time()
    result = measure()
    seconds, own = time.monotonic() - start_seconds, time.process_time() - start_own
    end_busy = _busy_seconds(stat)
    if start_busy is None or end_busy is None:
        return result, 0.0
    share = (end_busy - start_busy - own) / (seconds * (os.cpu_count() or 1))
    return result, round(min(max(share, 0.0), 1.0), 3)


def _busy_seconds(stat: Path) -> float | None:
    """Return the seconds that all CPUs were busy since boot, time stolen by other guests included; None if unknown."""
    try:
        user, nice, system, _, _, irq, softirq, steal = map(int, stat.read_text().split(maxsplit=9)[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def read_orders(path: Path, running: Mapping[str, Sequence[str]]) -> MeasuredOrders | None:
    """Read a kept measurement.

    Args:
        path: the file.
        running: variants that run on this CPU, by the name of each case that must be in the file.

    Returns:
        None where the file is missing or damaged, or where another library wrote it.
    """
    try:
        content = json.loads(path.read_text())
        orders = {name: tuple(content["orders"][name]) for name in running}
        is_whole = all(sorted(order) == sorted(running[name]) for name, order in orders.items())
        return MeasuredOrders(orders, float(content["busy_share"])) if is_whole else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def keep_orders(path: Path, measured: MeasuredOrders, running: Mapping[str, Sequence[str]]) -> Orders:
    """Write a measurement, unless another process was first: then its measurement is returned.

    A measurement of a busy machine gives way to one of a quiet machine. A folder that cannot be written is no error:
    the measurement is made again at the next start.
    """
    content = {"busy_share": measured.busy_share, "orders": measured.orders}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, fresh = tempfile.mkstemp(dir=path.parent)
    except OSError:
        return measured.orders
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
        os.link(fresh, path)
    except FileExistsError:
        first = read_orders(path, running)
        if first is not None and (first.is_final or not measured.is_final):
            return first.orders
        os.replace(fresh, path)
    except OSError:
        return measured.orders
    finally:
        with suppress(OSError):
            os.unlink(fresh)
    return measured.orders


def measurements_folder() -> Path | None:
    """Return the folder of kept measurements; None for a user without a home."""
    with suppress(RuntimeError):
        return Path("~/.cache/hybrid_backend/kernels").expanduser()
    return None

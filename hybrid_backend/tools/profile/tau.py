"""Two numbers from a hardware profile: tau, and the bytes that cross the bus while a layer computes.

Tau is the largest share of attended tokens that the CPU can compute unnoticed.
"""

from __future__ import annotations

import math
from bisect import bisect_right

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.hardware import Hardware
from hybrid_backend.model import ModelShape
from hybrid_backend.tools.plan.simulate.costs import Costs

_LEAST, _STEPS = 100, 10_000
"""Least share of attended tokens that is tried, in steps; a share of 1 is so many steps."""


def tau_of(hardware: Hardware, shape: ModelShape, config: HybridConfig, context: int, batch: int = 1) -> float:
    """Return the share at which the CPU's partial takes as long as the device's layer, between 0.01 and 1.

    With a lookahead of one layer the workers have one layer of the device's time (ScoutAttention, section 3.4):
    projections, prediction, scoring, attention of the resident share, the rest of the layer.

    Raises:
        ConfigError: the device tier of the profile is the CPU itself, where nothing overlaps; or the CPU cannot even
            answer an empty job in time.
    """
    if hardware.device == "cpu":
        raise ConfigError(
            f"{hardware.name}: its device tier is the CPU itself, so nothing runs beside it and tau cannot follow; "
            "give the profile of a machine with a GPU, or --tau"
        )
    layer = Costs(hardware, shape, config, context, -(-batch // hardware.gpus))

    def late_seconds(steps: int) -> float:
        share = steps / _STEPS
        cpu = layer.cpu_attention(_attended(layer) * share) + layer.copy(layer.answer_bytes, layer.answer_bytes)
        return cpu - _device_seconds(layer, 1 - share)

    in_time = bisect_right(range(_LEAST, _STEPS + 1), 0.0, key=late_seconds)
    if not in_time:
        raise ConfigError(
            f"{hardware.name}: its CPU needs longer for one percent of the budget than its device for a layer; "
            "a larger batch or --tau may help"
        )
    return (_LEAST + in_time - 1) / _STEPS


def prefetch_bytes_of(hardware: Hardware, shape: ModelShape, config: HybridConfig, context: int, batch: int = 1) -> int:
    """Return T_comp * B_PCIe of CLO (arXiv 2511.14510, Eq. 12 as meant: printed with B in the denominator).

    Returns:
        Bytes that one device's bus moves while the device computes one layer of one step, for all of its sequences
        together; at the link's best rate, since the device reads the pages by itself and sets up no copies.
    """
    layer = Costs(hardware, shape, config, context, -(-batch // hardware.gpus))
    return int(_device_seconds(layer, 1.0) * hardware.link_achieved(math.inf))


def _attended(layer: Costs) -> float:
    """Return the bytes of K and V that one layer attends."""
    return layer.kv(float(min(layer.config.budget_tokens, layer.context)))


def _device_seconds(layer: Costs, share: float) -> float:
    """Return the device's time for one layer with a prediction that attends that share of the selected tokens."""
    linear = layer.projections + layer.prediction + layer.rest
    return linear + layer.scoring(layer.digest_bytes) + layer.attention(_attended(layer) * share)

"""From a hardware profile: tau, the largest share of attended tokens that the CPU can compute unnoticed, and the bytes
that cross the bus while a layer computes."""

from __future__ import annotations

import math

from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.hardware import Hardware
from hybrid_backend.model import ModelShape
from hybrid_backend.tools.plan.simulate.costs import Costs


def tau_of(hardware: Hardware, shape: ModelShape, config: HybridConfig, context: int, batch: int = 1) -> float:
    """The share at which the CPU's partial takes as long as the device's layer, between 0.01 and 1.

    With a lookahead of one layer the workers have one layer of the device's time (ScoutAttention, section 3.4):
    projections, prediction, scoring, attention of the resident share, the rest of the layer.

    Raises:
        ConfigError: the device tier of the profile is the CPU itself, where nothing overlaps; or the CPU cannot even
            answer an empty job in time.
    """
    if hardware.device == "cpu":
        raise ConfigError(
            f"{hardware.name}: its device tier is the CPU itself, so nothing runs beside it and tau cannot follow; "
            "give the profile of a machine with a GPU, or recall.threshold"
        )
    step_costs = Costs(hardware, shape, config, context, -(-batch // hardware.gpus))

    def spare(share: float) -> float:
        answered = step_costs.cpu_attention(_attended(step_costs) * share) + step_costs.copy(
            step_costs.answer_bytes, step_costs.answer_bytes
        )
        return _device_seconds(step_costs, 1 - share) - answered

    low, high = 0.01, 1.0
    if spare(low) <= 0:
        raise ConfigError(
            f"{hardware.name}: its CPU needs longer for one percent of the budget than its device for a layer; "
            "a larger batch or recall.threshold may help"
        )
    if spare(high) >= 0:
        return high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if spare(middle) > 0 else (low, middle)
    return round(low, 4)


def prefetch_bytes_of(hardware: Hardware, shape: ModelShape, config: HybridConfig, context: int, batch: int = 1) -> int:
    """T_comp * B_PCIe of CLO (arXiv 2511.14510, Eq. 12 as meant: printed with B in the denominator).

    Returns:
        Bytes that one device's bus moves while the device computes one layer of one step, for all of its sequences
        together; at the link's best rate, since the device reads the pages by itself and sets up no copies.
    """
    step_costs = Costs(hardware, shape, config, context, -(-batch // hardware.gpus))
    return int(_device_seconds(step_costs, 1.0) * hardware.link_achieved(math.inf))


def _attended(step_costs: Costs) -> float:
    """Bytes of K and V that one layer attends."""
    return step_costs.kv(float(min(step_costs.config.budget_tokens, step_costs.context)))


def _device_seconds(step_costs: Costs, share: float) -> float:
    """The device's time for one layer with a prediction, of which it attends that share of the selected tokens."""
    linear = step_costs.projections + step_costs.prediction + step_costs.rest
    return linear + step_costs.scoring(step_costs.digest_bytes) + step_costs.attention(_attended(step_costs) * share)

"""One iteration of APEX (arXiv 2506.03296): the device attends whole requests, the CPU attends the others.

`Machine.costs` are those of the device's rows; `Machine.cpu_rows` more rows have their K and V in host memory. Each
function is one way to run both together. They write to `Machine.cpu_token_steps` how many iterations one token of a
CPU row takes. All layers attend everything. Transfers of queries and answers are counted, but take no time (section
3.2).
"""

from __future__ import annotations

import math
from dataclasses import replace

from hybrid_backend.methods.apex.rule import cpu_hides, judge
from hybrid_backend.tools.plan.simulate.costs import Costs
from hybrid_backend.tools.plan.simulate.pipelines import Machine, resident


def gpu_only(machine: Machine, step: int) -> None:
    """The CPU rows wait until there is room for them on the device."""
    machine.cpu_token_steps = math.inf
    resident(machine, step)


def lockstep(machine: Machine, step: int) -> None:
    """One batch; every layer waits for the CPU's answer, so that all rows pass all layers in one iteration."""
    if not machine.cpu_rows:
        return gpu_only(machine, step)
    here, there, both = _batches(machine)
    for _ in range(here.shape.layers):
        known = machine.device(both.projections)
        answer = machine.cpu(_all_kv(there), 0.0, known, asking=there)
        machine.device(here.attention(_all_kv(here)))
        machine.device(both.rest, answer)
    machine.device(both.head - here.head)


def pipeline(machine: Machine, step: int) -> None:
    """Asymmetric pipelining (Figure 2, from NEO): two batches take turns in the matrices, and the CPU attends for one
    while the device computes the other. CPU rows are shared out so that the CPU is never without work (Eq. 4): those of
    the first batch have the device's attention and the second batch's matrices, those of the second batch the first
    batch's matrices."""
    if not machine.cpu_rows:
        return gpu_only(machine, step)
    here, _, both = _batches(machine)
    linear, attention = here.projections + here.rest, here.attention(_all_kv(here))
    mixed = min(machine.cpu_rows - 1, round(machine.cpu_rows * (linear + attention) / (2 * linear + attention)))
    first, second = replace(here, rows=here.rows + mixed), replace(here, rows=machine.cpu_rows - mixed)
    mixed_kv, answered = here.context * here.shape.token_bytes * mixed, 0.0
    layers = here.shape.layers
    known = machine.device(first.projections)
    for layer in range(layers):
        answer = machine.cpu(mixed_kv, 0.0, known, asking=replace(here, rows=mixed))
        machine.device(attention)
        known = machine.device((second.rest if layer else 0.0) + second.projections, answered)
        answered = machine.cpu(_all_kv(second), 0.0, known, asking=second)
        known = machine.device(first.rest + (first.projections if layer + 1 < layers else 0.0), answer)
    machine.device(second.rest + both.head - here.head, answered)


def overlap(machine: Machine, step: int) -> None:
    """Asynchronous overlap (section 3.3): the CPU rows are in the batch at the layer where they are, and nowhere
    else."""
    if not machine.cpu_rows:
        return gpu_only(machine, step)
    here, _, both = _batches(machine)
    _iterate(machine, here, both.projections + both.rest - here.projections - here.rest)


def parked(machine: Machine, step: int) -> None:
    """The same in an engine whose forward pass has one batch for all layers: the CPU rows are in every layer's
    matrices, of which one layer's result is of use."""
    if not machine.cpu_rows:
        return gpu_only(machine, step)
    _, _, both = _batches(machine)
    _iterate(machine, both, 0.0)


def parked_apart(machine: Machine, step: int) -> None:
    """The same where CPU rows leave the batch: from one attention to the next they pass the model's own modules by
    themselves, so that one layer's matrices are read once more."""
    if not machine.cpu_rows:
        return gpu_only(machine, step)
    here, there, _ = _batches(machine)
    _iterate(machine, here, there.projections + there.rest)


def served(machine: Machine, step: int) -> None:
    """As the method itself chooses between what an engine can host (`methods.apex`), by ``apex.strategy``."""
    strategy, here, there = machine.costs.config.apex.strategy, machine.costs, machine.cpu_rows
    if strategy == "gpu":
        return _over_link(machine)
    tokens = here.rows * here.context
    if strategy == "auto":
        wanted = judge(here.times, here.rows, tokens, there).wanted
        hides = cpu_hides(here.times, here.rows, tokens, there * here.context)
        strategy = "lockstep" if wanted == "pipeline" and hides else "overlap"
    return (lockstep if strategy == "lockstep" else parked)(machine, step)


def _over_link(machine: Machine) -> None:
    """The device attends the CPU rows' pages where they lie."""
    here, there, both = _batches(machine)
    for _ in range(here.shape.layers):
        known = machine.device(both.projections + here.attention(_all_kv(here)))
        machine.device(0.0, machine.pull(_all_kv(there), known))
        machine.device(both.rest)
    machine.device(both.head - here.head)


def _iterate(machine: Machine, batch: Costs, visit: float) -> None:
    """One iteration without waiting, the mean of all.

    The CPU rows are together at one layer (as in the paper: section 6, "handling all requests for a single layer within
    one iteration"). An answer is taken when the device comes back to that layer, in the next iteration or, if it is
    not there yet, in a later one (end of section 3.4). A token of a model of L layers takes L such rounds, and one
    iteration more, because the first layer of the next token comes before the last layer of this one.

    Args:
        batch: costs of the rows that are in every layer's matrices.
        visit: seconds beside that of each iteration in which the CPU rows move on by a layer.
    """
    here, there, both = _batches(machine)
    layer = batch.projections + here.attention(_all_kv(here)) + batch.rest
    layers = here.shape.layers
    iteration = layers * layer + batch.head + here.hardware.step_overhead_s.value
    rounds = max(1, math.ceil(there.cpu_attention(_all_kv(there)) / iteration))
    machine.cpu_token_steps = layers * rounds + 1.0
    share = layers / machine.cpu_token_steps  # of the iterations in which the CPU rows move on
    machine.cpu(share * _all_kv(there), 0.0, machine.time.free("device"), asking=there)
    for _ in range(layers):
        machine.device(layer)
    machine.device(share * visit + batch.head - here.head + (both.head - batch.head) / machine.cpu_token_steps)


def _batches(machine: Machine) -> tuple[Costs, Costs, Costs]:
    """Costs of the device's rows, of the CPU rows, and of all."""
    here = machine.costs
    return here, replace(here, rows=machine.cpu_rows), replace(here, rows=here.rows + machine.cpu_rows)


def _all_kv(costs: Costs) -> float:
    """Bytes of K and V that these rows attend in a layer."""
    return costs.kv(costs.context)

"""One decode step of each method as tasks on the device, the workers and the link.

Each pipeline follows its method in `hybrid_backend.methods`: the same order, the same waits. ``share`` is what a method
leaves off the device: scout's and HGCA's tokens that the CPU attends, InfiniGen's tokens that are copied, as a share of
all tokens attended in the layer. CLO knows hit ratio and persistent heads instead. APEX is in `simulate.apex`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hybrid_backend.tools.plan.simulate.costs import Costs
from hybrid_backend.tools.plan.simulate.timeline import Resource, Timeline


@dataclass
class Machine:
    """The state that outlives a step."""

    costs: Costs
    share: float
    lookahead: bool
    recall: bool
    workers: Resource = "workers"  # "device" where the device tier's cores are the workers' too
    hit_ratio: float = 0.0  # CLO: lookups of cached KV heads that need no load
    persistent: tuple[int, ...] = ()  # CLO: of each layer, KV heads whose pages are all on the device
    cpu_rows: int = 0  # APEX: rows beside those of ``costs``, attended by the CPU
    cpu_token_steps: float = 1.0  # APEX: steps that one token of a CPU row takes
    time: Timeline = field(default_factory=Timeline)
    pcie_bytes: float = 0.0
    cpu_bytes: float = 0.0
    recalled: float = 0.0  # when the last recall ends: it becomes visible when the next step begins
    spent: Counter[str] = field(default_factory=Counter)  # seconds of the device, by `overheads.PARTS`

    def device(self, matrices: float, *after: float, **parts: float) -> float:
        """Work of one or several `overheads.PARTS`, by their names."""
        self.spent.update({"matrices": matrices, **parts})
        return self.time.run("device", matrices + sum(parts.values()), *after)

    def attended(self, seconds: float) -> float:
        """A layer: its projections, attention of so many seconds, and everything after it."""
        costs = self.costs
        return self.device(
            costs.projections + costs.others, **{"attention": seconds, "engine's kernels": costs.kernels}
        )

    def rest(self) -> float:
        """Of a layer, what comes after its attention."""
        return self.device(self.costs.others, **{"engine's kernels": self.costs.kernels})

    def copied(self, size: float, *after: float) -> float:
        """Pages copied by programs of the device beside its step."""
        arrived = self.link(size, *after)
        self.device(0.0, **{"copies' share": self.costs.beside(size)})
        return arrived

    def link(self, size: float, *after: float) -> float:
        self.pcie_bytes += size
        return self.time.run("link", self.costs.copy(size), *after)

    def pull(self, size: float, *after: float) -> float:
        self.pcie_bytes += size
        return self.time.run("link", self.costs.pull(size), *after)

    def cpu(self, size: float, copied: float, *after: float, asking: Costs | None = None) -> float:
        """When the workers' partial is there; at once if there is nothing to attend. ``asking``: costs of the rows that
        ask, None: all."""
        if not size:
            return 0.0
        self.cpu_bytes += size
        self.pcie_bytes += (asking or self.costs).answer_bytes
        return self.time.run(self.workers, self.costs.cpu_attention(size, copied), *after)


Pipeline = Callable[[Machine, int], None]


def _full_layers(machine: Machine) -> Iterator[int]:
    """The layers with full attention, in order. A sliding-window layer, the same in every method, runs on the way."""
    costs = machine.costs
    for layer, window in enumerate(costs.shape.windows):
        if window is None:
            yield layer
        else:
            machine.attended(costs.attention(costs.kv(min(window, costs.context))))


def stock(machine: Machine, step: int) -> None:
    """Dense, K and V in the device's memory."""
    costs = machine.costs
    for window in costs.shape.windows:
        tokens = costs.context if window is None else min(window, costs.context)
        machine.attended(costs.stock_attention(costs.kv(tokens)))


def resident(machine: Machine, step: int) -> None:
    """Our kernels over a context that is wholly on the device."""
    costs = machine.costs
    for _ in _full_layers(machine):
        machine.attended(costs.attention(costs.kv(costs.context)))


def in_place(machine: Machine, step: int) -> None:
    """The device tier is the host: select, then attend the selected pages where they are."""
    costs = machine.costs
    for layer in _full_layers(machine):
        if costs.fits or layer in costs.config.exact_layers:
            attention = costs.attention(costs.kv(costs.context))
        else:
            attention = costs.selecting_in_place + costs.attention(costs.kv(costs.config.budget_tokens))
        machine.attended(attention)


@dataclass(frozen=True)
class _Parts:
    """One layer's bytes: attended on the device, attended or copied from the host, digests scored."""

    here: float
    away: float
    digests: float


def _parts(machine: Machine, layer: int) -> _Parts:
    costs = machine.costs
    if layer in costs.whole_layers:
        return _Parts(costs.kv(costs.context), 0.0, 0.0)
    if layer in costs.config.exact_layers:
        resident = min(costs.context, costs.slot_tokens)
        return _Parts(costs.kv(resident), costs.kv(costs.context - resident), 0.0)
    away = machine.share * costs.config.budget_tokens
    return _Parts(costs.kv(costs.config.budget_tokens - away), costs.kv(away), costs.digest_bytes)


def _ahead(machine: Machine, layer: int) -> int | None:
    """The layer whose query is predicted at this one's input."""
    costs = machine.costs
    later = (x for x in range(layer + 1, costs.shape.layers) if costs.shape.windows[x] is None)
    following = next(later, None)
    return following if machine.lookahead and following is not None and costs.config.is_predicted(following) else None


def _select(machine: Machine, method: str, layer: int, ahead: bool) -> float:
    """Score the layer's digests on the device; returns when its selection is known. The launches of the layer are
    counted here."""
    costs = machine.costs
    parts = costs.launched(method)
    beside = parts.pop("selection") if ahead and costs.overheads.selects_beside else 0.0
    scored = machine.device(
        0.0,
        prediction=costs.prediction if ahead else 0.0,
        digests=costs.scoring(_parts(machine, layer).digests),
        **parts,
    )
    return machine.time.run("selection", beside, scored) if beside else scored


def _ask(machine: Machine, known: float, ahead: bool) -> float:
    """The query to the workers, by the device, once it is ``known`` for which pages; returns when they know of it."""
    if ahead and machine.costs.overheads.selects_beside:
        return machine.time.run("selection", machine.costs.asking, known)
    return machine.device(0.0, known, bus=machine.costs.asking)


def scout(machine: Machine, step: int) -> None:
    """What is not resident goes to the workers, one layer ahead; it is recalled now and then."""
    costs = machine.costs
    config = costs.config
    machine.device(0.0, machine.recalled)
    answers: dict[int, float] = {}
    selected: dict[int, float] = {}
    for layer in _full_layers(machine):
        parts, following, is_whole = _parts(machine, layer), _ahead(machine, layer), layer in costs.whole_layers
        recalls = machine.recall and layer not in config.exact_layers
        copied = parts.away / config.recall_interval(layer) if recalls else 0.0
        if following is not None:
            selected[following] = _select(machine, "scout", following, ahead=True)
            if config.lookahead.partial_query == "predicted":
                asked = _ask(machine, selected[following], ahead=True)
                answers[following] = machine.cpu(_parts(machine, following).away, copied, asked)
        machine.device(costs.projections)
        if is_whole:
            machine.device(0.0, **costs.launched("scout", is_whole))
        elif layer not in selected:
            selected[layer] = _select(machine, "scout", layer, ahead=False)
        if not is_whole and layer not in answers:
            answers[layer] = machine.cpu(parts.away, copied, _ask(machine, selected[layer], ahead=False))
        machine.device(0.0, selected.get(layer, 0.0), attention=costs.attention(parts.here))
        if not is_whole:
            machine.device(0.0, answers[layer], bus=costs.taking(is_empty=not parts.away))
        attended = machine.rest()
        if recalls and (step + layer) % config.recall_interval(layer) == 0:
            machine.recalled = machine.copied(parts.away, attended)


def infinigen(machine: Machine, step: int) -> None:
    """What is not resident is copied, one layer ahead, and attended on the device."""
    costs = machine.costs
    arrivals: dict[int, float] = {}
    for layer in _full_layers(machine):
        parts, following = _parts(machine, layer), _ahead(machine, layer)
        if following is not None:
            known = _select(machine, "infinigen", following, ahead=True)
            arrivals[following] = machine.copied(_parts(machine, following).away, known)
        machine.device(costs.projections)
        if layer not in arrivals:
            if layer in costs.whole_layers:
                known = machine.device(0.0, **costs.launched("infinigen", is_whole=True))
            else:
                known = _select(machine, "infinigen", layer, ahead=False)
            arrivals[layer] = machine.copied(parts.away, known)
        machine.device(0.0, arrivals[layer], attention=costs.attention(parts.here + parts.away))
        machine.rest()


def clo(machine: Machine, step: int) -> None:
    """Missed KV heads load their whole selection one layer ahead; persistent heads select by the true query and need
    no load (arXiv 2511.14510, section 4.2, Figure 9)."""
    costs = machine.costs
    arrivals: dict[int, float] = {}
    for layer in _full_layers(machine):
        following, exact = _ahead(machine, layer), layer in costs.config.exact_layers
        if following is not None and _cached(machine, following):
            arrivals[following] = _refresh(machine, following, costs.prediction)
        fresh = 0.0 if exact else (1.0 - _cached(machine, layer)) * costs.digest_bytes
        launched = costs.launched("clo", layer in costs.whole_layers)
        machine.device(costs.projections, digests=costs.scoring(fresh), **launched)
        if layer not in arrivals:
            arrivals[layer] = _refresh(machine, layer, 0.0)
        attended = costs.context if exact else costs.config.budget_tokens
        machine.device(0.0, arrivals[layer], attention=costs.attention(costs.kv(attended)))
        machine.rest()


def _cached(machine: Machine, layer: int) -> float:
    """The share of the layer's KV heads of which only the last selection is on the device."""
    return 1.0 - machine.persistent[layer] / machine.costs.shape.kv_heads


def _refresh(machine: Machine, layer: int, predicted: float) -> float:
    """Look up the cached heads, select for those that miss, load; returns when all is there. ``predicted``: seconds of
    the prediction. Sinks and recent pages are part of the budget, but never loaded."""
    costs, cached = machine.costs, _cached(machine, layer)
    if layer in costs.config.exact_layers:
        return machine.pull(cached * _parts(machine, layer).away, machine.device(0.0))
    if not cached:
        return 0.0
    missed = cached * (1.0 - machine.hit_ratio)
    known = machine.device(0.0, prediction=predicted, digests=costs.lookup + costs.scoring(missed * costs.digest_bytes))
    always = (costs.config.sinks + costs.config.recent) * costs.config.page_size
    return machine.pull(missed * costs.kv(costs.config.budget_tokens - always), known)


def hgca(machine: Machine, step: int) -> None:
    """A dense window on the device; the workers attend the kept older tokens beside it, not ahead."""
    costs = machine.costs
    window = min(costs.context, max(2 * costs.config.page_size, costs.config.hgca.window_tokens))
    kept = min(window * machine.share / (1.0 - machine.share), costs.context - window)
    for _ in _full_layers(machine):
        machine.device(costs.projections, **costs.launched("hgca"))
        answer = machine.cpu(costs.kv(kept), 0.0, _ask(machine, 0.0, ahead=False))
        machine.device(0.0, attention=costs.attention(costs.kv(window)))
        machine.device(0.0, answer, bus=costs.taking(is_empty=not kept))
        machine.rest()


def read_over_link(machine: Machine, step: int) -> None:
    """Dense attention of the device over host pages in place: every byte crosses the link while it is attended."""
    costs = machine.costs
    for _ in _full_layers(machine):
        known = machine.device(costs.projections, **costs.launched("dense"))
        machine.device(0.0, machine.link(costs.kv(costs.context), known))
        machine.rest()


def streamed(machine: Machine, step: int) -> None:
    """HeadInfer: all K and V pass through two staging buffers; a buffer is filled while the other is attended."""
    costs = machine.costs
    full = sum(window is None for window in costs.shape.windows)
    size = costs.kv(costs.context)
    begun = machine.time.free("device")
    emptied = [begun, begun]  # when each of the two buffers may be filled
    arrived = machine.link(size, emptied[0]) if full else 0.0
    for _ in _full_layers(machine):
        machine.device(costs.projections, **costs.launched("headinfer"))
        here, full = arrived, full - 1
        if full:
            arrived = machine.link(size, emptied[1])
        emptied = [emptied[1], machine.device(0.0, here, attention=costs.attention(size))]
        machine.rest()

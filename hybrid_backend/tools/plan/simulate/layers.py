"""Operations of one layer under each method: what the device does, what it waits for, and who supplies that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from hybrid_backend.tools.plan.simulate.costs import Costs

SCOUT_SHARE = 0.082
"""Share of the selected tokens that the CPU attends (ScoutAttention; 8.7 % measured, docs/lab/measurements.md)."""
WITHOUT_RECALL = 20.5 / 10.4
"""Factor of that share if nothing is recalled (measured over 256 steps, docs/lab/measurements.md)."""
INFINIGEN_SHARE = 0.088
"""Share of the selected pages that the step before did not select (measured, docs/lab/measurements.md)."""
HGCA_SHARE = 0.52
"""Share of the attended tokens that the CPU attends at beta 1 and a window of a quarter (docs/lab/measurements.md)."""
CLO_HITS = 0.7922
"""Share of clo's lookups that load nothing (CLO, mean of Table 4)."""


@dataclass(frozen=True)
class LayerWork:
    """Operations of one layer. All times are seconds of the device, except ``fetch_seconds``.

    Attributes:
        attended: attention before the fetched data is needed.
        choose: parts that come before the fetch.
        select: page selection, in a stream of its own if it is ahead.
        ask: sending the question to the workers, in the same stream.
        fetch: the resource that supplies what is not on the device.
        merged: attention after the fetch.
        bus: reading the workers' answer.
        copied: bytes of recalled pages, which only the next step needs.
        layers_ahead: layers before this one at whose input the fetch begins; 0 for the layer's own input.
    """

    attended: float = 0.0
    choose: Mapping[str, float] = field(default_factory=dict)
    select: float = 0.0
    ask: float = 0.0
    fetch: Literal["workers", "link"] | None = None
    fetch_seconds: float = 0.0
    pcie_bytes: float = 0.0
    cpu_bytes: float = 0.0
    merged: float = 0.0
    bus: float = 0.0
    copied: float = 0.0
    layers_ahead: int = 0


def layer_works(step_costs: Costs, method: str, is_cpu: bool, cpu_share: float | None) -> Iterator[LayerWork]:
    """Yield the work of each layer. A configuration's layer numbers count the layers with attention only."""
    entry = METHODS[method]
    work = entry.cpu_work if is_cpu and entry.cpu_work is not None else entry.work
    if entry.selects and step_costs.fits:
        work = _resident
    ordinal, last_full = 0, -1
    for index, window in enumerate(step_costs.shape.windows):
        if window is None:
            yield work(_Layer(step_costs, method, index, ordinal, index - last_full, cpu_share))
            last_full = index
        else:
            attend = step_costs.stock_attention if work is _stock else step_costs.attention
            yield LayerWork(attend(step_costs.kv(min(window, step_costs.context), window)))
        ordinal += window != 0


@dataclass(frozen=True)
class _Layer:
    """A full-attention layer under a method.

    Attributes:
        index: number of the layer in the model.
        number: number of the layer in the configuration.
        distance: layers to the full-attention layer before; ``index + 1`` if there is none.
        cpu_share: see `decode_step`.
    """

    step_costs: Costs
    method: str
    index: int
    number: int
    distance: int
    cpu_share: float | None

    @property
    def is_exact(self) -> bool:
        return self.step_costs.config.is_exact(self.number)

    @property
    def is_whole(self) -> bool:
        """True if the layer's KV lies on the device completely."""
        config = self.step_costs.config
        if config.whole_layers == "auto":
            return self.is_exact and self.step_costs.hardware.device != "cpu"
        return self.number in config.whole_layers

    @property
    def is_ahead(self) -> bool:
        """True if the layer before predicts this layer's query."""
        config = self.step_costs.config
        return self.index > 0 and config.lookahead.enabled and config.is_predicted(self.number)

    @property
    def all_kv(self) -> float:
        """Bytes of the K and V of the whole context."""
        return self.step_costs.kv(self.step_costs.context)

    def share(self, default: float) -> float:
        """Return the share of the attended tokens that is not on the device."""
        return default if self.cpu_share is None else self.cpu_share

    def split(self, share: float) -> tuple[float, float]:
        """Return the bytes to attend that are on the device and those that are not."""
        if self.is_whole:
            return self.all_kv, 0.0
        if self.is_exact:
            resident = self.step_costs.kv(min(self.step_costs.context, self.step_costs.frame_tokens))
            return resident, self.all_kv - resident
        selected = self.step_costs.kv(self.step_costs.config.budget_tokens)
        return selected * (1 - share), selected * share

    def choose(self) -> dict[str, float]:
        """Return the parts of the page selection that are the step's own: prediction, digests, launches."""
        if self.is_whole:
            return self.step_costs.launches(self.method, is_whole=True)
        return {
            "prediction": self.step_costs.prediction if self.is_ahead else 0.0,
            "digests": 0.0 if self.is_exact else self._scoring,
            **self.step_costs.launches(self.method),
        }

    @property
    def _scoring(self) -> float:
        """Seconds to score the digests, in the mean of a layer's steps."""
        step_costs = self.step_costs
        return step_costs.scoring(step_costs.digest_bytes) * step_costs.selections_per_step


def _stock(layer: _Layer) -> LayerWork:
    """Return the stock engine's attention over the device's own memory."""
    return LayerWork(layer.step_costs.stock_attention(layer.all_kv))


def _resident(layer: _Layer) -> LayerWork:
    """Return our dense attention over the device's own memory."""
    return LayerWork(layer.step_costs.attention(layer.all_kv))


def _in_place(layer: _Layer) -> LayerWork:
    """Return attention on a CPU that selects pages and attends them in the host pool."""
    if layer.is_exact or layer.step_costs.fits_budget:
        return _resident(layer)
    step_costs = layer.step_costs
    attended = step_costs.attention(step_costs.kv(step_costs.config.budget_tokens))
    return LayerWork(attended, {"digests": step_costs.selecting_in_place})


def _scout(layer: _Layer) -> LayerWork:
    """Return the work of a layer whose missing pages the CPU attends; some of them are recalled."""
    step_costs, config = layer.step_costs, layer.step_costs.config
    local, away = layer.split(layer.share(SCOUT_SHARE * (1.0 if config.recall.enabled else WITHOUT_RECALL)))
    if layer.is_whole:
        return LayerWork(step_costs.attention(local), layer.choose())
    is_recalled = config.recall.enabled and not layer.is_exact
    copied = away / config.recall_interval(layer.number) if is_recalled else 0.0
    return LayerWork(
        attended=step_costs.attention(local),
        choose=layer.choose(),
        select=step_costs.selecting,
        ask=step_costs.asking,
        fetch="workers",
        fetch_seconds=step_costs.cpu_attention(away, copied),
        pcie_bytes=step_costs.answer_bytes if away else 0.0,
        cpu_bytes=away,
        bus=step_costs.taking(is_empty=not away),
        copied=copied,
        layers_ahead=int(layer.is_ahead and config.lookahead.partial_query == "predicted"),
    )


def _infinigen(layer: _Layer) -> LayerWork:
    """Return the work of a layer whose missing pages are copied to the device."""
    step_costs = layer.step_costs
    local, away = layer.split(layer.share(INFINIGEN_SHARE))
    return LayerWork(
        choose={**layer.choose(), "copies' share": step_costs.copy_share(away)},
        select=0.0 if layer.is_whole else step_costs.selecting,
        fetch="link",
        fetch_seconds=step_costs.copy(away),
        pcie_bytes=away,
        merged=step_costs.attention(local + away),
        layers_ahead=int(layer.is_ahead),
    )


def _clo(layer: _Layer) -> LayerWork:
    """Return the work of a layer whose KV heads load their whole selection after a miss."""
    step_costs, config = layer.step_costs, layer.step_costs.config
    missed = 1.0 - CLO_HITS
    if layer.is_exact:
        choose, size, attended = step_costs.launches("clo", layer.is_whole), layer.split(0.0)[1], layer.all_kv
    else:
        scored = step_costs.lookup + missed * step_costs.scoring(step_costs.digest_bytes)
        never_loaded = (config.sinks + config.recent) * config.page_size
        choose = {**layer.choose(), "digests": scored, "selection": step_costs.selecting}
        size = missed * step_costs.kv(config.budget_tokens - never_loaded)
        attended = step_costs.kv(config.budget_tokens)
    return LayerWork(
        choose=choose,
        fetch="link",
        fetch_seconds=step_costs.pull(size),
        pcie_bytes=size,
        merged=step_costs.attention(attended),
        layers_ahead=int(layer.is_ahead),
    )


def _hgca(layer: _Layer) -> LayerWork:
    """Return the work of a layer with a dense window on the device, beside which the CPU attends older tokens."""
    step_costs, config = layer.step_costs, layer.step_costs.config
    share = layer.share(HGCA_SHARE)
    window = min(step_costs.context, max(2 * config.page_size, config.hgca.window_tokens))
    older = step_costs.kv(min(window * share / (1.0 - share), step_costs.context - window))
    return LayerWork(
        attended=step_costs.attention(step_costs.kv(window)),
        choose=step_costs.launches("hgca"),
        ask=step_costs.asking,
        fetch="workers",
        fetch_seconds=step_costs.cpu_attention(older),
        pcie_bytes=step_costs.answer_bytes if older else 0.0,
        cpu_bytes=older,
        bus=step_costs.taking(is_empty=not older),
    )


def _dense(layer: _Layer) -> LayerWork:
    """Return the work of a layer whose whole context the device reads over the link while it attends."""
    seconds = layer.step_costs.copy(layer.all_kv)
    launches = layer.step_costs.launches("dense")
    return LayerWork(choose=launches, fetch="link", fetch_seconds=seconds, pcie_bytes=layer.all_kv)


def _headinfer(layer: _Layer) -> LayerWork:
    """Return the work of a layer whose whole context is copied to one of two buffers during the layer before."""
    attended = layer.step_costs.attention(layer.all_kv)
    launches = layer.step_costs.launches("headinfer")
    return replace(_dense(layer), choose=launches, merged=attended, layers_ahead=layer.distance)


class Method(NamedTuple):
    """Functions and properties with which a method is simulated.

    Attributes:
        work: returns the work of a layer.
        cpu_work: the same where the device tier is the host, if it differs.
        selects: attention is dense while the context fits the frames.
        splits: the CPU attends some sequences completely.
    """

    work: Callable[[_Layer], LayerWork]
    cpu_work: Callable[[_Layer], LayerWork] | None = None
    selects: bool = False
    splits: bool = False


METHODS: Mapping[str, Method] = {
    "stock": Method(_stock),
    "dense": Method(_dense, _resident),
    "quest": Method(_in_place),
    "scout": Method(_scout, selects=True),
    "infinigen": Method(_infinigen, selects=True),
    "clo": Method(_clo, selects=True),
    "hgca": Method(_hgca),
    "headinfer": Method(_headinfer),
    "apex": Method(_resident, splits=True),
}

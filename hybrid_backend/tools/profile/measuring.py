"""Measurements of one model with one configuration: each is stored when it is done, and measured only if it is not."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from hybrid_backend.config import HybridConfig
from hybrid_backend.step.method import frames_per_request
from hybrid_backend.tools.profile.divergence import Probe, References, Sparse, divergences
from hybrid_backend.tools.profile.gates import GateState, Kind, passkeys, train
from hybrid_backend.tools.profile.measure import LayerMeasure, measure_window
from hybrid_backend.tools.profile.network import Network
from hybrid_backend.tools.profile.options import Options
from hybrid_backend.tools.profile.stages import Stages, Work
from hybrid_backend.tools.profile.store import Store, stage_key
from hybrid_backend.tools.profile.summary import INTERVALS, SparsityKL
from hybrid_backend.tools.profile.texts import Encode, Window

ALONE, TOGETHER = "KL of each layer alone", "KL of all but the exact layers"
_AT_ONCE = 4
"""Sets of exact layers that a probe is measured with before another probe is."""


@dataclass(frozen=True)
class Measuring:
    """``prefix``: what the titles of stages begin with, where several configurations are tried."""

    model: str
    config: HybridConfig
    options: Options
    network: Network
    encode: Encode
    store: Store
    stages: Stages
    references: References
    prefix: str = ""

    def window(self, window: Window, budgets: Mapping[int, int] | None = None) -> list[LayerMeasure]:
        """Measure all layers on a window of text.

        Args:
            window: the text.
            budgets: tokens of layers that have their own budget.
        """
        config, positions = self.config, self.options.positions
        # Eight recalls at least: with fewer, a long interval looks as good as the window happens to be.
        tried = tuple(i for i in INTERVALS if i <= max(1, positions // 8))
        settings = (config.page_size, config.budget_tokens, config.sinks, config.recent, frames_per_request(config))
        key = stage_key(
            "window, admitted by the last query",
            self.model,
            window.digest(),
            positions,
            tried,
            settings,
            config.selection,
            config.lookahead.enabled,
            self.options.limits.cosine,
            tuple(LayerMeasure.model_fields),
            *([sorted(budgets.items())] if budgets else []),
        )
        stored = self.store.get(key)
        if stored is not None:
            return [LayerMeasure.model_validate(layer) for layer in stored["layers"]]
        layers = len(self.network.layers)
        started = time.perf_counter()
        with self.stages.stage(window_title(self.prefix, window, budgets), layers, "layer") as advance:
            step = partial(advance, Work(self.network).window(len(window.ids)) / layers)
            measures = measure_window(
                self.network, config, window, positions, tried, self.options.limits.cosine, step, budgets
            )
        seconds = round(time.perf_counter() - started, 1)
        self.store.put(
            key,
            {"window": window.label, "seconds": seconds, "layers": [x.model_dump(mode="json") for x in measures]},
        )
        return measures

    def diverge(
        self, title: str, probes: Sequence[Probe], sparse: Sequence[Sparse], predicted: Sequence[Collection[int]] = ()
    ) -> dict[str, list[float]]:
        """Measure the KL of sets of sparse layers.

        Args:
            title: of the stage.
            probes: what it is measured on.
            sparse: the sets.
            predicted: for each set, or for none, the layers that select by predicted queries.

        Returns:
            For each kind of probe the mean KL of each set over the probes.
        """
        config = self.config
        settings = (config.page_size, config.budget_tokens, config.sinks, config.recent, config.selection)
        kl_of_probes: dict[str, list[list[float]]] = {}
        stored: dict[str, tuple[Probe, list[float], float]] = {}
        for probe in probes:
            key = stage_key("divergence", self.model, probe, settings, sparse, *([predicted] if predicted else []))
            entry = self.store.get(key) or {"kl": [], "seconds": 0.0}
            stored.setdefault(key, (probe, list(entry["kl"]), entry["seconds"]))  # two texts can be the same
            kl_of_probes.setdefault(probe.kind, []).append(stored[key][1])
        missing = {key: entry for key, entry in stored.items() if len(entry[1]) < len(sparse)}
        is_by_layer = all(len(layers) == 1 for layers in sparse) and len(set(map(tuple, sparse))) == len(sparse)
        noun = "layer" if is_by_layer else "layer set"
        for place, (key, (probe, kl, seconds)) in enumerate(missing.items(), 1):
            prompt = f"prompt {place} of {len(missing)}"
            if probe not in self.references:
                self._prefill(title, probe, prompt)
            with self.stages.stage(self.prefix + title, len(sparse) - len(kl), f"{prompt}, {noun}") as advance:
                self._diverge(key, probe, (sparse, predicted), kl, seconds, advance)
        return {kind: [fmean(values) for values in zip(*lists, strict=True)] for kind, lists in kl_of_probes.items()}

    def _prefill(self, title: str, probe: Probe, prompt: str) -> None:
        """Run the dense pass over a probe, as a part of the stage of that title. ``prompt``: the part's name."""
        layers = len(self.network.layers)
        with self.stages.stage(self.prefix + title, layers, f"{prompt}, prefill, layer") as advance:
            self.references.of(probe, partial(advance, Work(self.network).forward(probe.given) / layers))

    def _diverge(
        self,
        key: str,
        probe: Probe,
        sets: tuple[Sequence[Sparse], Sequence[Collection[int]]],
        kl: list[float],
        seconds: float,
        advance: Callable[[float], None],
    ) -> None:
        """Measure the sets of one probe that are missing, and store them, also where an interrupt ends the loop.

        Args:
            key: of the store.
            probe: the prompt.
            sets: sparse and predicted layers of all sets.
            kl: of the sets that are measured already; the others' are appended.
            seconds: that those took.
            advance: called with the work of each set.
        """
        (sparse, predicted), work, started = sets, Work(self.network), time.perf_counter()
        todo = sparse[len(kl) :]
        done = iter([work.sparse(probe, work.share(layers)) for layers in todo])

        def measured(value: float) -> None:
            kl.append(value)
            advance(next(done))

        try:
            reference = self.references.of(probe)
            divergences(reference, self.config, todo, measured, predicted[len(kl) :])
        finally:
            spent = round(seconds + time.perf_counter() - started, 1)
            if kl:
                self.store.put(key, {"probe": probe.kind, "seconds": spent, "sparse": sparse, "kl": list(kl)})

    def measure_kl(self, probes: Sequence[Probe]) -> SparsityKL:
        """Measure each layer alone, then all with the most expensive ones exact, one more at a time, until the KL of
        the others is low enough."""
        layers = [layer.index for layer in self.network.full_layers]
        alone = self.diverge(ALONE, probes, [(layer,) for layer in layers])
        sparsity_kl = SparsityKL({kind: dict(zip(layers, kl, strict=True)) for kind, kl in alone.items()})
        while (exact := sparsity_kl.exact_count(self.options.limits)) is None:
            diverge = partial(self.diverge, TOGETHER, probes)
            sparsity_kl = replace(sparsity_kl, together=longer(sparsity_kl.together, sparsity_kl.ranking, diverge))
        return replace(sparsity_kl, together=sparsity_kl.together[: exact + 1])

    def gates(self, text: str) -> dict[str, GateState]:
        """Train the gates of both kinds of heads on prompts made from ``text``."""
        options = self.options.gates
        assert options is not None
        prompts = passkeys(text, self.encode, options)
        kinds: tuple[Kind, ...] = ("kv_head", "query_head")
        states: dict[str, GateState] = {}
        for kind in kinds:
            key = stage_key("gates", self.model, kind, replace(options, save_every=1), [p.ids for p in prompts])
            stored = self.store.get(key) or {"seconds": 0.0}
            state = GateState.model_validate(stored["state"]) if "state" in stored else None
            if state is None or state.step < options.steps:
                steps = options.steps - (state.step if state else 0)
                with self.stages.stage(gates_title(kind), steps, "training step") as advance:
                    keep = _Keep(self.store, key, kind, stored["seconds"], time.perf_counter())
                    step = partial(advance, Work(self.network).training(options))
                    state = train(self.network, prompts, kind, options, state, keep, step)
            states[kind] = state
        return states


def window_title(prefix: str, window: Window, budgets: Mapping[int, int] | None = None) -> str:
    """Return the title of the stage that measures a window."""
    return f"{prefix}attention in {window.label}{', budgets per layer' if budgets else ''}"


def gates_title(kind: str) -> str:
    """Return the title of the stage that trains the gates of one kind of head."""
    return f"importance of each {kind.replace('_', ' ')}"


def longer(
    together: Sequence[Mapping[str, float]],
    ranking: Sequence[int],
    diverge: Callable[[list[tuple[int, ...]]], dict[str, list[float]]],
) -> list[Mapping[str, float]]:
    """Return ``together``, whose places say how many layers of the ``ranking`` are left out, and a few places more, by
    what ``diverge`` says of the layers that remain."""
    first = len(together)
    counts = range(first, min(first + _AT_ONCE, len(ranking) + 1))
    kl = diverge([tuple(sorted(ranking[count:])) for count in counts])
    return [*together, *({kind: kl_of_sets[index] for kind, kl_of_sets in kl.items()} for index in range(len(counts)))]


@dataclass(frozen=True)
class _Keep:
    """Stores a state of the gates and the seconds spent, those of earlier runs included."""

    store: Store
    key: str
    kind: str
    before: float
    started: float

    def __call__(self, state: GateState) -> None:
        seconds = round(self.before + time.perf_counter() - self.started, 1)
        self.store.put(self.key, {"kind": self.kind, "seconds": seconds, "state": state.model_dump(mode="json")})

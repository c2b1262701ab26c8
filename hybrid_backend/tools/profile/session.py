"""Measurements of a profile: each step of them is stored as soon as it is done, and is not measured again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from hybrid_backend.config import HybridConfig
from hybrid_backend.step.method import frames_per_request, looks_ahead
from hybrid_backend.tools.profile.divergence import Probe, References, Sparse, divergence
from hybrid_backend.tools.profile.gates import Kind, Passkey, train
from hybrid_backend.tools.profile.measure import LayerMeasure, measure_window
from hybrid_backend.tools.profile.network import Network
from hybrid_backend.tools.profile.options import Options, method_of, needed_tokens
from hybrid_backend.tools.profile.progress import Progress, Work
from hybrid_backend.tools.profile.report import kl_text, predicted_text
from hybrid_backend.tools.profile.spread import Spread, factors_of, pages_of, sizes_of, spread
from hybrid_backend.tools.profile.store import Store, stage_key
from hybrid_backend.tools.profile.summary import INTERVALS, KL, KLSearch, LayerSummary, exact_count, own_count
from hybrid_backend.tools.profile.texts import Window

ALONE, TOGETHER = "KL of each layer alone", "KL of all but the exact layers"
PREDICTED, BUDGETS = "KL by predicted queries", "KL of larger and smaller budgets"
KINDS: tuple[Kind, ...] = ("kv_head", "query_head")


def window_title(window: Window, budgets: Mapping[int, int] | None = None) -> str:
    """Return the title of the stage that measures a window."""
    return f"attention in {window.label}{', budgets per layer' if budgets else ''}"


def gates_title(kind: Kind) -> str:
    """Return the title of the stage that trains the gates of one kind of head."""
    return f"importance of each {kind.replace('_', ' ')}"


@dataclass(frozen=True)
class Session:
    """Measurements of a model with one configuration. ``prefix``: first words of the titles of its stages."""

    model: str
    config: HybridConfig
    options: Options
    network: Network
    store: Store
    progress: Progress
    references: References
    prefix: str = ""

    def window(self, window: Window, budgets: Mapping[int, int] | None = None) -> list[LayerMeasure]:
        """Measure all layers on a window of text. ``budgets``: tokens of layers that have a budget of their own."""
        config, positions, min_cosine = self.config, self.options.positions, self.options.min_cosine
        # With fewer than eight recalls a long interval looks as good as the window happens to be.
        intervals = tuple(i for i in INTERVALS if i <= max(1, positions // 8))
        settings = (config.page_size, config.budget_tokens, config.sinks, config.recent, frames_per_request(config))
        key = stage_key(
            "window, admitted by the last query",
            self.model,
            window.ids,
            positions,
            intervals,
            settings,
            config.selection,
            config.lookahead.enabled,
            min_cosine,
            tuple(LayerMeasure.model_fields),
            *([sorted(budgets.items())] if budgets else []),
        )
        measurement, layers = self.store.get(key), len(self.network.layers)
        if not measurement.layers:
            measurement.label = window.label
            with self.progress.stage(self.prefix + window_title(window, budgets), layers, "layer") as advance:
                step = partial(advance, Work(self.network).window(len(window.ids)) / layers)
                measurement.layers = measure_window(
                    self.network, config, window, positions, intervals, min_cosine, step, budgets
                )
            self.store.put(key, measurement)
        return measurement.layers

    def diverge(
        self, title: str, probes: Sequence[Probe], sparse: Sequence[Sparse], predicted: Sequence[Collection[int]] = ()
    ) -> dict[str, list[float]]:
        """Measure sets of sparse layers; return, by kind of probe, the mean KL of each set.

        ``predicted``: the layers of each set that select by predicted queries; empty: none.
        """
        config = self.config
        settings = (config.page_size, config.budget_tokens, config.sinks, config.recent, config.selection)
        inputs = (settings, sparse, *([predicted] if predicted else []))
        keys = {probe: stage_key("divergence", self.model, probe, *inputs) for probe in probes}
        missing = [probe for probe, key in keys.items() if len(self.store.get(key).kl) < len(sparse)]
        noun = "layer" if len({tuple(layers) for layers in sparse if len(layers) == 1}) == len(sparse) else "layer set"
        for place, probe in enumerate(missing, 1):
            measurement, work = self.store.get(keys[probe]), Work(self.network)
            kl = measurement.kl
            measurement.label, measurement.sparse, todo = probe.kind, sparse, sparse[len(kl) :]
            part = f"prompt {place} of {len(missing)}, {noun}"
            prefill = 0.0 if probe in self.references else work.forward(probe.prompt_tokens)
            with self.progress.stage(self.prefix + title, len(todo), part) as advance:
                reference = self.references.get(probe)
                for layers in todo:
                    kl.append(divergence(reference, config, layers, predicted[len(kl)] if predicted else ()))
                    self.store.put(keys[probe], measurement)
                    advance(prefill + work.sparse(probe, layers))
                    prefill = 0.0
        kl_of_probes = {probe: self.store.get(key).kl for probe, key in keys.items()}
        return {
            kind: list(map(fmean, zip(*(kl_of_probes[probe] for probe in probes if probe.kind == kind), strict=True)))
            for kind in dict.fromkeys(probe.kind for probe in probes)
        }

    def exact_layers(self, probes: Sequence[Probe]) -> KLSearch:
        """Search for the exact layers."""
        layers = [layer.index for layer in self.network.full_layers]
        alone = self.diverge(ALONE, probes, [(layer,) for layer in layers])
        search = KLSearch({kind: dict(zip(layers, kl, strict=True)) for kind, kl in alone.items()})
        rule = partial(exact_count, max_kl=self.options.max_kl, outliers=self.options.outliers)
        return search.complete(rule, partial(self.diverge, TOGETHER, probes))

    def predicted_layers(self, probes: Sequence[Probe], layers: Sequence[LayerSummary]) -> tuple[KL, KLSearch] | None:
        """Search for the layers that select by their own query, although a lookahead predicts queries.

        Returns:
            KL of all sparse layers by true queries, and the search; ``alone``: KL that each layer loses by its
            predicted query. None if no query is predicted.
        """
        sparse = tuple(layer.layer for layer in layers if not layer.is_exact)
        foreseen = [layer for layer in layers if not layer.is_exact and layer.is_predicted]
        method = method_of(self.config)
        if not foreseen or not looks_ahead(method, self.config):
            return None
        diverge = partial(self.diverge, PREDICTED, probes)
        singles = [(layer.layer,) for layer in foreseen]
        lost = {
            kind: {layer.layer: value - layer.kl[kind] for layer, value in zip(foreseen, kl, strict=True)}
            for kind, kl in diverge(singles, singles).items()
        }
        true = {kind: kl[0] for kind, kl in diverge([sparse]).items()}
        rule = partial(own_count, true=true, max_kl=self.options.max_kl)
        own = KLSearch(lost).complete(rule, lambda sets: diverge([sparse] * len(sets), sets))
        self.progress.line(f"predicted queries: {predicted_text(true, own)}")
        return true, own

    def spread(self, probes: Sequence[Probe], layers: Sequence[LayerSummary]) -> Spread | None:
        """Measure budgets per layer: each sparse layer alone with less and with more, then all of them together.

        A printed line gives the result, or the reason why nothing is measured.
        """
        config, sparse = self.config, [layer for layer in layers if not layer.is_exact]
        sizes, why_not = sizes_of(config.budget_pages, config.sinks + config.recent + 1, self._most_pages()), ""
        if not method_of(config).budgets_vary:
            why_not = f"method {config.method} has none"
        elif all(probe.kind == "text" for probe in probes):
            why_not = "they are found by lookups, too; write --lookups 1 or more"
        elif len(sparse) < 2:
            why_not = "fewer than two layers are sparse"
        elif sizes is None:
            why_not = f"no room for less and for more than {config.budget_tokens} tokens"
        if why_not or sizes is None:
            self.progress.line(f"budgets per layer: not measured, {why_not}")
            return None
        low, budget, high = (size * config.page_size for size in sizes)
        diverge = partial(self.diverge, BUDGETS, probes)
        alone = {
            kind: {x.layer: (less, x.kl[kind], more) for x, less, more in zip(sparse, kl[::2], kl[1::2], strict=True)}
            for kind, kl in diverge([{x.layer: tokens} for x in sparse for tokens in (low, high)]).items()
        }
        pages = spread(alone, sizes)
        factors = factors_of(pages, config.budget_pages, len(self.network.layers))
        attended = pages_of(config.model_copy(update={"budget_factors": factors}), pages)
        tokens = {layer: count * config.page_size for layer, count in attended.items()}
        both = diverge([dict.fromkeys(tokens, budget), tokens])
        even, apart = ({kind: kl[place] for kind, kl in both.items()} for place in (0, 1))
        measured = Spread((low, budget, high), alone, tokens, factors, even, apart)
        gain = "" if measured.helps else "none, they gain too little: "
        self.progress.line(f"budgets per layer: {gain}{kl_text(even, apart)}")
        return measured

    def _most_pages(self) -> int:
        """Return the largest budget, up to twice the configured one, whose `needed_tokens` every window exceeds."""
        budget, page_size = self.config.budget_pages, self.config.page_size
        for pages in range(2 * budget, budget, -1):
            larger = self.config.model_copy(update={"budget_tokens": pages * page_size})
            if needed_tokens(larger, self.options) < min(self.options.contexts):
                return pages
        return budget

    def gates(self, prompts: Sequence[Passkey]) -> dict[str, list[list[float]]]:
        """Train the gates of both kinds of heads; return them by kind, ``[full layers][heads]``."""
        options = self.options.gates
        if options is None:
            return {}
        gates: dict[str, list[list[float]]] = {}
        step = Work(self.network).training(options)
        for kind in KINDS:
            key = stage_key("gates", self.model, kind, options, [prompt.ids for prompt in prompts])
            measurement = self.store.get(key)
            steps = options.steps - (measurement.state.step if measurement.state else 0)
            if steps > 0:
                measurement.label = kind
                with self.progress.stage(gates_title(kind), steps, "training step") as advance:
                    for state in train(self.network, prompts, kind, options, measurement.state):
                        measurement.state = state
                        self.store.put(key, measurement)
                        advance(step)
            assert measurement.state is not None
            gates[kind] = measurement.state.gates
        return gates

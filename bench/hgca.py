"""HGCA on the demo model: perplexity by device share and beta (the paper's table 1), tokens kept per head.

    python -m bench.hgca [--tokens 6000] [--scored 256] [--shares 0.25,0.5,0.75] [--betas 0.25,0.5,1]

Perplexity of the last ``scored`` of ``tokens`` tokens of English prose, teacher forced through the decoding path,
against the stock backend on the same text; then the share of the older tokens that every KV head keeps after the
text. Writes bench/out/hgca.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.fidelity import follow
from hybrid_backend.config import apply_overrides, config_from_mapping, find_config, load_config, load_mapping
from hybrid_backend.tools.bench.fidelity import FIDELITY_FLAGS
from hybrid_backend.tools.hub import fetch
from tests.engines.server import MODEL, Server, hybrid_server, stock_server
from tests.engines.texts import tokens_of_prose
from tests.support.judged import judge_at_once

FLAGS = ("--dtype", "bfloat16", "--max-num-seqs", "2", "--enforce-eager", *FIDELITY_FLAGS)
START = 3000
_HEADS = "--heads-of-one-text"


def perplexity(server: Server, tokens: int, scored: int) -> float:
    text = tokens_of_prose(tokens, START)
    followed = follow(server, text[:-scored], text[-scored:])
    chosen = [position[token] for position, token in zip(followed, text[-scored:], strict=True)]
    return math.exp(-sum(chosen) / len(chosen))


def kept_per_head(tokens: int, window: int, beta: float) -> list[list[float]]:
    """Return the share of tokens that each KV head keeps, from an engine in a process of its own.

    The engine runs within that process, so that its method can be read.
    """
    command = [sys.executable, "-m", "bench.hgca", _HEADS, json.dumps([tokens, window, beta])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    kept: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return kept


def _print_kept(tokens: int, window: int, beta: float) -> None:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_NUM_OF_RESERVED_CPU="0")
    from vllm import LLM, SamplingParams

    from hybrid_backend.engines.vllm import BACKEND

    overrides = ["method=hgca", f"hgca.window_tokens={window}", f"hgca.beta={beta}"]
    config = config_from_mapping(apply_overrides(load_mapping(find_config(MODEL)), overrides), "bench")
    llm = LLM(
        str(fetch(MODEL)), dtype="bfloat16", enforce_eager=True, max_num_seqs=2, kv_cache_memory_bytes=2**29,
        block_size=config.page_size, attention_backend=BACKEND, disable_log_stats=True,
        additional_config={"hybrid": config.model_dump(mode="json")},
    )  # fmt: skip
    judge_at_once(llm.llm_engine.model_executor.driver_worker.worker.session.runtime.workers)
    text: list[list[float]] = []

    def look(runtime: Any) -> None:
        text[:] = runtime.method.kept_tokens()

    worker = llm.llm_engine.model_executor.driver_worker.worker
    runtime, release = worker.session.runtime, worker.session.runtime.release

    def before_release(request_ids: Any) -> None:
        look(runtime)
        release(request_ids)

    runtime.release = before_release
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for _ in range(2):  # a request is released when the next one starts
        llm.generate([{"prompt_token_ids": tokens_of_prose(tokens, START)}], sampling, use_tqdm=False)
        if any(any(line) for line in text):
            break
    older = (tokens + 3) // config.page_size * config.page_size - window
    print(json.dumps([[count / older for count in line] for line in text]))


def main() -> None:
    if _HEADS in sys.argv:
        return _print_kept(*json.loads(sys.argv[-1]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--scored", type=int, default=256)
    parser.add_argument("--shares", default="0.25,0.5,0.75")
    parser.add_argument("--betas", default="0.25,0.5,1")
    arguments = parser.parse_args()
    console = Console(width=120)
    page = load_config(find_config(MODEL)).page_size
    found: dict[str, Any] = {"arguments": vars(arguments), "hgca": []}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with stock_server(place, fetch(MODEL), [*FLAGS, "--kv-cache-memory-bytes", str(2**29)]) as server:
            dense = found["dense"] = perplexity(server, arguments.tokens, arguments.scored)
        table = Table("device share", "beta", "perplexity", f"against dense {dense:.3f}", "CPU attends")
        for share in map(float, arguments.shares.split(",")):
            window = round(share * arguments.tokens / page) * page
            for beta in map(float, arguments.betas.split(",")):
                keys = {"method": "hgca", "hgca.window_tokens": window, "hgca.beta": beta, "host_pool.size": "512MiB"}
                with hybrid_server(place, keys, FLAGS) as server:
                    value = perplexity(server, arguments.tokens, arguments.scored)
                    cpu, all_ = (server.total(f"hybrid_{kind}_tokens_total") for kind in ("cpu", "selected"))
                increase = value / dense - 1
                found["hgca"].append({"share": share, "beta": beta, "perplexity": value, "cpu_share": cpu / all_})
                table.add_row(f"{share}", f"{beta}", f"{value:.3f}", f"{increase:+.2%}", f"{cpu / all_:.1%} of tokens")
                print(found["hgca"][-1], flush=True)
    console.print(table)
    kept = found["kept_per_head"] = kept_per_head(arguments.tokens, round(0.25 * arguments.tokens / page) * page, 1.0)
    heads = Table("layer", *(f"head {h}" for h in range(len(kept[0]))), title="older tokens kept, share 0.25, beta 1")
    for layer, line in enumerate(kept):
        heads.add_row(str(layer), *(f"{x:.1%}" for x in line))
    console.print(heads)
    out = Path(__file__).parent / "out"
    out.mkdir(exist_ok=True)
    (out / "hgca.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

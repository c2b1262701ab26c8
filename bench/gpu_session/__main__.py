"""Measure on a GPU what a session of some minutes can measure, the most valuable first.

    python -m bench.gpu_session --budget MINUTES [--out bench/out/gpu_session] [--parts serve,prefill,...]

Parts, in this order: ``serve`` (trained weights over HTTP: answers as stock's where the budget holds the context, and
``hybrid bench accuracy`` at 16k), ``prefill`` (8k to 128k beside stock), ``traffic`` (``vllm bench serve`` beside
stock), ``decode`` (all methods of a GPU and both ablations of scout beside stock) and ``kernels``. Each case has a
process and a time limit of its own. OUT/session.jsonl gets every figure as soon as it is known, OUT/summary.md a table
after each case, OUT/logs the logs. The same command with the same OUT goes on where the last one ended: what is done is
left out, what failed or was late comes last. ``--memory-gb`` caps what an engine takes of the GPU, to stand for smaller
ones. ``--rehearse`` runs all of it at the least size on a simulated GPU.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from bench.gpu_session import rehearsal, summary
from bench.gpu_session.journal import Journal
from bench.gpu_session.plan import PARTS, Sizes, cases
from bench.gpu_session.runner import Runner
from hybrid_backend.tools.hub import hub_folder, resolve_model

ROOT = Path(__file__).parents[2]
MODEL = "qwen2.5-coder-0.5b-instruct"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, required=True, help="minutes")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out" / "gpu_session")
    parser.add_argument("--parts", default=",".join(PARTS), help="which, in the order of their value")
    parser.add_argument("--memory-gb", default="80,48", help="GB of the GPU that an engine may take")
    parser.add_argument("--model", default=MODEL, help="of part serve: catalog name, folder or hub id")
    parser.add_argument("--host-gb", type=int, help="host memory of the other parts; default: 3/4 of this machine's")
    parser.add_argument("--rehearse", action="store_true", help="everything at the least size on a simulated GPU")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts {','.join(sorted(unknown))}: choose of {','.join(PARTS)}")
    if not arguments.rehearse and not has_gpu():
        parser.exit(2, "bench.gpu_session needs a GPU; --rehearse runs it on a simulated one\n")
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    environment = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if arguments.rehearse:
        sizes = rehearsal.sizes(out / "model")
        environment |= rehearsal.environment()
    else:
        host_gb = arguments.host_gb or psutil.virtual_memory().total * 3 // 4 >> 30
        cards = [float(card) for card in arguments.memory_gb.split(",")]
        model = hub_folder(resolve_model(arguments.model))  # It is fetched before the time runs.
        sizes = Sizes(model=model, host_bytes=host_gb << 30, cards_gb=cards)
    all_cases, journal = cases(sizes, parts), Journal(out / "session.jsonl")
    journal.append("session", budget_minutes=arguments.budget, rehearsal=arguments.rehearse, machine=machine())

    def summarize() -> None:
        summary.write(out / "summary.md", journal, all_cases)

    runner = Runner(journal, out / "logs", environment, ROOT)
    try:
        runner.run(all_cases, arguments.budget * 60, summarize)
    finally:
        print(summary.write(out / "summary.md", journal, all_cases))
        print(f"written: {out}/summary.md, {out}/session.jsonl")


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def machine() -> dict[str, str]:
    """Return what a reader of the figures must know of this machine."""
    # A GPU's name without a context on it, which would take memory from the engines.
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip() or "none"
    except (OSError, subprocess.CalledProcessError):
        gpu = "none"
    versions = {}
    for name in ("torch", "triton", "vllm", "flashinfer-python"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    memory = psutil.virtual_memory().total >> 30
    cpus = {"CPUs": str(psutil.cpu_count()), "memory GiB": str(memory)}
    return {"GPU": gpu, **cpus, "Python": platform.python_version(), **versions}


if __name__ == "__main__":
    main()

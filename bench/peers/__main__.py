"""The command line; the package's docstring says what it does."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import bench.peers
from bench.peers.measure import LEAST_PROMPTS, REST, WARM_UP, Point, Prompt, sweep
from bench.peers.peer import DTYPES, GROUPS, Peer, Setup
from bench.peers.registry import PEERS, choose
from bench.peers.table import table, verdict
from hybrid_backend.errors import HybridError
from hybrid_backend.tools.bench.client import Endpoint, find_endpoint
from hybrid_backend.tools.hub import fetch
from hybrid_backend.tools.plan.model import find_shape
from tests.engines.server import MODEL
from tests.engines.texts import tokens_of_prose

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench" / "out"
QUICK = {"depths": "200,2000", "batches": "1", "rounds": 3, "tokens": 24}
FULL = {"depths": "200,2000,7500", "batches": "1,4", "rounds": 5, "tokens": 48}


def arguments_of(line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench.peers", description=bench.peers.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    native = ROOT / ".venv-peers" / "bin" / "llama-server"
    parser.add_argument("--quick", action="store_true", help=f"a small run: {QUICK}")
    groups = "; ".join(f"{name}: {what}" for name, what in GROUPS.items())
    names = ",".join(peer.name for peer in PEERS)
    parser.add_argument("--peers", default="equal", help=f"a group ({groups}), all, or of: {names}")
    parser.add_argument(
        "--endpoint",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="running servers instead; a peer's name puts one into its group",
    )
    parser.add_argument("--hold", action="store_true", help="start the peers, print their addresses and wait")
    parser.add_argument("--model", default=MODEL, help="of the catalogue")
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES), help="of the rows at equal precision")
    parser.add_argument("--depths", help="tokens of a prompt")
    parser.add_argument("--batches", help="requests at once")
    parser.add_argument("--rounds", type=int, help="of decoding")
    parser.add_argument("--tokens", type=int, help="decoded in a round")
    parser.add_argument(
        "--prompts", type=int, default=LEAST_PROMPTS, help="of a depth, at least: fewer where they are long"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="cores, of every server")
    parser.add_argument("--rest", type=float, default=REST, help="seconds between a server's turn and the next one's")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--deadline", type=float, default=900, help="seconds that a server may be silent")
    parser.add_argument("--native", type=Path, default=native if native.exists() else None, help="a llama-server")
    parser.add_argument("--peers-python", type=Path, default=ROOT / ".venv-peers" / "bin" / "python")
    parser.add_argument("--sglang-python", type=Path, default=ROOT / ".venv-sglang" / "bin" / "python")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of peers.json and peers.md")
    given = parser.parse_args(line)
    for key, value in (QUICK if given.quick else FULL).items():
        if getattr(given, key) is None:
            setattr(given, key, value)
    try:
        given.peers = choose(given.peers)
        for key in ("depths", "batches"):
            setattr(given, key, sorted(int(item) for item in getattr(given, key).split(",")))
    except ValueError as error:
        parser.error(f"--peers, --depths or --batches: {error}")
    if min(*given.depths, *given.batches, given.rounds, given.prompts) < 1 or given.tokens < 2:
        parser.error("--depths, --batches, --rounds and --prompts start at 1, --tokens at 2")
    if given.rest < 0:
        parser.error(f"--rest {given.rest:g}: seconds, 0 or more")
    if not 1 <= given.threads <= len(os.sched_getaffinity(0)):
        parser.error(f"--threads {given.threads}: this process may run on {len(os.sched_getaffinity(0))} cores")
    return given


def setup_of(given: argparse.Namespace, place: Path) -> Setup:
    folder = fetch(given.model)
    shape = find_shape(str(folder), given.dtype)
    length = max(*given.depths, given.tokens + WARM_UP) + given.tokens + 32
    if shape.max_context is not None and length > shape.max_context:
        raise HybridError(f"--depths: {given.model} takes {shape.max_context} tokens, not {length}")
    return Setup(
        model=given.model, folder=folder, dtype=given.dtype, length=length, batch=max(given.batches),
        kv_bytes=int(shape.layers * shape.token_bytes * length * max(given.batches) * 1.1),
        threads=given.threads, place=place,
        peers_python=given.peers_python, sglang_python=given.sglang_python, native=given.native,
    )  # fmt: skip


@contextmanager
def started(peers: Sequence[Peer], setup: Setup) -> Iterator[tuple[list[Endpoint], dict[str, str]]]:
    """Start the peers one after the other; yield those that run, and the reasons why others do not."""
    found, failed = list[Endpoint](), dict[str, str]()
    with ExitStack() as stack:
        for peer in peers:
            try:
                server = stack.enter_context(peer.start(setup))
            except (HybridError, RuntimeError, OSError, ValueError) as error:
                lines = str(error).strip().splitlines() or [type(error).__name__]
                failed[peer.name] = next((each for each in reversed(lines) if "Error" in each), lines[-1])
            else:
                found.append(find_endpoint(f"{peer.name}={server.url}", None, 30))
                print(f"--endpoint {peer.name}={server.url}", flush=True)
        yield found, failed


def prompts_of(model: str, seed: int, depth: int, count: int) -> list[Prompt]:
    """Return distinct prompts; no two depths and no two seeds begin alike."""
    return [tokens_of_prose(depth or WARM_UP, 4001 * i + 7 * depth + 113 * seed, model) for i in range(count)]


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    said = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    names = {key.strip(): value.strip() for key, value in said.items()}
    widest = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in names.get("flags", "").split()]
    return {"cpu": names.get("model name", platform.machine()), "isa": widest, "cores": os.cpu_count()}


def main(line: Sequence[str] | None = None) -> None:
    given = arguments_of(line)
    # Servers and the client share the same cores, as many as there are threads.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.threads])
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if given.endpoint:
            endpoints, failed = [find_endpoint(each, None, 30) for each in given.endpoint], dict[str, str]()
        else:
            endpoints, failed = stack.enter_context(started(given.peers, setup_of(given, Path(folder))))
        for name, reason in failed.items():
            print(f"{name} does not run here: {reason}", flush=True)
        if given.hold:
            print("serving; Ctrl-C ends it", flush=True)
            ends = {signal.SIGINT, signal.SIGTERM}
            signal.pthread_sigmask(signal.SIG_BLOCK, ends)
            signal.sigwait(ends)
            return
        points = list[Point]()
        prompts = partial(prompts_of, given.model, given.seed)
        sizes = (given.depths, given.batches, given.rounds, given.tokens, given.deadline, given.prompts, given.rest)
        written = ""
        for point in sweep(endpoints, prompts, *sizes):
            points.append(point)
            print(point, flush=True)
            written = save(points, failed, given)  # whatever stops a long run
    print(f"\n{written}\nwritten: {given.out}/peers.json, peers.md")


def save(points: Sequence[Point], failed: Mapping[str, str], given: argparse.Namespace) -> str:
    """Write both files of the results; return the markdown."""
    here = machine()
    llama = "built for this CPU" if given.native else "the wheel's AVX2 build"
    title = f"{given.model} on {given.threads} threads of {here['cpu']} ({', '.join(here['isa'])}); llama.cpp: {llama}"
    written = f"{title}\n\n{table(points, given.dtype)}\n{verdict(points)}"
    written += "".join(f"- {name} does not run here: {reason}\n" for name, reason in failed.items())
    given.out.mkdir(parents=True, exist_ok=True)
    said = {**vars(given), "peers": [peer.name for peer in given.peers]}
    record = {
        "arguments": said, "machine": here, "llama.cpp": llama, "failed": failed,
        "points": [point.model_dump() for point in points],
    }  # fmt: skip
    (given.out / "peers.json").write_text(json.dumps(record, indent=1, default=str))
    (given.out / "peers.md").write_text(written)
    return written


if __name__ == "__main__":
    try:
        main()
    except HybridError as error:
        sys.exit(f"error: {error}")

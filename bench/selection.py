"""Time to select pages, by context length: a decode layer against attention of as many pages alone.

    python -m bench.selection [--pages 1024,4096,32768] [--page-size 32] [--budget 64] [--group 4] [--per-head]
        [--interval 8]

One thread; 8 KV heads, head_dim 128, bf16, batch 1. Every variant selects ``budget`` pages of the context and attends
them in one native call; "attention" attends ``budget`` given pages: those that the last variant selected a turn before
(of its first list), each taken for another page, so that attention finds as many in a cache as a decoder does. The last
two look at all pages in every n-th step only (`selection.interval`, by default what `auto` stands for), and select from
what that look kept between. Interleaved; medians of CPU time, and of these two the mean over an interval, from the
medians of each of its steps. Prints a table and writes bench/out/selection.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from hybrid_backend.config import SelectionConfig
from hybrid_backend.kernels import codes, cpu
from hybrid_backend.kernels.cpu import digests as native

KV_HEADS, DIM = 8, 128
QUERIES = 8  # in turns, so that neither digests nor pages stay in a cache


def measure(
    pages: int,
    page_size: int,
    budget: int,
    group: int,
    reps: int,
    candidates: int,
    aggregate: str,
    per_head: bool,
    intervals: dict[str, int],
) -> dict[str, float]:
    """Return the microseconds of CPU time per layer by variant; ``spans``: two levels of bounds in bytes."""
    rng = torch.Generator().manual_seed(pages)
    layer = torch.randn(64, KV_HEADS, 2, page_size, DIM, generator=rng).bfloat16().repeat(-(-pages // 64), 1, 1, 1, 1)
    digests = torch.randn(pages, KV_HEADS, 2, DIM, generator=rng).bfloat16().sort(2, descending=True).values
    byte_digests = native.empty_byte_digests(digests)
    native.write_byte_digests(byte_digests, digests, torch.arange(pages))
    coded = codes.encode(torch.randn(64, KV_HEADS, page_size, DIM, generator=rng))
    coded = coded[torch.randint(64, (pages,), generator=rng)]
    heads, scale = KV_HEADS * group, DIM**-0.5
    queries = torch.randn(QUERIES, 1, heads, DIM, generator=rng).bfloat16()
    out = torch.empty(1, heads, DIM, dtype=torch.bfloat16)
    table = torch.randperm(pages, generator=rng)[None]
    given, others_of = torch.randperm(pages, generator=rng)[None, :budget], torch.randperm(pages, generator=rng)
    plain = {"team": "caller"}
    decoders = {
        "attention": cpu.Decoder([layer], {}, heads, scale, **plain),
        "bf16": cpu.Decoder([layer], {0: digests}, heads, scale, **plain),
        "bytes": cpu.Decoder([layer], {0: digests}, heads, scale, byte_digests={0: byte_digests}, **plain),
        "spans": cpu.Decoder([layer], {0: digests}, heads, scale, byte_digests={0: byte_digests}, **plain),
        "codes": cpu.Decoder([layer], {0: coded}, heads, scale, **plain),
        "spans, lazy": cpu.Decoder([layer], {0: digests}, heads, scale, byte_digests={0: byte_digests}, **plain),
        "codes, lazy": cpu.Decoder([layer], {0: coded}, heads, scale, **plain),
    }

    def begin(name: str, turn: int) -> int:
        """Which step of its interval it is: by the position, the first one looks at all pages."""
        columns = given if name == "attention" else table
        interval = intervals.get(name, 1)
        round_of = interval if interval % 2 == 0 else 2 * interval  # codes alternate from token to token
        lengths = torch.tensor([columns.shape[1] * page_size - turn % round_of])
        decoders[name].begin(
            columns,
            lengths,
            torch.tensor([budget]),
            sequences=torch.zeros(1, dtype=torch.int64) if name.endswith("lazy") or name == "spans" else None,
            candidates=candidates,
            interval=interval,
            aggregate=aggregate,
            per_head=per_head,
        )
        return int(lengths) % round_of

    times: dict[str, dict[int, list[float]]] = {name: {} for name in decoders}
    for turn in range(QUERIES * (reps + 1)):
        for name in decoders:
            step = begin(name, turn)
            began = time.thread_time()
            decoders[name].layer(0, queries[turn % QUERIES], None, None, out)
            if turn >= QUERIES:
                times[name].setdefault(step, []).append(1e6 * (time.thread_time() - began))
        given = others_of[table[:, decoders["codes, lazy"].selected(0).long()]]

    return {
        name: statistics.mean(statistics.median(some) for some in by_step.values()) for name, by_step in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pages", default="1024,4096,32768")
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--budget", type=int, default=64, help="pages")
    parser.add_argument("--group", type=int, default=4, help="query heads per KV head")
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--aggregate", choices=("softmax", "sum"), default="softmax")
    parser.add_argument("--per-head", action="store_true", help="a selection per KV head")
    parser.add_argument("--interval", type=int, help="steps between looks of the last two columns; default: auto's")
    parser.add_argument("--reps", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    hows = {"spans, lazy": SelectionConfig(digest="minmax_int8"), "codes, lazy": SelectionConfig(digest="codes")}
    intervals = {name: options.interval or how.steps_between_looks for name, how in hows.items()}
    spans, coded = (f"every {steps} steps" for steps in intervals.values())
    print(
        "| pages | attention us | bf16 | in bytes | in bytes, two levels | codes "
        f"| two levels, {spans} | codes, {coded} |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for pages in map(int, options.pages.split(",")):
        times = measure(
            pages, options.page_size, options.budget, options.group, options.reps, options.candidates,
            options.aggregate, options.per_head, intervals,
        )  # fmt: skip
        found[pages] = times
        names = [name for name in times if name != "attention"]
        extra = [100 * (times[name] / times["attention"] - 1) for name in names]
        cells = " | ".join(f"{times[name]:.0f} us, +{share:.0f} %" for name, share in zip(names, extra, strict=True))
        print(f"| {pages} | {times['attention']:.0f} | {cells} |", flush=True)
    path = Path(__file__).parent / "out" / "selection.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"options": vars(options), "microseconds": found}, indent=1))


if __name__ == "__main__":
    main()

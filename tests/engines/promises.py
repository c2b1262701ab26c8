"""Promises of every server, whichever engine and mode it runs."""

from __future__ import annotations

import contextlib
import io
import re
import time
from collections.abc import Sequence
from pathlib import Path

from tests.engines.server import Server

METRICS = {
    "hybrid_selected_tokens_total", "hybrid_cpu_tokens_total", "hybrid_resident_hit_ratio",
    "hybrid_recalled_pages_total", "hybrid_wait_seconds_total", "hybrid_predicted_query_cosine",
    "hybrid_frames_in_use", "hybrid_resident_requests", "hybrid_host_pool_pages",
}  # fmt: skip
# Gauges that are zero when no request is there.
NOTHING_LEFT = ("hybrid_resident_requests", "hybrid_frames_in_use")


def the_readmes_first_answer_is_right_each_time(server: Server) -> None:
    """The snippet is cut out of README and run as it stands, but for the server's address."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert f'model="{server.model}"' in code
    assert code.count("http://localhost:8000/v1") == 1
    for _ in range(6):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code.replace("http://localhost:8000", server.url), "README.md", "exec"), {})
        assert "Tokyo" in printed.getvalue()


def a_chat_completion_streams(server: Server) -> None:
    stream = server.client().chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
        temperature=0,
        max_tokens=24,
        stream=True,
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert len(pieces) > 3, "the answer came in one piece"
    assert "Paris" in "".join(pieces)


def what_serves_is_said_once(server: Server, method: str, budget: int) -> None:
    """The start log has one line with method, pool, budget, digests, kernels and threads."""
    lines = [line for line in server.log.read_text().splitlines() if "hybrid backend: method" in line]
    assert len(lines) == 1, lines
    assert re.search(
        rf"method {method}, host pool [\d.]+ [MG]iB \([\d,]+ tokens\), "
        rf"budget {budget:,} tokens \(exact up to [\d,]+ tokens\), digests \w+, "
        r"kernels native \(\w+\), (in place on \d+ threads|\d+ worker threads)$",
        lines[0],
    ), lines[0]


def cached_prompts_answer_the_same(
    server: Server, prompts: Sequence[str], expected: Sequence[str], tokens: int, longest: int, counter: str
) -> None:
    """The last prompt, of ``longest`` tokens, asked again comes from the prefix cache; then all of them, four at once.

    ``counter``: the engine's metric of tokens that came from there.
    """
    assert server.complete(prompts[-1], tokens) == expected[-1]
    before = server.total(counter)
    assert server.complete(prompts[-1], tokens) == expected[-1]
    hits = server.total(counter) - before
    assert hits > 0.9 * longest, f"only {hits} of {longest} tokens came from the prefix cache"
    assert server.complete_all(prompts[::-1], tokens)[::-1] == expected


def nothing_is_left(server: Server) -> None:
    """Of requests that have ended."""
    deadline = time.monotonic() + 60
    while True:
        server.complete("One more.", 2)  # its steps see that copies under way have ended
        left = {gauge: server.total(gauge) for gauge in NOTHING_LEFT}
        if not any(left.values()):
            return
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.5)

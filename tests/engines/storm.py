"""Many requests at once, some of them aborted: survivors answer as if alone, and nothing is left behind."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tests.engines.promises import nothing_is_left
from tests.engines.server import Server
from tests.engines.texts import english

GREEDY = 6


def abort_storm(
    server: Server,
    survivor_lengths: Sequence[int],
    aborted_length: int,
    aborted_tokens: int,
    survivors: int = 120,
    aborted: int = 80,
    own: Mapping[str, float] | None = None,
) -> None:
    """``own``: what each request asks for beside, as ``budget_tokens`` (vLLM)."""
    extra = {"vllm_xargs": dict(own)} if own else {}
    rng = random.Random(1)
    prompts = [english(rng.choice(survivor_lengths), start=rng.randrange(20000)) for _ in range(8)]
    expected = {prompt: server.complete(prompt, GREEDY, extra_body=extra) for prompt in prompts}
    # Three prompts only, so that aborted requests share pages; cached, or the first ones would all compute them.
    leaving = [english(aborted_length, start=5000 * i) for i in range(3)]
    for prompt in leaving:
        server.complete(prompt, 1)

    def stays(prompt: str) -> tuple[str, str]:
        return prompt, server.complete(prompt, GREEDY, extra_body=extra)

    def leaves(delay: float, prompt: str) -> None:
        """The client goes away in mid-answer."""
        body = {
            "model": server.model,
            "prompt": prompt,
            "max_tokens": aborted_tokens,
            "stream": True,
            "ignore_eos": True,
            **extra,
        }
        with server.http() as client, client.stream("POST", f"{server.url}/v1/completions", json=body) as r:
            r.raise_for_status()
            until = time.monotonic() + delay
            for _ in r.iter_lines():
                if time.monotonic() > until:
                    return

    work = [partial(stays, rng.choice(prompts)) for _ in range(survivors)]
    work += [partial(leaves, rng.uniform(0, 1), rng.choice(leaving)) for _ in range(aborted)]  # type: ignore[misc]
    rng.shuffle(work)
    with ThreadPoolExecutor(len(work)) as pool:
        answers = [job.result(timeout=600) for job in [pool.submit(each) for each in work]]
    wrong = [a for a in answers if a is not None and expected[a[0]] != a[1]]
    assert not wrong, (
        f"{len(wrong)} survivors answered differently, first: {wrong[0]!r}, alone: {expected[wrong[0][0]]!r}"
    )
    nothing_is_left(server)

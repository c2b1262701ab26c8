"""Decode rows with drafts of the next tokens, some of which are rejected, for the methods that attend in place."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybrid_backend.batch import Step
from hybrid_backend.config import HybridConfig
from hybrid_backend.in_place.step import InPlaceStep
from hybrid_backend.kernels import cpu
from tests.support.harness import PAGE, Engine, config, spec
from tests.support.scenario import check_nothing_is_left

pytestmark = [
    pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable())),
    pytest.mark.usefixtures("one_thread"),
]

MOST_DRAFTS = 5
DIGESTS = ("minmax", "codes", "auto")
EXACT = {"method": "quest", "sparse": "never"}
SPARSE = {"method": "quest", "sparse": "always", "budget_tokens": 4 * PAGE, "exact_layers": [2]}


def engine(cfg: HybridConfig, seed: int = 0, kv_dtype: torch.dtype | None = None) -> Engine:
    return Engine(cfg, replace(spec(), kv_dtype=kv_dtype), seed=seed, speculates=True)


def live(made: Engine, chance: random.Random, steps: int, tolerance: float | None, check: Iterator[None]) -> None:
    """Requests draft at random, and at random some drafts are rejected; prompts, preemptions and aborts go beside.

    ``check`` goes on after each step, before drafts are rejected.
    """
    for number in range(steps):
        if chance.random() < 0.25 and len(made.sequences) < 5:
            donor = chance.choice([None, *made.sequences])
            made.add(f"request {number}", chance.randint(PAGE, 9 * PAGE), shared_with=donor)
        work = {}
        for name, sequence in made.sequences.items():
            if chance.random() < 0.2:
                continue
            left = sequence.prompt - sequence.tokens
            work[name] = (
                chance.randint(1, left) if left > 0 else 1 + chance.choice((0, 0, chance.randint(1, MOST_DRAFTS)))
            )
        if not work:
            continue
        decoding = [name for name in work if made.sequences[name].tokens >= made.sequences[name].prompt]
        made.step(work, tolerance=tolerance)
        next(check)
        for name in decoding:
            made.reject(name, chance.randint(0, work[name] - 1))
        if decoding and chance.random() < 0.1:
            chance.choice((made.drop, made.preempt))(chance.choice(decoding))
    for name in list(made.sequences):
        made.drop(name)
    check_nothing_is_left(made)


def nothing() -> Iterator[None]:
    while True:
        yield


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("keys", [EXACT, {"method": "dense"}, {**EXACT, "kv_dtype": "int8"}], ids=str)
def test_every_query_of_a_row_with_drafts_attends_all_tokens_up_to_itself(keys: dict[str, object], seed: int) -> None:
    is_int8 = "kv_dtype" in keys
    made = engine(config(**keys), seed, torch.int8 if is_int8 else None)
    live(made, random.Random(seed), 60, 1e-3 if is_int8 else 1e-4, nothing())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("digest", DIGESTS)
def test_no_digest_keeps_a_rejected_key(digest: str, seed: int) -> None:
    """After each step, every digest of the requests' pages is what their keys make, drafts of this step included."""
    made = engine(config(**SPARSE, selection={"digest": digest, "interval": 1}), seed)
    digests, checked = made.runtime.tiers.digests, 0
    assert digests is not None and digests.layers

    def compare() -> Iterator[None]:
        nonlocal checked
        while True:
            yield
            for name, sequence in made.sequences.items():
                if name not in made.ran.request_ids:
                    continue
                pages = torch.tensor(sequence.pages[: -(-sequence.tokens // PAGE)])
                tokens = (sequence.tokens - torch.arange(len(pages)) * PAGE).clamp(max=PAGE)
                for layer in digests.layers:
                    for kept, store in (
                        (store[pages].clone(), store)
                        for store in (digests.layers[layer], digests.byte_copies.get(layer))
                        if store is not None
                    ):
                        is_defined = tokens == PAGE
                        if store is digests.layers[layer] and digests._format.covers_growing_pages:
                            is_defined = tokens > 0
                        digests.rebuild(layer, pages, tokens)
                        assert torch.equal(kept[is_defined], store[pages][is_defined]), name
                        checked += int(is_defined.sum())

    check = compare()
    next(check)
    live(made, random.Random(seed), 60, None, check)
    assert checked > 500


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("interval", [1, 8])
def test_a_query_with_drafts_beside_it_selects_and_attends_as_if_alone(interval: int, seed: int) -> None:
    """What each query of a row with drafts gets is what the decoder gives it in a batch of its own."""
    made = engine(config(**SPARSE, selection={"interval": interval}), seed)
    executor, forward, compared = made.runtime.executor, made.runtime.forward, 0
    assert isinstance(executor, InPlaceStep)
    alone = cpu.Decoder(
        made.kv, made.runtime.tiers.digests.layers, made.model.num_heads, made.model.scale,
        byte_digests=made.runtime.tiers.digests.byte_copies, bound=made.cfg.selection.bound,
    )  # fmt: skip

    def checked(layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        nonlocal compared
        forward(layer, step, q, k, v, out)
        rows = step.decode
        if rows is None:
            return
        for row in range(rows.count):
            if rows.request_ids.count(rows.request_ids[row]) == 1:
                continue
            token = rows.tokens[row : row + 1]
            budget = made.runtime.method.budgets(rows)[row : row + 1]
            alone.begin(
                rows.page_table[row : row + 1], rows.seq_lens[row : row + 1], budget, sinks=made.cfg.sinks,
                recent=made.cfg.recent, aggregate=made.cfg.selection.aggregate,
            )  # fmt: skip
            expected = torch.empty(1, *out.shape[1:])
            alone.layer(layer, q[token], None, None, expected)
            assert torch.allclose(out[token], expected, atol=1e-5), (rows.request_ids[row], layer)
            compared += int(budget < rows.num_pages[row])

    made.runtime.forward = checked  # type: ignore[method-assign]
    live(made, random.Random(seed), 50, None, nothing())
    alone.close()
    assert compared > 50


def test_what_the_decoder_keeps_goes_with_the_requests() -> None:
    """Sequences of single queries of rows with drafts are forgotten in the step after."""
    made = engine(config(**SPARSE, selection={"interval": 8, "candidates": 2}))
    made.admit("long", 40 * PAGE)
    executor = made.runtime.executor
    assert isinstance(executor, InPlaceStep)
    made.step({"long": 4}, tolerance=None)
    made.reject("long", 2)
    made.step({"long": 1}, tolerance=None)
    one = executor.host_bytes
    for _ in range(20):
        made.step({"long": 4}, tolerance=None)
        made.reject("long", 3)
        made.step({"long": 1}, tolerance=None)
    assert executor.host_bytes <= 2 * one
    made.drop("long")
    assert executor.host_bytes == 0
    made.close()

"""One decode layer in one call: cache, digests, selection and output against their references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_backend.config import SelectionConfig
from hybrid_backend.errors import WorkerError
from hybrid_backend.kernels import cpu, reference
from tests.support import cases
from tests.unit.kernels.decode_case import TOLERANCE, Case

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))


@pytest.fixture(scope="module")
def pool():
    with cpu.Pool(2) as made:
        yield made


@pytest.mark.parametrize("team", ["caller", "openmp", "pool"])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_matches_the_references(team, pool, data):
    dtype = data.draw(st.sampled_from(list(TOLERANCE)))
    kv_heads, group, dim = data.draw(
        st.sampled_from([(3, 3, 64), (2, 4, 128), (8, 2, 128), (1, 8, 64), (2, 1, 80), (1, 16, 96)])
    )
    case = Case(
        data.draw(st.integers(0, 2**31)), dtype, kv_heads, group, dim, data.draw(st.sampled_from([16, 32])),
        data.draw(st.integers(1, 6)),
    )  # fmt: skip
    how = SelectionConfig(
        granularity=data.draw(st.sampled_from(["layer", "kv_head"])),
        aggregate=data.draw(st.sampled_from(["sum", "max", "softmax"])),
        bound=data.draw(st.sampled_from([0.4, 1.0])),
    )
    budgets = torch.tensor([data.draw(st.sampled_from([-1, 5, 8, 1000])) for _ in case.tokens])
    score_q = torch.randn(case.q.shape, generator=case.rng).to(dtype) if data.draw(st.booleans()) else None
    sinks = 3 * torch.randn(kv_heads * group, generator=case.rng) if data.draw(st.booleans()) else None
    if sinks is not None:
        sinks[1::2] = float("-inf")  # none
    decoder = cpu.Decoder(
        [case.layer],
        {0: case.digests},
        kv_heads * group,
        case.scale,
        sinks=None if sinks is None else {0: sinks},
        bound=how.bound,
        team=pool if team == "pool" else team,
        threads=2,
    )
    recent = data.draw(st.integers(1, 3))
    case.check(decoder, budgets, how, sinks=1, recent=recent, score_q=score_q, sinks_of_heads=sinks)


@pytest.mark.parametrize("isa", cpu.isas() if cpu.available() else [])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_tokens_that_a_row_leaves_out_at_the_start_do_not_count(isa, data):
    """They may even be NaN. What a sliding window that begins in the middle of a page asks for."""
    dtype = data.draw(st.sampled_from(list(TOLERANCE)))
    kv_heads, group, dim = data.draw(
        st.sampled_from([(3, 3, 64), (2, 4, 128), (1, 8, 256), (1, 2, 512), (2, 1, 80), (1, 16, 96)])
    )
    size, rows = data.draw(st.sampled_from([16, 32, 64])), data.draw(st.integers(1, 5))
    case = Case(data.draw(st.integers(0, 2**31)), dtype, kv_heads, group, dim, size, rows, columns=4)
    skips = torch.tensor([data.draw(st.integers(0, min(size, int(n)) - 1)) for n in case.seq_lens])
    for row, skip in enumerate(skips.tolist()):
        case.layer[case.table[row, 0], :, :, :skip] = float("nan")
    decoder = cpu.Decoder([case.layer], {}, kv_heads * group, case.scale, team="caller", isa=isa)
    decoder.begin(case.table, case.seq_lens, torch.full((rows,), -1), tokens=case.tokens, skips=skips)
    decoder.layer(0, case.q, case.k, case.v, case.out, lse=case.lse)
    column = torch.arange(4)[None]
    valid = (case.seq_lens[:, None] - column * size).clamp(0, size)[:, None]
    out, lse = reference.paged_attention(
        case.q[case.tokens], case.layer, case.table[:, None], valid, case.scale, skips=skips
    )
    assert cases.relative_error(case.out[case.tokens], out) <= TOLERANCE[dtype]
    assert torch.allclose(case.lse.double(), lse, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize(("length", "skip"), [(40, 16), (40, -1), (5, 5)])
def test_a_row_cannot_leave_out_a_whole_page_nor_its_own_token(length, skip):
    case = Case(0, torch.float32, 1, 1, 64, 16, rows=1)
    decoder = cpu.Decoder([case.layer], {}, 1, case.scale)
    with pytest.raises(WorkerError, match="cannot leave out its first page, nor its own token"):
        decoder.begin(case.table, torch.tensor([length]), torch.tensor([-1]), skips=torch.tensor([skip]))


def test_long_sequence_on_several_threads(pool):
    """Enough digests and pages for every split: scoring ranges, attention chunks, merges."""
    for seed in range(4):
        case = Case(seed, torch.bfloat16, 8, 2, 128, 16, rows=2, columns=160)
        decoder = cpu.Decoder([case.layer], {0: case.digests}, 16, case.scale, bound=0.5, team=pool)
        how = SelectionConfig(
            granularity="layer" if seed % 2 else "kv_head", aggregate="softmax" if seed > 1 else "sum"
        )
        case.check(decoder, torch.tensor([60, -1]), how, sinks=1, recent=2)


@pytest.mark.parametrize("isa", cpu.isas() if cpu.available() else [])
def test_long_sequence_with_every_instruction_set(isa):
    case = Case(8, torch.bfloat16, 3, 3, 64, 16, rows=2, columns=61)
    decoder = cpu.Decoder([case.layer], {0: case.digests}, 9, case.scale, bound=0.5, team="caller", isa=isa)
    case.check(decoder, torch.tensor([20, 9]), SelectionConfig(aggregate="softmax"), sinks=1, recent=2)


def test_layer_without_digests_is_exact(pool):
    case = Case(0, torch.bfloat16, 3, 3, 64, 32, rows=3)
    decoder = cpu.Decoder([case.layer], {}, 9, case.scale, team=pool)
    decoder.begin(case.table.int(), case.seq_lens, torch.tensor([4, 4, 4]), tokens=case.tokens)
    decoder.layer(0, case.q, case.k, case.v, case.out)
    assert [len(decoder.selected(row)) for row in range(3)] == case.num_pages.tolist()
    assert (case.digests == 7).any()


def test_steps_of_a_growing_sequence(pool):
    """Token after token through two layers, with nothing but what the decoder itself wrote."""
    layers = [torch.full((10, 2, 2, 16, 64), float("nan")).bfloat16() for _ in range(2)]
    digests = {1: torch.full((10, 2, 2, 64), float("nan")).bfloat16()}
    decoder = cpu.Decoder(layers, digests, 4, 0.125, team=pool)
    table = torch.randperm(10)[None]
    torch.manual_seed(0)
    history = []
    for length in range(1, 100):
        decoder.begin(table, torch.tensor([length]), torch.tensor([-1]))
        kv = torch.randn(2, 2, 1, 2, 64).bfloat16()
        q = torch.randn(1, 4, 64).bfloat16()
        history.append(kv)
        for index in range(2):
            out = torch.empty_like(q)
            decoder.layer(index, q, kv[index, 0], kv[index, 1], out)
            k, v = (torch.cat([h[index, part] for h in history]).double().repeat_interleave(2, 1) for part in (0, 1))
            weights = (torch.einsum("qhd,thd->hqt", q.double(), k) * 0.125).softmax(-1)
            assert cases.relative_error(out, torch.einsum("hqt,thd->qhd", weights, v)) < 1e-2
    for page in range(7):
        tokens = 16 if page < 6 else 3
        held = table[0, page]
        assert torch.equal(digests[1][held], reference.digest(layers[1][held], tokens))


def test_refusals():
    case = Case(0, torch.bfloat16, 2, 2, 64, 16, rows=2, columns=4)
    decoder = cpu.Decoder([case.layer], {0: case.digests}, 4, case.scale, team="caller")
    with pytest.raises(ValueError, match="more pages than the table's 1 columns"):
        decoder.begin(case.table[:, :1], case.seq_lens, torch.tensor([-1, -1]))
    decoder.begin(case.table + 100, case.seq_lens, torch.tensor([-1, -1]), tokens=case.tokens)
    with pytest.raises(WorkerError, match="but the cache of layer 0 has 9 pages"):
        decoder.layer(0, case.q, case.k, case.v, case.out)
    decoder.begin(case.table, case.seq_lens, torch.tensor([-1, -1]), tokens=case.tokens)
    with pytest.raises(ValueError, match="k must be"):
        decoder.layer(0, case.q, case.k.float(), case.v, case.out)
    with pytest.raises(ValueError, match="team must be"):
        cpu.Decoder([case.layer], {}, 4, 0.1, team="everyone")


def test_a_refused_layer_leaves_nothing_to_the_next() -> None:
    kv = torch.randn(4, 2, 2, 16, 64)
    decoder = cpu.Decoder([kv], {}, 4, 0.1, team="caller")
    decoder.begin(torch.tensor([[0], [1]]), torch.tensor([16, 16]), torch.tensor([-1, -1]))
    q, out = torch.randn(2, 4, 64), torch.empty(2, 4, 64)
    decoder.layer(0, q, None, None, out)
    expected = out.clone()
    with pytest.raises(ValueError, match="out must be"):
        decoder.layer(0, torch.randn(2, 8, 64)[:, :4], None, None, torch.empty(2, 4, 64, dtype=torch.float64))
    decoder.layer(0, q, None, None, out)
    assert torch.equal(out, expected)


def test_no_layer_runs_of_a_step_that_was_refused() -> None:
    kv = torch.randn(64, 2, 2, 16, 64)
    decoder = cpu.Decoder([kv], {}, 4, 0.1, team="caller")
    q, out = torch.randn(40, 4, 64), torch.zeros(40, 4, 64)
    decoder.begin(torch.tensor([[0]]), torch.tensor([16]), torch.tensor([-1]))
    decoder.layer(0, q, None, None, out)
    lengths = torch.full((40,), 900)
    lengths[39] = 0
    with pytest.raises(WorkerError, match="own token"):
        decoder.begin(torch.arange(60)[None].repeat(40, 1), lengths, torch.full((40,), -1))
    with pytest.raises(WorkerError, match="refused"):
        decoder.layer(0, q, None, None, out)

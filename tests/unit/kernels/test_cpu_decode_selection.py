"""Selection of the native decoder: digests in bytes and codes, two levels, shortlists between looks at all pages."""

from __future__ import annotations

import pytest
import torch

from hybrid_backend.config import SelectionConfig
from hybrid_backend.kernels import codes, cpu, oracle, reference
from hybrid_backend.kernels.cpu import digests as native
from hybrid_backend.kernels.cpu import operations
from tests.support import cases
from tests.unit.kernels.decode_case import TOLERANCE, Case

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))


@pytest.fixture(scope="module")
def pool():
    with cpu.Pool(2) as made:
        yield made


@pytest.mark.parametrize("aggregate", ["sum", "softmax"])
def test_selection_from_bytes(pool, aggregate):
    """Scored from bytes, the selection is worth as much as the exact one; a page that fills is brought up to date."""
    case = Case(1, torch.bfloat16, 3, 3, 64, 16, rows=1, columns=100)  # this token fills the last page
    byte_digests = native.empty_byte_digests(case.digests)
    native.write_byte_digests(byte_digests, case.digests, case.table[0, :-1])
    byte_digests_too = {"byte_digests": {0: byte_digests}, "bound": 0.5}
    decoder = cpu.Decoder([case.layer], {0: case.digests}, 9, case.scale, **byte_digests_too, team=pool)
    decoder.begin(case.table, case.seq_lens, torch.tensor([20]), tokens=case.tokens, aggregate=aggregate)
    decoder.layer(0, case.q, case.k, case.v, case.out)
    how = SelectionConfig(aggregate=aggregate)
    q = case.q[case.tokens]
    exact = case.scores(q, how)[0, 0]
    forced = exact.clone()
    forced[[0, 99]] = float("inf")
    mine, best = decoder.selected(0).long(), forced.topk(20).indices
    assert len(mine) == 20 and mine[0] == 0 and mine[-1] == 99
    assert exact[mine].sum() > 0.999 * exact[best].sum()
    fresh = native.empty_byte_digests(case.digests)
    native.write_byte_digests(fresh, case.digests, case.table[0, -1:])
    assert torch.equal(byte_digests[case.table[0, -1]], fresh[case.table[0, -1]])


@pytest.mark.parametrize("isa", cpu.isas() if cpu.available() else [])
@pytest.mark.parametrize("per_head", [False, True])
def test_selection_by_codes(pool, isa, per_head):
    """Where the budget is a quarter of the pages all of them are scored by their codes: the selection is worth as much
    as the oracle's by exact scores. The page that this token fills gets its codes; what is selected is attended."""
    for team in ("caller", pool):
        case = Case(1, torch.bfloat16, 3, 4, 64, 16, rows=1, columns=100)
        case.digests = torch.zeros(len(case.layer), 3, 256, dtype=torch.uint8)
        whole, sixteen = case.table[0, :-1].int(), torch.full((99,), 16, dtype=torch.int32)
        oracle.build_digests(case.layer, case.digests, whole, sixteen)
        decoder = cpu.Decoder([case.layer], {0: case.digests}, 12, case.scale, bound=0.5, team=team, isa=isa)
        decoder.begin(case.table, case.seq_lens, torch.tensor([25]), tokens=case.tokens, per_head=per_head,
                      aggregate="softmax", recent=2)  # fmt: skip
        decoder.layer(0, case.q, case.k, case.v, case.out)
        fresh = torch.zeros_like(case.digests)
        operations.build_digests(case.layer, fresh, case.table[0, -1:].int(), sixteen[:1])
        assert torch.equal(case.digests[case.table[0, -1]], fresh[case.table[0, -1]])
        how = SelectionConfig(aggregate="softmax", granularity="kv_head" if per_head else "layer")
        exact = case.scores(case.q[case.tokens], how)[0]
        lists = [decoder.selected(0, head).long() for head in range(len(exact))]
        for mine, scores in zip(lists, exact, strict=True):
            scores[[0, 98, 99]] = 1e3
            assert len(mine) == 25 and {0, 98, 99} <= set(mine.tolist()) and mine.equal(mine.sort().values)
            scores[[0, 98, 99]] = 0
            assert scores[mine].sum() > 0.99 * scores.topk(22).values.sum()
        ids = case.table[0][torch.stack(lists)][None]
        valid = torch.full_like(ids, 16)
        out, _ = reference.paged_attention(case.q[case.tokens], case.layer, ids, valid, case.scale)
        assert cases.relative_error(case.out[case.tokens], out) <= TOLERANCE[case.out.dtype]


def test_a_long_row_is_scored_by_codes_where_a_first_look_finds_it_worth(pool):
    """A page whose keys are the query stands out by its middles alone, and is found among many."""
    case = Case(2, torch.float32, 2, 2, 64, 16, rows=1, columns=300)
    q = case.q[case.tokens[0]].view(2, 2, 64).mean(1)
    case.layer[case.table[0, 123], :, 0] += 2 * q[:, None]
    case.digests = torch.zeros(len(case.layer), 2, 256, dtype=torch.uint8)
    oracle.build_digests(case.layer, case.digests, case.table[0, :-1].int(), torch.full((299,), 16, dtype=torch.int32))
    decoder = cpu.Decoder([case.layer], {0: case.digests}, 4, case.scale, bound=0.5, team=pool)
    decoder.begin(case.table, case.seq_lens, torch.tensor([6]), tokens=case.tokens, aggregate="softmax")
    decoder.layer(0, case.q, case.k, case.v, case.out)
    how = SelectionConfig(aggregate="softmax")
    scores = case.scores(case.q[case.tokens], how)[0, 0]
    mine = decoder.selected(0).long()
    assert int(scores.argmax()) == 123 and 123 in mine.tolist() and len(mine) == 6


def two_levels(case: Case, pages: int, budget: int, candidates: int) -> list[int]:
    """Pages that a search in two levels selects for row 0: spans first, then the pages of the best spans."""
    q = case.q[case.tokens[0]]
    spans = (pages - 1) // 8
    inside = case.digests[case.table[0, : spans * 8]].unflatten(0, (spans, 8))
    coarse = torch.stack([inside[:, :, :, 0].amax(1), inside[:, :, :, 1].amin(1)], 2)
    best = cases.byte_scores(q, coarse, bound=1.0).topk(-(-candidates * budget // 8))
    columns = [c for c in range(pages) if c // 8 in best.indices or c // 8 >= spans or c < 1 or c >= pages - 2]
    scores = cases.byte_scores(q, case.digests[case.table[0, columns]], bound=1.0)
    scores[[0, -1, -2]] = float("inf")
    return sorted(columns[i] for i in scores.topk(budget).indices)


@pytest.mark.parametrize(("dtype", "shape"), [(torch.bfloat16, (3, 3, 64)), (torch.float32, (2, 4, 128))])
def test_long_rows_are_searched_by_spans_first(pool, dtype, shape):
    kv_heads, group, dim = shape
    case = Case(3, dtype, kv_heads, group, dim, 16, rows=2, columns=203)
    byte_digests = native.empty_byte_digests(case.digests)
    for row, pages in enumerate(case.num_pages.tolist()):
        native.write_byte_digests(byte_digests, case.digests, case.table[row, : pages - 1])
    heads = kv_heads * group
    decoder = cpu.Decoder([case.layer], {0: case.digests}, heads, case.scale, byte_digests={0: byte_digests}, team=pool)
    # Row 0 is long, row 1 dense. The sequence grows a page: one span more is whole.
    for length in (199 * 16 + 5, 201 * 16 + 1):
        seq_lens = torch.tensor([length, int(case.seq_lens[1])])
        how = {"sinks": 1, "recent": 2, "tokens": case.tokens, "sequences": torch.tensor([4, 9]), "candidates": 2}
        decoder.begin(case.table, seq_lens, torch.tensor([12, -1]), **how)
        decoder.layer(0, case.q, None, None, case.out)
        pages = -(-length // 16)
        assert decoder.selected(0).tolist() == two_levels(case, pages, 12, 2)
    assert decoder.span_bytes >= 25 * native.byte_digests.page_row(kv_heads, dim)
    # Forgotten, the id serves a sequence of other pages.
    decoder.forget(4)
    case.table[0] = case.table[0].flip(0)
    native.write_byte_digests(byte_digests, case.digests, case.table[0])
    decoder.begin(case.table, seq_lens, torch.tensor([12, -1]), **how)
    decoder.layer(0, case.q, None, None, case.out)
    assert decoder.selected(0).tolist() == two_levels(case, pages, 12, 2)
    decoder.forget(4)
    decoder.forget(9)
    assert decoder.span_bytes == 0


def columns_of(length):
    return -(-length // 16)


def summarized(case, digest):
    """Digests of all of the case's pages, taken for whole ones; returns those in bytes, if that is what is wanted."""
    case.layer.nan_to_num_(0.5)
    every = torch.arange(len(case.layer))
    if digest == "codes":
        case.digests = codes.encode(case.layer[:, :, 0])
    else:
        oracle.build_digests(case.layer, case.digests, every.int(), torch.full_like(every, 16).int())
    if digest != "bytes":
        return None
    byte_digests = native.empty_byte_digests(case.digests)
    native.write_byte_digests(byte_digests, case.digests, every)
    return byte_digests


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("digest", ["minmax", "bytes", "codes"])
def test_between_two_looks_at_all_pages_a_row_chooses_among_four_times_its_budget_and_newer_ones(
    pool, digest, per_head
):
    """Two layers look in turn; a row with another budget looks at once. With codes a look's own shortlist stays: what
    is chosen until the next look is best among all that is chosen until then. In every second step they choose among
    twice the budget, the best of the step before: what these two steps choose is the best of it."""
    case = Case(14, torch.bfloat16, 2, 2, 64, 16, rows=2, columns=60)
    byte_copy = summarized(case, digest)
    byte_digests = {} if byte_copy is None else {0: byte_copy, 1: byte_copy}
    layers, digests = [case.layer, case.layer], {0: case.digests, 1: case.digests}
    lazy, eager = (
        cpu.Decoder(layers, digests, 4, case.scale, byte_digests=byte_digests, bound=0.5, team=pool) for _ in range(2)
    )
    lists, kept, last, seen = (2 if per_head else 1), {}, {}, {}
    # Shares depend on what they are taken among, sums do not.
    how = {"sinks": 1, "recent": 2, "per_head": per_head, "aggregate": "sum" if digest == "codes" else "softmax"}

    def chosen_of(layer, row, q, length, budget, columns):
        """Of each list, by a decoder whose table holds that list's columns only."""
        found = []
        for head, some in enumerate(columns):
            if len(some) <= budget:
                found.append(some)
                continue
            left_out = columns_of(length) - len(some)
            eager.begin(
                case.table[row, some][None], torch.tensor([length - 16 * left_out]), torch.tensor([budget]), **how
            )
            eager.layer(layer, q[row : row + 1], None, None, torch.empty(1, 4, 64).bfloat16())
            found.append(torch.tensor(some)[eager.selected(0, head).long()].tolist())
        return found

    def check_codes(layer, row, budget):
        steps = seen.pop((row, layer), []) if digest == "codes" else []
        passed_over = 0
        for at, (q, length, found) in enumerate(steps):
            is_of_few = at > 0 and (length + layer) % 2 == 1
            best = []
            for some, times in ((steps, 4), (steps[at - 1 : at + 1] if is_of_few else steps, 2 if is_of_few else 4)):
                among = [sorted({page for *_, each in some for page in each[head]}) for head in range(lists)]
                assert all(len(pages) <= times * budget + 1 for pages in among)
                among = [[page for page in one if page < columns_of(length)] for one in among]
                best.append(chosen_of(layer, row, q, length, budget, among))
            assert found == best[1]
            passed_over += found != best[0]
        return passed_over

    missed = passed_over = 0
    for step, length in enumerate(range(40 * 16 + 10, 44 * 16 + 10), start=1):
        lengths, budgets = torch.tensor([length, 490 + step]), torch.tensor([4 if step < 20 else 5, 4])
        if step in (13, 14):
            budgets[1] = -1
        q = torch.randn(4, 4, 64, generator=case.rng).bfloat16()
        lazy.begin(case.table, lengths, budgets, sequences=torch.tensor([7, 3]), interval=3, **how)
        for layer in (0, 1):
            lse, out = torch.empty(2, 4), torch.empty(4, 4, 64).bfloat16()
            lazy.layer(layer, q, None, None, out, lse=lse)
            for row, length_of in enumerate(lengths.tolist()):
                pages, budget = columns_of(length_of), int(budgets[row])
                found = [lazy.selected(row, head).tolist() for head in range(lists)]
                if budget < 0:
                    assert found[0] == list(range(pages))
                    continue
                every = [list(range(pages))] * lists
                fresh = chosen_of(layer, row, q, length_of, budget, every)
                if (length_of + layer) % 3 == 0 or last.get((row, layer)) != budget:
                    passed_over += check_codes(layer, row, last.get((row, layer)))
                    kept[row, layer] = (chosen_of(layer, row, q, length_of, 4 * budget, every), pages)
                    last[row, layer], seen[row, layer] = budget, [(q, length_of, found)]
                    assert found == fresh
                    continue
                old, then = kept[row, layer]
                seen[row, layer].append((q, length_of, found))
                among = [one + list(range(then, pages)) for one in old]
                assert digest == "codes" or found == chosen_of(layer, row, q, length_of, budget, among)
                missed += found != fresh
                chosen = torch.tensor(found)[None]
                valid = torch.where(chosen == pages - 1, length_of - 16 * (pages - 1), 16)
                ids = case.table[row][chosen]
                expected, expected_lse = reference.paged_attention(q[row : row + 1], case.layer, ids, valid, case.scale)
                assert cases.relative_error(out[row : row + 1], expected) <= TOLERANCE[torch.bfloat16]
                assert torch.allclose(lse[row : row + 1].double(), expected_lse, atol=1e-3)
    assert missed > 20, "pages of all would have been chosen"
    assert digest != "codes" or passed_over > 0, "pages of what the look left would have been chosen"
    for pages in (52, 45):  # many pages at once, and fewer than there were: there is nothing to go on with
        lengths[0] = 16 * pages - 3
        lazy.begin(case.table, lengths, budgets, sequences=torch.tensor([7, 3]), interval=3, **how)
        eager.begin(case.table, lengths, budgets, **how)
        for layer in (0, 1):
            for decoder in (lazy, eager):
                decoder.layer(layer, q, None, None, out)
            assert [lazy.selected(0, head).tolist() for head in range(lists)] == [
                eager.selected(0, head).tolist() for head in range(lists)
            ]
    lazy.forget(7)
    lazy.forget(3)
    assert lazy.span_bytes == 0
    with pytest.raises(ValueError, match="with sequences"):
        lazy.begin(case.table, lengths, budgets, interval=2)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("aggregate", ["sum", "max", "softmax"])
@pytest.mark.parametrize("digest", ["minmax", "bytes", "spans", "codes"])
def test_what_is_kept_to_choose_among_does_not_depend_on_who_computes(pool, digest, aggregate, per_head):
    """Lists of several ranges, whichever thread scores which: one thread selects the same, in every step; and what is
    chosen between looks is mostly what would be chosen of all."""
    case = Case(12, torch.float32 if digest == "minmax" else torch.bfloat16, 2, 2, 64, 16, rows=2, columns=400)
    byte_copy = summarized(case, "bytes" if digest == "spans" else digest)
    byte_digests = {} if byte_copy is None else {0: byte_copy}
    decoders = [
        cpu.Decoder([case.layer], {0: case.digests}, 4, case.scale, byte_digests=byte_digests, bound=0.5, team=team)
        for team in (pool, "caller", "caller")
    ]
    how = {"sinks": 1, "recent": 2, "per_head": per_head, "aggregate": aggregate, "sequences": torch.tensor([1, 2])}
    how["candidates"] = 3 if digest == "spans" else 0
    q = torch.randn(2, 4, 64, generator=case.rng).to(case.layer.dtype)
    for step in range(6):
        q = (q.float() + 0.2 * torch.randn(2, 4, 64, generator=case.rng)).to(case.layer.dtype)
        lengths, found = torch.tensor([6300 + step, 6000 + step]), []
        for decoder, interval in zip(decoders, (4, 4, 1), strict=True):
            decoder.begin(case.table, lengths, torch.tensor([70, 60]), interval=interval, **how)
            decoder.layer(0, q, None, None, torch.empty_like(q))
            found.append(
                [decoder.selected(row, head).tolist() for row in (0, 1) for head in range(2 if per_head else 1)]
            )
        assert found[0] == found[1]
        for mine, best in zip(found[1], found[2], strict=True):
            assert len(mine) == len(best) and len(set(mine) & set(best)) > 0.7 * len(best)


@pytest.mark.parametrize(("aggregate", "per_head"), [("sum", False), ("softmax", False), ("softmax", True)])
def test_all_spans_as_candidates_select_what_one_level_selects(aggregate, per_head):
    case = Case(5, torch.bfloat16, 8, 2, 128, 16, rows=1, columns=300)
    byte_digests = native.empty_byte_digests(case.digests)
    native.write_byte_digests(byte_digests, case.digests, case.table[0])
    decoder = cpu.Decoder(
        [case.layer], {0: case.digests}, 16, case.scale, byte_digests={0: byte_digests}, team="caller"
    )
    found = []
    for candidates in (0, 21):  # 21 x 12 pages of 300, and 37 spans
        decoder.begin(case.table, case.seq_lens, torch.tensor([12]), tokens=case.tokens, sequences=torch.tensor([0]),
                      candidates=candidates, aggregate=aggregate, per_head=per_head)  # fmt: skip
        decoder.layer(0, case.q, case.k, case.v, case.out)
        found.append([set(decoder.selected(0, head).tolist()) for head in range(8 if per_head else 1)])
    assert all(len(one) == 12 and len(one & two) >= 11 for one, two in zip(*found, strict=True))

"""The device tier's Triton kernels against plain torch: on the GPU if there is one, else under Triton's interpreter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from hybrid_backend.attention import selection
from hybrid_backend.attention.partial import PageList, weighted_partial
from hybrid_backend.config import SelectionConfig
from hybrid_backend.kernels import reference
from hybrid_backend.kernels import triton as kernels
from tests.kernels.cases import page_lists, relative_error, spoil_beyond

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of the output, relative; LSE: within 1e-3


def here(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def layer_of(pages: int, kv_heads: int, page: int, dim: int, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    return torch.randn(pages, kv_heads, 2, page, dim, generator=rng).to(dtype)


# rows, kv_heads, group, head_dim, page_size, pages in a list, list per head
SHAPES = [
    (3, 2, 3, 64, 16, 5, False),
    (2, 3, 1, 80, 32, 4, True),
    (2, 1, 8, 128, 16, 7, False),
    (1, 2, 4, 128, 64, 3, True),
    (2, 1, 16, 256, 16, 2, False),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_partials_in_parts_merge_to_dense_attention(shape: Any, dtype: torch.dtype, splits: int) -> None:
    """Lists of all lengths, empty ones too, a ragged last page; what was never written is NaN."""
    rows, kv_heads, group, dim, page, k, per_head = shape
    rng = generator(rows + k)
    layer = layer_of(3 * k, kv_heads, page, dim, dtype, rng)
    ids, valid = page_lists(rows, kv_heads if per_head else 1, k, 3 * k, page, rng)
    spoil_beyond(layer, ids, valid)
    for h in range(ids.shape[1]):  # a page that two lists share may be full in one of them only
        for r in range(rows):
            for i in range(k):
                if ids[r, h, i] >= 0 and valid[r, h, i]:
                    layer[ids[r, h, i], :, :, : valid[r, h, i]].nan_to_num_(0.5)
    q = torch.randn(rows, kv_heads * group, dim, generator=rng).to(dtype)
    expected, lse = reference.paged_attention(q, layer, ids, valid, dim**-0.5)
    parts = kernels.paged_partial(*here(q, layer, ids.int(), valid.sum(-1).int()), dim**-0.5, splits)
    out, found = kernels.merge_partials(*parts)
    assert relative_error(out.cpu(), expected) < ERROR[dtype]
    assert torch.equal(found.cpu() == float("-inf"), lse == float("-inf"))
    assert torch.allclose(found.cpu().double(), lse, atol=1e-3, rtol=0)


def test_logits_of_any_size_give_no_nan() -> None:
    rng = generator(1)
    layer = layer_of(4, 1, 16, 64, torch.float32, rng)
    layer[0, 0, 0, 3] = 1e18
    layer[1, 0, 0, 5] = -1e30
    layer[2, 0, 0] = float("-inf")
    q = torch.ones(1, 2, 64)
    ids, tokens = torch.tensor([[[0, 1]]]), torch.tensor([[32]])
    out, lse = kernels.merge_partials(*kernels.paged_partial(*here(q, layer, ids.int(), tokens.int()), 1.0, 2))
    assert torch.equal(out.cpu(), layer[0, 0, 1, 3].expand(1, 2, -1))  # it takes all the weight
    ids, tokens = torch.tensor([[[2]]]), torch.tensor([[16]])
    out, lse = kernels.merge_partials(*kernels.paged_partial(*here(q, layer, ids.int(), tokens.int()), 1.0, 1))
    assert not out.cpu().any() and bool((lse.cpu() == float("-inf")).all())


@pytest.mark.parametrize("empty", ["neither", "device", "cpu", "both"])
def test_merging_with_the_cpus_partial_is_attention_over_both(empty: str) -> None:
    rng = generator(2)
    rows, heads, splits, dim = 2, 3, 4, 64
    out, lse = torch.randn(rows, heads, splits, dim, generator=rng), torch.randn(rows, heads, splits, generator=rng)
    cpu_out, cpu_lse = torch.randn(rows, heads, dim, generator=rng), torch.randn(rows, heads, generator=rng)
    lse[0, 0, 1:] = float("-inf")
    if empty in ("device", "both"):
        lse.fill_(float("-inf"))
    if empty in ("cpu", "both"):
        cpu_lse.fill_(float("-inf"))
    every = torch.cat([lse, cpu_lse[..., None]], -1).double()
    weights = every.softmax(-1).nan_to_num(0.0)
    expected = (weights[..., None] * torch.cat([out, cpu_out[:, :, None]], 2)).sum(2)
    merged, total = kernels.merge_partials(*here(out, lse), cpu=tuple(here(cpu_out, cpu_lse)), dtype=torch.bfloat16)
    assert merged.dtype == torch.bfloat16
    assert torch.allclose(merged.cpu().double(), expected, atol=2e-2)
    assert torch.allclose(total.cpu().double(), every.logsumexp(-1), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("page", "dim"), [(16, 64), (48, 80)])
def test_digests_are_the_exact_extremes_of_written_keys(dtype: torch.dtype, page: int, dim: int) -> None:
    rng = generator(3)
    layer = layer_of(5, 2, page, dim, dtype, rng)
    digests = torch.zeros(5, 2, 2, dim, dtype=dtype)
    ids, tokens = torch.tensor([3, -1, 0, 4]), torch.tensor([page, page, 1, 0])
    layer[0, :, :, 1:] = float("nan")
    before = digests.clone()
    layer, digests, ids, tokens = here(layer, digests, ids.int(), tokens.int())
    kernels.build_digests(layer, digests, ids, tokens)
    assert torch.equal(digests[3].cpu(), reference.digest(layer[3].cpu(), page))
    assert torch.equal(digests[0].cpu(), reference.digest(layer[0].cpu(), 1))
    assert torch.equal(digests[[1, 2, 4]].cpu(), before[[1, 2, 4]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_new_tokens_reach_host_page_slot_and_digest_and_nothing_else(dtype: torch.dtype) -> None:
    rng = generator(4)
    page, dim, kv_heads = 16, 80, 2
    host, slots = layer_of(6, kv_heads, page, dim, dtype, rng), layer_of(3, kv_heads, page, dim, dtype, rng)
    digests = torch.randn(6, kv_heads, 2, dim, generator=rng).to(dtype)
    k, v = torch.randn(2, 4, kv_heads, dim, generator=rng).to(dtype)
    pages, positions, slot_ids = torch.tensor([4, 1, -1, 2]), torch.tensor([35, 48, 7, 0]), torch.tensor([2, -1, 0, 1])
    regions, slot_of = torch.tensor([1, 0, 0, 2]), torch.full((3, 4), -1)
    slot_of[1, 2], slot_of[2, 0], slot_of[0, 0] = 2, 1, 0
    want = [host.clone(), slots.clone(), digests.clone()]
    for r in (0, 1, 3):
        at = int(positions[r]) % page
        want[0][pages[r], :, 0, at], want[0][pages[r], :, 1, at] = k[r], v[r]
        if slot_ids[r] >= 0:
            want[1][slot_ids[r], :, 0, at], want[1][slot_ids[r], :, 1, at] = k[r], v[r]
        old = digests[pages[r]]
        want[2][pages[r], :, 0] = k[r] if at == 0 else torch.maximum(old[:, 0], k[r])
        want[2][pages[r], :, 1] = k[r] if at == 0 else torch.minimum(old[:, 1], k[r])
    k, v, host, slots, digests, pages, positions, regions, slot_of = here(
        k, v, host, slots, digests, pages.int(), positions.int(), regions.int(), slot_of.int()
    )
    kernels.append_tokens(k, v, host, pages, positions, slots, regions, slot_of, digests)
    assert all(torch.equal(a.cpu(), b) for a, b in zip((host, slots, digests), want, strict=True))


@pytest.mark.parametrize("granularity", ["layer", "kv_head"])
@pytest.mark.parametrize("aggregate", ["sum", "max", "softmax"])
@pytest.mark.parametrize(("dtype", "dim", "group"), [(torch.float32, 64, 3), (torch.bfloat16, 80, 4)], ids=str)
def test_page_scores_are_those_of_the_selection(
    granularity: str, aggregate: str, dtype: torch.dtype, dim: int, group: int
) -> None:
    rng = generator(5)
    kv_heads, columns = 2, 150  # three tiles
    num_pages, budgets = torch.tensor([150, 1, 67, 0, 90]), torch.tensor([149, 0, 20, 0, 90])
    rows = len(num_pages)
    digests = torch.randn(200, kv_heads, 2, dim, generator=rng).to(dtype).sort(2, descending=True).values
    q = torch.randn(rows, kv_heads * group, dim, generator=rng).to(dtype)
    table = torch.stack([torch.randperm(200, generator=rng)[:columns] for _ in range(rows)])
    how = SelectionConfig(granularity=granularity, aggregate=aggregate, bound=0.5)
    expected = selection.page_scores(q, digests, table, num_pages, how, dim**-0.5)
    expected[4] = 0  # it may take all of its pages
    listed = torch.arange(columns) < num_pages[:, None]
    table[~listed] = 10**6  # must not be followed
    table[4] = 10**6  # nor what needs no score
    found = kernels.page_scores(
        *here(q, digests, table.int(), num_pages.int(), budgets.int()), aggregate, granularity == "kv_head", how.bound,
        dim**-0.5,
    ).cpu()  # fmt: skip
    assert found.shape == expected.shape
    listed = listed[:, None].expand_as(found)
    assert bool((found[~listed] == float("-inf")).all())
    assert relative_error(found[listed], expected[listed]) < ERROR[dtype]


@pytest.mark.parametrize("columns", [40, 2500])
def test_selection_is_top_k_with_forced_pages_split_by_residency(columns: int) -> None:
    rng = generator(6)
    lists, page, sinks, recent, most = 2, 16, 1, 2, 24
    num_pages = torch.tensor([columns, 20, 5, 0])
    lengths = num_pages * page - torch.tensor([3, 0, 15, 0])
    budgets, regions = torch.tensor([24, 7, 24, 24]), torch.tensor([2, 0, 3, 1])
    rows = len(num_pages)
    scores = torch.randn(rows, lists, columns, generator=rng)
    table = torch.stack([torch.randperm(5000, generator=rng)[:columns] for _ in range(rows)])
    slot_of = torch.where(torch.rand(4, columns, generator=rng) < 0.5, torch.arange(4 * columns).view(4, -1), -1)
    for r in range(rows):  # the growing page always has a slot
        slot_of[regions[r], max(0, int(num_pages[r]) - 1)] = 7
    forced = selection.force_pages(scores, num_pages, sinks, recent)
    expected = selection.select_pages(forced, torch.minimum(budgets, num_pages))
    got = kernels.select_pages(
        *here(scores, num_pages.int(), lengths.int(), budgets.int(), regions.int(), slot_of.int(), table.int()),
        page, sinks, recent, most,
    )  # fmt: skip
    got = kernels.SelectedPages(*(x.cpu().long() for x in got))
    for r in range(rows):
        for h in range(lists):
            want = [int(p) for p in expected[r, h] if p >= 0]
            assert got.pages[r, h, : got.pages_listed[r, h]].tolist() == want
            slots = slot_of[regions[r], want] if want else torch.empty(0, dtype=torch.int64)
            assert got.slots[r, h, : got.slots_listed[r, h]].tolist() == slots[slots >= 0].tolist()
            absent = table[r, torch.tensor(want, dtype=torch.int64)[slots < 0]]
            assert got.missing[r, h, : got.missing_listed[r, h]].tolist() == absent.tolist()
            tail = int(num_pages[r] * page - lengths[r])
            assert int(got.tokens[r, h]) == (int((slots >= 0).sum()) * page - tail if want else 0)


def test_of_equal_scores_the_first_pages_are_selected_and_nan_is_the_worst() -> None:
    scores = torch.zeros(1, 1, 40)
    scores[0, 0, 3] = float("nan")
    scores[0, 0, 30] = -0.5
    got = kernels.select_pages(
        *here(scores, *(torch.tensor([x], dtype=torch.int32) for x in (40, 640, 10, 0))),
        *here(torch.full((1, 40), -1, dtype=torch.int32), torch.arange(40, dtype=torch.int32)[None]), 16, 1, 1, 16,
    )  # fmt: skip
    assert got.pages[0, 0, :10].tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9, 39]
    assert int(got.pages_listed[0, 0]) == 10 and int(got.missing_listed[0, 0]) == 10


@pytest.mark.parametrize("columns", [5, 100])
def test_the_union_of_all_heads_lists_holds_each_absent_page_once(columns: int) -> None:
    rows, lists, k = 3, 4, 7
    scores = torch.randn(rows, lists, columns)
    listed = torch.randint(0, min(k, columns) + 1, (rows, lists), dtype=torch.int32)
    listed[1] = 0
    absent = torch.full((rows, lists, k), -1, dtype=torch.int32)
    for row in range(rows):
        for one in range(lists):
            count = int(listed[row, one])
            absent[row, one, :count] = torch.randperm(columns)[:count].sort().values.int()
    pages, many, best = kernels.union_pages(absent.to(DEVICE), listed.to(DEVICE), scores.to(DEVICE))
    assert pages.shape == (rows, 1, min(lists * k, columns))
    assert torch.equal(best.cpu(), scores.amax(1, keepdim=True))
    for row in range(rows):
        expected = sorted({int(p) for one in range(lists) for p in absent[row, one, : int(listed[row, one])]})
        assert pages[row, 0, : int(many[row])].tolist() == expected


def test_recalled_pages_equal_their_host_pages_and_show_when_committed() -> None:
    """The most important absent pages take the places of the least important ones that are not selected."""
    rng = generator(7)
    page, size, columns = 16, 4, 8
    host, slots = layer_of(20, 2, page, 80, torch.bfloat16, rng), layer_of(8, 2, page, 80, torch.bfloat16, rng)
    before = slots.clone()
    # Region 1 holds the pages 0, 3, 5 and 7; of 8 pages 0, 1, 4 and 7 are selected.
    slot_of, page_of = torch.full((2, columns), -1), torch.full((8,), -1)
    slot_of[1, [0, 3, 5, 7]] = torch.tensor([4, 6, 5, 7])
    page_of[[4, 6, 5, 7]] = torch.tensor([0, 3, 5, 7])
    importance = torch.tensor([-float("inf")] * 4 + [float("inf"), -2.0, 0.5, float("inf")])
    scores = torch.tensor([[[0.0, 1.0, -3.0, 0.5, 2.0, -2.0, -4.0, 0.0]]])
    table = torch.arange(10, 18)[None]
    maps = kernels.Maps(*here(slot_of[None].int(), page_of[None].int(), importance[None]))
    empty = torch.full((1, 1, 3), -1, dtype=torch.int32)
    copies = kernels.Copies(
        *here(empty, empty.clone(), empty.clone(), torch.zeros(1, 1, 3)),
        *here(torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int64)),
    )
    integers = [torch.tensor(x, dtype=torch.int32) for x in ([[[4, 7, 0]]], [[2]], [[[1, 4, 0]]], [[2]], [8], [1], [1])]
    selected, selected_count, absent, absent_count, num_pages, regions, due = here(*integers)
    (generations, scores, table, host, slots) = here(torch.tensor([0, 5]), scores, table.int(), host, slots)
    (opened,) = here(torch.tensor([5], dtype=torch.int32))  # the row's region then
    keep = torch.zeros(1, size, dtype=torch.int32, device=DEVICE)
    arguments = (scores, table, (selected, selected_count), (absent, absent_count), num_pages, regions, opened)
    kernels.plan_recall(maps.of(0), copies.of(0), *arguments, torch.zeros_like(due), keep)
    assert copies.slots.tolist() == [[[-1, -1, -1]]], "not due"
    kernels.plan_recall(maps.of(0), copies.of(0), *arguments, due, keep)
    assert copies.slots.tolist() == [[[5, 6, -1]]] and copies.pages[0, 0, :2].tolist() == [4, 1]
    assert slot_of.tolist()[1] != maps.slot_of[0, 1].tolist() == [4, -1, -1, -1, -1, -1, -1, 7]
    kernels.copy_pages(host, slots, copies.host_pages[0], copies.slots[0])
    assert torch.equal(slots[[5, 6]], host[[14, 11]])
    assert torch.equal(slots[[0, 1, 2, 3, 4, 7]].cpu(), before[[0, 1, 2, 3, 4, 7]])
    moved = kernels.Copies(*(x.clone() for x in copies))
    kernels.commit_pages(maps, moved, generations + 1)
    assert maps.slot_of[0, 1].tolist() == [4, -1, -1, -1, -1, -1, -1, 7], "the region was released meanwhile"
    kernels.commit_pages(maps, copies, generations)
    assert maps.slot_of[0].tolist() == [[-1] * 8, [4, 6, -1, -1, 5, -1, -1, 7]]
    assert maps.page_of[0, 4:].tolist() == [0, 4, 1, 7] and maps.importance[0, 5:7].tolist() == [2.0, 1.0]
    assert copies.slots.tolist() == [[[-1, -1, -1]]], "each copy is committed once"


def test_a_page_that_begins_takes_the_least_important_slot_in_every_layer() -> None:
    page_of = torch.tensor([[0, 1, 2, -1], [2, 1, 0, 3]])
    slot_of = torch.tensor([[[0, 1, 2, -1, -1]], [[2, 1, 0, 3, -1]]])
    importance = torch.tensor([[float("inf"), 1.0, 2.0, -float("inf")], [0.5, 3.0, float("inf"), 4.0]])
    maps = kernels.Maps(*here(slot_of.int(), page_of.int(), importance))
    regions, pages = here(torch.zeros(2, dtype=torch.int32), torch.tensor([9, -1], dtype=torch.int32))
    kernels.open_pages(maps, regions, pages, *here(torch.tensor([63, 64], dtype=torch.int32)), 16)
    assert torch.equal(maps.page_of.cpu(), page_of.int()), "neither begins a page: one in mid-page, one of padding"
    for _ in range(2):  # the second time the page has its slot
        kernels.open_pages(maps, regions, pages, *here(torch.tensor([64, 0], dtype=torch.int32)), 16)
        assert maps.page_of.tolist() == [[0, 1, 2, 4], [4, 1, 0, 3]]
        assert maps.slot_of.tolist() == [[[0, 1, 2, -1, 3]], [[2, 1, -1, 3, 0]]]
        assert maps.importance[:, 0].tolist() == [float("inf"), 4.0] and float(maps.importance[0, 3]) == 4.0


def test_importance_of_resident_pages_is_their_latest_score() -> None:
    page_of = torch.tensor([[0, 2, 4, -1]])
    slot_of = torch.tensor([[[0, -1, 1, -1, 2]]])
    scores = torch.tensor([[[9.0, 9.0, 0.25, 9.0, 0.5], [9.0, 9.0, 0.75, 9.0, 0.0]]])
    (maps_of,) = [kernels.Maps(*here(slot_of.int(), page_of.int(), torch.zeros(1, 4)))]
    five, one, zero = here(*(torch.tensor([x], dtype=torch.int32) for x in (5, 1, 0)))
    kernels.note_scores(maps_of.of(0), *here(scores), five, five, zero, 1, 1)
    assert not maps_of.importance.any(), "a row that attends everything says nothing"
    kernels.note_scores(maps_of.of(0), *here(scores), five, one, zero, 1, 1)
    assert maps_of.importance[0].tolist() == [float("inf"), 0.75, float("inf"), -float("inf")]


@pytest.mark.parametrize("largest", [False, True])
def test_moving_averages_are_those_of_hgca(largest: bool) -> None:
    rng = generator(8)
    rows, kv_heads, group, dim, page, k, alpha = 2, 2, 3, 64, 16, 6, 0.3
    layer = layer_of(12, kv_heads, page, dim, torch.float32, rng)
    ids = torch.randperm(12, generator=rng).view(rows, 1, k)
    tokens = torch.tensor([[k * page - 5], [2 * page]])
    valid = (tokens[..., None] - page * torch.arange(k)).clamp(0, page)
    q = torch.randn(rows, kv_heads * group, dim, generator=rng)
    average = torch.rand(12, kv_heads, page, generator=rng)
    partial, weights = weighted_partial(q, layer, PageList(ids.masked_fill(valid == 0, -1), valid), dim**-0.5)
    new = weights.view(rows, kv_heads, group, k, page)
    new = (new.amax(2) if largest else new.mean(2)).transpose(1, 2)
    expected = average.clone()
    for r in range(rows):
        for i in range(k):
            n = int(valid[r, 0, i])
            at = expected[ids[r, 0, i], :, :n]
            at.copy_((1 - alpha) * at + alpha * new[r, i, :, :n])
    (average,) = here(average)
    kernels.page_weights(*here(q, layer, ids.int(), tokens.int(), partial.lse), average, dim**-0.5, alpha, largest)
    assert torch.allclose(average.cpu(), expected, atol=1e-6)


def test_a_small_batch_is_split_to_fill_the_device() -> None:
    assert kernels.splits_for(rows=1, kv_heads=8, most_tokens=65536, processors=132) == 32
    assert kernels.splits_for(rows=40, kv_heads=8, most_tokens=65536, processors=132) == 1
    assert kernels.splits_for(rows=1, kv_heads=8, most_tokens=256, processors=132) == 1


def test_every_kernel_compiles_for_hopper_and_spills_nothing(tmp_path: Path) -> None:
    """At the shapes of the models that people serve; no GPU is needed for it."""
    report = tmp_path / "compiled.json"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_INTERPRET")}
    command = [sys.executable, "-m", "bench.triton_compile", "--json", str(report)]
    subprocess.run(command, env=environment, check=True, timeout=900, cwd=Path(__file__).parents[2])
    found = json.loads(report.read_text())
    source = "".join(path.read_text() for path in Path(kernels.__file__).parent.glob("*.py"))
    assert {entry["kernel"] for entry in found} == set(re.findall(r"def _(\w+_kernel)\(", source))
    assert not [entry for entry in found if entry["local"]]
    print(f"\n{len(found)} variants, at most {max(entry['registers'] for entry in found)} registers")

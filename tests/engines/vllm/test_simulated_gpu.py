"""vLLM's CUDA engine with our plugin, on a GPU that is simulated (simulated_gpu.py): answers, graphs, what is left.

Prompts come in chunks beside decoding rows, two share a prefix, one is preempted, another request is aborted. The
device does nothing before the host waits for it.
"""

from __future__ import annotations

import pytest
import torch

from hybrid_backend.tools.plan.simulate.costs import LAUNCHES as SIMULATED
from tests.engines.probes import ROOT, Probe, run

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a real GPU is there: tests/engines/vllm/test_gpu_engine.py"),
]

SPARSE = ["scout.sparse", "scout.per_head", "scout.codes", "infinigen.sparse", "clo.sparse"]
WINDOWS = "headinfer.windows"
SCOUT = [f"_{kernel}_kernel" for kernel in (
    "stream", "queries", "score", "combine", "select", "ask", "append", "partial", "await", "merge", "plan", "copy",
    "sample",
)]  # fmt: skip
V2 = ["scout", "clo", "hgca", "hgca.caches", "headinfer", "dense", "apex"]
INT8 = ["scout.int8", "dense.int8", "hgca.int8"]
"""Cases whose K and V are in 8 bits, which changes answers of a random model."""
V1 = ["scout.full", "apex.overlap"]
ROWS = 4  # gpu_probe.ROWS
APEX = {"apex": "lockstep", "apex.overlap": "overlap"}
LATE_V2, LATE_V1 = ["late", "late.always"], ["late.full"]
EXACT = {"scout": "gpu.model_runner", "scout.full": "gpu_model_runner"}
FAMILIES_V2, FAMILIES_V1 = ["gemma3", "gpt_oss", "lfm2"], ["gemma3.full", "gpt_oss.full", "lfm2.full"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Probe:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    folder = tmp_path_factory.mktemp("simulated")
    v2 = [*V2, *INT8, *SPARSE, WINDOWS, "scout.promise", *FAMILIES_V2, "again", *LATE_V2, "at_once"]
    run(folder, "vllm/gpu_probe.py", "v2", *v2, seconds=3000, paths=[ROOT])
    return run(folder, "vllm/gpu_probe.py", "v1", *V1, *LATE_V1, *FAMILIES_V1, seconds=3000, paths=[ROOT])


@pytest.mark.parametrize("name", [*V2, *V1])
def test_answers_are_those_of_the_model(seen: Probe, name: str) -> None:
    """Token for token as transformers, although the frames hold a part only."""
    found = seen(name)
    assert found["tokens"] == found["expected"]
    assert found["preempted"] == ["2"] and "aborted" in found["ran"] and found["left"] is None
    assert found["replays"] > 0, "captured at start with rows that nobody scheduled"
    if name.startswith(("scout", "hgca", "apex")):
        assert found["cpu_tokens"] > 0


def test_8_bits_answer_the_same_from_frames_and_over_the_bus(seen: Probe) -> None:
    """All read the same stored values: `scout` in frames, whole layers and by the CPU, `dense` in the host pool, and
    `hgca` in its ring and, of tokens that have left it, in context caches."""
    scout, dense, hgca = (seen(name) for name in INT8)
    assert scout["tokens"] == dense["tokens"] == hgca["tokens"]
    assert scout["cpu_tokens"] > 0 and hgca["cpu_tokens"] > 0
    assert all(found["replays"] > 0 for found in (scout, dense, hgca))
    assert scout["page_bytes"] == 2 * 2 * 16 * (32 + 2) and seen("scout")["page_bytes"] == 2 * 2 * 16 * 32 * 4
    assert all(found["planned"].items() <= found["gauges"].items() for found in (scout, dense, hgca))


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_steps_attend_exactly_what_they_select(seen: Probe, name: str) -> None:
    """In replayed graphs on a late device, recalls and copies under way: every row of every layer as fp64 attention
    over the pages of the host pool that were selected. And the figures are those of what the device did."""
    found, attention = seen(name), seen(name)["attention"]
    assert attention["worst"] < 1e-4
    assert attention["sparse_rows"] > 15 and found["replays"] > 0
    assert set(found["preempted"]) == {"2"}
    for layer, counted in enumerate(found["layers"]):
        assert attention["pages"][str(layer)] == counted["resident_lookups"]
        assert 0 < counted["resident_hits"] <= counted["resident_lookups"] - (layer > 0)
        if name == "clo.sparse" and layer > 0:
            assert 0 < counted["head_hits"] < counted["head_lookups"] and counted["loaded_head_pages"] > 0
        elif layer > 0:
            assert counted["recalled_pages"] > 0
            assert (counted["cpu_tokens"] > 0) == name.startswith("scout")
            assert (counted["lead_seconds"] > 0) == (counted["wait_seconds"] > 0) == name.startswith("scout")
            # Steps with prompts are graphs in pieces, in which no query is predicted.
            assert 0 < counted["mass_sum"] < counted["mass_samples"]
            assert 0 < abs(counted["cosine_sum"]) <= counted["cosine_samples"]
    assert found["copied_bytes"] > 0


def test_heads_with_a_window_attend_their_first_and_last_pages_and_the_others_everything(seen: Probe) -> None:
    """In replayed graphs: every head of every row as fp64 attention over these pages of the host pool."""
    found, plain = seen(WINDOWS), seen("headinfer")
    for each in (found, plain):
        assert each["attention"]["worst"] < 1e-4 and each["attention"]["rows"] > 15 and each["replays"] > 0
    assert plain["attention"]["sparse_rows"] == 0 < found["attention"]["sparse_rows"]
    assert all(found["gauges"][each] == size for each, size in found["planned"].items())


def test_a_promised_mass_is_followed_in_replayed_graphs(seen: Probe) -> None:
    """Four of up to ten pages hold less than 0.99: the budget grows as far as the frames go, then all is attended."""
    found, gauges = seen("scout.promise"), seen("scout.promise")["gauges"]
    assert found["attention"]["worst"] < 1e-4 and found["replays"] > 0 and found["compiled_late"] == []
    assert 0 < gauges["hybrid_quality_mass"] < gauges["hybrid_quality_min_mass"] == 0.99
    assert gauges["hybrid_quality_budget_tokens"] >= 6 * 16
    assert all(gauges[each] == size for each, size in found["planned"].items())


@pytest.mark.parametrize("name", [*V2, *V1])
def test_no_kernel_is_compiled_while_somebody_waits(seen: Probe, name: str) -> None:
    """But where rows park, whose first steps nobody can make up."""
    assert seen(name)["compiled_late"] == [] or name == "apex.overlap"


# Of a layer, at most; as they are in docs/lab/cuda.md. The layers of headinfer have three pieces here, and six at most.
LAUNCHES = {
    "scout": 20, "scout.sparse": 20, "scout.per_head": 20, "scout.codes": 20, "infinigen.sparse": 20, "dense": 4,
    "hgca": 11, "hgca.caches": 11, "clo": 18, "clo.sparse": 18, "headinfer": 11, WINDOWS: 8, "apex": 8,
}  # fmt: skip


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_layer_is_a_few_launches(seen: Probe, name: str) -> None:
    """Its prediction with it, counted in the captured graph; the oracle's are not."""
    launches = {int(layer): counted for layer, counted in seen(name)["launches"].items()}
    print(name, launches)
    counts = {layer: sum(counted.values()) - counted.get("", 0) for layer, counted in launches.items()}
    # The last layer hands the counters over as well.
    assert max(counts.values()) <= LAUNCHES[name]
    if name.startswith(("scout", "infinigen")):
        assert counts[0] == 4, "exact, on the device whole: two stores, attention, merge"
        assert counts[1] + 1 >= counts[2]
    if name == "scout.sparse":
        assert sorted(launches[1].items()) == sorted({"": 1, "mm": 1, **dict.fromkeys(SCOUT, 1)}.items())


@pytest.mark.parametrize("name", ["scout", "scout.sparse"])
def test_steps_that_mix_prompts_with_decode_rows_have_their_lookahead(seen: Probe, name: str) -> None:
    """In replayed pieces too, for each layer that can be predicted. The first layer here is exact."""
    mixed = seen(name)["mixed"]
    assert mixed["steps"] > 0 and mixed["lookaheads"] == 2 * mixed["steps"]


# What kernels may read and write over the bus, in decode steps. Whoever has frames attends nothing there.
READ = {
    "scout": {"_merge_kernel", "_await_kernel", "_copy_kernel"}, "hgca": {"_merge_kernel", "_await_kernel"},
    "infinigen": {"_copy_kernel", "_commit_kernel"}, "clo": {"_copy_kernel"}, "dense": {"_partial_kernel"},
    "headinfer": {"_copy_kernel", "_partial_kernel"}, "apex": {"_partial_kernel", "_take_rows_kernel"},
}  # fmt: skip
WRITTEN = {
    "scout": {"_select_kernel", "_ask_kernel"}, "hgca": {"_ask_kernel"},
    "apex": {"_ask_rows_kernel", "_publish_kernel"},
}  # fmt: skip
SAMPLED = [name for name in SPARSE if name != "clo.sparse"]  # a layer again when its last sample has come
COPYING = 12  # programs


@pytest.mark.parametrize("name", [*V2, *SPARSE, WINDOWS])
def test_little_crosses_the_bus_in_a_step(seen: Probe, name: str) -> None:
    """Of a row and layer its token, its query and, where the CPU had a part, the answer; pages that are due, once, by a
    few programs."""
    found, method = seen(name), name.partition(".")[0]
    bus, replayed = found["bus"], found["replayed"]
    print(name, bus, replayed.get("_await_kernel"))
    encoded = {"_encode_kernel"} if name == "scout.codes" else set()  # reads the keys of a page that has become whole
    assert {kind for kind, (read, _) in bus.items() if read} <= READ[method] | encoded
    samples = {"_sample_kernel"} if name in SAMPLED else set()
    writing = WRITTEN.get(method, set()) | {"_append_kernel"} | samples
    assert {kind for kind, (_, written) in bus.items() if written} <= writing
    token, vector, page = 2 * 2 * 32 * 4, 4 * 32 * 4, found["page_bytes"]  # of gpu_probe's model, in fp32
    assert 0 < bus["_append_kernel"][1] <= replayed["_append_kernel"] * ROWS * token
    assert bus["_append_kernel"][1] % token == 0
    assert found["programs"] <= COPYING
    if encoded:
        assert bus["_encode_kernel"][0] % (page // 2) == 0
        assert 0 < bus["_encode_kernel"][0] // (page // 2) < bus["_append_kernel"][1] // token
    if samples:  # a row's query, its pages and those that it selects, the cosines of all
        most = vector + 4 * (4 * ROWS + 12 + 2 * 13 + 1)
        assert 0 < bus["_sample_kernel"][1] <= replayed["_sample_kernel"] * most
    if "_copy_kernel" in bus and method != "headinfer":  # a page, or a head's part of it
        assert bus["_copy_kernel"][0] % (page // 2 if method == "clo" else page) == 0
        assert 0 < bus["_copy_kernel"][0] <= found["copied_bytes"]
    if method == "headinfer":  # head pages that stream, and without frames the growing page
        assert bus["_copy_kernel"][0] % (page // 2) == 0 and ("_partial_kernel" in bus) == (name != WINDOWS)
        assert 0 < bus["_copy_kernel"][0] <= found["copied_bytes"]
    if name == WINDOWS:  # Three of six heads stream, and the frames hold four of at most ten pages.
        assert bus["_copy_kernel"][0] < seen("headinfer")["bus"]["_copy_kernel"][0] / 2
    if "_publish_kernel" in bus:
        assert bus["_publish_kernel"][1] == replayed["_publish_kernel"] * ROWS * 2 * 4
    if "_await_kernel" in bus:
        asked = replayed["_ask_kernel"]
        assert replayed["_await_kernel"] == asked
        assert bus["_await_kernel"][0] % 4 == 0 and bus["_ask_kernel"][1] == asked * (ROWS * vector + 4)
        # The lse of all rows, which says whose partial is there.
        assert bus["_merge_kernel"][0] <= asked * ROWS * (4 * 4 + vector)
        assert name == "scout" or bus["_merge_kernel"][0] < asked * ROWS * vector
    if "_select_kernel" in bus:
        most = sum(layer["resident_lookups"] - layer["resident_hits"] for layer in found["layers"]) * 2
        assert bus["_select_kernel"][1] <= 4 * (most + replayed["_select_kernel"] * ROWS * 2)


@pytest.mark.parametrize("name", ["scout.sparse", "infinigen.sparse", "clo.sparse", "hgca", "headinfer", "dense"])
def test_the_simulator_counts_the_same_launches(seen: Probe, name: str) -> None:
    """Of clo in the last layer, which has no persistent heads and hands the counters over too; and of a whole layer."""
    counts = {int(layer): sum(found.values()) - found.get("", 0) for layer, found in seen(name)["launches"].items()}
    known = SIMULATED[name.removesuffix(".sparse")]
    assert (counts[2] - 1 if name == "clo.sparse" else counts[1]) == known.sparse
    if name in SPARSE:
        assert counts[0] == known.whole


@pytest.mark.parametrize(("name", "runner"), EXACT.items())
def test_exact_steps_of_both_model_runners_attend_everything_with_queries_predicted_in_three_launches(
    seen: Probe, name: str, runner: str
) -> None:
    """But those of the first layer, which is exact. vLLM's CPU worker, when imported, replaces streams, events, pinning
    and UVA buffers by nothing; the CUDA worker leaves them as they are."""
    found = seen(name)
    assert found["runner"] == f"vllm.v1.worker.{runner}" and not found["made_harmless"]
    assert found["attention"]["worst"] < 1e-4
    assert found["attention"]["rows"] > 0 and found["attention"]["sparse_rows"] == 0
    assert found["predictors"] == ["NoneType", "FusedPredictor", "FusedPredictor"]


@pytest.mark.parametrize("name", [*FAMILIES_V2, *FAMILIES_V1])
def test_models_with_other_layers_beside_full_attention_answer_as_themselves(seen: Probe, name: str) -> None:
    """In replayed graphs, with requests that outgrow their window and the frames: token for token as transformers. The
    host pool holds the layers with full attention, and nothing is left in any group's pool of blocks. Layers with a
    window stay on the device by the engine's own kernels; a state, in a block for each request and one that nobody
    owns, where rows that nobody scheduled write."""
    found = seen(name)
    assert found["tokens"] == found["expected"]
    assert found["replays"] > 0 and found["cpu_tokens"] > 0 and "aborted" in found["ran"]
    assert found["backends"]["full_attention"] == "HybridBackend"
    assert found["gauges"]["hybrid_host_pool_pages"] == found["planned"]["hybrid_host_pool_pages"]
    assert found["gauges"]["hybrid_device_bytes"] == found["planned"]["hybrid_device_bytes"]
    assert found["window_bytes"] == found["planned_window_bytes"]
    assert found["blocks_left"] == 0
    if name.startswith("lfm2"):
        assert found["backends"]["state"] == "ShortConvAttentionBackend" and found["state_blocks"] == [ROWS + 1]
    else:
        assert found["backends"]["sliding_attention"] == "TritonAttentionBackend" and found["window_bytes"] > 0


def test_the_last_token_of_a_cached_prompt_is_answered_by_the_graph_it_replays(seen: Probe) -> None:
    first, second = seen("again")["tokens"]
    assert first == second


@pytest.mark.parametrize("name", ["late", "late.full"])
def test_a_step_without_the_cpu_s_answers_is_computed_again_and_nobody_else_s(seen: Probe, name: str) -> None:
    """The workers get none of one step's questions, while the step after it is under way. Its two requests, of which
    one would have ended in it, answer as if nothing had been; the third is not touched."""
    found = seen(name)
    assert found["late"] == [["0", "1"]] == found["preempted"]
    assert found["tokens"] == found["expected"]
    assert set(found["reasons"].values()) == {"length"}
    assert found["scheduler"] == "RecomputingAsyncScheduler"
    assert found["running"] == 0


def test_requests_that_are_late_again_end_with_an_error_and_no_wrong_token(seen: Probe) -> None:
    """The workers never answer: the engine lives, and ends a request after its second try at a token. Some come to
    their end all the same: what is computed again as a prompt asks no worker."""
    found = seen("late.always")
    assert "error" in found["reasons"].values() and set(found["reasons"].values()) <= {"error", "length"}
    for name, tokens in found["tokens"].items():
        assert tokens == found["expected"][name][: len(tokens)]
    assert found["running"] == 0


@pytest.mark.parametrize("name", APEX)
def test_requests_are_on_the_device_or_on_the_cpu_whole_and_nothing_is_left_of_them(seen: Probe, name: str) -> None:
    """Steps of both kinds replay the same graphs; under overlap, rows park, also beside the chunks of prompts, whose
    steps replay graphs in pieces."""
    found = seen(name)
    assert {done for done, _ in found["steps"]} == {"gpu", APEX[name]}
    assert found["scheduler"] == ("ParkingScheduler" if name == "apex.overlap" else "RecomputingAsyncScheduler")
    assert (found["parked"] > 1) == (name == "apex.overlap")
    assert found["gauges"]["hybrid_moved_requests"] > 0 and found["copied_bytes"] > 0
    left = ("hybrid_frames_in_use", "hybrid_resident_requests", "hybrid_parked_rows")
    assert [found["gauges"][name] for name in left] == [0, 0, 0]


@pytest.mark.parametrize("name", [*V2, *V1])
def test_the_gpu_s_memory_is_what_was_planned(seen: Probe, name: str) -> None:
    found = seen(name)
    growing = {"hybrid_context_cache_bytes"} if name.startswith("hgca") else set()
    assert all(found["gauges"][each] == size for each, size in found["planned"].items() if each not in growing)


def test_a_gpu_admits_as_many_requests_at_once_as_it_has_memory_for(seen: Probe) -> None:
    """1,024 were asked for, which is vLLM's default on large GPUs."""
    small, middle, large = list(seen("at_once").values())[:3]
    assert "frames_per_request: auto: one request needs" in small["refused"]
    assert "choose fewer frames or a smaller host_pool.size" in small["refused"]
    assert 1 < middle["admitted"] < 1024
    assert large["admitted"] == 1024


def test_steps_in_parts_are_refused(seen: Probe) -> None:
    assert "leave out --enable-dbo and --ubatch-size" in seen("at_once")["in parts"]["refused"]

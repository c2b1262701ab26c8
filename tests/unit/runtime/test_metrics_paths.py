"""Every figure means the same on every path: compared with counts made here, of selections made here.

The test's own digests say what each query selects; which pages the device tier held is noted when a step begins; what
was recalled is what it holds when the next one begins. Nothing here asks who computed the step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from hybrid_backend.attention.quality import covered_tokens, mass_recall
from hybrid_backend.batch import Step
from hybrid_backend.config import HybridConfig
from hybrid_backend.in_place.step import InPlaceStep
from hybrid_backend.kernels import oracle
from hybrid_backend.observe.metrics import Publisher
from hybrid_backend.step.driver import StepDriver
from tests.support.harness import PAGE, Engine, config, resident, spec

FRAMES, LAYERS, EXACT, STEPS, CHUNK, REST = 6, 3, 0, 8, 40, 0.002
BASE: dict[str, object] = {
    "frames_per_request": FRAMES, "exact_layers": [EXACT], "recall": {"intervals": 2},
    "metrics": {"sample_interval": 1}, "selection": {"digest": "minmax"},
    "whole_layers": [],  # on every path the exact layer has frames (test_simulated_gpu.py counts whole ones)
}  # fmt: skip
TORCH = {"workers": {"threads": 2, "deadline_seconds": 20, "kernel": "torch"}}
KERNELS: dict[str, object] = {"device_kernels": "triton"}
PATHS: dict[str, dict[str, object]] = {
    "quest": {"method": "quest"},
    "native": {},
    "torch": TORCH,
}
MORE: dict[str, dict[str, object]] = {
    "as is": {},
    "per head": {"selection": {"granularity": "kv_head", "digest": "minmax"}},
    "infinigen": {"method": "infinigen"},
}
CASES = [(path, ahead, "as is") for path in PATHS for ahead in (True, False)]
CASES += [(path, True, more) for path, more in (("quest", "per head"), ("native", "per head"), ("native", "infinigen"))]


@dataclass
class Counted:
    """Of one layer."""

    selected_tokens: float = 0
    context_tokens: int = 0
    cpu_tokens: float = 0
    resident_lookups: float = 0
    resident_hits: float = 0
    recalled_pages: int = 0
    masses: list[float] = field(default_factory=list)
    cosines: list[float] = field(default_factory=list)
    asked_ahead: int = 0  # steps in which the CPU had something to do for a predicted query


class Watched(Engine):
    """Counts what it sees of the queries and of the device tier."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.layers = [Counted() for _ in range(self.model.num_layers)]
        self.asks_cpu = self.cfg.method == "scout" and bool(self.runtime.tiers.frames.size)
        self.held: dict[tuple[str, int], set[int]] = {}
        self.predicted: dict[int, Tensor] = {}
        self.work: dict[str, int] = {}
        self._forward, self._lookahead = self.runtime.forward, self.runtime.lookahead
        self.runtime.forward, self.runtime.lookahead = self.seen, self.foreseen  # type: ignore[method-assign]

    def _begin(self, work: dict[str, int]) -> tuple[Step, list[int]]:
        before, self.work = self.held, work
        opened = {name: s.tokens // PAGE for name, s in self.sequences.items() if name in work}
        begun = super()._begin(work)
        self.held = {
            (name, layer): resident(self, name, layer) for name in self.sequences for layer in range(len(self.layers))
        }
        for (name, layer), pages in self.held.items():
            if not self.runtime.tiers.frames.size:
                continue
            if before.get((name, layer)):
                self.layers[layer].recalled_pages += len(pages - before[name, layer] - {opened.get(name)})
        return begun

    def foreseen(self, layer: int, step: Step, q: Tensor) -> None:
        self.predicted[layer] = q.cpu()
        self._lookahead(layer, step, q)
        time.sleep(REST)

    def seen(self, layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        self._forward(layer, step, q, k, v, out)
        if step.decode is None:
            return
        ahead, entry, true = self.predicted.pop(layer, None), self.layers[layer], q.cpu()
        if ahead is not None:
            entry.cosines.append(float(torch.cosine_similarity(ahead, true, dim=-1).mean()))
        on_cpu = 0.0
        for r, name in enumerate(self.work):
            tokens = self.sequences[name].tokens + 1
            lists = self.selection(name, layer, (true if ahead is None else ahead)[r], tokens)
            everything = range(-(-tokens // PAGE))
            entry.context_tokens += tokens
            here = self.held[name, layer] if self.runtime.tiers.frames.size else set(everything)
            for pages in lists:
                sizes = {page: min(PAGE, tokens - page * PAGE) for page in pages}
                entry.selected_tokens += sum(sizes.values()) / len(lists)
                entry.resident_lookups += len(pages) / len(lists)
                entry.resident_hits += len(pages & here) / len(lists)
                on_cpu += sum(size for page, size in sizes.items() if page not in here) / len(lists)
            if any(len(pages) < len(everything) for pages in lists):
                entry.masses.append(self.mass(name, layer, true[r], lists, tokens))
        if self.asks_cpu:
            entry.cpu_tokens += on_cpu
            entry.asked_ahead += ahead is not None and on_cpu > 0

    def selection(self, name: str, layer: int, q: Tensor, tokens: int) -> list[set[int]]:
        """By digests of what the request wrote; the growing page is always selected, whatever its digest."""
        count = -(-tokens // PAGE)
        fits = self.cfg.budget_pages if self.cfg.method == "quest" else FRAMES
        if layer == EXACT or count <= fits:
            return [set(range(count))]
        kv = torch.stack(self.sequences[name].kv[layer])[:, :, 0]
        whole = kv[: (count - 1) * PAGE].view(count - 1, PAGE, *kv.shape[1:])
        digests = torch.zeros(count, self.model.num_kv_heads, 2, self.model.head_dim)
        digests[:-1] = torch.stack([whole.amax(1), whole.amin(1)], 2)
        how, cfg = self.cfg.selection, self.cfg
        table, pages, budget = (
            torch.tensor(x, dtype=torch.int32) for x in ([range(count)], [count], [cfg.budget_pages])
        )
        scores = oracle.page_scores(
            q[None], digests, table, pages, budget, how.aggregate, how.granularity == "kv_head", how.bound,
            self.model.scale,
        )  # fmt: skip
        free = scores[0, :, cfg.sinks : count - cfg.recent].topk(cfg.budget_pages - cfg.sinks - cfg.recent).indices
        always = {*range(cfg.sinks), *range(count - cfg.recent, count)}
        return [always | {page + cfg.sinks for page in chosen} for chosen in free.tolist()]

    def mass(self, name: str, layer: int, q: Tensor, lists: list[set[int]], tokens: int) -> float:
        pages = torch.tensor(self.sequences[name].pages)
        covered = covered_tokens(torch.tensor([sorted(pages) for pages in lists]), tokens, PAGE)
        return mass_recall(q, self.kv[layer].flatten(0, 2), pages, covered, self.model.num_kv_heads, self.model.scale)


def run(settings: HybridConfig, device: torch.device) -> Watched:
    """A request in chunks grows out of its frames beside short ones, which come and go; pages are recalled."""
    made = Watched(settings, spec(LAYERS), num_pages=64, max_requests=3, device=device)
    made.admit("a", FRAMES * PAGE - 1, chunk=CHUNK)
    made.admit("b", 2 * PAGE + 3)
    for step in range(STEPS):
        if step == STEPS // 2:
            made.drop("b")
            made.held = {key: pages for key, pages in made.held.items() if key[0] != "b"}
            made.admit("c", PAGE)
        made.step(
            dict.fromkeys(["a", "b"] if step < STEPS // 2 else ["c", "a"], 1), lookahead_noise=0.3, tolerance=None
        )
    return made


def value(registry: CollectorRegistry, name: str, layer: int | None = None) -> float | None:
    return registry.get_sample_value(name, {"rank": "0"} | ({} if layer is None else {"layer": str(layer)}))


@pytest.mark.parametrize(("path", "ahead", "more"), CASES, ids=lambda x: str(x).replace(" ", "-"))
def test_every_figure_is_what_an_independent_count_says(path: str, ahead: bool, more: str) -> None:
    check_figures(PATHS[path] | MORE[more], ahead)


def check_figures(keys: dict[str, object], ahead: bool, device: torch.device | None = None) -> None:
    """``device``: the far one."""
    settings = config(**BASE | keys | {"lookahead": {"enabled": ahead}})
    began = time.perf_counter()
    made = run(settings, device or torch.device("cpu"))
    check(made, elapsed=time.perf_counter() - began)


def check(made: Watched, elapsed: float) -> None:
    runtime, registry = made.runtime, CollectorRegistry()
    if isinstance(runtime.executor, StepDriver):
        runtime.executor.samples.finish()  # a device's are measured beside it
    has_frames, separate = bool(runtime.tiers.frames.size), runtime.tiers.stream is not None
    copies_in, page_bytes = made.cfg.method == "infinigen", made.model.page_bytes(PAGE)
    publisher = Publisher(runtime.stats, runtime.gauges, 0, registry)
    publisher.publish(force=True)
    stats, gauges = runtime.stats.layers, runtime.gauges()
    made._begin({"a": 1})  # what the last step recalled is there now
    copied = runtime.gauges()["hybrid_copied_bytes"]

    for layer, (counted, expected) in enumerate(zip(stats, made.layers, strict=True)):
        for name in (
            "selected_tokens",
            "context_tokens",
            "cpu_tokens",
            "resident_lookups",
            "resident_hits",
            "recalled_pages",
        ):
            assert getattr(counted, name) == pytest.approx(getattr(expected, name)), f"{name} of layer {layer}"
        assert 0 < counted.resident_hits <= counted.resident_lookups
        assert (counted.mass_samples, counted.cosine_samples) == (len(expected.masses), len(expected.cosines))
        assert counted.mass_sum == pytest.approx(sum(expected.masses), abs=1e-4)
        assert counted.cosine_sum == pytest.approx(sum(expected.cosines), abs=1e-4)
        waits = expected.cpu_tokens > 0
        assert expected.asked_ahead * REST <= counted.lead_seconds <= elapsed
        assert (counted.lead_seconds > 0) == waits
        assert 0 <= counted.wait_seconds <= elapsed
        in_place = isinstance(runtime.executor, InPlaceStep)
        assert (0 < counted.attention_seconds < elapsed) if in_place else counted.attention_seconds == 0
        assert counted.wait_seconds > 0 if waits else counted.wait_seconds == 0 or has_frames

    selecting = [layer for layer in range(LAYERS) if layer != EXACT]
    for layer in selecting if has_frames else ():
        misses = stats[layer].resident_lookups - stats[layer].resident_hits
        assert misses > 0 and stats[layer].recalled_pages > 0, "nothing was missing: this shows less"
        assert (stats[layer].cpu_tokens > 0) == (not copies_in)

    # Bytes: recalls alone, since prompts are attended in the frames in which their requests decode.
    pages = sum(entry.recalled_pages for entry in stats)
    assert copied == (pages * page_bytes if separate else 0)
    held = sum(map(len, made.held.values())) if has_frames else 0
    assert gauges["hybrid_frames_in_use"] == runtime.gauges()["hybrid_frames_in_use"] == held
    assert gauges["hybrid_resident_requests"] == (2 if has_frames else 0)

    # What is published is what was counted; what was not counted has no sample.
    for name, amount in gauges.items():
        assert value(registry, name) == amount
    for layer, counted in enumerate(stats):
        shown = vars(counted) | {
            "resident_hit_ratio": counted.resident_hits / counted.resident_lookups,
            "predicted_query_cosine": counted.cosine_samples and counted.cosine_sum / counted.cosine_samples,
            "attention_mass_recall": counted.mass_samples and counted.mass_sum / counted.mass_samples,
        }
        for name, amount in shown.items():
            if not name.startswith(("cosine", "mass")):
                gauge = "resident_hit_ratio", "predicted_query_cosine", "attention_mass_recall"
                found = value(registry, f"hybrid_{name}" + ("" if name in gauge else "_total"), layer)
                assert found == (pytest.approx(amount) if amount else None), f"{name} of layer {layer}"


@pytest.mark.parametrize("path", ["quest", "native", "kernels"])
def test_before_anything_is_decoded_nothing_is_said_of_residency(path: str) -> None:
    """No ratio of 1.0 that nobody measured; of every layer there is the count of attended tokens, which is 0."""
    keys = BASE | (KERNELS if path == "kernels" else PATHS[path])
    made, registry = Engine(config(**keys), spec(LAYERS)), CollectorRegistry()
    made.admit("a", 3 * PAGE)
    Publisher(made.runtime.stats, made.runtime.gauges, 0, registry).publish(force=True)
    for layer in range(LAYERS):
        assert value(registry, "hybrid_resident_hit_ratio", layer) is None
        assert value(registry, "hybrid_selected_tokens_total", layer) == 0


WHOLE: dict[str, dict[str, object]] = {
    "dense": {"method": "dense"},
    "dense, torch": {"method": "dense", **TORCH},
    "headinfer": {"method": "headinfer"},
    "headinfer, a head of four stays": {
        "method": "headinfer", "headinfer": {"resident_heads": ["0:1", "1:0"]},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_methods_without_frames_attend_whole_contexts_where_they_lie(name: str) -> None:
    """Where the device tier is the host pool every page is there; where it is not, what streams is not."""
    made = Engine(config(**WHOLE[name]), spec(2), num_pages=64)
    made.add("a", 3 * PAGE + 5)
    made.add("b", PAGE)
    for request in ("a", "b"):
        made.prefill(request)
    lengths = [(3 * PAGE + 5 + step, PAGE + step) for step in range(3)]
    for _ in lengths:
        made.step({"a": 1, "b": 1})
    tokens = sum(before + 1 for step in lengths for before in step)
    pages = sum(before // PAGE + 1 for step in lengths for before in step)
    whole = sum(before // PAGE for step in lengths for before in step)  # the last page is attended where it lies
    share = {"headinfer": 1.0, "headinfer, a head of four stays": 0.5}.get(name, 0.0)
    for entry in made.runtime.stats.layers:
        assert (entry.selected_tokens, entry.cpu_tokens) == (tokens, 0)
        assert (entry.resident_lookups, entry.resident_hits) == (pages, (1 - share) * pages)
        assert (entry.recalled_pages, entry.wait_seconds, entry.lead_seconds) == (0, 0, 0)
    copied = made.runtime.gauges()["hybrid_copied_bytes"]
    assert copied == share * whole * made.model.num_layers * made.model.page_bytes(PAGE)


def test_hgca_counts_tokens_and_looks_no_page_up() -> None:
    """What its heads keep lies in no page. Its CPU is asked when its device begins. The pages of its window are copied
    once if another request computed them, and never if its own prompt did."""
    ring = 2
    made = Engine(config(method="hgca", sparse="never", hgca={"window_tokens": ring * PAGE}), spec(2))
    made.admit("a", 4 * PAGE)
    made.decode("a", steps=3)
    for entry in made.runtime.stats.layers:
        assert entry.selected_tokens == sum(4 * PAGE + step for step in (1, 2, 3))
        assert entry.cpu_tokens == 3 * (5 - ring - made.cfg.sinks) * PAGE
        assert entry.resident_lookups == entry.resident_hits == entry.recalled_pages == entry.mass_samples == 0
        assert entry.wait_seconds > 0 and entry.lead_seconds > 0
    assert made.runtime.gauges()["hybrid_copied_bytes"] == 0
    whole = made.add("b", 4 * PAGE + 1, shared_with="a")
    whole.prompt = whole.tokens
    made.decode("b")
    copied = (ring + made.cfg.sinks - 1) * 2 * made.model.page_bytes(PAGE)  # the last page begins with its token
    assert made.runtime.gauges()["hybrid_copied_bytes"] == copied

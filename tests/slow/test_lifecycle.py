"""The tiers' rules over random request lives: append, attend, recall, abort, preempt, prefix reuse, finish."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybrid_backend.methods.clo import Clo
from hybrid_backend.methods.headinfer import HeadInfer
from hybrid_backend.methods.hgca import Hgca
from tests.support.harness import PAGE, Engine, config, decode_step, spec
from tests.support.scenario import check_digests, check_nothing_is_left, step

MAX_REQUESTS = 5


class Life(RuleBasedStateMachine):
    """An engine that does everything an engine may do; after each step every invariant holds.

    Every output is attention in fp64 of exactly the pages or tokens that the method says that it selected. With
    ``sparse: never`` and fewer frames than pages residency, CPU partials, evictions and merges all happen, and every
    output must still be dense attention.
    """

    method = "scout"
    kv_dtype = "auto"

    @initialize(
        sparse=st.sampled_from(["never", "auto", "always"]),
        granularity=st.sampled_from(["layer", "kv_head"]),
        query=st.sampled_from(["predicted", "real", "none"]),
        kernel=st.sampled_from(["native", "torch"]),
        digest=st.sampled_from(["auto", "minmax", "codes"]),
        factors=st.sampled_from([(), (1.25, 1, 1, 0.75)]),
        interval=st.sampled_from(["auto", 3, 8]),
        seed=st.integers(0, 2**16),
    )
    def start(
        self, sparse: str, granularity: str, query: str, kernel: str, digest: str, factors: tuple[float, ...],
        interval: int | str, seed: int,
    ) -> None:  # fmt: skip
        cfg = config(
            method=self.method,
            sparse=sparse,
            selection={
                "granularity": "layer" if self.method == "infinigen" else granularity,
                "digest": digest,
                "interval": "auto" if self.method == "clo" else interval,
            },
            lookahead={"enabled": False} if query == "none" else {"enabled": True, "partial_query": query},
            workers={"kernel": "native" if self.method == "quest" else kernel, "threads": 2, "deadline_seconds": 20},
            recall={"intervals": 2},
            exact_layers=[1],
            budget_factors=factors,
            frames_per_request=5,
            staging_tokens=3 * PAGE,
            hgca={"window_tokens": 4 * PAGE, "alpha": 0.5},
            headinfer={
                "group_thresholds": [3 * PAGE, 6 * PAGE],
                "resident_heads": ["0:1"],
                "window_heads": ["1:0", "3:0", "3:1"],
                "window_tokens": PAGE,
            },
            clo={"eta": 0.3, "persistent": ["0:0", "0:1", "3:1"]},
            metrics={"sample_interval": 7},
            kv_dtype=self.kv_dtype,
        )
        model = spec(layers=4, windows=(None, None, 24, None))
        if self.kv_dtype == "int8":
            model = replace(model, kv_dtype=torch.int8)
        self.engine = Engine(cfg, model, max_requests=MAX_REQUESTS, seed=seed, is_witnessed=True)
        self.count = 0

    def ready(self) -> list[str]:
        return [name for name, request in self.engine.sequences.items() if request.tokens >= request.prompt]

    def waiting(self) -> list[str]:
        return [name for name, request in self.engine.sequences.items() if request.tokens < request.prompt]

    @precondition(lambda self: len(self.engine.sequences) < MAX_REQUESTS)
    @rule(prompt=st.integers(1, 9 * PAGE))
    def arrive(self, prompt: int) -> None:
        self.count += 1
        self.engine.add(f"r{self.count}", prompt)

    @precondition(lambda self: self.ready() and len(self.engine.sequences) < MAX_REQUESTS)
    @rule(data=st.data(), more=st.integers(1, 3 * PAGE))
    def arrive_with_cached_prefix(self, data: st.DataObject, more: int) -> None:
        donor = data.draw(st.sampled_from(self.ready()))
        self.count += 1
        self.engine.add(f"r{self.count}", self.engine.sequences[donor].tokens + more, shared_with=donor)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data(), chunk=st.integers(1, 4 * PAGE))
    def mixed_step(self, data: st.DataObject, chunk: int) -> None:
        """Compute a prompt chunk beside decoding rows, in any order of rows."""
        name = data.draw(st.sampled_from(self.waiting()))
        request = self.engine.sequences[name]
        work = {name: min(chunk, request.prompt - request.tokens), **dict.fromkeys(self.ready(), 1)}
        step(self.engine, {name: work[name] for name in data.draw(st.permutations(list(work)))})

    @precondition(lambda self: self.ready())
    @rule(data=st.data(), steps=st.integers(1, 12))
    def decode(self, data: st.DataObject, steps: int) -> None:
        names = data.draw(st.lists(st.sampled_from(self.ready()), min_size=1, unique=True))
        for _ in range(steps):
            if max(self.engine.sequences[name].tokens for name in names) > 16 * PAGE:
                break
            step(self.engine, dict.fromkeys(names, 1))

    @precondition(lambda self: self.engine.sequences)
    @rule(data=st.data())
    def finish_or_abort(self, data: st.DataObject) -> None:
        self.engine.drop(data.draw(st.sampled_from(sorted(self.engine.sequences))))

    @precondition(lambda self: self.engine.sequences)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.engine.preempt(data.draw(st.sampled_from(sorted(self.engine.sequences))))

    @precondition(lambda self: self.ready())
    @rule(data=st.data())
    def fail_half_way(self, data: st.DataObject) -> None:
        """A forward that dies between lookahead and attend leaves nothing behind."""
        name = data.draw(st.sampled_from(self.ready()))
        self.engine.begin_and_die(name, is_told=data.draw(st.booleans()))

    @invariant()
    def digests_are_those_of_what_was_written(self) -> None:
        digests = self.engine.runtime.tiers.digests
        if digests is not None and digests.layers:
            check_digests(self.engine)

    @invariant()
    def host_pages_hold_what_was_written(self) -> None:
        for s in self.engine.sequences.values():
            for layer in range(self.engine.model.num_layers):
                for t in range(0, s.tokens, 7):
                    written = self.content(layer, self.engine.kv[layer][s.pages[t // PAGE]])[:, :, t % PAGE]
                    assert torch.equal(written, s.kv[layer][t]), f"{s.name}: layer {layer}, token {t}"

    def content(self, layer: int, page: torch.Tensor) -> torch.Tensor:
        """Return K and V of a page, ``[kv_heads, 2, page_size, head_dim]``, decoded."""
        kv = self.engine._format(layer)
        return torch.stack(kv.decode(page), 1) if kv.is_int8 else page

    @invariant()
    def frames_belong_to_running_requests_and_equal_their_host_pages(self) -> None:
        frames, method = self.engine.runtime.tiers.frames, self.engine.runtime.method
        if not frames.size:
            return  # pages are attended where they lie: none is resident
        owned = {name: index for name in self.engine.sequences if (index := frames.index(name)) is not None}
        assert len(set(owned.values())) == len(owned) == frames.running
        nobody = sorted(set(range(MAX_REQUESTS)) - set(owned.values()))
        if isinstance(method, Clo):
            assert not method._state.labels[:, nobody].any()  # type: ignore[type-var]
            for name, index in owned.items():
                self.clo_s_frames_hold_what_belongs_there(method, name, index)
            return
        if isinstance(method, HeadInfer):
            for name, index in owned.items():
                self.headinfer_s_frames_hold_what_belongs_there(method, name, index)
            return
        buffers = decode_step(self.engine).buffers
        page_of = buffers.maps.page_of.view(len(buffers.maps.page_of), -1, MAX_REQUESTS).transpose(1, 2)
        assert (page_of[:, nobody] == -1).all(), "the frames of nobody still hold pages"
        assert (buffers.maps.frame_of[:, nobody] == -1).all()
        for name, index in owned.items():
            last = (self.engine.sequences[name].tokens - 1) // PAGE
            for layer, row in ((layer, buffers.position) for layer, buffers in buffers.layers.items()):
                held = page_of[row, index].tolist()
                pages = {page: index + i * MAX_REQUESTS for i, page in enumerate(held) if page >= 0}
                assert len(pages) == sum(page >= 0 for page in held), "a page in two frames of one request"
                frame_of = enumerate(buffers.maps.frame_of[row, index].tolist())
                assert {page: frame for page, frame in frame_of if frame >= 0} == pages, "the two maps disagree"
                # A step that began the next page and died may have given the tail's frame away to it.
                assert last in pages or last + 1 in pages, "the tail page is always resident"
                for page, frame in pages.items():
                    self.is_copy(layer, name, page, frame)

    def is_copy(self, layer: int, name: str, page: int, frame: int) -> None:
        request = self.engine.sequences[name]
        tokens = min(PAGE, request.tokens - page * PAGE)
        pages = self.engine.runtime.tiers.frames.layers[layer][frame], self.engine.kv[layer][request.pages[page]]
        copy, source = (self.content(layer, x)[:, :, :tokens] for x in pages)
        assert torch.equal(copy, source)

    def clo_s_frames_hold_what_belongs_there(self, method: Clo, name: str, index: int) -> None:
        """Whole contexts that fit; else sinks, recent pages, and what each head loaded when it was asked last.

        A step that began the next page and died may have admitted the request with that page instead of an older one.
        """
        request, cfg, heads = self.engine.sequences[name], self.engine.cfg, self.engine.model.num_kv_heads
        count = -(-request.tokens // PAGE)
        begun = count + (request.tokens % PAGE == 0)
        always = set(range(count))
        for pages in {count, begun}:
            if pages > method._limit:
                always &= {*range(cfg.sinks), *range(pages - cfg.recent, pages)}
        for layer, store in self.engine.runtime.tiers.frames.layers.items():
            for page in sorted(always):
                self.is_copy(layer, name, page, index + int(method.frame_of(torch.tensor([page]))) * MAX_REQUESTS)
            if layer not in method._row or count <= method._limit:
                continue
            for head in range(heads):
                if not method._state.labels[method._row[layer], index, head * 2 : head * 2 + 2].any():
                    continue
                cached = method._state.pages[method._row[layer], index * heads + head]
                for i, page in enumerate(cached.tolist()):
                    frame = store[index + (cfg.sinks + i) * MAX_REQUESTS, head]
                    assert torch.equal(frame, self.engine.kv[layer][request.pages[page], head])

    def headinfer_s_frames_hold_what_belongs_there(self, method: HeadInfer, name: str, index: int) -> None:
        """Sinks and the window. A step that began the next page and died may have written to the oldest one's frame."""
        first, last, count = method._first, method._last, -(-self.engine.sequences[name].tokens // PAGE)
        pages = range(count) if count < first + last else (*range(first), *range(count - last + 1, count))
        for layer in self.engine.runtime.tiers.frames.layers:
            for page in pages:
                self.is_copy(layer, name, page, index + int(method.frame_of(torch.tensor([page]))) * MAX_REQUESTS)

    @invariant()
    def context_caches_hold_evicted_tokens_of_running_requests(self) -> None:
        method, tiers = self.engine.runtime.method, self.engine.runtime.tiers
        if not isinstance(method, Hgca):
            return
        running = {tiers.frames.index(name): name for name in self.engine.sequences}
        for layer, store in tiers.cache.stores.items():
            for index in range(MAX_REQUESTS):
                lengths = tiers.cache.tokens[tiers.cache.row[layer], index]
                for head, positions in enumerate(tiers.cache.positions(layer, index)):
                    assert len(positions) == lengths[head]
                    assert index in running or not len(positions), "the index of nobody still has a context cache"
                    if not len(positions):
                        continue
                    name = running[index]
                    assert positions.tolist() == sorted(set(positions.tolist())), "each token once, in order"
                    assert int(positions[-1]) // PAGE < method._running[name].first
                    for i in range(0, len(positions), 5):
                        page = self.content(layer, store[index * tiers.cache.pages + i // PAGE])
                        token = page[head, :, i % PAGE]
                        assert torch.equal(token, self.engine.sequences[name].kv[layer][int(positions[i])][head])

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            for name in list(self.engine.sequences):
                self.engine.drop(name)
            check_nothing_is_left(self.engine)
            self.engine.close()


def lives_of(method: str, examples: int = 40, kv_dtype: str = "auto") -> Any:
    """Return the test case of a method."""
    machine = type(f"LifeOf{method.title()}", (Life,), {"method": method, "kv_dtype": kv_dtype})
    # No shrinking: it takes minutes here; the printed blob reproduces a failure.
    phases = [Phase.explicit, Phase.reuse, Phase.generate]
    machine.TestCase.settings = settings(max_examples=examples, stateful_step_count=40, phases=phases)
    return machine.TestCase


TestEveryLifeKeepsTheRules = lives_of("scout", 150)
TestEveryLifeOfClo = lives_of("clo")
TestEveryLifeOfDense = lives_of("dense")
TestEveryLifeOfHeadInfer = lives_of("headinfer")
TestEveryLifeOfHgca = lives_of("hgca")
TestEveryLifeOfInfiniGen = lives_of("infinigen")
TestEveryLifeOfQuest = lives_of("quest")
TestEveryLifeOfScoutIn8Bits = lives_of("scout", kv_dtype="int8")
TestEveryLifeOfCloIn8Bits = lives_of("clo", 15, "int8")
TestEveryLifeOfHgcaIn8Bits = lives_of("hgca", 15, "int8")

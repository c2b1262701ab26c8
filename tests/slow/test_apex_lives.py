"""APEX over random request lives: rows that wait from one step to the next, late answers, requests that arrive, grow,
move, are aborted, preempted and left out of steps. Every token is the model's, whatever happened on the way."""

from __future__ import annotations

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybrid_backend.methods.apex.parking import Parking
from tests.support.harness import PAGE, config
from tests.support.tiny_engine import TinyEngine, TinyModel, random_prompt

LAYERS, MAX_REQUESTS = 3, 5
MODEL = TinyModel(LAYERS, seed=3)


class Lives(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(1, 12),
        kernel=st.sampled_from(["native", "torch"]),
    )
    def start(self, pages: int, kernel: str) -> None:
        cfg = config(
            method="apex", workers={"kernel": kernel, "threads": 2, "deadline_seconds": 20},
            apex={"strategy": "overlap", "device_tokens": pages * PAGE},
        )  # fmt: skip
        self.engine = TinyEngine(cfg, MODEL, max_requests=MAX_REQUESTS)
        self.count, self.late, self.strategy = 0, False, "overlap"
        self.engine.method._strategy = (  # type: ignore[method-assign]
            lambda rows, on_cpu: self.strategy if bool(on_cpu.any()) else "gpu"
        )
        # Late: no answer is there where nobody waits for it; else all are.
        self.parking.questions.has_arrived = lambda request, ticket: not self.late  # type: ignore[attr-defined]

    @property
    def parking(self) -> Parking:
        parking = self.engine.executor.waiting
        assert parking is not None
        return parking

    @precondition(lambda self: len(self.engine.requests) < MAX_REQUESTS)
    @rule(length=st.integers(1, 5 * PAGE), seed=st.integers(0, 99))
    def arrive(self, length: int, seed: int) -> None:
        self.engine.add(f"r{self.count}", random_prompt(length, seed))
        self.count += 1

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), times=st.integers(1, 2 * LAYERS))
    def step(self, data: st.DataObject, times: int) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.engine.requests)), unique=True, min_size=1))
        for _ in range(times):
            self.engine.step(names)

    @precondition(lambda self: self.engine.requests)
    @rule(times=st.integers(1, 3 * LAYERS))
    def step_all(self, times: int) -> None:
        self.engine.advance(times)

    @rule(late=st.booleans(), strategy=st.sampled_from(["overlap", "overlap", "lockstep"]))
    def change(self, late: bool, strategy: str) -> None:
        self.late, self.strategy = late, strategy

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.drop(data.draw(st.sampled_from(sorted(self.engine.requests))))

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.engine.preempt(data.draw(st.sampled_from(sorted(self.engine.requests))))

    @invariant()
    def every_token_is_the_model_s(self) -> None:
        assert self.engine.failed == []
        self.engine.check_answers()

    @invariant()
    def frames_are_those_of_requests_on_the_device(self) -> None:
        shared, tiers = self.engine.runtime.method._residency, self.engine.runtime.tiers
        assert shared is not None
        held = [frame for frames in shared._frames.values() for frame in frames]
        assert len(set(held)) == len(held) <= shared.placement.pages
        assert shared.placement.used <= shared.placement.pages
        if tiers.frames.layers:
            assert len(held) + len(shared._supply._free) + len(shared._supply._borrower) == shared.placement.pages
            mapped = self.engine.executor.buffers.maps.frame_of[0]
            assert sorted(mapped[mapped >= 0].tolist()) == sorted(held)
        assert self.parking.parked_rows <= tiers.frames.running

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for name in list(self.engine.requests):
            self.engine.drop(name)
        gauges = self.engine.runtime.gauges()
        assert self.parking.parked_rows == gauges["hybrid_resident_requests"] == gauges["hybrid_frames_in_use"] == 0
        self.engine.close()


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=20, stateful_step_count=25, deadline=None, phases=[Phase.explicit, Phase.generate, Phase.shrink]
)

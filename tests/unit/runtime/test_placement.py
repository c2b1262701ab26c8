"""Which requests are on the device: by arrival, never more than it holds, and nobody waits for a place."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybrid_backend.methods.apex.placement import Placement


def test_requests_go_to_the_device_as_they_arrive_while_it_has_room() -> None:
    placement = Placement(10, 0.95)
    placement.step({"a": 4, "b": 6}, settled=[])
    assert "a" in placement and "b" in placement and placement.used == 10


def test_once_one_goes_to_the_cpu_so_do_later_ones_of_that_step() -> None:
    placement = Placement(10, 0.95)
    placement.step({"a": 4, "b": 7, "c": 1}, settled=[])
    assert [name in placement for name in "abc"] == [True, False, False]
    placement.step({"a": 4, "b": 7, "c": 1, "d": 1}, settled=[])
    assert "d" in placement, "a request goes to the CPU only if it does not fit"


def test_growth_without_room_evicts_the_youngest_on_the_device() -> None:
    placement = Placement(10, 0.95)
    placement.step({"a": 4, "b": 3, "c": 3}, settled=[])
    moves = placement.step({"a": 5, "b": 3, "c": 3}, settled="abc")
    assert moves.evicted == ["c"] and moves.returned == [] and placement.used == 8


def test_one_that_outgrows_the_device_alone_evicts_itself() -> None:
    placement = Placement(3, 1.0)
    placement.step({"a": 3}, settled=[])
    assert placement.step({"a": 4}, settled="a").evicted == ["a"] and placement.used == 0


def test_the_oldest_returns_while_the_device_is_then_at_most_so_full() -> None:
    placement = Placement(20, 0.95)
    placement.step({"a": 10, "b": 11, "c": 9}, settled=[])
    assert [name in placement for name in "abc"] == [True, False, False]
    assert placement.step({"a": 10, "b": 11, "c": 9}, settled="abc").returned == [], "b comes first, and has no room"
    placement.release("a")
    assert placement.step({"b": 11, "c": 9}, settled="bc").returned == ["b"], "20 of 20 is more than 0.95"
    assert placement.step({"b": 11, "c": 8}, settled="bc").returned == ["c"]


def test_a_request_in_the_middle_of_a_token_stays_where_it_is_and_keeps_its_turn() -> None:
    placement = Placement(10, 1.0)
    placement.step({"a": 10, "b": 4, "c": 4}, settled=[])
    placement.release("a")
    assert placement.step({"b": 4, "c": 4}, settled="c").returned == []
    assert placement.step({"b": 4, "c": 4}, settled="bc").returned == ["b", "c"]


def test_a_request_that_can_never_return_holds_up_nobody() -> None:
    placement = Placement(10, 1.0)
    placement.step({"a": 10, "huge": 11, "c": 4}, settled=[])
    placement.release("a")
    assert placement.step({"huge": 11, "c": 4}, settled=["huge", "c"]).returned == ["c"]


@pytest.mark.parametrize("name", ["a", "nobody"])
def test_released_requests_leave_nothing(name: str) -> None:
    placement = Placement(10, 1.0)
    placement.step({"a": 10}, settled=[])
    placement.release(name)
    assert placement.used == (0 if name == "a" else 10)


class Lives(RuleBasedStateMachine):
    """Requests arrive, grow, end; steps run some of them."""

    @initialize(pages=st.integers(1, 30), swap_in=st.sampled_from([0.5, 0.95, 1.0]))
    def start(self, pages: int, swap_in: float) -> None:
        self.placement, self.limit = Placement(pages, swap_in), swap_in * pages
        self.pages: dict[str, int] = {}
        self.seen: list[str] = []
        self.next = 0

    @rule(pages=st.integers(1, 35))
    def arrive(self, pages: int) -> None:
        self.pages[f"r{self.next}"] = pages
        self.next += 1

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.pages)))
        self.placement.release(name)
        del self.pages[name]
        self.seen = [each for each in self.seen if each != name]

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.pages)), unique=True, min_size=1))
        for name in names:
            if name in self.seen:
                self.pages[name] += data.draw(st.integers(0, 1))
        settled = data.draw(st.sets(st.sampled_from(names)))
        before = {name for name in self.seen if name in self.placement}
        moves = self.placement.step({name: self.pages[name] for name in names}, settled)
        after = {name for name in [*self.seen, *names] if name in self.placement}
        assert set(moves.evicted) == before - after
        assert set(moves.returned) == (after - before) & set(self.seen) <= settled
        if moves.returned:
            assert not moves.evicted
            fresh = sum(self.pages[name] for name in after - set(self.seen))
            assert self.placement.used - fresh <= self.limit
        on_cpu = [name for name in names if name not in self.seen and name not in after]
        if on_cpu:  # and with it those of the step that came later
            later = names[names.index(on_cpu[0]) :]
            assert not [name for name in later if name not in self.seen and name in after]
        self.seen += [name for name in names if name not in self.seen]

    @invariant()
    def the_device_is_never_over_its_tokens(self) -> None:
        if hasattr(self, "placement"):
            assert 0 <= self.placement.used <= self.placement.pages


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

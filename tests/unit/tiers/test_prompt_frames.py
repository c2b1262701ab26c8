"""Frames of running prompts: what a chunk finds in them is what its own prompt wrote, whoever comes and goes."""

from __future__ import annotations

import random

import pytest
import torch

from hybrid_backend.batch import PrefillRow, Step
from hybrid_backend.tiers.frame_supply import IndexedFrames, SharedFrames
from hybrid_backend.tiers.frames import FramePool
from hybrid_backend.tiers.prompt_frames import PromptFrames

PAGE, REQUESTS, SIZE = 4, 4, 3
CPU = torch.device("cpu")


class Device:
    """Frames that remember the request and page that wrote them last."""

    def __init__(self, sinks: int = 0) -> None:
        self.pool = FramePool({}, REQUESTS, SIZE, CPU)
        self.frames = PromptFrames(IndexedFrames(self.pool), PAGE, sinks, CPU)
        self.content: dict[int, tuple[str, int]] = {}
        self.tokens: dict[str, int] = {}  # of running prompts
        self.crossed: list[tuple[str, int]] = []  # pages that were copied from the host to a frame
        self._first, self._born = dict[str, int](), 0

    def prefill(self, **chunks: int) -> dict[str, int]:
        """Run chunks of so many tokens in one step; return the earlier tokens of each that the host must send."""
        rows, start = [], 0
        for name, count in chunks.items():
            seq_len = self.tokens.setdefault(name, 0) + count
            pages = self._first_page(name) + torch.arange(-(-seq_len // PAGE))
            written = pages[self.tokens[name] // PAGE :].int()
            rows.append(PrefillRow(name, start, start + count, seq_len, pages, written))
            start += count
        none = torch.empty(0)
        self.frames.begin(Step(0, start, None, rows, none, none, none))
        if self.frames.fills is not None:
            names = {first // 1000: name for name, first in self._first.items()}
            for page, frame in zip(self.frames.fills.pages.tolist(), self.frames.fills.frames.tolist(), strict=True):
                self.content[frame] = names[page // 1000], page % 1000
                self.crossed.append(self.content[frame])
        token_frames = [-1] * start if self.frames.token_frames is None else self.frames.token_frames.tolist()
        missing = {}
        for row in rows:
            chunk, before = self.frames.chunk(row.request_id), row.earlier_tokens
            owners = [(row.request_id, t // PAGE) for t in range(before, row.seq_len)]
            missing[row.request_id] = before
            if chunk is None:
                assert set(token_frames[row.start : row.end]) == {-1}
                self.tokens[row.request_id] = row.seq_len
                continue
            missing[row.request_id] = chunk.missing_tokens
            assert chunk.earlier + chunk.missing_tokens == before
            listed = [self.content[frame] for frame in chunk.ids.tolist()[: -(-chunk.earlier // PAGE)]]
            on_host = [("", int(page) % 1000) for page in chunk.missing]
            assert {name for name, _ in listed} <= {row.request_id}
            assert sorted(page for _, page in [*listed, *on_host]) == list(range(-(-before // PAGE)))
            for frame, owner in zip(token_frames[row.start : row.end], owners, strict=True):
                if frame >= 0:
                    self.content[frame] = owner
            if chunk.tokens:  # The call over pages finds the whole chunk, in order, at the end of the list.
                assert -1 not in token_frames[row.start : row.end]
                own_pages = list(range(before // PAGE, -(-row.seq_len // PAGE)))
                tail = chunk.ids.tolist()[-len(own_pages) :]
                assert [self.content[frame][1] for frame in tail] == own_pages
            self.tokens[row.request_id] = row.seq_len
        return missing

    def _first_page(self, name: str) -> int:
        """Return the host page of a request's first page, a multiple of 1000 that no other request has."""
        if name not in self._first:
            self._born += 1
            self._first[name] = 1000 * self._born
        return self._first[name]

    def decode(self, name: str) -> list[int]:
        """Begin to decode; return the pages that the request finds on the device."""
        index = self.pool.allocate(name)
        found = self.frames.take(name, self.tokens.pop(name))
        for page, frame in enumerate(found):
            assert frame < 0 or self.content[frame] == (name, page)
        for slot in range(SIZE):
            self.content[index + slot * REQUESTS] = (f"{name} decodes", slot)
        return [page for page, frame in enumerate(found) if frame >= 0]

    def end(self, name: str) -> None:
        self.tokens.pop(name, None)
        self._first.pop(name, None)
        self.pool.release(name)
        self.frames.release(name)


def test_a_prompt_borrows_the_frames_of_requests_that_do_not_run_and_gives_them_back() -> None:
    device = Device()
    assert device.prefill(a=5 * PAGE) == {"a": 0}
    assert device.prefill(a=5 * PAGE) == {"a": 0}
    assert device.decode("a") == list(range(10))
    assert device.prefill(b=SIZE * PAGE * 3 + 1) == {"b": 0}, "three indices are free"
    assert device.prefill(b=1) == {"b": PAGE}, "nine pages fit, and the first one is not among them"


def test_a_request_that_arrives_takes_its_frames_back_and_the_prompt_reads_these_pages_from_the_host() -> None:
    device = Device()
    device.prefill(a=4 * SIZE * PAGE)
    assert device.prefill(b=1) == {"b": 0}
    assert device.prefill(a=PAGE)["a"] >= SIZE * PAGE
    device.end("b")
    device.end("a")
    assert all(device.pool.lend(name) is not None for name in "wxyz"), "an index is lost"


def test_a_chunk_that_is_longer_than_all_frames_leaves_its_last_pages() -> None:
    device = Device()
    pages = REQUESTS * SIZE + 2
    device.prefill(a=pages * PAGE)
    assert device.decode("a") == list(range(2, pages))


def test_a_prompt_that_is_computed_again_begins_anew() -> None:
    device = Device()
    device.prefill(a=2 * PAGE)
    device.tokens["a"] = PAGE  # the engine dropped the step's tokens
    assert device.prefill(a=2 * PAGE) == {"a": 0}
    assert device.crossed == [("a", 0)]


def test_pages_of_a_prefix_hit_cross_once_and_lie_where_the_request_decodes() -> None:
    device = Device()
    device.tokens["a"] = 4 * PAGE
    assert device.prefill(a=PAGE + 1) == device.prefill(a=PAGE) == {"a": 0}
    assert sorted(device.crossed) == [("a", page) for page in range(4)]
    assert device.decode("a") == list(range(7))


def test_a_request_that_fits_finds_page_n_in_its_nth_frame_behind_a_hit_too() -> None:
    for hit in range(SIZE):
        device = Device()
        device.tokens["a"] = hit * PAGE
        device.prefill(a=SIZE * PAGE - hit * PAGE)
        index = device.pool.allocate("a")
        assert device.frames.take("a", SIZE * PAGE) == [index + slot * REQUESTS for slot in range(SIZE)]


def test_a_hit_that_is_longer_than_all_frames_keeps_its_sink_and_its_last_pages_and_streams_the_others() -> None:
    device = Device(sinks=1)
    pages = REQUESTS * SIZE + 4
    device.tokens["a"] = pages * PAGE
    assert device.prefill(a=PAGE) == {"a": 5 * PAGE}
    assert device.prefill(a=PAGE) == {"a": 6 * PAGE}, "the oldest page but the sink gave way"
    assert len(device.crossed) == REQUESTS * SIZE - 1
    assert device.decode("a") == [0, *range(7, pages + 2)]


def test_new_pages_of_one_prompt_come_before_the_hit_of_another() -> None:
    device = Device()
    device.tokens["a"] = REQUESTS * SIZE * PAGE
    assert device.prefill(a=PAGE, b=2 * SIZE * PAGE)["b"] == 0
    assert device.decode("b") == list(range(2 * SIZE))


def test_shared_frames_are_borrowed_until_a_decoding_request_takes_them() -> None:
    supply = SharedFrames(5)
    frames = PromptFrames(supply, PAGE, 0, CPU)
    pages, none = torch.arange(4), torch.empty(0)
    frames.begin(
        Step(0, 4 * PAGE, None, [PrefillRow("a", 0, 4 * PAGE, 4 * PAGE, pages, pages.int())], none, none, none)
    )
    taken = supply.take(3)
    assert len(set(taken)) == 3
    left = frames.take("a", 4 * PAGE)
    assert sum(frame >= 0 for frame in left) == 5 - 3 and not set(taken).intersection(left)
    supply.keep([frame for frame in left if frame >= 0])
    supply.free(taken)
    assert sorted(supply.take(3)) == sorted(taken)


@pytest.mark.parametrize("seed", range(30))
def test_whoever_comes_and_goes_no_prompt_reads_what_another_request_wrote(seed: int) -> None:
    chance, device, running = random.Random(seed), Device(), dict[str, str]()
    for number in range(120):
        prompts = [name for name, state in running.items() if state == "prompt"]
        event = chance.random()
        if len(running) < REQUESTS and event < 0.3:
            running[f"r{number}"] = "prompt"
            device.tokens[f"r{number}"] = chance.choice([0, 0, 2 * PAGE])  # a prefix that another request left
        elif prompts and event < 0.75:
            chosen = chance.sample(prompts, chance.randint(1, len(prompts)))
            device.prefill(**{name: chance.randint(1, 6 * PAGE) for name in chosen})
        elif prompts and event < 0.85:
            name = chance.choice(prompts)
            if device.tokens[name]:
                device.decode(name)
                running[name] = "decodes"
        elif running:
            name = chance.choice(list(running))
            device.end(name)
            del running[name]
    for name in running:
        device.end(name)
    assert device.frames.running == device.pool.running == 0
    assert all(device.pool.reserve(f"last {i}") is not None for i in range(REQUESTS)), "an index is lost"

"""Frames of running prompts: what a chunk finds in them is what its own prompt wrote, whoever comes and goes."""

from __future__ import annotations

import random

import pytest
import torch

from hybrid_backend.batch import PrefillRow, Step
from hybrid_backend.tiers.frames import FramePool
from hybrid_backend.tiers.prompt_frames import PromptFrames

PAGE, REQUESTS, SIZE = 4, 4, 3
CPU = torch.device("cpu")


class Device:
    """Frames that remember the request and page that wrote them last."""

    def __init__(self) -> None:
        self.pool = FramePool({}, REQUESTS, SIZE, CPU)
        self.frames = PromptFrames(self.pool, PAGE, CPU)
        self.content: dict[int, tuple[str, int]] = {}
        self.tokens: dict[str, int] = {}  # of running prompts

    def prefill(self, **chunks: int) -> dict[str, int]:
        """Run chunks of so many tokens in one step; return the earlier tokens of each that the host must send."""
        rows, start = [], 0
        for name, count in chunks.items():
            seq_len = self.tokens.setdefault(name, 0) + count
            pages = 1000 + torch.arange(-(-seq_len // PAGE))
            written = pages[self.tokens[name] // PAGE :].int()
            rows.append(PrefillRow(name, start, start + count, seq_len, pages, written))
            start += count
        none = torch.empty(0)
        self.frames.begin(Step(0, start, None, rows, none, none, none))
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
            on_host = [("", int(page) - 1000) for page in chunk.missing]
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
    assert device.prefill(a=2 * PAGE) == {"a": PAGE}


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

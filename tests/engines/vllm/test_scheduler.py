"""A failed step is taken back by vLLM's own schedulers, without a model: what is dropped, preempted, forgotten. Rows
that wait are scheduled once more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from hybrid_backend.batch import StepFailure
from hybrid_backend.engines.vllm.outputs import checked
from hybrid_backend.engines.vllm.scheduler import (
    ParkingScheduler,
    RecomputingAsyncScheduler,
    RecomputingScheduler,
)
from hybrid_backend.errors import DeadlineError
from hybrid_backend.step.request_room import RequestRoom

pytestmark = pytest.mark.engine

BLOCK, BLOCKS = 16, 40


class Core:
    """An engine core whose model says token 7, or a wrong one in a step that failed."""

    def __init__(self, folder: Path, is_async: bool = False, parks: bool = False) -> None:
        from transformers import LlamaConfig

        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=256, architectures=["LlamaForCausalLM"],
        ).save_pretrained(folder)  # fmt: skip
        model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32")
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
        cache.num_gpu_blocks = BLOCKS
        config = VllmConfig(
            model_config=model,
            cache_config=cache,
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=256, max_model_len=256, is_encoder_decoder=False,
                async_scheduling=is_async,
            ),
        )  # fmt: skip
        config.scheduler_config.async_scheduling = is_async
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=model.dtype)
        kv = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        kind = ParkingScheduler if parks else RecomputingAsyncScheduler if is_async else RecomputingScheduler
        self.scheduler = kind(config, kv, StructuredOutputManager(config), block_size=BLOCK)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.told: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}

    def add(self, name: str, prompt: list[int], tokens: int = 8) -> None:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        sampling.update_from_generation_config({}, None)
        self.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=self.hasher))
        self.told[name] = []

    def schedule(self) -> Any:
        return self.scheduler.schedule()

    def answer(
        self,
        scheduled: Any,
        failed: list[str] | None = None,
        token: int = 7,
        silent: Sequence[str] = (),
        unfinished: Sequence[str] = (),
        room: RequestRoom | None = None,
    ) -> None:
        """The step's output comes; ``failed``: these requests' tokens in it are wrong; ``silent``: these have none."""
        names = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[[] if name in silent else [13 if name in (failed or ()) else token] for name in names],
        )
        failure = None
        if failed is not None:
            pages = [page for name in failed for page in self.written.get(name, [])]
            failure = StepFailure(DeadlineError("late"), failed, pages)
        output = checked(output, failure, unfinished, room)
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for each in outputs.outputs:
                self.told[each.request_id] += each.new_token_ids
                if each.finish_reason is not None:
                    self.reasons[each.request_id] = str(each.finish_reason)

    @property
    def written(self) -> dict[str, list[int]]:
        """The page that each running request's next token goes to."""
        return {each.request_id: self.scheduler.kv_cache_manager.get_block_ids(each.request_id)[0][-1:]
                for each in self.scheduler.running}  # fmt: skip

    def run(self) -> None:
        while self.scheduler.has_requests():
            self.answer(self.schedule())


def prompt(first: int, length: int = 20) -> list[int]:
    return [(first + at) % 64 for at in range(length)]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_only_the_failed_requests_are_computed_again(tmp_path: Path, is_async: bool) -> None:
    """With asynchronous scheduling the next step is under way already, on wrong tokens: it is dropped for them too."""
    core = Core(tmp_path, is_async)
    for at, name in enumerate("abc"):
        core.add(name, prompt(10 * at))
    core.answer(core.schedule())
    bad = core.schedule()
    after = core.schedule() if is_async else None
    core.answer(bad, failed=["a", "b"])
    assert [core.told[name] for name in "abc"] == [[7], [7], [7, 7]]
    if after is not None:
        again = core.schedule()
        core.answer(after, token=9)
        assert [core.told[name] for name in "abc"] == [[7], [7], [7, 7, 9]]
        core.answer(again)
    else:
        again = core.schedule()
        core.answer(again)
    assert again.num_scheduled_tokens["a"] > 1 and again.num_scheduled_tokens["c"] == 1
    core.run()
    assert all(len(core.told[name]) == 8 and 13 not in core.told[name] for name in "abc")
    assert set(core.reasons.values()) == {"length"}


def test_a_request_that_fails_again_without_a_token_ends_with_an_error(tmp_path: Path) -> None:
    core = Core(tmp_path)
    for at, name in enumerate("ab"):
        core.add(name, prompt(10 * at))
    core.answer(core.schedule())
    core.answer(core.schedule(), failed=["a"])
    core.answer(core.schedule(), failed=["a"])
    assert core.reasons == {"a": "error"} and core.told["a"] == [7]
    core.run()
    assert core.reasons["b"] == "length" and len(core.told["b"]) == 8


def test_pages_with_wrong_kv_leave_the_prefix_cache(tmp_path: Path) -> None:
    """The failed step filled a page, which vLLM had entered in its prefix cache when it planned the step."""
    core = Core(tmp_path)
    core.add("a", prompt(0, BLOCK + BLOCK - 1))
    core.answer(core.schedule())
    bad = core.schedule()  # the 32nd token's KV
    core.answer(bad, failed=["a"])
    core.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)  # or it writes that page first
    core.add("b", [*prompt(0, BLOCK + BLOCK - 1), 7, 1, 2])
    found = core.schedule().scheduled_new_reqs
    assert {each.req_id: each.num_computed_tokens for each in found}.get("b") == BLOCK


@pytest.mark.parametrize("what", ["preempted", "aborted"])
def test_what_was_on_its_way_for_a_request_that_was_taken_out_is_not_told(tmp_path: Path, what: str) -> None:
    core = Core(tmp_path, is_async=True)
    core.add("a", prompt(0))
    core.answer(core.schedule())
    bad, pages = core.schedule(), core.written["a"]
    request = core.scheduler.requests["a"]
    if what == "preempted":
        core.scheduler.running.remove(request)
        core.scheduler._preempt_request(request, 0.0)
    else:
        core.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    names = list(bad.num_scheduled_tokens)
    output = ModelRunnerOutput(req_ids=names, req_id_to_index={"a": 0}, sampled_token_ids=[[13]])
    core.scheduler.update_from_output(bad, checked(output, StepFailure(DeadlineError("late"), ["a"], pages)))
    core.run()
    assert 13 not in request.output_token_ids
    assert len(core.told["a"]) == (8 if what == "preempted" else 1)


def test_a_row_that_waits_gets_its_token_once_more_and_its_page_to_the_prefix_cache_when_it_is_done(
    tmp_path: Path,
) -> None:
    core = Core(tmp_path, parks=True)
    core.add("a", prompt(0, BLOCK - 1))
    core.answer(core.schedule())  # the next token fills the page
    (page,) = core.written["a"]
    block = core.scheduler.kv_cache_manager.block_pool.blocks[page]
    for _ in range(3):
        scheduled = core.schedule()
        assert scheduled.num_scheduled_tokens == {"a": 1} and core.scheduler.requests["a"].num_tokens == BLOCK
        core.answer(scheduled, silent=["a"], unfinished=["a"])
        assert block.block_hash is None and core.written["a"] == [page]
    core.answer(core.schedule())
    assert core.told["a"] == [7, 7] and block.block_hash is not None
    core.run()
    assert core.reasons == {"a": "length"}


@pytest.mark.parametrize("waits", [True, False])
def test_a_row_that_is_computed_again_one_token_at_a_time_waits_like_any_other(tmp_path: Path, waits: bool) -> None:
    """It has no token to yield, whether it waits or is done: only the worker knows."""
    core = Core(tmp_path, parks=True)
    core.add("a", prompt(0, BLOCK))
    for _ in range(4):
        core.answer(core.schedule())
    request = core.scheduler.requests["a"]
    core.scheduler.running.remove(request)
    core.scheduler._preempt_request(request, 0.0)
    most, core.scheduler.max_num_scheduled_tokens = core.scheduler.max_num_scheduled_tokens, 1  # the others' are more
    scheduled = core.schedule()
    assert scheduled.num_scheduled_tokens == {"a": 1} and request.num_computed_tokens == BLOCK + 1
    core.answer(scheduled, silent=["a"], unfinished=["a"] if waits else [])
    assert request.num_computed_tokens == BLOCK + (not waits)
    core.scheduler.max_num_scheduled_tokens = most
    core.run()
    assert core.told["a"] == 8 * [7] and core.reasons == {"a": "length"}


# --- how many requests may run ---


@pytest.mark.parametrize("kind", ["synchronous", "asynchronous", "parking"])
def test_no_request_starts_beyond_the_room_that_the_last_step_named_and_all_of_them_end(
    tmp_path: Path, kind: str
) -> None:
    """Two of 20 tokens fit the device, and one more the CPU, until a step names no limit."""
    core = Core(tmp_path, is_async=kind == "asynchronous", parks=kind == "parking")
    room = RequestRoom(device_tokens=60, cpu_tokens=30)
    core.add("first", prompt(0), tokens=3)
    core.answer(core.schedule(), room=room)
    for index in range(4):
        core.add(f"later {index}", prompt(20 + index), tokens=3)
    scheduled = core.schedule()
    assert set(scheduled.num_scheduled_tokens) == {"first", "later 0", "later 1"}
    core.answer(scheduled, room=room)
    scheduled = core.schedule()
    assert "later 2" not in scheduled.num_scheduled_tokens, "nobody has ended yet"
    core.answer(scheduled, room=None)
    assert "later 3" in core.schedule().num_scheduled_tokens, "there is no limit any more"


def test_a_request_larger_than_the_room_runs_when_nothing_else_does(tmp_path: Path) -> None:
    core, room = Core(tmp_path), RequestRoom(device_tokens=10, cpu_tokens=5)
    core.add("first", prompt(0), tokens=2)
    core.add("large", prompt(9, 100), tokens=2)
    core.answer(core.schedule(), room=room)
    steps = 0
    while core.scheduler.has_requests():
        core.answer(core.schedule(), room=room)
        steps += 1
        assert steps < 9, "a request waits for ever"
    assert {name: len(tokens) for name, tokens in core.told.items()} == {"first": 2, "large": 2}

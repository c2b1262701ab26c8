"""With ``--enable-mixed-chunk`` running requests share batches with prompts, and decode there as everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_backend.attention.lookahead import Layer
from hybrid_backend.config import config_from_mapping
from hybrid_backend.engines.sglang.patches import _all_freed
from tests.engines import ends
from tests.engines.answers import StockAnswers
from tests.engines.conftest import TOKENS
from tests.engines.server import Server
from tests.engines.sglang.server import hybrid_server
from tests.engines.sglang.suite import prompts

pytestmark = pytest.mark.engine
PAGE, LAYERS, HEADS, DIM = 16, 2, 2, 16
CHUNK = 64
FLAGS = ("--dtype", "float32", "--enable-mixed-chunk", "--chunked-prefill-size", str(CHUNK))
FLAGS += ("--max-running-requests", "4")
COUNTED = "hybrid_selected_tokens_total"


class Scheduler:
    """SGLang's row table and token pool over a `Session`, and batches as its eager runner hands them on."""

    def __init__(self, **keys: Any) -> None:
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.runtime_context import get_context

        from hybrid_backend.engines.sglang.pool import HostTokenPool
        from hybrid_backend.engines.sglang.session import Session

        pool = HostTokenPool(64 * PAGE, PAGE, torch.float32, HEADS, DIM, LAYERS, "cpu", False)
        self.rows = ReqToTokenPool(4, 32 * PAGE, "cpu", False)
        layer = SimpleNamespace(tp_q_head_num=HEADS, tp_k_head_num=HEADS, qk_head_dim=DIM, v_head_dim=DIM, scaling=0.25)
        config = config_from_mapping({"page_size": PAGE, "workers": {"threads": 1}, **keys}, "test")
        runner = SimpleNamespace(token_to_kv_pool=pool, req_to_token_pool=self.rows)
        with get_context().override_server_args(device="cpu"):
            self.session = Session(runner, config, [Layer(layer, torch.nn.Identity(), None)] * LAYERS)
        self.prompts: dict[int, int] = {}

    def admit(self, prompt: int) -> int:
        """A new request's row. Its slots are those of pages of its own."""
        (row,) = self.rows.alloc_rows(1) or [0]
        self.rows.req_to_token[row] = torch.arange(32 * PAGE) + (1 + 16 * (row - 1)) * PAGE
        self.prompts[row] = prompt
        return row

    def forward(self, work: dict[int, tuple[int, int]], mode: str = "EXTEND") -> list[bool]:
        """One step: ``{row: (tokens before, tokens now)}``. Returns which rows decoded."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        rows, lengths = torch.tensor(list(work)), torch.tensor([sum(x) for x in work.values()])
        slots = [self.rows.req_to_token[row, before : before + now] for row, (before, now) in work.items()]
        batch = SimpleNamespace(
            forward_mode=ForwardMode[mode], req_pool_indices=rows, seq_lens=lengths, seq_lens_cpu=lengths,
            extend_seq_lens_cpu=[now for _, now in work.values()], out_cache_loc=torch.cat(slots),
            orig_seq_lens=torch.tensor([max(sum(x), self.prompts[row]) for row, x in work.items()]),
        )  # fmt: skip
        self.session.begin_step(batch)
        step = self.session.step
        assert step is not None
        names = step.decode.request_ids if step.decode else []
        q, k, v = torch.randn(3, step.num_tokens, HEADS, DIM)
        for layer in range(LAYERS):
            self.session.forward(layer, q, k, v, torch.empty_like(q))
        return [f"{row}.{int(self.rows.req_generation[row])}" in names for row in work]

    def frames(self, row: int) -> tuple[int, int]:
        """Of a running request, and how often it was given away."""
        frames = self.session.runtime.tiers.frames
        index = frames.index(f"{row}.{int(self.rows.req_generation[row])}")
        assert index is not None
        return index, int(frames.generation[index])


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    made = Scheduler(method="hgca", hgca={"window_tokens": 4 * PAGE})
    yield made
    made.session.runtime.close()


def test_a_running_row_keeps_its_frames_in_a_mixed_step(scheduler: Scheduler) -> None:
    a = scheduler.admit(6 * PAGE)
    assert scheduler.forward({a: (0, 6 * PAGE)}) == [False]
    assert scheduler.forward({a: (6 * PAGE, 1)}, "DECODE") == [True]
    held = scheduler.frames(a)
    b = scheduler.admit(3 * PAGE)
    assert scheduler.forward({b: (0, PAGE), a: (6 * PAGE + 1, 1)}) == [False, True]
    assert scheduler.forward({b: (PAGE, 2 * PAGE), a: (6 * PAGE + 2, 1)}) == [False, True]
    assert scheduler.frames(a) == held


def test_the_first_token_of_an_answer_may_be_in_a_mixed_step(scheduler: Scheduler) -> None:
    a, b = scheduler.admit(PAGE), scheduler.admit(4 * PAGE)
    assert scheduler.forward({a: (0, PAGE), b: (0, PAGE)}) == [False, False]
    assert scheduler.forward({b: (PAGE, PAGE), a: (PAGE, 1)}) == [False, True]


def test_the_last_token_of_a_prompt_is_part_of_the_prompt(scheduler: Scheduler) -> None:
    """Alone in its chunk, it looks like a running row."""
    a, b = scheduler.admit(PAGE), scheduler.admit(PAGE + 1)
    assert scheduler.forward({a: (0, PAGE), b: (0, PAGE)}) == [False, False]
    assert scheduler.forward({b: (PAGE, 1), a: (PAGE, 1)}) == [False, True]
    assert scheduler.forward({a: (PAGE + 1, 1), b: (PAGE + 1, 1)}, "DECODE") == [True, True]


def test_a_row_that_was_given_back_begins_with_a_prompt_again(scheduler: Scheduler) -> None:
    a = scheduler.admit(PAGE)
    scheduler.forward({a: (0, PAGE)})
    scheduler.rows.free_rows([a])
    scheduler.session._freed([a])
    again = scheduler.admit(1)
    assert again == a
    assert scheduler.forward({again: (0, 1)}) == [False]
    assert not scheduler.session._answering - {f"{a}.{int(scheduler.rows.req_generation[a])}"}


def test_flushing_the_cache_takes_the_frames_of_every_row_back(scheduler: Scheduler) -> None:
    """Also of a streaming session's that idles, which SGLang does not free one by one."""
    a, b = scheduler.admit(PAGE), scheduler.admit(PAGE)
    scheduler.forward({a: (0, PAGE), b: (0, PAGE)})
    scheduler.forward({a: (PAGE, 1), b: (PAGE, 1)}, "DECODE")
    assert scheduler.session.runtime.tiers.frames.running == 2
    _all_freed(None, scheduler.rows)
    assert scheduler.session.runtime.tiers.frames.running == 0 and not scheduler.session._answering


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = {"method": "hgca", "host_pool.size": "256MiB", "hgca.window_tokens": 1024}
    with hybrid_server(tmp_path_factory.mktemp("mixed"), keys, FLAGS) as running:
        yield running


def test_mixed_batches_answer_as_torch_native_and_decode_every_token(server: Server, stock: StockAnswers) -> None:
    """Prompts in small chunks, four requests at once: most tokens are generated beside a prompt's chunk. What decoding
    attends is counted; prompts are not."""
    asked = prompts()[:6]

    def ask(prompt: str) -> tuple[str, int]:
        """The answer, and how many tokens each layer attends for it while decoding."""
        answer = server.client().completions.create(model=server.model, prompt=prompt, max_tokens=TOKENS, temperature=0)
        assert answer.usage is not None
        length, generated = answer.usage.prompt_tokens, answer.usage.completion_tokens
        return answer.choices[0].text, sum(range(length + 1, length + generated))

    before = server.total(COUNTED, {0})
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, asked))
    assert [text for text, _ in found] == stock.to(asked, TOKENS)
    assert server.total(COUNTED, {0}) - before >= sum(tokens for _, tokens in found)
    assert server.total("hybrid_resident_requests") == 0


def test_a_killed_server_takes_its_processes_along(server: Server) -> None:
    ends.a_killed_server_takes_its_processes_along(server)

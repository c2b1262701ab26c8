"""The way from vLLM's forward to the runtime."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm")

from vllm.compilation.backends import split_graph
from vllm.config import CompilationConfig
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from hybrid_backend.batch import StepFailure
from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.vllm.hooks import LAYER_INPUT, LOOKAHEAD
from hybrid_backend.engines.vllm.layer import HybridImpl
from hybrid_backend.engines.vllm.model_hooks import attach_inputs, cut_before
from hybrid_backend.engines.vllm.outputs import CheckedOutput, UnreadRank, checked
from hybrid_backend.engines.vllm.session import Session
from hybrid_backend.engines.vllm.sinks import Sinks
from hybrid_backend.errors import DeadlineError
from tests.support.harness import PAGE, Engine, config, spec

pytestmark = pytest.mark.engine


def test_a_forward_that_raised_abandons_its_step() -> None:
    """Its CPU jobs are given up and the step is not ended as if all layers had run; the next one is exact."""
    engine = Engine(config(sparse="never", frames_per_request=4), spec(layers=3))
    session = Session.__new__(Session)  # of an engine that is this test
    session.runtime, session._step, session._unread_rank, session._sinks = engine.runtime, None, None, Sinks([])
    abandoned, method = [], engine.runtime.method
    method.abandon = abandoned.append  # type: ignore[method-assign]
    engine.add("a", 12 * PAGE)
    engine.prefill("a")
    with pytest.raises(ZeroDivisionError), session.scheduled():
        session._step, _ = engine._begin({"a": 1})
        _ = 1 / 0
    assert session._step is not None and abandoned == [session._step] and engine.runtime._open is None
    assert not session.is_scheduled
    engine.step({"a": 1})
    assert len(abandoned) == 1


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_step_attends_with_the_attention_sinks_that_the_engine_has_by_then(kind: torch.dtype) -> None:
    """However they came: written through ``Parameter.data``, as loaders do, or in other memory, as trainers do."""
    parameter = nn.Parameter(torch.zeros(4, dtype=kind), requires_grad=False)
    impl = HybridImpl(4, 32, 1.0, 2, None, None, "auto", sinks=parameter)
    session = Session.__new__(Session)
    session._unread_rank, session._sinks = None, Sinks([object(), impl])
    before, sinks = session._sinks.layers
    assert before is None and sinks is not None and sinks.dtype == torch.float32
    address = sinks.data_ptr()  # native decoders and captured graphs keep it
    for value in (1.5, 2.5):
        if value > 2:
            parameter.data = torch.empty_like(parameter)
        parameter.data.copy_(torch.full((4,), value))
        with session.scheduled():
            assert sinks.tolist() == [value] * 4 and sinks.data_ptr() == address


class _OnItsWay(AsyncModelRunnerOutput):
    asked = False

    def get_output(self) -> ModelRunnerOutput:
        self.asked = True
        return ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})

    def get_kv_connector_output(self) -> None:
        """Abstract since vLLM 0.33."""


LATE = StepFailure(DeadlineError("late"), ["a"], [7])


def test_a_rank_that_is_not_asked_ends_with_output_that_may_not_be_used() -> None:
    rank = UnreadRank()
    rank.check(ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0}))
    with pytest.raises(SystemExit):
        rank.check(checked(ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0}), LATE))


def test_a_rank_that_is_not_asked_waits_for_an_output_only_when_the_next_step_is_under_way() -> None:
    rank, outputs = UnreadRank(), [_OnItsWay() for _ in range(3)]
    rank.check(CheckedOutput(outputs[0], lambda: None))
    assert not outputs[0].asked
    rank.check(CheckedOutput(outputs[1], lambda: LATE))
    assert outputs[0].asked and not outputs[1].asked
    with pytest.raises(SystemExit):
        rank.check(CheckedOutput(outputs[2], lambda: None))
    assert outputs[1].asked and not outputs[2].asked


class _Layer(nn.Module):
    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        if self.op == LAYER_INPUT:
            torch.ops.hybrid_backend.layer_input(x, None, "layer")
        else:
            torch.ops.hybrid_backend.lookahead(None, x, None, x, "layer")
        return x + 1


@pytest.mark.parametrize("op", [LAYER_INPUT, LOOKAHEAD])
def test_pieces_of_a_compiled_model_end_before_each_hook(op: str) -> None:
    """As vLLM cuts it: a piece is captured without a step, so what a hook does there would never be done."""
    compilation = CompilationConfig(splitting_ops=list(CompilationConfig._attention_ops))
    cut_before(op, SimpleNamespace(compilation_config=compilation))  # type: ignore[arg-type]
    _, pieces = split_graph(torch.fx.symbolic_trace(_Layer(op)), compilation.splitting_ops or [])
    assert [piece.is_splitting_graph for piece in pieces] == [False, True, False]


def test_a_model_that_is_not_cut_stays_whole() -> None:
    compilation = CompilationConfig(splitting_ops=[])
    attach_inputs(nn.Module(), SimpleNamespace(compilation_config=compilation), HybridConfig())  # type: ignore[arg-type]
    assert compilation.splitting_ops == []

"""Every other method behind the same flag: exact where it promises to be, and nothing left behind by aborts."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.engines import promises
from tests.engines.answers import StockAnswers
from tests.engines.conftest import TOKENS
from tests.engines.installed import ENGINE, only
from tests.engines.server import Server
from tests.engines.storm import abort_storm

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=list(ENGINE.METHODS))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engine: ModuleType
) -> Iterator[tuple[str, Server]]:
    with engine.method_server(tmp_path_factory.mktemp(request.param), request.param) as server:
        yield request.param, server


def test_tokens_equal_the_stock_backends_alone_and_four_at_once(
    served: tuple[str, Server], stock: StockAnswers, engine: ModuleType
) -> None:
    method, server = served
    exact, prompts = engine.METHODS[method], engine.prompts()
    alone, together = [prompts[i] for i in exact.alone], [prompts[i] for i in exact.together]
    assert [server.complete(prompt, TOKENS) for prompt in alone] == stock.to(alone, TOKENS)
    assert server.complete_all(together, TOKENS) == stock.to(together, TOKENS)
    assert (server.total("hybrid_cpu_tokens_total") > 0) == exact.asks_cpu
    if exact.on_device:
        assert server.total("hybrid_device_bytes") > 0
        assert server.total("hybrid_frame_bytes") + server.total("hybrid_copied_bytes") > 0, "headinfer has no frames"
    promises.nothing_is_left(server)


@only("vllm", "what SGLang aborts is the same for every method: sglang/test_serving.py")
@pytest.mark.parametrize(
    "served", [method for method, exact in ENGINE.METHODS.items() if exact.on_device], indirect=True, scope="module"
)
def test_two_hundred_requests_with_random_aborts_leave_nothing_behind(served: tuple[str, Server]) -> None:
    """Survivors fit the window or the frames, where every method is exact: they answer as if they were alone.
    (``dense`` keeps nothing of a request.)"""
    _, server = served
    abort_storm(server, survivor_lengths=(8, 40, 150, 200), aborted_length=700, aborted_tokens=200)
    assert "Traceback" not in server.log.read_text()

"""On a GPU, over HTTP (``pytest -m gpu``): as the stock backend while everything is resident; graphs as eager."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_backend.tools.bench.accuracy.fidelity import FIDELITY_FLAGS, compare
from tests.engines.server import Server, hybrid_server, stock_server
from tests.engines.storm import abort_storm
from tests.engines.texts import english
from tests.engines.vllm.distributions import SHORT, short_distributions

pytestmark = pytest.mark.gpu
FLAGS = ("--dtype", "bfloat16", "--max-num-seqs", "8", "--max-model-len", "4096", *FIDELITY_FLAGS)
SPARSE = {"host_pool.size": "2GiB", "frames_per_request": 40, "budget_tokens": 512, "sparse": "always"}


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = {"host_pool.size": "2GiB", "frames_per_request": 260}
    with hybrid_server(tmp_path_factory.mktemp("resident"), keys, FLAGS) as server:
        yield server


def test_distributions_equal_the_stock_backends(resident: Server, tmp_path: Path, model_dir: Path) -> None:
    with stock_server(tmp_path, model_dir, FLAGS) as stock:
        dense = short_distributions(stock)
    compared = [compare(a, b) for a, b in zip(dense, short_distributions(resident), strict=True)]
    assert len(compared) == len(SHORT)
    assert sum(c.kl for c in compared) / len(compared) <= 2e-3


@pytest.mark.parametrize("keys", [{"method": "headinfer"}, {"method": "hgca", "sparse": "never"}], ids=str)
def test_methods_planned_on_the_host_equal_the_stock_backend(
    keys: dict[str, object], tmp_path: Path, model_dir: Path
) -> None:
    with stock_server(tmp_path, model_dir, FLAGS) as stock:
        dense = short_distributions(stock)
    with hybrid_server(tmp_path, {"host_pool.size": "2GiB", "hgca.window_tokens": 256, **keys}, FLAGS) as server:
        compared = [compare(a, b) for a, b in zip(dense, short_distributions(server), strict=True)]
    assert sum(c.kl for c in compared) / len(compared) <= 2e-3


def test_random_aborts_leave_nothing_behind(resident: Server) -> None:
    abort_storm(resident, (8, 40, 150, 400), aborted_length=1600, aborted_tokens=400)
    assert "Traceback" not in resident.log.read_text()


def test_graphs_answer_as_the_eager_step(tmp_path: Path) -> None:
    """Under the budget, with the CPU's share and recalls."""
    prompts = [english(length, start=3000 * i) for i, length in enumerate((900, 1500, 2500, 3500))]
    answers = []
    for name, flags in (("graphs", ()), ("eager", ("--enforce-eager",))):
        folder = tmp_path / name
        folder.mkdir()
        with hybrid_server(folder, SPARSE, [*FLAGS, *flags]) as server:
            answers.append([server.complete(prompt, 32) for prompt in prompts])
            assert server.total("hybrid_cpu_tokens_total") > 0
    same = sum(a == b for a, b in zip(*answers, strict=True))
    assert same >= len(prompts) - 1, "bf16 may break a tie otherwise in one of them"

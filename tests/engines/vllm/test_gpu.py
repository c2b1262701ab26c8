"""On a GPU, over HTTP (``pytest -m gpu``): the model's own tokens in fp32, the stock backend's distributions in bf16,
and graphs as eager."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_backend.tools.bench.fidelity import FIDELITY_ENVIRONMENT, FIDELITY_FLAGS, compare
from tests.engines.answers import Distributions
from tests.engines.server import Server, hybrid_server, stock_server
from tests.engines.storm import abort_storm
from tests.engines.texts import english, tokenizer, tokens_of_prose
from tests.engines.vllm.distributions import SHORT, short_distributions

pytestmark = pytest.mark.gpu
SMALL = ("--gpu-memory-utilization", "0.14")  # several servers share the GPU
FLAGS = ("--dtype", "bfloat16", "--max-num-seqs", "8", "--max-model-len", "4096", *SMALL)
FOLLOWING = (*FLAGS, *FIDELITY_FLAGS)
SPARSE = {"host_pool.size": "2GiB", "frames_per_request": 40, "budget_tokens": 512, "sparse": "always"}
# Everything is attended: 40 pages of 16 tokens where the GPU has them, the rest by the CPU.
EXACT = {"host_pool.size": "2GiB", "frames_per_request": 40, "sparse": "never", "lookahead.partial_query": "real"}
PROMPTS = [tokens_of_prose(length, 3000 * i) for i, length in enumerate((300, 1200, 2600, 5000))]
TOKENS = 32


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = {"host_pool.size": "2GiB", "frames_per_request": 260}
    with hybrid_server(
        tmp_path_factory.mktemp("resident"), keys, FOLLOWING, environment=FIDELITY_ENVIRONMENT
    ) as server:
        yield server


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Distributions:
    """What stock vLLM says."""
    with stock_server(tmp_path_factory.mktemp("stock"), model_dir, FOLLOWING, FIDELITY_ENVIRONMENT) as stock:
        return short_distributions(stock)


def test_distributions_equal_the_stock_backends(dense: Distributions, resident: Server) -> None:
    compared = [compare(a, b) for a, b in zip(dense, short_distributions(resident), strict=True)]
    assert len(compared) == len(SHORT)
    assert sum(c.kl for c in compared) / len(compared) <= 2e-3


@pytest.mark.parametrize("keys", [{"method": "headinfer"}, {"method": "hgca", "sparse": "never"}], ids=str)
def test_methods_planned_on_the_host_equal_the_stock_backend(
    keys: dict[str, object], tmp_path: Path, dense: Distributions
) -> None:
    keys = {"host_pool.size": "2GiB", "hgca.window_tokens": 256, **keys}
    with hybrid_server(tmp_path, keys, FOLLOWING, environment=FIDELITY_ENVIRONMENT) as server:
        compared = [compare(a, b) for a, b in zip(dense, short_distributions(server), strict=True)]
    assert sum(c.kl for c in compared) / len(compared) <= 2e-3


def model_says(model_dir: Path, prompts: list[list[int]]) -> list[str]:
    """Greedy tokens of transformers on the same GPU, in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa").cuda()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        length = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **length, do_sample=False)
        answers.append(str(tokenizer().decode(out[0, len(prompt) :].tolist())))
    return answers


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--dtype", "float32", "--max-num-seqs", "8", "--max-model-len", "8192", *SMALL)
    with hybrid_server(tmp_path_factory.mktemp("exact"), EXACT, flags) as server:
        yield server


def test_answers_are_those_of_the_model_in_fp32(exact: Server, model_dir: Path) -> None:
    """Four at once, most of their pages on the CPU; and again, where prompts are found in the prefix cache."""
    texts = [tokenizer().decode(prompt) for prompt in PROMPTS]
    answers = [exact.complete_all(texts, TOKENS, extra_body={"ignore_eos": True}) for _ in range(2)]
    assert exact.total("hybrid_cpu_tokens_total") > 0
    assert exact.metrics("vllm:prefix_cache_hits_total")["vllm:prefix_cache_hits_total"][""] > 5000
    expected = model_says(model_dir, [tokenizer()(text).input_ids for text in texts])
    assert answers == [expected, expected]


def test_random_aborts_leave_nothing_behind(exact: Server) -> None:
    abort_storm(exact, (8, 40, 150, 400), aborted_length=1600, aborted_tokens=400)
    assert "Traceback" not in exact.log.read_text()


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

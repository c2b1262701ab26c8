"""Sparse and right: ScoutAttention at budget 1024 of 6,600 tokens, fp32, against the stock backend.

Twice: with the true query in the CPU's partial, as shipped for this model, and with the predicted one, as in the paper,
where the CPU starts a layer ahead. The figures that were measured are printed and stand in docs/lab/measurements.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from openai import BadRequestError

from bench import agents
from bench.fidelity import PAIR, answers_in_a_row, follow, lookups
from hybrid_backend.config import find_config, load_config
from hybrid_backend.tools.bench.fidelity import FIDELITY_FLAGS, compare
from tests.engines import ends
from tests.engines.answers import Distributions, StockAnswers
from tests.engines.server import MODEL, Server, hybrid_server
from tests.engines.texts import english, tokens_of_prose

pytestmark = pytest.mark.engine

CONTEXT, POSITIONS = 6900, 48
# English prose with twenty pairs in it: their keys, and two continuations on which distributions are compared.
LOOKUPS = lookups(haystacks=1, facts=20, tokens=CONTEXT, seed=1, fact=PAIR)
CONTINUATIONS = [tokens_of_prose(POSITIONS, start) for start in (0, 20000)]
CONFIG = load_config(find_config(MODEL))
EXACT_LAYERS = set(CONFIG.exact_layers)
LAYERS = 30
SPARSE_LAYERS = set(range(LAYERS)) - EXACT_LAYERS
PREDICTED_LAYERS = {layer for layer in range(1, LAYERS) if CONFIG.is_predicted(layer)}
OTHER_LAYERS = set(range(LAYERS)) - PREDICTED_LAYERS
FLAGS = ("--dtype", "float32", "--max-num-seqs", "4", "--enforce-eager", *FIDELITY_FLAGS)
CHUNKS = ("--max-num-batched-tokens", "512")
"""Every prompt here comes in chunks, those of agents beside others' decoding."""
NO_SPACES = ("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}')
"""A small model that may write spaces between the parts of JSON writes nothing else."""
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
ANIMAL = {
    "type": "object",
    "properties": {"animal": {"enum": ["lion", "otter"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["animal", "legs"],
    "additionalProperties": False,
}
KEYS = {"method": "scout", "budget_tokens": 1024, "host_pool.size": "1GiB", "metrics.sample_interval": 8}
STEPS = 96


def found(server: Server) -> list[bool]:
    return answers_in_a_row(server, LOOKUPS)


def long(server: Server) -> Distributions:
    return [follow(server, LOOKUPS[0].prompt, after) for after in CONTINUATIONS]


@pytest.fixture(scope="module", params=["real", "predicted"])
def query(request: pytest.FixtureRequest) -> str:
    """The query of the CPU's partial."""
    return str(request.param)


@pytest.fixture(scope="module")
def sparse(query: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = {**KEYS, "lookahead.partial_query": query}
    with hybrid_server(tmp_path_factory.mktemp("sparse"), keys, [*FLAGS, *CHUNKS, *NO_SPACES, *TOOLS]) as server:
        yield server


class Decoded(NamedTuple):
    """Over `STEPS` decode steps at full context."""

    cpu_share: float  # of the tokens that sparse layers attended
    recalled: float  # pages
    # From the start of a layer's CPU partial to the moment it was needed, as a share of the time that a layer takes.
    lead: float  # of layers whose query is predicted
    own_lead: float  # of the others


@pytest.fixture(scope="module")
def decoded(sparse: Server) -> Decoded:
    def totals() -> dict[str, float]:
        return {
            "cpu": sparse.total("hybrid_cpu_tokens_total", SPARSE_LAYERS),
            "selected": sparse.total("hybrid_selected_tokens_total", SPARSE_LAYERS),
            "recalled": sparse.total("hybrid_recalled_pages_total"),
            "lead": sparse.total("hybrid_lead_seconds_total", PREDICTED_LAYERS),
            "own_lead": sparse.total("hybrid_lead_seconds_total", OTHER_LAYERS),
            "seconds": sparse.total("vllm:request_decode_time_seconds_sum"),
        }

    before = totals()
    sparse.complete(LOOKUPS[0].prompt, STEPS, extra_body={"ignore_eos": True})  # type: ignore[arg-type]
    done = {name: value - before[name] for name, value in totals().items()}
    layer = done["seconds"] / LAYERS
    return Decoded(
        done["cpu"] / done["selected"],
        done["recalled"],
        done["lead"] / len(PREDICTED_LAYERS) / layer,
        done["own_lead"] / len(OTHER_LAYERS) / layer,
    )


def test_next_token_distributions_stay_near_dense(sparse: Server, stock: StockAnswers) -> None:
    """Measured: 0.018 nats with the true query, 0.022 with the predicted one."""
    dense = stock.distributions("long", long)
    results = [compare(a, b) for a, b in zip(dense, long(sparse), strict=True)]
    kl = sum(r.kl for r in results) / len(results)
    print(f"\nmean KL {kl:.4f} nats over {sum(r.positions for r in results)} positions: {results}")
    assert kl <= 0.035


def test_attention_mass_recall_of_sparse_layers_is_at_least_ninety_percent(sparse: Server) -> None:
    by_layer = sparse.metrics("hybrid_attention_mass_recall")["hybrid_attention_mass_recall"]
    mass = [value for layer, value in by_layer.items() if int(layer) in SPARSE_LAYERS]
    cosine = sparse.metrics("hybrid_predicted_query_cosine")["hybrid_predicted_query_cosine"]
    print(f"\nmass recall {sum(mass) / len(mass):.3f}, worst layer {min(mass):.3f}")
    print(f"cosine of predicted queries {sum(cosine.values()) / len(cosine):.3f}, worst {min(cosine.values()):.3f}")
    assert sum(mass) / len(mass) >= 0.90
    assert {int(layer) for layer in cosine} == PREDICTED_LAYERS and min(cosine.values()) > 0.8


def test_keys_that_dense_finds_stay_found(sparse: Server, stock: StockAnswers) -> None:
    """Measured: dense finds 16 of 20; sparse keeps all of them with the true query, 12 with the predicted one."""
    dense, ours = stock.once("pairs", found), found(sparse)
    asked = sum(dense)
    kept = sum(a and b for a, b in zip(dense, ours, strict=True))
    print(f"\nkeys: dense finds {asked} of {len(ours)}, sparse keeps {kept}")
    assert asked >= 10, "the dense model itself finds few: this test shows nothing"
    assert kept >= 0.6 * asked


def test_the_cpu_workers_did_their_part_and_recall_kept_it_small(decoded: Decoded) -> None:
    """The paper reports 8.2 % on average at its recall threshold of 12 %; measured here: 15 %, with frames for the
    budget and three pages more."""
    print(f"\nCPU share of attended tokens over {STEPS} steps: {decoded.cpu_share:.4f}")
    assert 0 < decoded.cpu_share < 0.2
    assert decoded.recalled > 0


def test_the_cpu_starts_a_layer_ahead_where_the_query_is_predicted(decoded: Decoded, query: str) -> None:
    """A partial that starts inside its own layer, as all do without a lookahead and with the true query, leads by the
    device's partial only: measured 0.04 to 0.06 of a layer's time, against 1.04 with the predicted query."""
    print(f"\nlead of the CPU partial: {decoded.lead:.3f} of a layer's time, unpredicted {decoded.own_lead:.3f}")
    assert decoded.own_lead < 0.2
    if query == "predicted":
        assert decoded.lead > 0.5
    else:
        assert decoded.lead < 0.2


def test_sessions_of_agents_find_their_prefixes_and_leave_pages_out(sparse: Server, tmp_path: Path) -> None:
    """`bench.agents`: three sessions over one system prompt grow beyond their frames, turn by turn. Prompts come
    in chunks, beside what others decode."""

    def totals() -> tuple[float, ...]:
        names = ("vllm:prefix_cache_hits_total", "hybrid_cpu_tokens_total", "vllm:request_success_total")
        return tuple(sparse.total(name) for name in names)

    before = totals()
    asked = ["--agents=3", "--turns=3", "--system=900", "--tool=250", "--answer=16", "--think=0.2"]
    asked += ["--calls", "--repeats=1"]
    written = tmp_path / "agents.json"
    agents.main([f"sparse={sparse.url}", *asked, f"--out={written}"])
    hits, by_cpu, requests = (after - first for after, first in zip(totals(), before, strict=True))
    row = json.loads(written.read_text())["figures"]["sparse"]
    assert (row["turns"], row["failed"], requests) == ([9], [0], 10)  # one to warm up
    assert row["prompt_tokens_most"][0] > KEYS["budget_tokens"] + 300 and by_cpu > 0, "nothing was left out"
    answers = [a for run in json.loads(written.read_text())["runs"] for a in run["answers"]]
    prompts = [a["prompt_tokens"] for a in answers if a["turn"] < 2]
    assert hits >= 0.95 * sum(prompts), "what the turn before computed is not computed again"


def animal_asked(server: Server, **options: Any) -> Any:
    """The answer to a prompt that outgrows its frames, of which pages must have been left out."""
    by_cpu = server.total("hybrid_cpu_tokens_total")
    asked = [{"role": "user", "content": english(2000) + "\nName an animal and how many legs it has."}]
    answer = server.client().chat.completions.create(
        model=server.model, messages=asked, max_tokens=60, temperature=0, **options  # type: ignore[arg-type]
    )  # fmt: skip
    assert answer.usage is not None and answer.usage.prompt_tokens > KEYS["budget_tokens"] + 300
    assert server.total("hybrid_cpu_tokens_total") > by_cpu
    return answer.choices[0]


def check_animal(text: str) -> None:
    found = json.loads(text)
    assert found["animal"] in ("lion", "otter") and 0 <= found["legs"] <= 9 and len(found) == 2


def test_answers_keep_to_a_schema_where_pages_are_left_out(sparse: Server) -> None:
    """Structured output."""
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": ANIMAL}}
    check_animal(animal_asked(sparse, response_format=form).message.content)


@pytest.mark.parametrize(
    ("choice", "end"), [({"type": "function", "function": {"name": "tell"}}, "stop"), ("required", "tool_calls")]
)
def test_tools_are_called_with_arguments_by_their_schema_where_pages_are_left_out(
    sparse: Server, choice: str | dict[str, Any], end: str
) -> None:
    """By name, and when any tool must be called. vLLM holds only the arguments of a tool that is ``strict`` to its
    schema; others may be any JSON."""
    tell = {"name": "tell", "description": "Tell of an animal.", "parameters": ANIMAL, "strict": True}
    other = {**tell, "name": "sing"}
    tools = [{"type": "function", "function": function} for function in (tell, other)]
    answer = animal_asked(sparse, tools=tools, tool_choice=choice)
    assert answer.finish_reason == end and not answer.message.content
    (call,) = answer.message.tool_calls
    assert call.function.name in ("tell", "sing") and (choice == "required" or call.function.name == "tell")
    check_animal(call.function.arguments)


def test_a_request_may_ask_for_a_budget_of_its_own(sparse: Server) -> None:
    """Tokens attended of one request, by what it asks for; what is no number of tokens is refused with status 400."""

    def attended(budget: int) -> float:
        before = sparse.total("hybrid_selected_tokens_total", SPARSE_LAYERS)
        sparse.complete(LOOKUPS[0].prompt, 9, extra_body={"ignore_eos": True, "vllm_xargs": {"budget_tokens": budget}})
        time.sleep(0.6)  # the worker publishes at most every half second, after a step
        sparse.complete("One more.", 1)
        return sparse.total("hybrid_selected_tokens_total", SPARSE_LAYERS) - before

    few, many = attended(256), attended(768)
    print(f"\ntokens attended: {few:.0f} with 256, {many:.0f} with 768")
    assert 2.5 < many / few < 3.2
    for budget, stream in ((0, False), ("many", True), (True, True)):
        with pytest.raises(BadRequestError, match=r"budget_tokens: got .*, expected a whole number of tokens"):
            sparse.complete("Hello", 1, stream=stream, extra_body={"vllm_xargs": {"budget_tokens": budget}})
    assert "Traceback" not in sparse.log.read_text()


def test_a_killed_server_takes_its_processes_along(sparse: Server) -> None:
    ends.a_killed_server_takes_its_processes_along(sparse)

"""`python -m bench.peers` without a peer: who is chosen, what is asked of whom, what the table says."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from safetensors.torch import load_file

from bench.peers.__main__ import started
from bench.peers.gguf_files import export
from bench.peers.measure import Point, decode_rate, prefill_rate, sweep
from bench.peers.peer import GROUPS, Peer, Setup
from bench.peers.registry import PEERS, choose
from bench.peers.table import table, verdict
from bench.streams import Streamed
from hybrid_backend.tools.bench.client import BenchError, find_endpoint
from hybrid_backend.tools.hub.gguf_convert import convert
from tests.unit.hub.test_gguf_convert import HIDDEN, write_gguf
from tests.unit.status.server_stand import serving


def point(peer: str, depth: int, *decode: float, prefill: tuple[float, ...] = ()) -> Point:
    return Point(peer=peer, depth=depth, batch=1, decode=decode, prefill=prefill)


def answer(times: list[float], tokens: int, prompt: int = 100, cached: int | None = None) -> Streamed:
    return Streamed("text", tuple(times), times[-1] + 1, prompt, tokens, cached)


def cells(written: str, peer: str) -> list[str]:
    (line,) = [line for line in written.splitlines() if f"| {peer} |" in line]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_peers_are_chosen_by_name_or_group_in_the_tables_order() -> None:
    assert [peer.name for peer in choose("vllm, hybrid-sparse,vllm")] == ["hybrid-sparse", "vllm"]
    assert choose("all") == list(PEERS) == choose(",".join(GROUPS))
    assert set(choose("equal,llamacpp-q8")) - set(choose("equal")) == set(choose("llamacpp-q8"))
    with pytest.raises(ValueError, match=r"'ollama' is no peer; there are: equal, kv8, int8, int4, untouched, all"):
        choose("vllm,ollama")
    assert len({peer.name for peer in PEERS}) == len(PEERS)


def test_a_peer_that_does_not_start_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    def fails(setup: Setup) -> Any:
        raise BenchError("a server ended with 1: error: no kernel for Float")

    nowhere = tmp_path / "none"
    setup = Setup("model", nowhere, "float32", 10, 1, 1, 1, tmp_path, nowhere, nowhere, None)
    app = FastAPI()
    app.add_api_route("/v1/models", lambda: {"data": [{"id": "model"}]}, methods=["GET"])
    with serving(app) as url:
        runs = Peer("runs", "", "equal", lambda _: nullcontext(SimpleNamespace(url=url)))
        with started([Peer("fails", "", "int4", fails), runs], setup) as (found, failed):
            assert [endpoint.name for endpoint in found] == ["runs"]
            assert list(failed) == ["fails"] and "no kernel for Float" in failed["fails"]


def test_decode_rate_is_that_of_the_median_span_over_all_streams() -> None:
    steady = [1.0, 1.1, 1.2, 1.3, 1.4]
    disturbed = [1.0, 1.1, 3.1, 3.2, 3.3]  # one gap is of something else
    assert decode_rate("a", [answer(steady, 5)], 5) == pytest.approx(10)
    assert decode_rate("a", [answer(steady, 5), answer(disturbed, 5)], 5) == pytest.approx(20)
    # Steps of 18 ms, heard of at ticks of 4 ms: most gaps are 20 ms.
    ticks = [math.ceil(i * 0.018 / 0.004 - 1e-9) * 0.004 for i in range(48)]
    assert decode_rate("a", [answer(ticks, 48)], 48) == pytest.approx(1 / 0.018, rel=0.02)
    late = [at + (2.0 if i > 20 else 0) for i, at in enumerate(ticks)]
    assert decode_rate("a", [answer(late, 48)], 48) == pytest.approx(1 / 0.018, rel=0.02), "one gap moves nothing"
    lumps = [1.0, 1.4, 1.8]  # two tokens an event
    assert decode_rate("a", [answer(lumps, 5)], 5) == pytest.approx(5)


def test_a_server_that_stops_early_or_knows_the_prompt_is_not_compared() -> None:
    with pytest.raises(BenchError, match="a: an answer has 3 tokens in 3 events, not 5"):
        decode_rate("a", [answer([1, 2, 3], 3)], 5)
    assert prefill_rate("a", answer([2.0], 1, prompt=100, cached=16)) == 50
    with pytest.raises(BenchError, match="96 of a prompt's 100 tokens came from its prefix cache"):
        prefill_rate("a", answer([2.0], 1, prompt=100, cached=96))


def test_losing_rows_are_marked_and_ratios_are_of_the_same_rounds() -> None:
    points = [
        point("hybrid-sparse", 200, 10, 20, 30, prefill=(50,)),
        point("llamacpp", 200, 20, 40, 60, prefill=(25,)),
        point("vllm", 200, 5, 10, 60, prefill=(100,)),
    ]
    written = table(points, "bfloat16")
    what = "bfloat16 weights, KV f16 (its default)"
    assert cells(written, "llamacpp") == [
        "200", "1", "llamacpp", what, "40.0 (20.0..60.0)", "**0.50, slower**", "25.0", "2.00",
    ]  # fmt: skip
    # Medians' ratio would be the same here for vllm's; the rounds' is the median of 2, 2, 0.5.
    assert cells(written, "vllm")[5:] == ["2.00", "100.0", "**0.50, slower**"]
    assert cells(written, "hybrid-sparse")[5] == "", "it is not compared with itself"


def test_rows_are_compared_with_ours_of_as_many_bits() -> None:
    points = [
        point("hybrid-sparse", 200, 10.0),
        point("hybrid-int8", 200, 30.0),
        point("llamacpp-q8", 200, 20.0),
        point("llamacpp-shipped", 200, 40.0),
        point("mine", 200, 5.0),
    ]
    written = table(points, "float32")
    assert cells(written, "llamacpp-q8")[5] == "1.50" and cells(written, "llamacpp-shipped")[5] == ""
    assert cells(written, "mine")[3:6] == ["", "5.0", "2.00"], "a server of somebody's own, beside the equal ones"


def test_the_verdict_names_the_hardest_peer_and_the_goal_that_is_missed() -> None:
    points = [
        *(point("hybrid-sparse", depth, 10.0) for depth in (200, 4000, 7500)),
        *(point("llamacpp", depth, rate) for depth, rate in ((200, 20.0), (4000, 9.0), (7500, 8.0))),
        *(point("llamacpp-q8", depth, 100.0) for depth in (200, 4000, 7500)),
    ]
    short, long, longer = verdict(points).splitlines()
    assert "0.50 of llamacpp (no goal); slower than llamacpp (0.50)" in short
    assert "1.11 of llamacpp (goal 1, met)" in long and "1.25 of llamacpp (goal 1.5, MISSED)" in longer
    assert "q8" not in short + long + longer, "it has fewer bits"


@contextmanager
def speaking(asked: list[tuple[str, dict[str, Any]]], name: str, gap: float) -> Iterator[str]:
    app = FastAPI()
    app.add_api_route("/v1/models", lambda: {"data": [{"id": "model"}]}, methods=["GET"])

    @app.post("/v1/completions")
    def complete(body: dict[str, Any]) -> StreamingResponse:
        asked.append((name, body))

        def events() -> Iterator[str]:
            for i in range(body["max_tokens"]):
                time.sleep(gap)
                yield f"data: {json.dumps({'choices': [{'text': f'word{i} '}]})}\n\n"
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    with serving(app) as url:
        yield url


@pytest.mark.slow
def test_servers_take_turns_over_http_with_the_same_prompts_and_are_ranked_by_their_speed() -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def prompts(depth: int, count: int) -> list[list[int]]:
        return [[depth, i] * 20 for i in range(count)]

    with speaking(asked, "fast", 0.01) as fast, speaking(asked, "slow", 0.03) as slow:
        endpoints = [find_endpoint(f"{name}={url}", None, 30) for name, url in (("fast", fast), ("slow", slow))]
        points = list(sweep(endpoints, prompts, [200, 300], [1, 2], rounds=2, tokens=6, deadline=30, rest=0))
    assert [(p.peer, p.depth, p.batch) for p in points] == [
        (name, depth, batch) for depth in (200, 300) for batch in (1, 2) for name in ("fast", "slow")
    ]
    for quick, late in zip(points[::2], points[1::2], strict=True):
        assert sum(quick.decode) > sum(late.decode) and len(quick.decode) == 2
        assert [len(p.prefill) for p in (quick, late)] == ([3, 3] if quick.batch == 1 else [0, 0])
    of_each = [sorted(json.dumps(body) for name, body in asked if name == which) for which in ("fast", "slow")]
    assert of_each[0] == of_each[1] and len(of_each[0]) == 2 + 2 * (3 + 2 * (1 + 2))
    first = [name for name, body in asked if body["max_tokens"] == 1]
    assert first == ["fast", "slow", "slow", "fast", "fast", "slow"] * 2, "the order changes from turn to turn"
    assert all(body["ignore_eos"] and body["temperature"] == 0 for _, body in asked)


def test_a_re_exported_gguf_holds_the_engines_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (8, HIDDEN), "model.norm.weight": (HIDDEN,),
        **{
            f"model.layers.{layer}.{name}.weight": shape
            for layer in range(2)
            for name, shape in {
                "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,), "self_attn.q_proj": (32, HIDDEN),
                "self_attn.k_proj": (16, HIDDEN), "self_attn.v_proj": (16, HIDDEN), "self_attn.o_proj": (HIDDEN, 32),
                "mlp.gate_proj": (48, HIDDEN), "mlp.up_proj": (48, HIDDEN), "mlp.down_proj": (HIDDEN, 48),
            }.items()
        },
    }  # fmt: skip
    source = write_gguf(tmp_path / "source.gguf", {name: torch.randn(shape) for name, shape in shapes.items()})
    original = converted(source, tmp_path / "original")
    for precision, error in (("F32", 0.0), ("BF16", 0.0), ("Q8_0", 0.02)):
        made = tmp_path / f"{precision}.gguf"
        export(source, made, precision)
        again = converted(made, tmp_path / precision)
        assert again.keys() == original.keys()
        for name, weight in original.items():
            assert (again[name].float() - weight.float()).abs().max() <= error * weight.float().abs().max(), name
    assert (tmp_path / "Q8_0.gguf").stat().st_size < (tmp_path / "F32.gguf").stat().st_size


def converted(source: Path, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    convert(source, folder, name="tiny")
    return dict(load_file(folder / "model.safetensors"))

"""K and V in 8 bits with SGLang on a CPU: methods of both executors serve them, and a pool holds more tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines import promises
from tests.engines.answers import StockAnswers
from tests.engines.server import Server
from tests.engines.sglang.server import PAGE, hybrid_server
from tests.engines.sglang.suite import BYTES_PER_TOKEN, next_tokens
from tests.engines.texts import english

pytestmark = pytest.mark.engine

PROMPTS = [english(length, start=3000 * i + 200) for i, length in enumerate((200, 900))]
TOKENS, POOL = 12, 2**28
NATS = 0.25  # as tests/engines/vllm/test_int8.py
EXACT: dict[str, Any] = {"sparse": "never", "frames_per_request": 40}
METHODS: dict[str, dict[str, Any]] = {
    "quest": {},
    "dense": {},
    "scout": EXACT,
}


@pytest.fixture(scope="module", params=list(METHODS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Server]]:
    name = request.param
    keys = {"method": name, "kv_dtype": "int8", "host_pool.size": POOL, **METHODS[name]}
    flags = ["--dtype", "float32", "--chunked-prefill-size", "512", "--max-running-requests", "4"]
    with hybrid_server(tmp_path_factory.mktemp(name), keys, flags) as server:
        yield name, server


def test_a_method_answers_in_8_bits_as_torch_native_does(served: tuple[str, Server], stock: StockAnswers) -> None:
    """The first token of an answer follows from chunks of which the later ones read the earlier ones in 8 bits."""
    _, server = served
    equal = 0
    for prompt in PROMPTS:
        expected = stock.once([prompt, TOKENS, "int8"], lambda other, text=prompt: next_tokens(other, text, TOKENS))
        for likely, found in zip(expected, next_tokens(server, prompt, TOKENS), strict=True):
            token = max(likely, key=lambda text: likely[text])
            assert token in found and abs(likely[token] - found[token]) < NATS
            if max(found, key=lambda text: found[text]) != token:
                break
            equal += 1
    assert equal >= TOKENS
    promises.nothing_is_left(server)


def test_a_pool_holds_the_tokens_that_the_format_promises(served: tuple[str, Server]) -> None:
    """A token of fp32 takes 256 bytes of K per KV head, one of 8 bits 64 and a scale of 2."""
    _, server = served
    plain = POOL // BYTES_PER_TOKEN
    assert server.total("hybrid_host_pool_pages") * PAGE / plain == pytest.approx(256 / 66, rel=0.01)
    log = server.log.read_text()
    assert " tokens in 8 bits), " in log
    assert "Traceback" not in log

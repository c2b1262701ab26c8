"""The gates find the heads that need the whole context."""

from __future__ import annotations

import pytest
import torch

from hybrid_backend.errors import ConfigError
from hybrid_backend.tools.profile.gates import (
    GateOptions,
    GateState,
    Kind,
    Passkey,
    gated_attention,
    passkeys,
    train,
)
from hybrid_backend.tools.profile.network import Network, wrap
from tests.unit.profile.models import VOCABULARY, build, encode

OPTIONS = GateOptions(steps=40, context=160, sink=2, recent=8, rate=0.1, weight=0.02, samples=2)
LAYER, HEAD = 1, 2  # the only query head whose output goes anywhere; its KV head is 1


def one_head() -> Network:
    model = build("llama", attention_bias=False)
    for index, layer in enumerate(model.model.layers):
        weight = layer.self_attn.o_proj.weight.unflatten(1, (4, -1))
        for head in range(4):
            if (index, head) != (LAYER, HEAD):
                weight[:, head] = 0
    return wrap(model)


def prompts() -> list[Passkey]:
    random = torch.Generator().manual_seed(3)
    return [
        Passkey(tuple(torch.randint(1, VOCABULARY, (160,), generator=random).tolist()), 40)
        for _ in range(OPTIONS.samples)
    ]


@pytest.mark.parametrize(("kind", "head"), [("query_head", HEAD), ("kv_head", HEAD // 2)])
def test_the_one_head_that_matters_is_found(kind: Kind, head: int) -> None:
    *_, state = train(one_head(), prompts(), kind, OPTIONS)
    gates = torch.tensor(state.gates)
    others = gates.flatten()[torch.arange(gates.numel()) != LAYER * gates.shape[1] + head]
    assert gates[LAYER, head] > 0.5
    assert others.max() < 0.05


def test_without_regularisation_nothing_is_given_up() -> None:
    options = GateOptions(steps=5, context=160, sink=2, recent=8, weight=0.0, samples=2)
    *_, state = train(wrap(build("qwen3")), prompts(), "query_head", options)
    assert state.losses[0] == 0.0  # gates of 1 are full attention
    assert torch.tensor(state.gates).min() == 1.0


def test_an_interrupted_training_ends_where_a_whole_one_does() -> None:
    network = wrap(build("llama"))
    whole = list(train(network, prompts(), "kv_head", OPTIONS))
    assert [state.step for state in whole] == [*range(1, 41)]
    middle = GateState.model_validate_json(whole[16].model_dump_json())
    assert list(train(network, prompts(), "kv_head", OPTIONS, middle)) == whole[17:]


def test_sliding_layers_keep_their_window_and_have_no_gate() -> None:
    network = wrap(build("gemma3"))
    *_, state = train(network, prompts(), "kv_head", GateOptions(steps=2, sink=2, recent=8, samples=2))
    assert len(state.gates) == 2  # layers 2 and 5
    assert state.losses[0] == 0.0
    ids = torch.tensor([prompts()[0].ids])
    with torch.no_grad():
        own = network.decoder(ids, use_cache=False).last_hidden_state
        with network.attending(gated_attention(network, OPTIONS)):
            ours = network.decoder(ids, use_cache=False).last_hidden_state
    assert (own - ours).abs().max() < 1e-4


def test_passkeys_are_hidden_in_the_prompt_and_asked_for_at_its_end() -> None:
    options = GateOptions(context=1200)
    text = "In the beginning there was a long text. " * 200
    for prompt in passkeys(text, encode, options):
        assert len(prompt.ids) == 1200
        told = bytes(prompt.ids).decode()
        answer = told[-prompt.answer :].strip()
        for line in answer.split("\n"):
            assert line.startswith("The words of list ") and told.count(line) == 2


def test_a_context_too_short_for_its_passkeys_is_refused() -> None:
    with pytest.raises(ConfigError, match="too short"):
        passkeys("text " * 1000, encode, GateOptions(context=256))

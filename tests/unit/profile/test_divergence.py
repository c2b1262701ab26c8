"""What sparse layers cost, on tiny models, against the model's own attention with a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

from hybrid_backend.config import config_from_mapping
from hybrid_backend.errors import ConfigError
from hybrid_backend.kernels.digest_format import MINMAX_INT8
from hybrid_backend.tools.profile import divergence as module
from hybrid_backend.tools.profile.divergence import Probe, Reference, References, divergence, lookup_probes, text_probe
from hybrid_backend.tools.profile.measure import page_digests, select
from hybrid_backend.tools.profile.network import wrap
from hybrid_backend.tools.profile.texts import Window
from tests.unit.profile.models import VOCABULARY, build, encode

CONFIG = config_from_mapping({"page_size": 16, "budget_tokens": 64}, "test")
TOKENS = tuple(int(i) for i in torch.randint(0, VOCABULARY, (300,), generator=torch.Generator().manual_seed(3)))
PROBE = Probe("text", TOKENS, 260, tuple(range(265, 300)))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_where_everything_is_selected_nothing_is_lost_and_elsewhere_something_is(family: str) -> None:
    network = wrap(build(family))
    full = [layer.index for layer in network.full_layers]
    sets = [*((layer,) for layer in full), full, ()]
    reference = Reference(network, PROBE)
    whole = [divergence(reference, CONFIG.model_copy(update={"budget_tokens": 320}), layers) for layers in sets]
    *sparse, nothing = [divergence(reference, CONFIG, layers) for layers in sets]
    assert max(map(abs, whole)) < 1e-6
    assert min(sparse) > 1e-6
    assert abs(nothing) < 1e-6 and sparse[-1] > max(sparse[:-1])
    assert network.decoder.config._attn_implementation == "sdpa"


def test_the_cost_is_that_of_the_model_with_the_unselected_pages_masked() -> None:
    """In one pass over the whole text, without a cache."""
    model = build("llama")
    network = wrap(model)
    sets: list[tuple[int, ...]] = [(layer.index,) for layer in network.full_layers]
    sets.append(tuple(layer.index for layer in network.full_layers))
    reference = Reference(network, PROBE)
    found = [divergence(reference, CONFIG, layers) for layers in sets]
    position, key = torch.arange(300)[:, None], torch.arange(300)
    masked: tuple[int, ...] = ()

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        allowed = key <= position
        if module.layer_idx in masked:
            tokens = k[0].transpose(0, 1)
            digests = page_digests(tokens, 16, MINMAX_INT8)
            pages = select(q[0].transpose(0, 1), digests, torch.arange(1, 301), CONFIG, scaling)[0][:, 0]
            allowed = allowed & (pages[:, key // 16] | (position < PROBE.prompt_tokens))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scaling).transpose(1, 2), None

    AttentionInterface.register("masked_for_test", attention)
    model.config._attn_implementation = "masked_for_test"

    def distributions() -> Tensor:
        return torch.log_softmax(model(torch.tensor([TOKENS])).logits[0, 264:299], -1)

    with torch.inference_mode():
        dense = distributions()
        for sparse, kl in zip(sets, found, strict=True):
            masked = sparse  # by the attention above
            expected = float((dense.exp() * (dense - distributions())).sum(-1).mean())
            assert kl == pytest.approx(expected, rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_layers_may_have_budgets_of_their_own(family: str) -> None:
    network = wrap(build(family))
    one, *others = (layer.index for layer in network.full_layers)
    layers = (one, *others)
    reference = Reference(network, PROBE)
    budgets = [dict.fromkeys(layers, 64), dict.fromkeys(layers, 96), {**dict.fromkeys(layers, 64), one: 96}, {one: 96}]
    alike, other, mixed, alone = [divergence(reference, CONFIG, tokens) for tokens in budgets]
    nothing = divergence(reference, CONFIG, {})
    larger = CONFIG.model_copy(update={"budget_tokens": 96})
    assert divergence(reference, CONFIG, layers) == alike
    assert [divergence(reference, larger, layers), divergence(reference, larger, (one,))] == [other, alone]
    assert len({alike, other, mixed, alone}) == 4 and abs(nothing) < 1e-6


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_layers_before_the_first_sparse_one_are_not_computed_again_and_no_cost_changes(family: str) -> None:
    network = wrap(build(family))
    reference, last = Reference(network, PROBE), network.full_layers[-1].index
    fresh = Reference(network, PROBE)
    computed: list[int] = []
    usual = network.replaying

    def counted(outputs: Any, first: int) -> Any:
        computed.append(len(network.layers) - first)
        return usual(outputs, first)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(network), "replaying", lambda _, *args: counted(*args))
        replayed = [divergence(reference, CONFIG, layers) for layers in [(last,), ()]]
        patch.setattr(type(network), "replaying", lambda _, *args: usual([], 0))
        whole = [divergence(fresh, CONFIG, layers) for layers in [(last,), ()]]
    assert computed == [len(network.layers) - last, 0]
    assert replayed == pytest.approx(whole, abs=1e-7) and replayed[0] > 1e-6


def test_dense_passes_are_kept_as_far_as_they_fit() -> None:
    network = wrap(build("llama"))
    probes = [Probe("text", TOKENS[start:], 200, (201, 202)) for start in range(3)]
    large = References(network)
    first = large.get(probes[0])
    assert large.get(probes[1]) is not first and large.get(probes[0]) is first
    small = References(network, limit=2 * first.bytes)
    passes = [small.get(probe) for probe in probes]
    assert small.get(probes[1]) is passes[1] and small.get(probes[2]) is passes[2]
    assert small.get(probes[0]) is not passes[0]


def test_lookups_ask_for_entries_of_their_register_and_compare_the_answers() -> None:
    (probe, other) = lookup_probes(encode, 3000, 2)
    text = bytes(probe.ids).decode()
    register, questions = text[: probe.prompt_tokens], text[probe.prompt_tokens :]
    assert len(probe.ids) <= 3000 and other.ids != probe.ids
    asked = questions.strip().split("\n")
    assert len(asked) == 4
    for line in asked:
        entry, code = line.removeprefix("The code of entry ").split(" is ")
        assert f"Entry {entry} has the code {code}.\n" in register
    assert "".join(chr(probe.ids[place]) for place in probe.compared) == "".join(
        " " + line.split(" is ")[1] for line in asked
    )
    assert lookup_probes(encode, 3000, 2) == [probe, other]


def test_a_context_that_holds_too_few_entries_is_refused() -> None:
    with pytest.raises(ConfigError, match="--context 900: too short for lookups; take a longer one, or --lookups 0"):
        lookup_probes(encode, 900, 1)


def test_of_a_text_its_last_tokens_are_compared() -> None:
    probe = text_probe(Window("a", 0, TOKENS))
    assert (probe.kind, probe.prompt_tokens, probe.compared) == ("text", 235, tuple(range(236, 300)))
    assert text_probe(Window("a", 0, TOKENS[:100])).compared == tuple(range(75, 100))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_a_predicted_query_selects_in_the_layers_that_are_named_and_in_no_others(family: str) -> None:
    network = wrap(build(family))
    first, second, *_ = [layer.index for layer in network.full_layers]
    reference = Reference(network, PROBE)
    true, ahead, other = [divergence(reference, CONFIG, (second,), layers) for layers in [(), (second,), (first,)]]
    assert true == other and abs(ahead - true) > 1e-7
    # Selected by what `Layer.queries_and_keys` says of the input of the layer before.
    seen: dict[int, Tensor] = {}

    def watch(index: int, x: Tensor, rope: tuple[Tensor, Tensor]) -> None:
        if index == second:
            seen[second] = network.layers[second].queries_and_keys(seen.pop(second - 1), rope)[0]
        seen[index] = x if index != second else seen[second]

    chosen: list[Tensor] = []
    usual = module._selected

    def spied(config: Any, scale: float, q: Tensor, k: Tensor) -> Tensor:
        chosen.append(q)
        return usual(config, scale, q, k)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_selected", spied)
        divergence(reference, CONFIG, (second,), (second,))
    with torch.inference_mode(), network.watched(watch):
        network.decoder(torch.tensor([PROBE.ids]), use_cache=False)
    assert torch.allclose(chosen[0].transpose(0, 1), seen[second][PROBE.prompt_tokens :], atol=1e-4)

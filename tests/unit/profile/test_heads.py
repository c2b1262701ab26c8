"""What `hybrid profile` says of heads: the similarity of adjacent queries, and the file for method clo."""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hybrid_backend.config import HybridConfig, config_from_mapping, read_heads
from hybrid_backend.errors import ConfigError
from hybrid_backend.hardware import find_hardware
from hybrid_backend.tools.profile.heads import head_scores, write_heads
from hybrid_backend.tools.profile.measure import LayerMeasure, adjacent_cosine, measure_window
from hybrid_backend.tools.profile.network import Network, Rope, wrap
from hybrid_backend.tools.profile.tau import prefetch_bytes_of
from hybrid_backend.tools.profile.texts import Window
from tests.support.models import llama_8b
from tests.unit.profile.models import build

POSITIONS, TOKENS = 12, 200
WINDOW = Window(
    "random", 0, tuple(torch.randint(1, 128, (TOKENS,), generator=torch.Generator().manual_seed(7)).tolist())
)
GATES = {"query_head": [[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]], "kv_head": [[0.0, 1.0], [0.25, 0.75]]}


def config(enabled: bool) -> HybridConfig:
    keys = {"page_size": 16, "budget_tokens": 96, "lookahead": {"enabled": enabled}}
    return config_from_mapping(keys, "test")


def plain_cosines(q: Tensor, kv_heads: int) -> list[float]:
    """``[positions, heads, head_dim]`` -> one mean per KV head, in plain fp64 arithmetic."""
    queries, group = q.double().tolist(), q.shape[1] // kv_heads
    means = []
    for kv_head in range(kv_heads):
        found = []
        for now, then in zip(queries[1:], queries, strict=False):
            for head in range(kv_head * group, (kv_head + 1) * group):
                a, b = now[head], then[head]
                dot = sum(x * y for x, y in zip(a, b, strict=True))
                found.append(dot / sqrt(sum(x * x for x in a)) / sqrt(sum(y * y for y in b)))
        means.append(sum(found) / len(found))
    return means


def true_queries(network: Network) -> dict[int, Tensor]:
    """What each layer's attention is given for the window, ``[tokens, heads, head_dim]``."""
    seen: dict[int, Tensor] = {}

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any) -> Any:
        seen[module.layer_idx] = q[0].transpose(0, 1).clone()
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, mask, **more)

    AttentionInterface.register("watched_by_head_tests", attention)
    AttentionMaskInterface.register("watched_by_head_tests", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])  # sliding windows
    before = network.decoder.config._attn_implementation
    network.decoder.config._attn_implementation = "watched_by_head_tests"
    with torch.no_grad():
        network.decoder(torch.tensor([WINDOW.ids]), use_cache=False)
    network.decoder.config._attn_implementation = before
    return seen


def predicted_queries(network: Network) -> dict[int, Tensor]:
    """Of every layer but the first, from the input of the layer before."""
    inputs: dict[int, tuple[Tensor, Rope]] = {}

    def seen(index: int, x: Tensor, rope: Rope) -> None:
        inputs[index] = (x.clone(), rope)

    with torch.no_grad(), network.watched(seen):
        network.decoder(torch.tensor([WINDOW.ids]), use_cache=False)
        return {
            index: network.layers[index].queries_and_keys(inputs[index - 1][0], rope)[0]
            for index, (_, rope) in inputs.items()
            if index
        }


def measured(network: Network, enabled: bool) -> list[LayerMeasure]:
    return measure_window(network, config(enabled), WINDOW, POSITIONS, (1,))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("enabled", [False, True])
def test_similarity_is_the_mean_cosine_of_the_queries_that_are_looked_up(family: str, enabled: bool) -> None:
    """Those that the model's attention sees, or with the lookahead the predicted ones; at the measured positions."""
    network = wrap(build(family))
    queries = true_queries(network)
    if enabled:
        queries |= predicted_queries(network)
    found = measured(network, enabled)
    assert [m.layer for m in found] == [layer.index for layer in network.full_layers]
    for layer in found:
        expected = plain_cosines(queries[layer.layer][-POSITIONS:], network.kv_heads)
        assert layer.similarity == pytest.approx(expected, abs=2e-5)
        assert len(set(layer.similarity)) == network.kv_heads  # heads that are told apart


def test_a_query_that_never_turns_has_similarity_one_and_its_opposite_minus_one() -> None:
    still = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(0)).expand(9, -1, -1)
    turning = still * torch.tensor([1.0, -3.0, 1.0, -3.0, 1.0, -3.0, 1.0, -3.0, 1.0])[:, None, None]
    q = torch.cat([still[:, :2], turning[:, 2:]], 1)
    assert adjacent_cosine(q, 2).tolist() == pytest.approx([1.0, -1.0])


def test_the_written_file_is_read_back_with_a_row_for_every_layer(tmp_path: Path) -> None:
    network, path = wrap(build("gemma3")), tmp_path / "tiny.heads.json"
    windows = [measured(network, True), measured(network, False)]
    write_heads(path, head_scores("tiny", network, windows, GATES, 12345))
    scores = read_heads(path, len(network.layers), network.heads, network.kv_heads)
    assert (scores.model, scores.prefetch_bytes) == ("tiny", 12345)
    assert scores.similarity is not None
    for row, layer in enumerate((2, 5)):
        assert scores.importance[layer] == tuple(GATES["query_head"][row])
        assert scores.kv_importance[layer] == tuple(GATES["kv_head"][row])
        means = [(windows[0][row].similarity[head] + windows[1][row].similarity[head]) / 2 for head in (0, 1)]
        assert scores.similarity[layer] == pytest.approx(means, abs=1e-5)
    for layer in (0, 1, 3, 4):  # sliding: nothing to load, nothing to keep
        assert scores.importance[layer] == (0,) * 4 and scores.kv_importance[layer] == (0, 0)
        assert scores.similarity[layer] == (1, 1)


def test_a_heads_file_that_cannot_be_written_is_an_error_of_one_line(tmp_path: Path) -> None:
    network = wrap(build("gemma3"))
    scores = head_scores("tiny", network, [measured(network, False)], GATES)
    with pytest.raises(ConfigError, match=r"nowhere.*cannot be written .*--out"):
        write_heads(tmp_path / "nowhere" / "a.heads.json", scores)


def test_prefetched_bytes_are_those_of_a_layers_time_on_the_link() -> None:
    """Llama 3.1 8B on an H100: a layer's matrices alone take this long at the memory's peak; PCIe 5 has 64 GB/s."""
    shape = llama_8b()
    hardware = find_hardware("h100")
    at_peak = shape.layer_weight_bytes / 3.35e12 * 64e9
    one = prefetch_bytes_of(hardware, shape, HybridConfig(), 32768)
    assert 0.5 * at_peak < one < 2 * at_peak
    assert one < prefetch_bytes_of(hardware, shape, HybridConfig(), 131072)  # more digests to score
    assert one < prefetch_bytes_of(hardware, shape, HybridConfig(), 32768, batch=16)  # more to attend

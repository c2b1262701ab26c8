"""What `hybrid profile` says of heads: the similarity of adjacent queries, and the file for method clo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybrid_backend.config import HybridConfig, config_from_mapping, read_heads
from hybrid_backend.hardware import find_hardware
from hybrid_backend.tools.profile.gates import head_scores, prefetch_bytes_of
from hybrid_backend.tools.profile.measure import LayerMeasure, adjacent_cosine, measure_window
from hybrid_backend.tools.profile.network import Network, Rope, wrap
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
    """``[positions, heads, head_dim]`` -> one mean per KV head."""
    directions = q.double() / q.double().norm(dim=-1, keepdim=True)
    cosines = (directions[1:] * directions[:-1]).sum(-1)
    return [float(group.mean()) for group in cosines.chunk(kv_heads, 1)]


def queries(network: Network, is_predicted: bool) -> dict[int, Tensor]:
    """The query of each layer from its own input, or from the input of the layer before where there is one."""
    inputs: list[tuple[Tensor, Rope]] = []
    with torch.no_grad(), network.watched(lambda _, x, rope: inputs.append((x.clone(), rope))):
        network.hidden(WINDOW.ids)
        return {
            index: network.layers[index].queries_and_keys(inputs[max(0, index - is_predicted)][0], rope)[0]
            for index, (_, rope) in enumerate(inputs)
        }


def measured(network: Network, enabled: bool) -> list[LayerMeasure]:
    return measure_window(network, config(enabled), WINDOW, POSITIONS, (1,))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("enabled", [False, True])
def test_similarity_is_the_mean_cosine_of_the_queries_that_are_looked_up(family: str, enabled: bool) -> None:
    """The true queries, or with the lookahead the predicted ones; at the measured positions."""
    network = wrap(build(family))
    selecting = queries(network, enabled)
    found = measured(network, enabled)
    assert [m.layer for m in found] == [layer.index for layer in network.full_layers]
    for layer in found:
        expected = plain_cosines(selecting[layer.layer][-POSITIONS:], network.kv_heads)
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
    path.write_text(head_scores("tiny", network, windows, GATES, 12345).model_dump_json())
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


def test_prefetched_bytes_are_those_of_a_layers_time_on_the_link() -> None:
    """Llama 3.1 8B on an H100: a layer's matrices alone take this long at the memory's peak; PCIe 5 has 64 GB/s."""
    shape = llama_8b()
    hardware = find_hardware("h100")
    at_peak = shape.layer_weight_bytes / 3.35e12 * 64e9
    one = prefetch_bytes_of(hardware, shape, HybridConfig(), 32768)
    assert 0.5 * at_peak < one < 2 * at_peak
    assert one < prefetch_bytes_of(hardware, shape, HybridConfig(), 131072)  # more digests to score
    assert one < prefetch_bytes_of(hardware, shape, HybridConfig(), 32768, batch=16)  # more to attend

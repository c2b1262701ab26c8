"""The heads file of method ``clo``, from the gates and from the similarity of adjacent queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from hybrid_backend.config import HeadScores
from hybrid_backend.errors import ConfigError
from hybrid_backend.tools.profile.network import Network
from hybrid_backend.tools.profile.summary import Measures

Rows = tuple[tuple[float, ...], ...]


def head_scores(
    model: str,
    network: Network,
    windows: Measures,
    gates: Mapping[str, Sequence[Sequence[float]]],
    prefetch_bytes: int = 0,
) -> HeadScores:
    """Return the scores that CLO (arXiv 2511.14510) decides by, for every head.

    Args:
        model: its name.
        network: for its layers and heads.
        windows: similarity is their mean.
        gates: of ``kv_head`` and of ``query_head``, ``[full layers][heads]``.
        prefetch_bytes: of Eq. 12, 0 where the hardware is not known.

    Returns:
        All layers of the model. Those with a sliding window have importance 0 and similarity 1: nothing of them is
        offloaded, and no rule would ever keep or load one of their heads.
    """

    def of_all_layers(rows: Sequence[Sequence[float]], heads: int, otherwise: float) -> Rows:
        row_of_layer = {layer.index: row for layer, row in zip(network.full_layers, rows, strict=True)}
        rows_of_layers = (row_of_layer.get(layer.index, (otherwise,) * heads) for layer in network.layers)
        return tuple(tuple(round(value, 5) for value in row) for row in rows_of_layers)

    similarity = [
        [fmean(head) for head in zip(*(m.similarity for m in layers), strict=True)]
        for layers in zip(*windows, strict=True)
    ]
    return HeadScores(
        model=model,
        importance=of_all_layers(gates["query_head"], network.heads, 0.0),
        kv_importance=of_all_layers(gates["kv_head"], network.kv_heads, 0.0),
        similarity=of_all_layers(similarity, network.kv_heads, 1.0),
        prefetch_bytes=prefetch_bytes,
    )


def write_heads(path: Path, scores: HeadScores) -> None:
    """Write the file that `read_heads` reads."""
    try:
        path.write_text(scores.model_dump_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); give another --out") from None

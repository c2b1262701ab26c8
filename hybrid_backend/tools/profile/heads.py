"""The heads file of method ``clo``, from the gates and from the similarity of adjacent queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from hybrid_backend.config import HeadScores
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
    """Return the scores that CLO (arXiv 2511.14510) decides by, for every head of every layer.

    Layers with a sliding window get importance 0 and similarity 1: nothing of them is offloaded, and no rule would
    ever keep or load one of their heads.

    Args:
        model: name of the model.
        network: the model.
        windows: measurements whose mean similarity is taken.
        gates: of ``kv_head`` and of ``query_head``, ``[full layers][heads]``.
        prefetch_bytes: value of Eq. 12, 0 where the hardware is not known.
    """

    def rows_of(full_layers: Sequence[Sequence[float]], otherwise: float) -> Rows:
        rows = {layer.index: row for layer, row in zip(network.full_layers, full_layers, strict=True)}
        sliding = [otherwise] * len(full_layers[0])
        return tuple(tuple(round(score, 5) for score in rows.get(layer.index, sliding)) for layer in network.layers)

    similarity = [
        list(map(fmean, zip(*(layer.similarity for layer in layers), strict=True)))
        for layers in zip(*windows, strict=True)
    ]
    return HeadScores(
        model=model,
        importance=rows_of(gates["query_head"], 0.0),
        kv_importance=rows_of(gates["kv_head"], 0.0),
        similarity=rows_of(similarity, 1.0),
        prefetch_bytes=prefetch_bytes,
    )

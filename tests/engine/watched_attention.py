"""Every decoding row's attention on the simulated GPU, beside an oracle that knows what was selected.

The oracle is a launch of its own after each layer's: a graph keeps it with the others and runs it again when it is
replayed, and a late device comes to it when it has done what was launched before.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.runtime import far_device


@dataclass
class Watch:
    """What the device did since the last `take`."""

    worst: float = 0.0  # largest error of any output
    rows: int = 0  # that were compared
    sparse_rows: int = 0  # those of them that attended less than their context
    pages: Counter[int] = field(default_factory=Counter)  # selected, by layer

    def take(self) -> dict[str, Any]:
        found = {"worst": self.worst, "rows": self.rows, "sparse_rows": self.sparse_rows, "pages": dict(self.pages)}
        self.worst, self.rows, self.sparse_rows, self.pages = 0.0, 0, 0, Counter()
        return found

    def compare(self, graph: Any, layer: int, q: Tensor, out: Tensor, chosen: Any) -> None:
        """``q``, ``out``: ``[rows, heads, head_dim]``; ``chosen``: `SelectedPages`; fp64 over the host pool."""
        host, now, page_size = _near(graph._host[layer]), graph.inputs, graph._page
        table, lengths, counts = (_near(x) for x in (now.table, now.lengths, now.num_pages))
        regions, generations = _near(now.regions), _near(now.generations)
        pages, listed = _near(chosen.pages), _near(chosen.pages_listed)
        group = q.shape[1] // host.shape[1]
        for r in range(len(q)):
            if not int(counts[r]):
                continue
            self.pages[layer] += int(listed[r].sum()) // listed.shape[1]
            if int(graph.generations[regions[r]]) != int(generations[r]):
                continue  # released after the host opened the step: nobody reads its output, and the CPU drops its part
            self.rows += 1
            self.sparse_rows += int(listed[r].min()) < int(counts[r])
            for head in range(q.shape[1]):
                mine = pages[r, min(head // group, listed.shape[1] - 1)]
                logical = mine[: int(listed[r, min(head // group, listed.shape[1] - 1)])].long()
                kv = host[table[r, logical].long(), head // group].double()  # [n, 2, page_size, dim]
                k, v = kv[:, 0].flatten(0, 1), kv[:, 1].flatten(0, 1)
                position = (logical[:, None] * page_size + torch.arange(page_size)).flatten()
                logits = (k @ q[r, head].double()) * graph.shape.scale
                weights = logits.masked_fill(position >= int(lengths[r]), float("-inf")).softmax(0)
                self.worst = max(self.worst, float((out[r, head].double() - weights @ v).abs().max()))


def watch_attention() -> Watch:
    """From now on, in this process."""
    from hybrid_backend.methods.graph_step import GraphStep

    seen, select, attend = Watch(), GraphStep._select, GraphStep.attend
    chosen: dict[tuple[int, int], Any] = {}

    def selecting(self: GraphStep, layer: int, q: Tensor) -> None:
        select(self, layer, q)
        chosen[id(self), layer] = self._selected[layer][0]

    def attending(self: GraphStep, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(self, layer, q, k, v)
        what = chosen[id(self), layer]
        far_device._work.launch(lambda: seen.compare(self, layer, _near(q), _near(out), what))
        return out

    GraphStep._select, GraphStep.attend = selecting, attending  # type: ignore[method-assign]
    return seen


def _near(x: Tensor) -> Tensor:
    return x.inner if isinstance(x, far_device.Far) else x

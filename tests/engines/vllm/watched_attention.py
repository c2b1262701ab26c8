"""Every decoding row's attention on the simulated GPU, beside an oracle that knows what was selected.

The oracle is a launch of its own after each layer's: a graph keeps it with the others and runs it again when it is
replayed, and a late device comes to it when it has done what was launched before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tests.support.far_device import Far
from tests.support.streams import STREAMS

if TYPE_CHECKING:
    from hybrid_backend.methods.clo import Clo
    from hybrid_backend.methods.headinfer import HeadInfer
    from hybrid_backend.step import Toolbox


@dataclass
class Watch:
    """What the device did since the last `take`."""

    worst: float = 0.0  # largest error of any output
    rows: int = 0  # that were compared
    sparse_rows: int = 0  # those of them that attended less than their context
    pages: Counter[int] = field(default_factory=Counter)  # selected, by layer
    is_on: bool = True  # off: on a GPU that captures, the oracle has no place in the graph

    def take(self) -> dict[str, Any]:
        found = {"worst": self.worst, "rows": self.rows, "sparse_rows": self.sparse_rows, "pages": dict(self.pages)}
        self.worst, self.rows, self.sparse_rows, self.pages = 0.0, 0, 0, Counter()
        return found

    def launch(self, work: Callable[[], None]) -> None:
        if self.is_on:
            STREAMS.launch(work)

    def compare(self, step: Any, layer: int, q: Tensor, out: Tensor, chosen: Any) -> None:
        """``q``, ``out``: ``[rows, heads, head_dim]``; ``chosen``: `Selection`; fp64 over the host pool."""
        host, now, page_size = _near(step._tiers.host.views[layer]), step.buffers.inputs, step._config.page_size
        table, lengths, counts = (_near(x) for x in (now.table, now.seq_lens, now.num_pages))
        requests, generations = _near(now.requests), _near(now.generations)
        pages, listed = _near(chosen.pages), _near(chosen.pages_listed)
        group = q.shape[1] // host.shape[1]
        for r in range(len(q)):
            if not int(counts[r]):
                continue
            self.pages[layer] += int(listed[r].sum()) // listed.shape[1]
            if int(step._tiers.frames.generation[requests[r]]) != int(generations[r]):
                continue  # released after the host opened the step: nobody reads its output, and the CPU drops its part
            self.rows += 1
            self.sparse_rows += int(listed[r].min()) < int(counts[r])
            for head in range(q.shape[1]):
                mine = pages[r, min(head // group, listed.shape[1] - 1)]
                logical = mine[: int(listed[r, min(head // group, listed.shape[1] - 1)])].long()
                kv = host[table[r, logical].long(), head // group].double()  # [n, 2, page_size, dim]
                k, v = kv[:, 0].flatten(0, 1), kv[:, 1].flatten(0, 1)
                position = (logical[:, None] * page_size + torch.arange(page_size)).flatten()
                logits = (k @ q[r, head].double()) * step._model.scale
                weights = logits.masked_fill(position >= int(lengths[r]), float("-inf")).softmax(0)
                self.worst = max(self.worst, float((out[r, head].double() - weights @ v).abs().max()))


def watch_attention() -> Watch:
    """From now on, in this process."""
    from hybrid_backend.methods.clo import Clo
    from hybrid_backend.methods.headinfer import HeadInfer
    from hybrid_backend.step import StepDriver, Toolbox

    seen, select, merge = Watch(), Toolbox.select, Toolbox.merge
    chosen: dict[tuple[int, int], Any] = {}
    now: dict[int, tuple[int, Tensor]] = {}

    def selecting(self: Toolbox, layer: int, q: Tensor) -> Any:
        chosen[id(self), layer] = select(self, layer, q)
        return chosen[id(self), layer]

    resident = Toolbox.attend_resident

    def attending(self: Toolbox, layer: int, q: Tensor) -> Any:
        now[id(self)] = layer, q
        return resident(self, layer, q)

    def merging(self: Toolbox, *args: Any) -> Tensor:
        out = merge(self, *args)
        if id(self) in now:
            layer, q = now.pop(id(self))
            what = chosen[id(self), layer]
            seen.launch(lambda: seen.compare(self, layer, _near(q), _near(out), what))
        return out

    decode_on_device = StepDriver._decode_on_device

    def decoding_on_device(self: StepDriver, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = decode_on_device(self, layer, q, k, v)
        seen.launch(lambda: seen.compare(self.toolbox, layer, _near(q), _near(out), _every_page(self.toolbox)))
        return out

    attend = Clo.attend

    def attending_by_head(self: Clo, step: Toolbox, layer: int, q: Tensor) -> Tensor:
        out = attend(self, step, layer, q)
        persistent = self._by_true_query
        seen.launch(lambda: seen.compare(step, layer, _near(q), _near(out), _by_head(self, step, layer, persistent)))
        return out

    stream = HeadInfer.attend

    def attending_streamed(self: HeadInfer, step: Toolbox, layer: int, q: Tensor) -> Tensor:
        out = stream(self, step, layer, q)
        seen.launch(lambda: seen.compare(step, layer, _near(q), _near(out), _with_windows(self, step, layer)))
        return out

    HeadInfer.attend = attending_streamed  # type: ignore[method-assign]
    Toolbox.select, Toolbox.merge = selecting, merging  # type: ignore[method-assign]
    Toolbox.attend_resident = attending  # type: ignore[method-assign]
    StepDriver._decode_on_device = decoding_on_device  # type: ignore[method-assign]
    Clo.attend = attending_by_head  # type: ignore[method-assign]
    return seen


class _Pages(NamedTuple):
    pages: Tensor  # [rows, 1 | kv_heads, n] logical
    pages_listed: Tensor  # [rows, 1 | kv_heads]


def _every_page(step: Toolbox) -> _Pages:
    counts = _near(step.buffers.inputs.num_pages)
    return _Pages(torch.arange(max(1, int(counts.max()))).expand(len(counts), 1, -1), counts[:, None])


def _by_head(method: Clo, step: Any, layer: int, persistent: Any) -> _Pages:
    """What CLO's heads have: the whole context, or sinks, cached and recent pages, or what the true query selected."""
    now, config, every = step.buffers.inputs, method.config, method.model.num_kv_heads
    counts, budgets, requests = (_near(x).tolist() for x in (now.num_pages, now.budgets, now.requests))
    if layer not in method._row:  # exact
        budgets = counts
    cached = _near(method._state.pages)[method._row.get(layer, 0)]
    pages = torch.zeros(len(counts), every, max([1, *counts]), dtype=torch.int32)
    listed = torch.zeros(len(counts), every, dtype=torch.int32)
    for r, count in enumerate(counts):
        for head in range(every):
            mine = list(range(count))
            if budgets[r] < count and head in method._persistent.heads.get(layer, ()):
                chosen = _near(persistent.pages)[r * every + head, 0]
                mine = chosen[: int(_near(persistent.pages_listed)[r * every + head, 0])].tolist()
            elif budgets[r] < count:
                kept = cached[requests[r] * every + head].tolist()
                mine = [*range(config.sinks), *kept, *range(count - config.recent, count)]
            pages[r, head, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
            listed[r, head] = len(mine)
    return _Pages(pages, listed)


def _with_windows(method: HeadInfer, step: Any, layer: int) -> _Pages:
    """What HeadInfer's heads attend: the whole context, or its first and last pages."""
    counts, heads = _near(step.buffers.inputs.num_pages).tolist(), method.model.num_kv_heads
    pages = torch.zeros(len(counts), heads, max([1, *counts]), dtype=torch.int32)
    listed = torch.zeros(len(counts), heads, dtype=torch.int32)
    for r, count in enumerate(counts):
        for head in range(heads):
            first, last = method._first, count - method._last
            is_windowed = head in method._heads[layer].windowed
            mine = [page for page in range(count) if not is_windowed or page < first or page >= last]
            pages[r, head, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
            listed[r, head] = len(mine)
    return _Pages(pages, listed)


def _near(x: Tensor) -> Tensor:
    return x.inner if isinstance(x, Far) else x.cpu()

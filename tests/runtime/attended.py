"""What a method attended, as it says itself: the one place in the tests that knows where each method keeps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_backend.methods.hgca import Hgca
from hybrid_backend.methods.in_place import InPlace
from hybrid_backend.methods.scout import Scout
from hybrid_backend.methods.selective import LayerPlan, Selective, StepPlan
from hybrid_backend.runtime import HybridRuntime
from hybrid_backend.step import DecodeRows, Step


class Attended(NamedTuple):
    """One row of one layer in one step. H KV heads, T tokens of the sequence, the step's own among them."""

    tokens: Tensor  # [H, T] bool
    guessed: Tensor  # [H, T] bool: those whose logits are of the predicted query
    guess: Tensor | None  # [heads, head_dim] the predicted query

    @property
    def is_everything(self) -> bool:
        """Dense attention with the true query."""
        return bool(self.tokens.all()) and not bool(self.guessed.any())


class Witness:
    """Looks on while a runtime decodes; after each `forward` it says what each row attended in that layer.

    Logical pages and token positions only: which host page, slot and offset they are, how many tokens a page holds,
    what was computed where and how it was merged is what the outputs prove.
    """

    def __init__(self, runtime: HybridRuntime) -> None:
        self._runtime = runtime
        self._planned: dict[int, tuple[StepPlan, LayerPlan]] = {}
        self.sparse_rows = 0  # that left tokens out
        self.guessed_rows = 0  # that the predicted query attended some tokens of
        method = runtime.method
        if isinstance(method, Selective) and method.in_place is None:
            self._watch(method, method._attend_planned)

    def _watch(self, method: Selective, attend: Callable[..., Tensor]) -> None:
        def watched(layer: int, step: Step, plan: StepPlan, entry: LayerPlan, q: Tensor) -> Tensor:
            self._planned[layer] = (plan, entry)
            return attend(layer, step, plan, entry, q)

        method._attend_planned = watched  # type: ignore[method-assign]

    def begin(self) -> None:
        """A step begins."""
        self._planned.clear()

    def of(self, layer: int, step: Step, r: int) -> Attended:
        """Decoding row ``r`` in ``layer``, which has just run (a layer with full attention)."""
        assert step.decode is not None
        attended = self._of(layer, step, step.decode, r)
        self.sparse_rows += not bool(attended.tokens.all())
        self.guessed_rows += bool(attended.guessed.any())
        return attended

    def _of(self, layer: int, step: Step, rows: DecodeRows, r: int) -> Attended:
        method = self._runtime.method
        nothing = torch.zeros(self._runtime.model.num_kv_heads, int(rows.seq_lens[r]), dtype=torch.bool)
        if isinstance(method, Selective) and isinstance(method.in_place, InPlace):
            return Attended(self._by_pages(self._decoded_in_place(method.in_place, rows, r), nothing), nothing, None)
        if isinstance(method, Selective) and layer in self._planned:
            plan, entry = self._planned[layer]
            tokens = self._by_pages(list(entry.selected[r]), nothing)
            ahead = isinstance(method, Scout) and method.config.lookahead.partial_query == "predicted"
            if not (ahead and plan.is_sparse and entry.query is not None):
                return Attended(tokens, nothing, None)
            missing = self._by_pages([entry.missing_pages[r].nonzero().flatten()], nothing)
            return Attended(tokens, tokens & missing, entry.query[r])
        if isinstance(method, Hgca) and method.config.sparse != "never" and layer not in method.config.exact_layers:
            tokens = self._by_pages([step.plan.window[r, 0]], nothing)
            for head, positions in enumerate(method._caches[layer].positions(int(step.plan.regions[r]))):
                assert not tokens[head, positions].any(), "a token in the window and in the context cache"
                tokens[head, positions] = True
            return Attended(tokens, nothing, None)
        return Attended(~nothing, nothing, None)

    def _decoded_in_place(self, in_place: InPlace, rows: DecodeRows, r: int) -> list[Tensor]:
        first = in_place._decoder.selected(r).long()
        if len(first) == int(rows.num_pages[r]) or self._runtime.config.selection.granularity == "layer":
            return [first]
        return [in_place._decoder.selected(r, head).long() for head in range(self._runtime.model.num_kv_heads)]

    def _by_pages(self, lists: list[Tensor], nothing: Tensor) -> Tensor:
        """Logical pages (one list for all KV heads, or one each; -1 for padding) as tokens."""
        size = self._runtime.config.page_size
        tokens = nothing.clone()
        for head in range(len(tokens)):
            pages = lists[head if len(lists) > 1 else 0].tolist()
            for page in (p for p in pages if p >= 0):
                tokens[head, page * size : (page + 1) * size] = True
        return tokens

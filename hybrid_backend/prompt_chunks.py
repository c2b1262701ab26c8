"""Storing and attention of prefill chunks in layers with full attention."""

from __future__ import annotations

from torch import Tensor

from hybrid_backend.attention.partial import Partial
from hybrid_backend.batch import ModelSpec, PrefillRow, Step, whole_tokens
from hybrid_backend.in_place.prompts import InPlacePrompts
from hybrid_backend.step import Executor, Method
from hybrid_backend.step.method import AttendsPrompts, SeesPrompts
from hybrid_backend.tiers import Tiers


class PromptChunks:
    """Stores and attends the prefill chunks of each step.

    Attention and digests use the K and V that the model has just computed on the device. Copying K and V to the host
    pool overlaps with the step.
    """

    def __init__(
        self, model: ModelSpec, method: Method, executor: Executor, tiers: Tiers, in_place: InPlacePrompts | None
    ) -> None:
        """Keep references to the components of one rank's runtime.

        Args:
            model: the rank's model.
            method: may attend prefill chunks itself (`AttendsPrompts`), or observe the queries (`SeesPrompts`).
            executor: observes the queries of each prefill chunk.
            tiers: store of K, V and digests.
            in_place: attention over the pages of the host pool. None: PyTorch's attention over gathered tokens.
        """
        self._model, self._method, self._executor, self._tiers = model, method, executor, tiers
        self._in_place = in_place

    def forward(self, layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Store the K and V of a step's new tokens and attend its prefill chunks.

        Args:
            layer: a layer with full attention.
            step: the open step, which has prefill chunks.
            q: ``[tokens, heads, head_dim]`` of the batch.
            k: ``[tokens, kv_heads, head_dim]``.
            v: like ``k``.
            out: like ``q``; the tokens of prefill chunks are written.
        """
        tiers, rows, pages, offsets = self._tiers, step.prefill, step.prompt_pages, step.write_offsets
        # If decode rows can park, the engine's prefix cache offers a page only after the row that fills it has ended.
        if step.fills_prefix and not self._model.parks:
            pages = step.write_pages
        k, v = (whole_tokens(x[: step.num_tokens]) for x in (k, v))
        k, v = tiers.write_back.store(layer, k, v, pages, offsets)
        tiers.whole.append(layer, pages, offsets, k, v)
        tiers.append_heads(layer, pages, offsets, k, v)
        if step.fills_prefix or (len(rows) > 1 and any(row.earlier_tokens for row in rows)):
            # The prefix of a chunk may be in pages that another row writes in this step.
            tiers.write_back.join()
        owns = [] if self._in_place else tiers.prompts.own(q, k, v, [(row.start, row.end) for row in rows])
        for i, row in enumerate(rows):
            chunk = slice(row.start, row.end)
            if tiers.has_digests(layer):
                assert tiers.digests is not None
                tiers.digests.extend(layer, row, k[chunk], tiers.write_back.join)
            if self._in_place is not None:
                self._in_place.attend(layer, row, q, k, v, out)
            else:
                out[chunk] = self._attend(layer, row, q[chunk], owns[i])
            if isinstance(self._method, SeesPrompts):
                self._method.saw_prompt(layer, row, q[chunk])
            self._executor.saw_prompt(layer, row, q[chunk])

    def _attend(self, layer: int, row: PrefillRow, q: Tensor, own: Partial) -> Tensor:
        """Return the exact attention of a prefill chunk. ``own`` is the attention of the chunk over itself."""
        if isinstance(self._method, AttendsPrompts):
            return self._method.prefill(layer, row, q, own)
        before = self._tiers.prefix(layer, row.pages, row.seq_len - len(q))
        return self._tiers.prompts.attend(q, own, before, self._model.sink(layer))

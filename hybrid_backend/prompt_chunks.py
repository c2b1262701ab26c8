"""Storing and attention of prefill chunks in layers with full attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from hybrid_backend.attention.partial import Partial
from hybrid_backend.attention.prefill import KVBlock
from hybrid_backend.attention.prompts import PagedPrompts
from hybrid_backend.batch import ModelSpec, PrefillRow, Step, whole_tokens
from hybrid_backend.in_place.prompts import InPlacePrompts
from hybrid_backend.step import Executor, Method
from hybrid_backend.step.method import AttendsPrompts, SeesPrompts
from hybrid_backend.tiers import Tiers
from hybrid_backend.tiers.prompt_frames import ChunkPages


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
        next_layer = self._next_streamed(layer)
        # The prefix of a chunk may be in pages that another row writes in this step.
        is_late = step.fills_prefix or (len(rows) > 1 and any(row.earlier_tokens for row in rows))
        if is_late:
            next_layer = None
        else:
            self._fill_ahead(layer, next_layer)
        k, v = tiers.store_prompts(layer, k, v, pages, offsets)
        if is_late and (isinstance(self._method, AttendsPrompts) or any(tiers.reads_host(layer, row) for row in rows)):
            tiers.write_back.join()
        tiers.prompt_fills.copy(layer)
        tiers.prompt_fills.wait(layer)
        partials = {} if self._in_place else self._partials(layer, rows, q, k, v)
        for row in rows:
            chunk = slice(row.start, row.end)
            if tiers.has_digests(layer):
                assert tiers.digests is not None
                tiers.digests.extend(layer, row, k[chunk], tiers.write_back.join, tiers.begun_page(layer, row))
            if self._in_place is not None:
                self._in_place.attend(layer, row, q, k, v, out)
            else:
                out[chunk] = self._attend(layer, row, q[chunk], *partials[row.request_id], next_layer)
            if isinstance(self._method, SeesPrompts):
                self._method.saw_prompt(layer, row, q[chunk])
            if self._executor.residency is not None:
                self._executor.residency.saw_prompt(layer, row, q[chunk])

    def _fill_ahead(self, layer: int, next_layer: int | None) -> None:
        """Begin to copy the pages of prefix-cache hits to the frames of a layer and of the next layer with frames."""
        fills = self._tiers.prompt_fills
        fills.copy(layer)
        fills.copy(next_layer)
        if fills.has_begun_page(layer):
            fills.wait(layer)  # The copy would overwrite the chunk's tokens.

    def _partials(
        self, layer: int, rows: Sequence[PrefillRow], q: Tensor, k: Tensor, v: Tensor
    ) -> dict[str, tuple[Partial, bool]]:
        """Return the attention of each chunk by its request.

        True: the partial is over all tokens of the sequence that the device holds, in one call for all such chunks.
        False: the partial is over the chunk's own tokens.
        """
        prompts, in_pages = self._tiers.prompts, list[tuple[PrefillRow, Tensor, ChunkPages]]()
        reads_pages = self._model.kv_dtype is None and not isinstance(self._method, AttendsPrompts)
        if isinstance(prompts, PagedPrompts) and reads_pages:  # Pages in 8 bits are decoded in blocks.
            resident = [(row, self._tiers.chunk_pages(layer, row)) for row in rows if row.earlier_tokens]
            in_pages = [(row, *pages) for row, pages in resident if pages is not None and pages[1].tokens]
        partials = dict[str, tuple[Partial, bool]]()
        if in_pages and isinstance(prompts, PagedPrompts):
            chunks = [(row.start, row.end) for row, _, _ in in_pages]
            lists = [(pages.ids, pages.tokens) for _, _, pages in in_pages]
            attended = prompts.over_pages(q, in_pages[0][1], chunks, lists)
            partials = {row.request_id: (out, True) for (row, _, _), out in zip(in_pages, attended, strict=True)}
        others = [row for row in rows if row.request_id not in partials]
        if others:
            owns = prompts.own(q, k, v, [(row.start, row.end) for row in others])
            partials |= {row.request_id: (own, False) for row, own in zip(others, owns, strict=True)}
        return partials

    def _next_streamed(self, layer: int) -> int | None:
        """Return the next layer whose prompts stream what is not on the device; None after the last one."""
        model, whole = self._model, self._tiers.whole.stores
        layers = (later for later in range(layer + 1, model.num_layers) if model.window(later) is None)
        return next((later for later in layers if later not in whole), None)

    def _attend(
        self, layer: int, row: PrefillRow, q: Tensor, partial: Partial, has_device_pages: bool, next_layer: int | None
    ) -> Tensor:
        """Return the exact attention of a prefill chunk, given its result of `_partials`.

        ``next_layer`` is that of `HeadStream.blocks`.
        """
        tiers = self._tiers
        if isinstance(self._method, AttendsPrompts):
            return self._method.prefill(layer, row, q, partial)
        resident = tiers.chunk_pages(layer, row) if has_device_pages else None
        before: Iterable[KVBlock] = tiers.before(layer, row, next_layer)
        if resident is not None:
            before = tiers.prefix(layer, resident[1].missing, resident[1].missing_tokens, next_layer=next_layer)
        return tiers.prompts.attend(q, partial, before, self._model.sink(layer))

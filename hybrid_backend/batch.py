"""Input of the runtime from the engine: the model's shapes (`ModelSpec`), and one `Batch` per scheduler step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid_backend.errors import EngineError, WorkerError
from hybrid_backend.kernels.kv_format import KvFormat


class LayerShape(NamedTuple):
    """Shape of an attention layer on one tensor-parallel rank; ``scale`` is the factor of the logits."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True)
class ModelSpec:
    """Shapes of the model on one tensor-parallel rank: head counts are those of the rank.

    Head counts, ``head_dim`` and ``scale`` are those of the layers with full attention, which select pages.

    Attributes:
        windows: per layer the sliding window in tokens, None for full attention. Empty: all layers have full attention.
        max_tokens: longest sequence that the engine admits, in tokens. None: the host pool's size is the limit.
        hidden: width of the hidden states. 0: unknown; decode rows then cannot park (``parks``).
        parks: a decode row may pause between layers and resume in a later step. The engine then calls
            `HybridRuntime.layer_input` for every layer, and drops the tokens of `HybridRuntime.unfinished` requests.
        layer_weight_bytes: weights of one decoder layer on this rank. 0: unknown.
        sinks: per layer ``[num_heads]`` fp32 logits of the attention sinks, contiguous, on the device that attends;
            None for a layer without sinks. The engine may change the values between steps. Empty: no layer has sinks.
        window_shape: shape of the layers with a sliding window. None: that of the layers with full attention.
        kv_dtype: dtype of the pages, ``torch.int8`` for K and V in 8 bits (`KvFormat`). None: ``dtype``.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    windows: tuple[int | None, ...] = ()
    max_tokens: int | None = None
    hidden: int = 0
    parks: bool = False
    layer_weight_bytes: int = 0
    sinks: tuple[Tensor | None, ...] = field(default=(), compare=False)  # `==` of tensors returns a tensor, not a bool
    window_shape: LayerShape | None = None
    kv_dtype: torch.dtype | None = None

    @property
    def full_shape(self) -> LayerShape:
        """Shape of the layers with full attention."""
        return LayerShape(self.num_heads, self.num_kv_heads, self.head_dim, self.scale)

    def shape(self, layer: int) -> LayerShape:
        """Return the shape of a layer."""
        return self.full_shape if self.window_shape is None or self.window(layer) is None else self.window_shape

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer in tokens; None for a layer with full attention."""
        return self.windows[layer] if self.windows else None

    def sink(self, layer: int) -> Tensor | None:
        """Return the attention sinks of a layer, ``[num_heads]`` fp32 logits; None for a layer without sinks."""
        return self.sinks[layer] if self.sinks else None

    @property
    def sinks_by_layer(self) -> dict[int, Tensor]:
        """Attention sinks of the layers that have sinks, by layer."""
        return {layer: sinks for layer, sinks in enumerate(self.sinks) if sinks is not None}

    def kv_format(self, page_size: int) -> KvFormat:
        """Return the format of this rank's pages of ``page_size`` tokens."""
        return KvFormat(self.num_kv_heads, page_size, self.head_dim, self.kv_dtype or self.dtype)

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of one page of one layer: K and V of the rank's KV heads."""
        return self.kv_format(page_size).page_bytes


@dataclass(frozen=True)
class Batch:
    """The rows of one scheduler step of the engine, one row per request.

    Row r has the query tokens ``query_start[r]:query_start[r + 1]``. The prompt of a decode row is computed already.
    A decode row has several query tokens if the engine speculates: its last token and drafts of the next ones, some of
    which the engine may reject. A slot is host page id * page_size + offset.
    """

    request_ids: list[str]  # the engine's id of each row's request
    query_start: list[int]  # [rows + 1] index of each row's first query token in the batch
    seq_lens: list[int]  # tokens of each row's sequence, those of this step included
    decode: list[bool]  # true for decode rows
    page_table: Tensor  # [rows, columns] int32 host page ids, in the order of the sequence
    slot_mapping: Tensor  # [tokens] slot that each query token's K and V are written to
    budgets: Sequence[int] = ()  # attention budget in tokens that each request set, 0 for none; empty: no request did


@dataclass(frozen=True)
class PrefillRow:
    """A prefill chunk: the query tokens ``start:end`` of the batch, which are the last of ``seq_len`` tokens."""

    request_id: str
    start: int
    end: int
    seq_len: int
    pages: Tensor  # [ceil(seq_len / page_size)] int64 host page ids of the sequence
    written: Tensor  # [n] int32 host page ids that the chunk's tokens are written to: the last n of `pages`

    @property
    def earlier_tokens(self) -> int:
        """Number of tokens of the sequence that were computed before this step."""
        return self.seq_len - (self.end - self.start)


@dataclass(frozen=True)
class DecodeRows:
    """The decode rows of a step: R rows with Q queries in all, with at most P pages each.

    ``tokens`` and ``page_table`` are on the device of the batch's page table, the other tensors on the host.
    """

    request_ids: list[str]
    query_start: Tensor  # [R + 1] int32: row r has the queries query_start[r]:query_start[r + 1] of Q
    tokens: Tensor  # [Q] int64 index of each query token in the batch
    seq_lens: Tensor  # [R] int64 tokens of each sequence, this step's tokens included
    num_pages: Tensor  # [R] int64 pages of each sequence
    page_table: Tensor  # [R, P] int64 host page ids; columns from a row's num_pages on are 0
    whole_batch: bool  # the batch has no prefill chunks, so that `tokens` is 0 to Q - 1
    budgets: Tensor | None = None  # [R] int64 budgets that requests set, in tokens, 0 for none; None: no request did

    @property
    def count(self) -> int:
        """Number of decode rows, R."""
        return len(self.request_ids)

    @property
    def has_own_budget(self) -> Tensor:
        """``[R]`` bool, true if the row's request set its own budget. Quality targets do not apply to that row."""
        return torch.zeros(self.count, dtype=torch.bool) if self.budgets is None else self.budgets > 0

    def gather(self, x: Tensor) -> Tensor:
        """Return the queries of the decode rows, ``[Q, ...]``, of ``x``, ``[tokens of the batch, ...]``."""
        return x[: self.tokens.shape[0]] if self.whole_batch else x.index_select(0, self.tokens.to(x.device))

    def by_query(self, page_size: int) -> DecodeRows:
        """Return the same queries as rows of their own: R = Q, a row for each query and the tokens up to it."""
        if self.tokens.shape[0] == self.count:
            return self
        counts = self.query_start.diff().long()
        row_of_query = torch.arange(self.count).repeat_interleave(counts)
        later_queries = self.query_start[1:][row_of_query] - 1 - torch.arange(len(row_of_query))
        seq_lens = self.seq_lens[row_of_query] - later_queries
        return replace(
            self,
            request_ids=[self.request_ids[row] for row in row_of_query.tolist()],
            query_start=torch.arange(len(row_of_query) + 1, dtype=torch.int32),
            seq_lens=seq_lens,
            num_pages=(seq_lens + page_size - 1) // page_size,
            page_table=self.page_table[sent(row_of_query, self.page_table.device)],
            budgets=None if self.budgets is None else self.budgets[row_of_query],
        )

    def check_one_query(self) -> None:
        """Check that each row has one query, for an executor that attends no more.

        Raises:
            EngineError: a row has another number of queries.
        """
        # Each row has at least one query, so as many queries as rows are one each.
        if self.tokens.shape[0] != self.count:
            counts = self.query_start.diff()
            row = int((counts != 1).nonzero()[0])
            raise EngineError(
                f"request {self.request_ids[row]} decodes {int(counts[row])} tokens in one step; the hybrid backend "
                "decodes one; leave out speculative decoding"
            )


class WindowRows(NamedTuple):
    """K and V that decode rows attend in layers with one sliding window size: R rows, with at most P pages each.

    Row r attends the tokens ``skips[r]:tokens[r]``, counted from the start of its page ``pages[r, 0]``. The last of
    these tokens is the row's own.
    """

    pages: Tensor  # [R, P] int64 host page ids, from the first page that the window reaches; the rest is arbitrary
    tokens: Tensor  # [R] int64 tokens in `pages`, up to the end of the sequence
    skips: Tensor  # [R] int64 tokens of the first page that lie before the window, less than page_size

    @classmethod
    def of(cls, rows: DecodeRows, window: int, page_size: int) -> WindowRows:
        """Find the pages that a sliding window of ``window`` tokens covers in each decode row."""
        first = (rows.seq_lens - window).clamp(min=0)
        page = first // page_size
        tokens = rows.seq_lens - page * page_size
        columns = page[:, None] + torch.arange(-(-int(tokens.max()) // page_size))
        columns = columns.clamp(max=rows.page_table.shape[1] - 1)
        return cls(rows.page_table.gather(1, columns.to(rows.page_table.device)), tokens, first - page * page_size)


@dataclass
class Step:
    """A scheduler step, split into decode rows and prefill chunks."""

    number: int  # number of the step since start; -1 for the step of a CUDA graph
    num_tokens: int  # query tokens of the batch, without padding
    decode: DecodeRows | None  # None: the step has no decode rows
    prefill: list[PrefillRow]  # the prefill chunks
    write_pages: Tensor  # [tokens] int32 host page id that each query token's K and V are written to
    write_offsets: Tensor  # [tokens] int64 offset of each query token in its page
    prompt_pages: Tensor  # `write_pages` with -1 for the tokens of decode rows, if the step has prefill chunks
    fills_prefix: bool = False  # a decode row fills a page that may end the prefix of a prefill chunk
    plan: Any = None  # state that the attention method (quest, scout, ...) keeps for the step
    windows: dict[int, WindowRows] = field(default_factory=dict)  # results of `window_rows` by sliding window size
    is_captured: bool = False  # the step is captured in a CUDA graph, whose replays serve later steps
    error: WorkerError | None = None  # error of a CPU worker, after which the remaining layers compute nothing

    @property
    def request_ids(self) -> list[str]:
        """Ids of the step's requests, those of decode rows first."""
        decoding = [] if self.decode is None else self.decode.request_ids
        return [*decoding, *(row.request_id for row in self.prefill)]


@dataclass(frozen=True)
class StepFailure:
    """Results of a failed step that must not be used: outputs of ``request_ids``, and K and V in ``pages``."""

    error: WorkerError
    request_ids: list[str]
    pages: list[int]  # host page ids that the step wrote to


def window_rows(step: Step, window: int, page_size: int) -> WindowRows:
    """Return the pages that the decode rows of a step attend in layers with a sliding window of ``window`` tokens.

    The result is computed for the first layer of a step and reused for the others.
    """
    if window not in step.windows:
        assert step.decode is not None
        step.windows[window] = WindowRows.of(step.decode, window, page_size)
    return step.windows[window]


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to ``device``. The copy from the host to a GPU goes through pinned memory and does not wait."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and not x.is_cuda else x.to(device)


def whole_tokens(x: Tensor) -> Tensor:
    """Return ``x`` such that the heads of each token are contiguous, as `Operations.append_tokens` requires.

    A slice of the fused QKV projection already is, and is returned without a copy.

    Args:
        x: ``[tokens, heads, head_dim]``, any strides.
    """
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def captured_step(rows: int) -> Step:
    """Return the step that a CUDA graph is captured with: ``rows`` decode rows that own no pages."""
    zeros = torch.zeros(rows, dtype=torch.int64)
    query_start, table = torch.arange(rows + 1, dtype=torch.int32), torch.zeros(rows, 0)
    decode = DecodeRows([""] * rows, query_start, torch.arange(rows), zeros, zeros, table, whole_batch=True)
    return Step(-1, rows, decode, [], zeros, zeros, zeros, is_captured=True)


def with_late_prefixes(
    batch: Batch, page_size: int, holds: Callable[[str], bool], captures_decode_steps: bool
) -> Batch:
    """Run a request's first decode row as a prefill chunk of one token, if this step still writes its prefix.

    An engine's prefix cache offers a page once the token that fills the page is scheduled, not once it is written.
    A preempted request that resumes with one token left would otherwise copy such a page to its frames too early.

    Args:
        batch: the batch of the engine.
        page_size: tokens per page.
        holds: tells whether a request has run a decode step already.
        captures_decode_steps: steps of decode rows alone are CUDA graphs, which cannot hold a prefill chunk.
    """
    table, lengths = batch.page_table, batch.seq_lens
    counts = [end - start for start, end in pairwise(batch.query_start)]
    # A step in which a row has drafts stores the tokens of all its decode rows before any row selects pages.
    late = {
        r
        for r, (request_id, length) in enumerate(zip(batch.request_ids, lengths, strict=False))
        if batch.decode[r] and counts[r] == 1 and length % page_size == 1 < length and not holds(request_id)
    }
    if not late or (captures_decode_steps and max(counts) == 1):
        return batch
    filled_pages = [
        table[r, (length - count) // page_size : length // page_size]
        for r, (length, count) in enumerate(zip(lengths, counts, strict=False))
        if length // page_size > (length - count) // page_size
    ]
    if not filled_pages:
        return batch
    # On a GPU the page ids are not compared, because reading them would wait for the device.
    if table.is_cpu:
        pages = torch.cat(filled_pages)
        late = {r for r in late if torch.isin(table[r, : lengths[r] // page_size], pages).any()}
    return replace(batch, decode=[is_decode and r not in late for r, is_decode in enumerate(batch.decode)])


def make_step(number: int, batch: Batch, page_size: int) -> Step:
    """Split a batch into decode rows and prefill chunks. ``number`` counts the steps since start."""
    decoding = [r for r, is_decode in enumerate(batch.decode) if is_decode]
    prefill = []
    for r, is_decode in enumerate(batch.decode):
        start, end = batch.query_start[r], batch.query_start[r + 1]
        if is_decode or start == end:
            continue
        prefill.append(_prefill_row(batch, r, start, end, page_size))
    slots, rows = batch.slot_mapping.long(), _decode_rows(batch, decoding, page_size)
    pages = (slots // page_size).int()
    return Step(
        number=number,
        num_tokens=batch.query_start[-1],
        decode=rows,
        prefill=prefill,
        write_pages=pages,
        write_offsets=slots % page_size,
        prompt_pages=pages if rows is None or not prefill else pages.index_fill(0, rows.tokens, -1),
        fills_prefix=rows is not None and _fills_prefix(rows, prefill, page_size),
    )


def _fills_prefix(rows: DecodeRows, prefill: list[PrefillRow], page_size: int) -> bool:
    """Tell whether a decode row fills a page that may be the last page of a prefill chunk's prefix.

    An engine's prefix cache offers a page once the token that fills the page is scheduled, not once it is written.
    """
    has_full_prefix = any(row.earlier_tokens and row.earlier_tokens % page_size == 0 for row in prefill)
    return has_full_prefix and bool((rows.seq_lens % page_size < rows.query_start.diff()).any())


def _prefill_row(batch: Batch, row: int, start: int, end: int, page_size: int) -> PrefillRow:
    """Return row ``row`` of a batch, whose query tokens are ``start:end``, as a prefill chunk."""
    seq_len = batch.seq_lens[row]
    first, count = (seq_len - (end - start)) // page_size, -(-seq_len // page_size)
    pages = batch.page_table[row, :count]
    return PrefillRow(batch.request_ids[row], start, end, seq_len, pages.long(), written=pages[first:].int())


def _decode_rows(batch: Batch, rows: list[int], page_size: int) -> DecodeRows | None:
    """Return the rows ``rows`` of a batch as decode rows; None if the list is empty."""
    if not rows:
        return None
    seq_lens = torch.tensor([batch.seq_lens[r] for r in rows])
    num_pages = (seq_lens + page_size - 1) // page_size
    columns = int(num_pages.max())
    table, device = batch.page_table[:, :columns], batch.page_table.device
    table = table[: len(rows)] if rows == list(range(len(rows))) else table[sent(torch.tensor(rows), device)]
    beyond = torch.arange(columns, device=device)[None] >= sent(num_pages, device)[:, None]
    start = batch.query_start
    tokens, query_start = [token for r in rows for token in range(start[r], start[r + 1])], [0]
    for r in rows:
        query_start.append(query_start[-1] + start[r + 1] - start[r])
    return DecodeRows(
        request_ids=[batch.request_ids[r] for r in rows],
        query_start=torch.tensor(query_start, dtype=torch.int32),
        tokens=sent(torch.tensor(tokens), device),
        seq_lens=seq_lens,
        num_pages=num_pages,
        page_table=table.long().masked_fill(beyond, 0),
        whole_batch=tokens == list(range(start[-1])),
        budgets=torch.tensor([batch.budgets[r] for r in rows]) if any(batch.budgets) else None,
    )

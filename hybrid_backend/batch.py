"""What an engine tells the runtime: the model's shape once, and one batch per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid_backend.errors import EngineError, WorkerError
from hybrid_backend.kernels.kv_format import KvFormat


@dataclass(frozen=True)
class ModelSpec:
    """Shapes of the model as this rank sees it (heads are local to the tensor-parallel rank).

    ``windows[layer]`` is the sliding window in tokens of a local layer, None for a layer with full attention.
    ``max_tokens``: of the longest sequence that the engine admits, None: as many as the host pool holds.
    ``hidden``: width of the decoder layers' input, 0: unknown, then rows cannot park.
    ``parks``: the engine lets rows wait from one step to the next: it hands every layer's input over
    (`HybridRuntime.layer_input`) and takes no token of `HybridRuntime.unfinished` rows.
    ``layer_weight_bytes``: all weights of one decoder layer on this rank, 0: unknown.
    ``sinks[layer]``: ``[num_heads]`` fp32, contiguous, on the device that attends: the layer's attention sinks
    (`attention.partial.with_sinks`), None: it has none. What a method calls a share is one of the keys' attention.
    The engine may change the values between steps, so every layer reads them where they are.
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
    sinks: tuple[Tensor | None, ...] = field(default=(), compare=False)  # tensors have no plain equality

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def sink(self, layer: int) -> Tensor | None:
        return self.sinks[layer] if self.sinks else None

    @property
    def sinks_by_layer(self) -> dict[int, Tensor]:
        return {layer: sinks for layer, sinks in enumerate(self.sinks) if sinks is not None}

    def kv_format(self, page_size: int) -> KvFormat:
        """Return the format of this rank's pages of ``page_size`` tokens."""
        return KvFormat(self.num_kv_heads, page_size, self.head_dim, self.dtype)

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of one page: K and V of one layer, all local KV heads."""
        return self.kv_format(page_size).page_bytes


@dataclass(frozen=True)
class Batch:
    """One engine step. Row r owns the query tokens ``query_start[r]:query_start[r + 1]``.

    ``decode[r]`` is true for a row that generates: the whole prompt is already computed. Executors take one query token
    of such a row (`DecodeRows.check_one_query`).
    ``page_table``: ``[rows, columns]`` int32 host page ids, in the order of the sequence.
    ``seq_lens`` counts the tokens of the sequence including this step's.
    ``slot_mapping``: ``[tokens]``, where each query token's K and V go: page id * page_size + offset.
    ``budgets``: tokens per row that the request asked for instead of ``budget_tokens``, 0: it did not; empty: none did.
    """

    request_ids: list[str]
    query_start: list[int]
    seq_lens: list[int]
    decode: list[bool]
    page_table: Tensor
    slot_mapping: Tensor
    budgets: Sequence[int] = ()


@dataclass(frozen=True)
class PrefillRow:
    """Query tokens ``start:end`` of the batch: the last ``end - start`` of ``seq_len`` tokens."""

    request_id: str
    start: int
    end: int
    seq_len: int
    pages: Tensor  # [ceil(seq_len / page_size)] int64
    written: Tensor  # [W] int32: the last of `pages`, which the query tokens are written to

    @property
    def earlier_tokens(self) -> int:
        """Of the sequence, computed before this step."""
        return self.seq_len - (self.end - self.start)


@dataclass(frozen=True)
class DecodeRows:
    """The decoding rows of a step. R rows, Q queries, P columns; ``tokens`` and ``page_table`` lie where the batch's
    page table does, the others on the host."""

    request_ids: list[str]
    query_start: Tensor  # [R + 1] int32: row r has the queries query_start[r]:query_start[r + 1] of Q
    tokens: Tensor  # [Q] int64: index of each query token in the batch
    seq_lens: Tensor  # [R] int64
    num_pages: Tensor  # [R] int64
    page_table: Tensor  # [R, P] int64, columns beyond num_pages are 0
    whole_batch: bool  # tokens == arange(len(batch)): no gather needed
    budgets: Tensor | None = None  # [R] int64 tokens that the request asked for, 0: none; None: nobody did

    @property
    def count(self) -> int:
        return len(self.request_ids)

    @property
    def has_own_budget(self) -> Tensor:
        """``[R]`` bool: rows whose request asked for a budget, which no promise (`config.quality`) is about."""
        return torch.zeros(self.count, dtype=torch.bool) if self.budgets is None else self.budgets > 0

    def gather(self, x: Tensor) -> Tensor:
        """Return the decoding rows' queries ``[Q, ...]`` of ``x`` ``[tokens of the batch, ...]``."""
        return x[: len(self.tokens)] if self.whole_batch else x.index_select(0, self.tokens.to(x.device))

    def check_one_query(self) -> None:
        """Check that each row has one query, for an executor that attends no more.

        Raises:
            EngineError: a row has another number of queries.
        """
        counts = self.query_start.diff()
        if not bool((counts == 1).all()):
            row = int((counts != 1).nonzero()[0])
            raise EngineError(
                f"request {self.request_ids[row]} decodes {int(counts[row])} tokens in one step; the hybrid backend "
                "decodes one; leave out speculative decoding"
            )


class WindowRows(NamedTuple):
    """What the decoding rows of a step attend of one sliding window, counted from the first page that the window
    reaches into: tokens ``skips[r]`` to ``tokens[r]`` of ``pages[r]``, the row's own token last."""

    pages: Tensor  # [R, P] int64 host page ids; what lies beyond `tokens` is any page
    tokens: Tensor  # [R] int64
    skips: Tensor  # [R] int64, less than a page

    @classmethod
    def of(cls, rows: DecodeRows, window: int, page_size: int) -> WindowRows:
        first = (rows.seq_lens - window).clamp(min=0)
        page = first // page_size
        tokens = rows.seq_lens - page * page_size
        columns = page[:, None] + torch.arange(-(-int(tokens.max()) // page_size))
        columns = columns.clamp(max=rows.page_table.shape[1] - 1)
        return cls(rows.page_table.gather(1, columns.to(rows.page_table.device)), tokens, first - page * page_size)


@dataclass
class Step:
    """One step as the runtime sees it. ``plan`` is the method's own state for the step, ``windows`` what the local
    layers of a window attend, made by the first of them."""

    number: int
    num_tokens: int
    decode: DecodeRows | None
    prefill: list[PrefillRow]
    write_pages: Tensor  # [tokens] int32: where the batch's K and V go
    write_offsets: Tensor  # int64
    prompt_pages: Tensor  # as write_pages, -1 where a decoding row's token goes
    fills_prefix: bool = False  # a prompt may begin with a page that a decoding row fills in this very step
    plan: Any = None
    windows: dict[int, WindowRows] = field(default_factory=dict)
    is_captured: bool = False  # of a graph: its rows stand for those of whatever step is open when it is replayed
    error: WorkerError | None = None  # what a layer met; nothing is computed after it

    @property
    def request_ids(self) -> list[str]:
        rows = [] if self.decode is None else self.decode.request_ids
        return [*rows, *(row.request_id for row in self.prefill)]


@dataclass(frozen=True)
class StepFailure:
    """What must not be used of a step: the outputs of these requests, and what it wrote to these pages."""

    error: WorkerError
    request_ids: list[str]
    pages: list[int]  # host page ids


def window_rows(step: Step, window: int, page_size: int) -> WindowRows:
    """Of the decoding rows, which the step must have; all layers of a step have pages of one size."""
    if window not in step.windows:
        assert step.decode is not None
        step.windows[window] = WindowRows.of(step.decode, window, page_size)
    return step.windows[window]


def sent(x: Tensor, device: torch.device) -> Tensor:
    """``x``, of the host, on ``device``; from pinned memory, so that nobody waits for a GPU that is behind."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and not x.is_cuda else x.to(device)


def whole_tokens(x: Tensor) -> Tensor:
    """``[tokens, heads, head_dim]``, each token contiguous for itself (`Operations.append_tokens`): a part of the
    projection to queries, keys and values is, as it is."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def captured_step(rows: int) -> Step:
    """What a graph of ``rows`` decoding rows is captured with: all rows decode, none owns a page."""
    nothing = torch.zeros(rows, dtype=torch.int64)
    query_start, table = torch.arange(rows + 1, dtype=torch.int32), torch.zeros(rows, 0)
    decode = DecodeRows([""] * rows, query_start, torch.arange(rows), nothing, nothing, table, whole_batch=True)
    return Step(-1, rows, decode, [], nothing, nothing, nothing, is_captured=True)


def make_step(number: int, batch: Batch, page_size: int) -> Step:
    """Split a batch into its decoding rows and its prefilling rows."""
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
    """Engines find a page in the prefix cache from when the token that fills it is scheduled."""
    begins = (row.earlier_tokens for row in prefill)
    return any(begin and begin % page_size == 0 for begin in begins) and bool((rows.seq_lens % page_size == 0).any())


def _prefill_row(batch: Batch, row: int, start: int, end: int, page_size: int) -> PrefillRow:
    seq_len = batch.seq_lens[row]
    first, count = (seq_len - (end - start)) // page_size, -(-seq_len // page_size)
    pages = batch.page_table[row, :count]
    return PrefillRow(batch.request_ids[row], start, end, seq_len, pages.long(), written=pages[first:].int())


def _decode_rows(batch: Batch, rows: list[int], page_size: int) -> DecodeRows | None:
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

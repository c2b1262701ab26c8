"""The buffers that operations share, and the numbers by which kernels know choices."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

AGGREGATES = ("sum", "max", "softmax")
"""Ways to combine the scores of query heads; kernels know each by its position."""

SIMILARITIES = ("harmonic", "min")
"""Ways to combine the similarities of a KV head's query heads (`match_labels`); kernels know each by its position."""


def check_one_query(query_start: Tensor, rows: int) -> None:
    """Check that each row has one query, for an implementation that takes no more.

    Raises:
        ValueError: a row has another number of queries.
    """
    if len(query_start) != rows + 1 or not bool((query_start.diff() == 1).all()):
        raise ValueError(f"these kernels take one query per row, not {query_start.diff().tolist()}")


class Maps(NamedTuple):
    """Residency maps: the page that each frame holds, of all layers, or of one layer without the first dimension.

    Pages are logical: positions in the sequence. So requests that share a prefix may each hold a copy of one host page.
    """

    frame_of: Tensor
    """``[layers, requests, columns]`` int32: frame of each logical page; -1: the page is not resident."""
    page_of: Tensor
    """``[layers, frames * requests]`` int32: the inverse; -1: the frame is empty or about to be overwritten."""
    importance: Tensor
    """``[layers, frames * requests]`` fp32: importance of the frame's page; -inf: the frame is empty; +inf: the page is
    always selected, or the frame does not exist, or the frame is empty and reserved for a page that is on its way."""

    def of(self, layer: int | slice) -> Maps:
        """Return the maps of one layer or of a slice of layers."""
        return Maps(*(tensor[layer] for tensor in self))

    @property
    def size(self) -> int:
        """Frames of each request."""
        return self.page_of.shape[-1] // self.frame_of.shape[-2]


class Copies(NamedTuple):
    """Recalls under way, ``[layers, rows, n]`` int32, or of one layer; an entry whose frame is -1 is empty."""

    frames: Tensor
    host_pages: Tensor
    pages: Tensor
    """Logical pages."""
    importance: Tensor
    """``[layers, rows, n]`` fp32."""
    requests: Tensor
    """``[layers, rows]`` int32."""
    started: Tensor
    """``[layers, rows]`` int64: generation of the request's index when the copy began."""

    def of(self, layer: int | slice) -> Copies:
        """Return the copies of one layer or of a slice of layers."""
        return Copies(*(tensor[layer] for tensor in self))


class AwaitedPages(NamedTuple):
    """Host pages on their way to the frames of one layer in another stream, for which the rows of a step wait.

    Copies are numbered in the order in which they are done. A step has 0, 1 or more rows that wait.
    """

    expected: Tensor
    """``[requests]`` int32: number of the last copy to the frames of each request index; 0: there was none."""
    arrived: Tensor
    """``[1]`` int32: number of the last copy that is done in the layer."""
    number: Tensor
    """``[1]`` int32: number of the step, a step input."""
    late: Tensor
    """``[steps, requests]`` int32 on the host, pinned if there is a GPU: ``late[number % steps, request]`` becomes
    ``number`` when no time is left. The step then goes on, and no result of the row may be used."""
    time_left: Tensor
    """``[1]`` int64 nanoseconds, from which waits are subtracted, so that all layers' waits together are bounded."""

    def of(self, layer: int) -> AwaitedPages:
        """Return the copies of one layer, where `arrived` has those of all layers."""
        return self._replace(arrived=self.arrived[layer : layer + 1])

    @property
    def nbytes(self) -> int:
        """Size of the tensors on the device, but for the step input, in bytes."""
        return self.expected.nbytes + self.arrived.nbytes + self.time_left.nbytes


class Counters(NamedTuple):
    """Columns of a layer's counters, a row ``[len(fields)]`` int64 of totals since start.

    Pages and tokens are summed over the lists of each row. The operation that knows a number adds it; an operation that
    gets no counters counts nothing.
    """

    resident_pages: int
    """Selected pages that are in a frame."""
    missing_pages: int
    """Selected pages that are in no frame."""
    resident_tokens: int
    """Tokens of the selected resident pages."""
    missing_tokens: int
    """Tokens of the selected missing pages."""
    recalled_pages: int
    """Copies into frames that were begun."""
    lookups: int
    """KV heads whose cached pages were looked up (`match_labels`)."""
    hits: int
    """Lookups whose cached pages are used again."""
    waited: int
    """Nanoseconds that the device tier waited for the CPU."""
    ahead: int
    """Nanoseconds from asking the CPU for a partial to needing the answer."""
    asked_at: int
    """Clock in nanoseconds at the last question; 0: it was about no page."""


class Selection(NamedTuple):
    """Selected pages: lists ``[rows, lists, k]`` int32 and their lengths ``[rows, lists]`` int32.

    Lists are ascending by logical page. Entries beyond a list's length are undefined.
    """

    pages: Tensor
    """All selected logical pages."""
    pages_listed: Tensor
    """Length of `pages`."""
    frames: Tensor
    """Frames of the selected pages that are resident."""
    frames_listed: Tensor
    """Length of `frames`."""
    tokens: Tensor
    """``[rows, lists]`` int32: tokens of the resident selected pages. The growing page is always resident, and last."""
    missing: Tensor
    """Host page ids of the selected pages that are not resident, which are whole."""
    absent: Tensor
    """Logical pages of `missing`."""
    missing_listed: Tensor
    """Length of `missing` and of `absent`."""


class Reuse(NamedTuple):
    """The last selection of each row in a layer, which the row attends again while its epoch stays the same.

    A row reuses its selection if it has pages and its epoch is the one in `list_epochs`. All tensors but `epochs` are
    of all layers, or of one layer without the first dimension. They may have more rows than a step.
    """

    epochs: Tensor
    """``[rows]`` int32 step input: a number that changes when the row has to select again."""
    list_epochs: Tensor
    """``[layers, rows, lists]`` int32: epoch in which each list was selected; 0: never."""
    pages: Tensor
    """``[layers, rows, lists, k]`` int32: `Selection.pages` of that epoch."""
    pages_listed: Tensor
    """``[layers, rows, lists]`` int32: `Selection.pages_listed` of that epoch."""
    scores: Tensor
    """``[layers, rows, lists, columns]`` fp32: scores of that epoch."""

    def of(self, layer: int) -> Reuse:
        """Return the selections of one layer."""
        return Reuse(self.epochs, *(tensor[layer] for tensor in self[1:]))

    @property
    def nbytes(self) -> int:
        """Size of all tensors but the step input in bytes."""
        return sum(tensor.nbytes for tensor in self[1:])


class StreamPlan(NamedTuple):
    """Pages of KV heads that pass through staging buffers in one step, and the tokens that are attended elsewhere.

    Tokens count from the beginning of a list of pages. The pieces of all groups of heads follow each other.
    """

    pages: Tensor
    """``[pieces, capacity]`` int32: head pages of the host pool."""
    places: Tensor
    """``[pieces, capacity]`` int32: place in the buffer of each of `pages`; -1: nothing is copied."""
    begins: Tensor
    """``[pieces, rows, kv_heads]`` int32: first token of each list in the buffer."""
    ends: Tensor
    """``[pieces, rows, kv_heads]`` int32: end of each list in the buffer; `begins`: the list is not in the piece."""
    rest_begins: Tensor
    """``[rows, kv_heads]`` int32: first token of the sequence that is attended in the host pool."""
    rest_ends: Tensor
    """``[rows, kv_heads]`` int32: end of these tokens; `rest_begins`: there are none."""
    resident: Tensor
    """``[rows, kv_heads]`` int32: tokens of resident heads; 0 for other heads."""
    framed: Tensor
    """``[rows, kv_heads]`` int32: tokens in frames that are attended; 0 for resident heads and without frames."""


NOWHERE, FAILED = -1, -2
"""Values of `RowStates.parked` that are no layer: the row is not parked; or the CPU could not answer, and it stays."""


class RowStates(NamedTuple):
    """Decode rows whose whole attention the CPU may compute, over one or several steps.

    Such a row asks the CPU in each layer. It waits in the layer, or it parks: later layers compute nothing valid for
    it, until a step reaches the same layer with the answer. All tensors are ``[rows]`` int32 on the device tier.
    """

    on_cpu: Tensor
    """1: the CPU attends the row."""
    parks: Tensor
    """1: the row parks when it asks."""
    parked: Tensor
    """Layer in which the row waits for an answer; `NOWHERE`; `FAILED`."""
    live: Tensor
    """1: what the layers compute for the row is valid."""
    asks: Tensor
    """1: the CPU attends the row, and the row is live."""
    stored: Tensor
    """Host page of the row's new token; -1 if the row is not live or is padding."""
    whole: Tensor
    """Whole pages that the CPU attends."""
    tail: Tensor
    """Tokens of the growing page, which the device attends in the host pool."""
    growing: Tensor
    """`tail` if the layer has taken the row's answer, else 0."""
    device_tokens: Tensor
    """Tokens of a row that the device attends in frames."""

    def first(self, rows: int) -> RowStates:
        """Return the states of the first ``rows`` rows."""
        return RowStates(*(tensor[:rows] for tensor in self))


class Sample(NamedTuple):
    """Inputs of a layer in a step that samples it, for the host: in pinned memory where there is a GPU.

    The tensors are of all layers, or of one layer without the first dimension.
    """

    q: Tensor
    """``[layers, heads, head_dim]``: true query of the sampled row."""
    table: Tensor
    """``[layers, columns]`` int32: host pages of the sampled row."""
    pages: Tensor
    """``[layers, lists, k]`` int32: logical pages that the row selected."""
    listed: Tensor
    """``[layers, lists]`` int32: lengths of `pages`."""
    cosines: Tensor
    """``[layers, rows, heads]`` fp32: cosine of the predicted and the true query of all rows; NaN: no prediction."""
    number: Tensor
    """``[layers, 1]`` int32: number of the step, which is written after everything else."""

    def of(self, layer: int) -> Sample:
        """Return the sample of one layer."""
        return Sample(*(tensor[layer] for tensor in self))

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self)

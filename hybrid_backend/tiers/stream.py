"""Exact streaming: host pages pass through two staging buffers, a group of KV heads at a time (HeadInfer, section 3).

While one buffer is attended, the next piece is copied into the other. Device memory is two buffers, whatever the
context: ``2 (buffers) x tokens x heads of a group x 2 (K, V) x head_dim x element size``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from hybrid_backend.attention.prefill import KVBlock
from hybrid_backend.errors import DeadlineError
from hybrid_backend.step import ModelSpec, sent
from hybrid_backend.tiers.host_pool import HostPool


@dataclass(frozen=True)
class Piece:
    """What one staging buffer holds at a time: ``tokens`` tokens of some KV heads of batch row ``row``."""

    row: int
    heads: tuple[int, ...]
    pages: Tensor  # host page ids
    tokens: int


def staging_bytes(model: ModelSpec, tokens: int, heads: int) -> int:
    """Device bytes of both buffers when each holds ``tokens`` tokens of ``heads`` KV heads of one layer."""
    return 2 * heads * tokens * model.head_dim * 2 * model.dtype.itemsize


def buffer_shape(model: ModelSpec, page_size: int, tokens: int) -> tuple[int, ...]:
    """Of both staging buffers, when each holds ``tokens`` tokens of all KV heads of one layer."""
    return (2, tokens // page_size * model.num_kv_heads * 2, page_size, model.head_dim)


class _Pending(Protocol):
    """A piece on its way into a buffer."""

    def result(self, timeout: float) -> KVBlock: ...


@dataclass(frozen=True)
class _OnDevice:
    """A copy that the device makes in a stream of its own; who uses the block waits for it in theirs."""

    block: KVBlock
    done: torch.cuda.Event

    def result(self, timeout: float) -> KVBlock:
        torch.cuda.current_stream().wait_event(self.done)
        return self.block


class HeadStream:
    """Two staging buffers of ``tokens`` tokens of all KV heads each, and who fills them: a thread, or a GPU itself,
    which reads the host pages in a stream beside the step's."""

    def __init__(
        self, host: HostPool, model: ModelSpec, page_size: int, tokens: int, device: torch.device, deadline: float
    ) -> None:
        self._host = host
        self._heads, self._dim, self._page_size = model.num_kv_heads, model.head_dim, page_size
        self._head_pages = tokens // page_size * model.num_kv_heads  # pages of one head that a buffer holds
        shape = buffer_shape(model, page_size, tokens)
        self._buffers = torch.empty(shape, dtype=model.dtype, device=device)
        self._deadline = deadline
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hybrid-stream", initializer=_alone)
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._turn = 0
        self._ahead: tuple[int, Piece, _Pending] | None = None
        self.copied_bytes = 0

    @property
    def nbytes(self) -> int:
        return self._buffers.nbytes

    def pieces(self, row: int, heads: Sequence[int], groups: int, pages: Tensor, tokens: int) -> list[Piece]:
        """Cut the first ``tokens`` tokens of a sequence into pieces that fit a buffer, ``groups`` head groups or more.

        A group whose context is longer than a buffer is cut along the tokens too.
        """
        found: list[Piece] = []
        if not tokens or not heads:
            return found
        size = -(-len(heads) // min(groups, len(heads)))
        size = min(size, self._head_pages)
        used = -(-tokens // self._page_size)
        for first in range(0, len(heads), size):
            group = tuple(heads[first : first + size])
            step = max(1, self._head_pages // len(group))
            for start in range(0, used, step):
                end = min(used, start + step)
                inside = min(tokens, end * self._page_size) - start * self._page_size
                found.append(Piece(row, group, pages[start:end], inside))
        return found

    def blocks(self, layer: int, pieces: Sequence[Piece], following: int | None = None) -> Iterator[KVBlock]:
        """K and V of the pieces, in order; a block is overwritten after the one that follows it was asked for.

        ``following``: the layer whose first piece is fetched while this layer's last one is attended; its pieces must
        be the same.

        Raises:
            DeadlineError: a copy did not end in time.
        """
        order: list[tuple[int, Piece] | None] = [(layer, piece) for piece in pieces]
        order.append((following, pieces[0]) if following is not None and pieces else None)
        for now, then in pairwise(order):
            assert now is not None
            future = self._taken(*now)
            if then is not None:
                self._ahead = (*then, self._fetch(*then))
            try:
                yield future.result(self._deadline)
            except Late:
                raise DeadlineError(f"staging copy of layer {layer} did not end within {self._deadline} s") from None

    def drop(self) -> None:
        """Forget what was fetched ahead; the step that it was for failed or is over. Nobody waits for it: whatever is
        fetched next comes after it."""
        self._ahead = None

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _taken(self, layer: int, piece: Piece) -> _Pending:
        """What was fetched ahead, if it is this; else a fetch that starts now."""
        if self._ahead is not None:
            ahead_layer, ahead_piece, future = self._ahead
            if ahead_layer == layer and ahead_piece is piece:
                self._ahead = None
                return future
            self.drop()
        return self._fetch(layer, piece)

    def _fetch(self, layer: int, piece: Piece) -> _Pending:
        self._turn ^= 1
        if self._beside is None:
            return self._thread.submit(self._copy, self._turn, layer, piece)
        # Whatever attended this buffer before, or wrote the host pages, is in the step's stream already.
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            block = self._copy(self._turn, layer, piece)
            return _OnDevice(block, self._beside.record_event())

    def _copy(self, turn: int, layer: int, piece: Piece) -> KVBlock:
        with torch.inference_mode():
            blocks = self._host.blocks(layer)  # as the device sees them
            heads, pages = (sent(x, blocks.device) for x in (torch.tensor(piece.heads), piece.pages))
            halves = torch.arange(2, device=blocks.device)
            index = (pages[None] * self._heads + heads[:, None])[:, None] * 2 + halves[None, :, None]
            index = index.flatten()  # [heads, K|V, pages]
            target = self._buffers[turn, : len(index)]
            torch.index_select(blocks, 0, index, out=target)
            self.copied_bytes += target.nbytes
            k, v = target.view(len(piece.heads), 2, -1, self._dim)[:, :, : piece.tokens].unbind(1)
            return KVBlock(piece.heads, k, v)


def _alone() -> None:
    # One OpenMP thread: a copy must not start a second team beside the engine's. vLLM replaces torch.set_num_threads by
    # a no-op, and the setting is this thread's own, so ask the C function.
    torch._C.set_num_threads(1)

"""Time of a prompt's chunk beyond its matrices: attention, and what storing and reading KV in host memory takes."""

from __future__ import annotations

import math
from collections import Counter
from enum import Enum
from typing import NamedTuple

from hybrid_backend.hardware.times import LayerTimes
from hybrid_backend.tools.plan.simulate.costs import COPY_PROGRAMS
from hybrid_backend.tools.plan.traffic.server import Server

KERNEL_SHARE = 0.71
"""Rate of FlashInfer's attention of a chunk over earlier tokens, relative to the profile's rate of products.

Measured on an H200: 421 TFLOP/s (docs/lab/cuda.md#the-first-time), where the profile has 593. No other GPU was
measured.
"""
OWN_SECONDS = 0.108e-3
"""Time of a chunk's attention over itself beyond its products (measured on an H200: 0.21 ms for 2,048 tokens)."""
PARTIAL_BYTES, MERGED_BYTES = 2, 4
"""Bytes of one element of attention's output: as FlashInfer writes it, and merged in fp32."""
STORED_COPIES = 2.5
"""Reads and writes in device memory per byte of new KV: a copy to write from, and the keys read for digests."""


class PromptPath(Enum):
    """The way of a running prompt's KV, from one chunk to the next and to the frames of the decoding request."""

    STREAMED = "streamed"
    """Earlier KV is read back over the bus in every chunk. Admission copies the frames over the bus on the step's own
    stream."""
    ON_DEVICE = "on the device"
    """Earlier KV stays in the device's free frames, as far as they reach, and one call attends it with the chunk.
    Admission keeps these frames; others are filled beside the next steps."""


def shipped_path() -> PromptPath:
    """Return the path of the shipped code (`prompt_chunks.py`, `tiers/stream.py`, `step/admission.py`)."""
    return PromptPath.ON_DEVICE


class Chunk(NamedTuple):
    """Tokens of one prompt in one step.

    Attributes:
        earlier: tokens of the prompt before the chunk.
        tokens: tokens of the chunk.
        resident: earlier tokens whose KV is in frames.
    """

    earlier: int
    tokens: int
    resident: int = 0


class ChunkSeconds(NamedTuple):
    """Seconds of a chunk in all layers: attention, and the path of its KV."""

    attention: float
    path: float


class PromptTimes:
    """Times of prompts on a server."""

    def __init__(self, server: Server, path: PromptPath, kernel_share: float = KERNEL_SHARE) -> None:
        """Compute the rates that every chunk needs.

        Args:
            server: the server.
            path: way of a prompt's KV; without effect on the stock engine.
            kernel_share: rate of our attention of prompts, relative to the stock engine's.
        """
        self._kernel_share = kernel_share
        hardware, shape = server.hardware, server.shape
        self._server, self._hbm, self._link = server, hardware.hbm_achieved, hardware.link_achieved(math.inf)
        self._windows = tuple(Counter(shape.attention_windows).items())
        self._pair_seconds = LayerTimes.of(hardware, shape).prompt_attention(1.0)
        self._token_bytes, self._values = shape.token_bytes, shape.heads * shape.head_dim
        # Share of the device's processors that a copy over the bus occupies.
        self._copy_share = min(1.0, COPY_PROGRAMS / hardware.processors) if hardware.processors else 0.0
        self.is_on_device = path is PromptPath.ON_DEVICE and server.frame_tokens > 0
        """True if a running prompt's KV stays in frames."""

    def chunk(self, chunk: Chunk, matrix_seconds: float) -> ChunkSeconds:
        """Return the seconds of a chunk beyond its matrices.

        Args:
            chunk: the chunk.
            matrix_seconds: time of one layer's matrices in this step, beside which KV is written to the host.
        """
        server, attention, path = self._server, 0.0, 0.0
        for window, layers in self._windows:
            if window is not None:
                attention += layers * self._engine(_pairs(chunk, window))
            elif not server.is_hybrid:
                attention += layers * self._engine(_pairs(chunk, None))
            else:
                attention += layers * self.attention(chunk)
                path += server.framed_layers * self._framed(chunk, matrix_seconds)
                path += server.whole_layers * self._whole(chunk)
        return ChunkSeconds(attention, path)

    def attention(self, chunk: Chunk) -> float:
        """Return the seconds of our attention of a chunk in one layer: over itself, then over earlier tokens."""
        own = OWN_SECONDS + self._ours(_pairs(Chunk(0, chunk.tokens), None))
        return own + self._ours(float(chunk.tokens) * chunk.earlier)

    def admission(self, context: int, resident: int) -> float:
        """Return the seconds in which a request that begins to decode gets its frames, in all layers.

        Args:
            context: tokens of the request.
            resident: its tokens whose KV is in frames already.
        """
        server = self._server
        size = server.framed_layers * self._kv(min(context, server.frame_tokens))
        if not self.is_on_device:
            return size / self._link
        share = min(1.0, resident / context)
        moved = 2.0 * size * share / self._hbm  # Frames beyond the request's own are given back.
        return moved + self._beside(size * (1.0 - share))

    def _framed(self, chunk: Chunk, matrix_seconds: float) -> float:
        """Return the seconds of a layer with frames: reading back, merging, and writing to the host."""
        streamed = chunk.earlier - (chunk.resident if self.is_on_device else 0)
        reading = self._reading(chunk, streamed, matrix_seconds)
        merging = self._merging(chunk, math.ceil(streamed / self._server.staging_tokens))
        new_bytes = self._kv(chunk.tokens)
        exposed = max(0.0, new_bytes / self._link - matrix_seconds - self.attention(chunk) - reading)
        stored = new_bytes / self._link * self._copy_share + STORED_COPIES * new_bytes / self._hbm
        return reading + merging + exposed + stored

    def _reading(self, chunk: Chunk, streamed: int, matrix_seconds: float) -> float:
        """Return the seconds that reading ``streamed`` earlier tokens over the bus adds to a layer.

        While a block is attended, the next block is copied. The first block is waited for; if prompts stay on the
        device, it is copied during the matrices of the layer before.
        """
        if not streamed:
            return 0.0
        block = min(streamed, self._server.staging_tokens)
        copying = self._kv(block) / self._link
        first = max(0.0, copying - matrix_seconds) if self.is_on_device else copying
        late = max(0.0, copying - self._ours(float(chunk.tokens) * block))
        return first + (streamed / block - 1.0) * late + self._beside(self._kv(streamed))

    def _beside(self, size: float) -> float:
        """Return the seconds that reading ``size`` bytes over the bus takes from the step: processors and writes."""
        return size / self._link * self._copy_share + size / self._hbm

    def _whole(self, chunk: Chunk) -> float:
        """Return the seconds of a whole layer: earlier KV is gathered on the device, block by block, and merged.

        If prompts stay on the device, one call attends the pages where they are.
        """
        if self.is_on_device:
            return 0.0
        blocks = math.ceil(chunk.earlier / self._server.staging_tokens)
        return 2.0 * self._kv(chunk.earlier) / self._hbm + self._merging(chunk, blocks)

    def _merging(self, chunk: Chunk, merges: int) -> float:
        """Return the seconds of ``merges`` merges of a chunk's partials in fp32, and of the result's conversion."""
        if not merges:
            return 0.0
        values = float(chunk.tokens * self._values)
        passes = merges * (2 * MERGED_BYTES + PARTIAL_BYTES) + MERGED_BYTES + PARTIAL_BYTES
        return values * passes / self._hbm

    def _kv(self, tokens: float) -> float:
        return tokens * self._token_bytes

    def _engine(self, pairs: float) -> float:
        """Return the seconds of the engine's own attention of so many pairs of query and key."""
        return pairs * self._pair_seconds

    def _ours(self, pairs: float) -> float:
        return self._engine(pairs) / self._kernel_share


def _pairs(chunk: Chunk, window: int | None) -> float:
    """Count the keys that the chunk's tokens attend, summed over the tokens."""
    first, last = chunk.earlier + 1, chunk.earlier + chunk.tokens
    if window is None or last <= window:
        return chunk.tokens * (first + last) / 2
    growing = max(0, window - chunk.earlier)
    return growing * (first + window) / 2 + (chunk.tokens - growing) * float(window)

"""How long the parts of a decode step take by themselves, method by method (the formulas: `hardware.times`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from hybrid_backend.config import HybridConfig
from hybrid_backend.hardware import Hardware
from hybrid_backend.hardware.times import LayerTimes
from hybrid_backend.methods.base import frames_per_request
from hybrid_backend.model import ModelShape

KERNEL_S = 2e-6
"""A small kernel in a CUDA graph, gap and all: the general figure that `Hardware.layer_overhead_s` is made of."""
LAUNCHES = {"scout": 10, "infinigen": 10}
"""Kernels of a sparse layer that the engine's own decode step does not have (tests/engines/vllm/test_simulated_gpu.py
counts them; docs/cuda.md lists them). The predictor's matrix is none of them: it is counted by its size."""
SPAN = 8
"""Pages of a span, the second level of digests in bytes (docs/cpu-kernels.md)."""
SCORING = 0.5
"""Bytes of digests scored per second in place, against bytes of K and V attended: choosing 64 of 1,024 pages costs 35 %
of attending them and reads a quarter of their bytes, of 4,096 pages 202 % and as many bytes (docs/cpu-kernels.md)."""


@dataclass(frozen=True)
class Costs:
    """``rows``: sequences on one device. Times in seconds, sizes in bytes, of one layer unless said otherwise."""

    hardware: Hardware
    shape: ModelShape
    config: HybridConfig
    context: int
    rows: int

    @cached_property
    def times(self) -> LayerTimes:
        """The formulas, which methods share."""
        return LayerTimes.of(self.hardware, self.shape)

    @cached_property
    def whole_layers(self) -> tuple[int, ...]:
        """Exact layers that lie on the device whole."""
        if self.config.whole_layers != "auto":
            return self.config.whole_layers
        return self.config.exact_layers if self.hardware.device != "cpu" else ()

    # --- sizes ---

    @property
    def slot_tokens(self) -> int:
        """Tokens that a request's frames hold."""
        return frames_per_request(self.config) * self.config.page_size

    @cached_property
    def fits(self) -> bool:
        """Whether the whole context is resident and therefore dense (``sparse: always`` excepted)."""
        limit = self.slot_tokens
        if self.config.sparse == "always":
            limit = min(limit, self.config.budget_tokens)
        return self.context <= limit or self.config.sparse == "never"

    def kv(self, tokens: float) -> float:
        """K and V of that many tokens of every row."""
        return tokens * self.shape.token_bytes * self.rows

    @cached_property
    def digest_bytes(self) -> float:
        """Minimum and maximum of K of every page of every row, in the cache's type."""
        pages = -(-self.context // self.config.page_size)
        return float(pages * self.shape.token_bytes * self.rows)

    @cached_property
    def digest_bytes_in_place(self) -> float:
        """The same in bytes, by two levels where that reads less."""
        pages = -(-self.context // self.config.page_size)
        candidates = self.config.selection.candidates * self.config.budget_pages
        scored = min(pages, pages / SPAN + candidates) if candidates else pages
        return scored * 2.0 * self.shape.kv_heads * self.shape.head_dim * self.rows

    # --- device ---

    def linear(self, weight_bytes: float) -> float:
        """Matrices of that size times the rows."""
        return self.times.matrices(weight_bytes, self.rows)

    def launches(self, method: str) -> float:
        """Of a sparse layer, beside what `rest` has."""
        return LAUNCHES[method] * KERNEL_S if self.hardware.device != "cpu" else 0.0

    @cached_property
    def projections(self) -> float:
        """Q, K and V."""
        shape = self.shape
        return self.linear(
            float(shape.hidden * shape.head_dim * (shape.heads + 2 * shape.kv_heads) * shape.dtype_bytes)
        )

    @cached_property
    def prediction(self) -> float:
        """The next layer's query: its projection once more."""
        shape = self.shape
        return self.linear(float(shape.hidden * shape.head_dim * shape.heads * shape.dtype_bytes))

    @cached_property
    def rest(self) -> float:
        """Everything of a layer after its attention, and its small kernels."""
        shape = self.shape
        output, size = float(shape.hidden * shape.head_dim * shape.heads), shape.dtype_bytes
        read, passed = output + shape.mlp_params(self.rows), output + shape.mlp_params()
        return self.times.matrices(read * size, self.rows, passed * size) + self.hardware.layer_overhead_s.value

    @cached_property
    def head(self) -> float:
        """Logits, once a step."""
        return self.linear(float(self.shape.head_weight_bytes))

    def attention(self, kv_bytes: float) -> float:
        """Of the device over its own memory, by our kernels."""
        return self.times.reading(kv_bytes, self.rows)

    def stock_attention(self, kv_bytes: float) -> float:
        """The same by the engine's own kernels."""
        curve = self.hardware.stock_attention_bytes_per_s
        return self.attention(kv_bytes) if curve is None else kv_bytes / curve.at(self.rows)

    def scoring(self, digest_bytes: float) -> float:
        """Of digests in the device's memory."""
        return digest_bytes / self.hardware.hbm_achieved

    @cached_property
    def lookup(self) -> float:
        """CLO: the queries against the labels of the heads' selections, one pass over both."""
        values = 2 * self.rows * self.shape.heads * self.shape.head_dim
        return float(values * self.shape.dtype_bytes) / self.hardware.hbm_achieved

    def scoring_in_place(self, digest_bytes: float) -> float:
        return self.attention(digest_bytes) / SCORING

    # --- link and host ---

    def copy(self, size: float, piece: float | None = None) -> float:
        """From host to device, page by page (or in other contiguous pieces)."""
        if not size:
            return 0.0
        page = self.shape.page_bytes(self.config.page_size)
        return size / self.hardware.link_achieved(page if piece is None else piece)

    def pull(self, size: float) -> float:
        """From host to device, read by the device itself: nothing to set up, so small pieces are as fast as large
        ones."""
        return size / self.hardware.link_achieved(math.inf)

    def cpu_attention(self, kv_bytes: float, copied: float = 0.0) -> float:
        """Of the workers, while ``copied`` bytes also leave the same memory for the device."""
        return self.times.cpu_reading(kv_bytes, copied)

    @property
    def answer_bytes(self) -> float:
        """A CPU job's query (in the cache's type) and its partial and LSE (fp32)."""
        values = self.rows * self.shape.heads * self.shape.head_dim
        return values * (self.shape.dtype_bytes + 4.0) + 4.0 * self.rows * self.shape.heads

"""Bytes and seconds of the single operations of one decoder layer, by the formulas of `hardware.times`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hybrid_backend.config import HybridConfig
from hybrid_backend.hardware import Hardware
from hybrid_backend.hardware.times import LayerTimes
from hybrid_backend.kernels.digest_format import CODES
from hybrid_backend.methods.selective import digest_format
from hybrid_backend.model import ModelShape, spec_of
from hybrid_backend.step.method import frames_per_request

SPAN_PAGES = 8
"""Pages that share one digest of the second level (docs/lab/cpu-kernels.md)."""
CANDIDATES_PER_PAGE = 4
"""Candidate pages per page of budget that a step which scores all pages leaves to the next steps (decode.cpp)."""
BEST_PER_PAGE = 2
"""Candidate pages per page of budget in every second step between two full searches, with digests in codes."""
DIGEST_RATE = 0.5
"""Rate of scoring digests in place, relative to the rate of attention (measured: docs/lab/cpu-kernels.md)."""
CODE_RATE = 0.3
"""Rate of scoring digests in codes, relative to the rate of attention (measured: docs/lab/measurements.md)."""
KERNEL_SECONDS = 2e-6
"""Duration of a small kernel. Estimate."""
GAP_SECONDS = 1.3e-6
"""Pause between two nodes of a CUDA graph on an H100 (Hazy Research, "Look Ma, No Bubbles!", 2025)."""
SELECT_SECONDS = 47e-6
"""Duration of one page selection beyond reading the digests. Estimate from the kernel's source."""
COPY_PROGRAMS = 12
"""Processors of the GPU that a copy from the host occupies (kernels/triton/residency.py)."""
INT8_BYTE = 1.5
"""Time to attend a byte of K and V in 8 bits, over that of a byte in 16: kernels are about 1.3 times as fast where they
read 0.52 of the bytes (docs/lab/cpu-kernels.md). Measured on one core with VNNI; without VNNI nothing is gained."""
GPU_INT8_BYTE = 1.97
"""The same on a GPU, not measured: a token in 8 bits (130 bytes) is taken to cost as much as one in 16 (256 bytes)."""
FLAG_SECONDS = 1.5e-6
"""Time of a flag over the bus. Estimate: a device reads host memory over PCIe in 1 to 2 us."""


class Launches(NamedTuple):
    """Number of launches in a captured CUDA graph for the attention of one layer."""

    sparse: int
    whole: int


ENGINE_LAUNCHES = 3
"""Number of launches of the engine's own attention of a layer; ``layer_overhead_s`` includes their time."""
LAUNCHES: Mapping[str, Launches] = {
    "scout": Launches(14, 4),
    "infinigen": Launches(14, 4),
    "clo": Launches(12, 4),
    "hgca": Launches(10, 4),
    "headinfer": Launches(9, 4),
    "dense": Launches(3, 4),
}
"""Counted in graphs that the engine's tests capture (tests/engines/vllm/counted_launches.py)."""


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of one layer's data in bytes for the ``rows`` sequences of one device."""

    hardware: Hardware
    shape: ModelShape
    config: HybridConfig
    context: int
    rows: int

    @property
    def frame_tokens(self) -> int:
        """Tokens that fit the frames of one request."""
        return frames_per_request(self.config) * self.config.page_size

    @cached_property
    def fits(self) -> bool:
        """True if all pages are resident, so that attention is dense (unless ``sparse: always``)."""
        limit = self.frame_tokens
        if self.config.sparse == "always":
            limit = min(limit, self.config.budget_tokens)
        return self.context <= limit or self.config.sparse == "never"

    @property
    def fits_budget(self) -> bool:
        """True if a step that attends pages in place attends all of them."""
        return self.context <= self.config.budget_tokens or self.config.sparse == "never"

    def kv(self, tokens: float, window: int | None = None) -> float:
        """Bytes of K and V of ``tokens`` tokens of each sequence in a layer with this window; None: full attention."""
        return tokens * self.shape.page_bytes(1, window) * self.rows

    @cached_property
    def digest_bytes(self) -> float:
        """Bytes of the digests of all pages in a separate device tier."""
        model = spec_of(self.shape)
        digests = digest_format(self.config, model)
        return float(self._pages * digests.page_bytes(model.dtype, model.num_kv_heads, model.head_dim) * self.rows)

    @cached_property
    def digest_bytes_in_place(self) -> float:
        """Bytes of int8 digests that a full search reads in place, by two levels where that reads less."""
        expanded = self.config.selection.candidates * self.config.budget_pages
        scored = min(self._pages, self._pages / SPAN_PAGES + expanded) if expanded else self._pages
        return scored * self._digest_page_bytes

    @property
    def selections_per_step(self) -> float:
        """Selections of a layer per decode step on separate tiers; fewer than 1 if a selection lasts several steps.

        A selection ends with its page at the latest.
        """
        page = self.config.page_size
        return -(-page // min(page, self.config.selection.steps_per_selection)) / page

    @property
    def query_bytes(self) -> float:
        """Bytes of the queries of a CPU job."""
        return float(self.rows * self.shape.heads * self.shape.head_dim * self.shape.dtype_bytes)

    @property
    def partial_bytes(self) -> float:
        """Bytes of a CPU partial in 16 bits with its LSE in fp32."""
        return self.rows * self.shape.heads * (self.shape.head_dim * 2.0 + 4.0)

    @property
    def answer_bytes(self) -> float:
        """Bytes that a CPU job sends over the bus: its queries and its partial."""
        return self.query_bytes + self.partial_bytes

    @property
    def _pages(self) -> int:
        return -(-self.context // self.config.page_size)

    @property
    def _digest_page_bytes(self) -> float:
        return 2.0 * self.shape.kv_heads * self.shape.head_dim * self.rows


class Costs(LayerSizes):
    """Seconds of one layer's operations for the ``rows`` sequences of one device."""

    @cached_property
    def times(self) -> LayerTimes:
        """The formulas that methods and the planner share."""
        return LayerTimes.of(self.hardware, self.shape)

    @property
    def selecting_in_place(self) -> float:
        """Seconds of one layer's page selection on a CPU, averaged over the steps of ``selection.interval``."""
        pages, budget = self._pages, self.config.budget_pages
        candidates = min(pages, CANDIDATES_PER_PAGE * budget)
        steps = self.config.selection.steps_between_looks
        if self.config.selection.digest != CODES.name:
            between = min(self.digest_bytes_in_place, candidates * self._digest_page_bytes)
            scored = (self.digest_bytes_in_place + (steps - 1) * between) / steps
            return self.attention(scored) / DIGEST_RATE
        # A full search replaces one of the steps with all candidates, so of an even interval fewer of those remain.
        odd_share = steps // 2 / (steps - 1) if steps > 1 and steps % 2 == 0 else 0.5
        between = 4 * (odd_share * min(pages, BEST_PER_PAGE * budget) + (1 - odd_share) * candidates)
        scored = (pages + 3 * candidates + (steps - 1) * between) / steps * self._digest_page_bytes / 2
        return self.attention(scored) / CODE_RATE

    # --- device ---

    @cached_property
    def projections(self) -> float:
        """Seconds of the Q, K and V projections, in the mean of layers with attention."""
        shape = self.shape
        weights = shape.attention_params - shape.output_params
        return self.times.matrices(float(weights * shape.dtype_bytes), self.rows)

    @cached_property
    def prediction(self) -> float:
        """Seconds of predicting the next layer's query: one more Q projection."""
        shape = self.shape
        return self.times.matrices(float(shape.hidden * shape.head_dim * shape.heads * shape.dtype_bytes), self.rows)

    @property
    def rest(self) -> float:
        """Seconds of a layer after its attention, with the engine's small kernels."""
        return self.after_attention + self.kernels

    @property
    def kernels(self) -> float:
        """Seconds of the engine's own small kernels of a layer, with the gaps between them."""
        return self.hardware.layer_overhead_s.value

    @cached_property
    def after_attention(self) -> float:
        """Seconds of the O projection and the MLP. Several rows of a mixture of experts read more experts than one."""
        shape = self.shape
        output = float(shape.output_params)
        read, multiplied = (output + count for count in (shape.mlp_params(self.rows), shape.mlp_params()))
        return self.times.matrices(read * shape.dtype_bytes, self.rows, multiplied * shape.dtype_bytes)

    @cached_property
    def head(self) -> float:
        """Seconds of the logits, once per step."""
        return self.times.matrices(float(self.shape.head_weight_bytes), self.rows)

    def attention(self, kv_bytes: float) -> float:
        """Seconds of our device kernels to attend ``kv_bytes`` in the device's own memory."""
        byte = INT8_BYTE if self.hardware.device == "cpu" else GPU_INT8_BYTE
        return self.times.reading(kv_bytes * (byte if self.shape.kv_dtype == "int8" else 1.0), self.rows)

    def stock_attention(self, kv_bytes: float) -> float:
        """Seconds of the stock engine's kernels to attend ``kv_bytes`` in the device's own memory."""
        curve = self.hardware.stock_attention_bytes_per_s
        return self.attention(kv_bytes) if curve is None else kv_bytes / curve.at(self.rows)

    def scoring(self, digest_bytes: float) -> float:
        """Seconds to score digests in the device's memory."""
        return digest_bytes / self.hardware.hbm_achieved

    @cached_property
    def lookup(self) -> float:
        """Seconds of clo's lookup: queries and labels of the heads' selections are read once."""
        values = 2 * self.rows * self.shape.heads * self.shape.head_dim
        return self.scoring(float(values * self.shape.dtype_bytes))

    @property
    def selecting(self) -> float:
        """Seconds of page selection on a GPU beyond reading the digests, in the mean of a layer's steps.

        A step that attends a selection again has the same launches, which `launches` prices.
        """
        return 0.0 if self.hardware.device == "cpu" else SELECT_SECONDS * self.selections_per_step

    def launches(self, method: str, is_whole: bool = False) -> dict[str, float]:
        """Seconds of the graph nodes that a layer has beyond the engine's own, and of the gaps before them."""
        if self.hardware.device == "cpu":
            return {}
        count = LAUNCHES[method][is_whole] - ENGINE_LAUNCHES
        return {"launches": count * KERNEL_SECONDS, "gaps": count * GAP_SECONDS}

    # --- link and host ---

    def copy(self, size: float, piece: float | None = None) -> float:
        """Seconds to copy ``size`` bytes from the host in pieces of one page, or of ``piece`` bytes."""
        if not size:
            return 0.0
        page = self.shape.page_bytes(self.config.page_size)
        return size / self.hardware.link_achieved(page if piece is None else piece)

    def pull(self, size: float) -> float:
        """Seconds in which the device itself reads ``size`` bytes of host memory. Small pieces cost nothing extra."""
        return size / self.hardware.link_achieved(math.inf)

    def cpu_attention(self, kv_bytes: float, copied_bytes: float = 0.0) -> float:
        """Seconds of the CPU workers' answer while ``copied_bytes`` leave the same host memory for the device."""
        if not kv_bytes:
            return 0.0
        if self.shape.kv_dtype == "int8":
            kv_bytes *= INT8_BYTE
        if self.hardware.device == "cpu":
            return self.times.cpu_reading(kv_bytes)
        return self.times.cpu_reading(kv_bytes, copied_bytes) + FLAG_SECONDS

    @property
    def asking(self) -> float:
        """Seconds in which the device sends queries to the workers."""
        return 0.0 if self.hardware.device == "cpu" else self.pull(self.query_bytes) + FLAG_SECONDS

    def taking(self, is_empty: bool) -> float:
        """Seconds in which the device reads the flag of a finished job and its partial, if it has one."""
        if self.hardware.device == "cpu":
            return 0.0
        return FLAG_SECONDS + (0.0 if is_empty else self.pull(self.partial_bytes))

    def copy_share(self, size: float) -> float:
        """Seconds that a copy of ``size`` bytes takes from the step beside it: its processors and its HBM writes."""
        if self.hardware.device == "cpu":
            return 0.0
        processors = self.hardware.processors
        share = min(1.0, COPY_PROGRAMS / processors) if processors else 0.0
        return self.copy(size) * share + size / self.hardware.hbm_achieved

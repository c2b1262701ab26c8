"""How long the parts of a decode step take by themselves, method by method (the formulas: `hardware.times`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from hybrid_backend.config import HybridConfig
from hybrid_backend.hardware import Hardware
from hybrid_backend.hardware.times import LayerTimes
from hybrid_backend.methods.selective import digest_kind
from hybrid_backend.model import ModelShape, spec_of
from hybrid_backend.step.method import frames_per_request
from hybrid_backend.tiers.sizes import digest_store
from hybrid_backend.tools.plan.simulate.overheads import SELECTING, Overheads

SPAN = 8
"""Pages of a span, the second level of digests in bytes (docs/cpu-kernels.md)."""
KEPT = 4
"""Pages that a look at all of them leaves to select among, per page of budget (kernels/cpu/src/decode.cpp)."""
BEST = 2
"""Of these, pages that a step leaves to the one after it to select among, where digests are codes."""
SCORING = 0.5
"""Bytes of digests scored per second in place, against bytes of K and V attended: choosing 64 of 1,024 pages costs 35 %
of attending them and reads a quarter of their bytes, of 4,096 pages 202 % and as many bytes (docs/cpu-kernels.md)."""
CODES_SCORING = 0.3
"""The same of digests in codes: about 40 % for 13 % of the bytes in a step between looks (docs/measurements.md)."""


@dataclass(frozen=True)
class Costs:
    """``rows``: sequences on one device. Times in seconds, sizes in bytes, of one layer unless said otherwise."""

    hardware: Hardware
    shape: ModelShape
    config: HybridConfig
    context: int
    rows: int
    overheads: Overheads = field(default_factory=Overheads)

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
        """Of every page of every row, as a separate device tier has them."""
        pages, model = self._pages, spec_of(self.shape)
        kind = digest_kind(self.config, model)
        shape, dtype = digest_store(kind, model.dtype, pages, model.num_kv_heads, model.head_dim)
        return float(math.prod(shape) * dtype.itemsize * self.rows)

    @cached_property
    def digest_bytes_in_place(self) -> float:
        """The same in bytes, by two levels where that reads less."""
        pages = self._pages
        candidates = self.config.selection.candidates * self.config.budget_pages
        scored = min(pages, pages / SPAN + candidates) if candidates else pages
        return scored * self._page_in_bytes

    @cached_property
    def digest_bytes_per_step(self) -> float:
        """The same in the mean over the steps of `selection.interval`, one of which looks at all pages."""
        look = self.digest_bytes_in_place
        return self._mean_over_steps(look, min(look, KEPT * self.config.budget_pages * self._page_in_bytes))

    @cached_property
    def code_bytes_per_step(self) -> float:
        """With `selection.digest: codes`: the middles of all pages in question, and the rest of some; between looks at
        even tokens of all that a look has kept, at odd ones of the best half of it."""
        kept = min(self._pages, KEPT * self.config.budget_pages)
        best = min(self._pages, BEST * self.config.budget_pages)
        steps = self.config.selection.steps_between_looks
        odd = steps // 2 / (steps - 1) if steps > 1 and steps % 2 == 0 else 0.5  # a look takes the place of an even one
        between = 4 * (odd * best + (1 - odd) * kept)
        return self._mean_over_steps(self._pages + 3 * kept, between) * self._page_in_bytes / 2

    @property
    def selecting_in_place(self) -> float:
        """Of one layer, in the mean over the steps of `selection.interval`."""
        if self.config.selection.digest == "codes":
            return self.attention(self.code_bytes_per_step) / CODES_SCORING
        return self.scoring_in_place(self.digest_bytes_per_step)

    def _mean_over_steps(self, look: float, between: float) -> float:
        """Of `selection.interval`, one of which looks at all pages."""
        steps = self.config.selection.steps_between_looks
        return (look + (steps - 1) * between) / steps

    @property
    def _pages(self) -> int:
        return -(-self.context // self.config.page_size)

    @property
    def _page_in_bytes(self) -> float:
        return 2.0 * self.shape.kv_heads * self.shape.head_dim * self.rows

    # --- device ---

    def linear(self, weight_bytes: float) -> float:
        """Matrices of that size times the rows."""
        return self.times.matrices(weight_bytes, self.rows)

    def launched(self, method: str, is_whole: bool = False) -> dict[str, float]:
        """Seconds of a layer's launches beyond the engine's own, of the gaps before them and of a selection."""
        extra, selects = self.overheads, method in SELECTING and not is_whole
        count = extra.beyond_engine(method, is_whole)
        return {
            "launches": count * extra.kernel_s,
            "gaps": count * extra.gap_s,
            "selection": extra.selection_s if selects else 0.0,
        }

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
        return self.others + self.kernels

    @property
    def kernels(self) -> float:
        """The engine's own small kernels of a layer, gaps and all."""
        return self.hardware.layer_overhead_s.value

    @cached_property
    def others(self) -> float:
        """The matrices of a layer after its attention."""
        shape = self.shape
        output, size = float(shape.hidden * shape.head_dim * shape.heads), shape.dtype_bytes
        read, passed = output + shape.mlp_params(self.rows), output + shape.mlp_params()
        return self.times.matrices(read * size, self.rows, passed * size)

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
        """Of the workers, from the flag on the device to the answer in host memory, while ``copied`` bytes also leave
        the same memory for the device."""
        if not kv_bytes:
            return 0.0
        job = self.times.cpu_reading(kv_bytes, copied if self.overheads.shares_dram else 0.0)
        return job + self.overheads.flag_s + self.overheads.wake_s

    @property
    def query_bytes(self) -> float:
        """A CPU job's query, in the cache's type."""
        return float(self.rows * self.shape.heads * self.shape.head_dim * self.shape.dtype_bytes)

    @property
    def partial_bytes(self) -> float:
        """Its partial, and the LSE in fp32."""
        return self.rows * self.shape.heads * (self.shape.head_dim * self.overheads.partial_bytes + 4.0)

    @property
    def answer_bytes(self) -> float:
        """Both."""
        return self.query_bytes + self.partial_bytes

    @property
    def asking(self) -> float:
        """Of the device: the query through the bus, and the flag after it."""
        return self.pull(self.query_bytes) + self.overheads.flag_s if self.overheads.asks else 0.0

    def taking(self, is_empty: bool) -> float:
        """Of the device, once the answer is there: the flag is read, and the partial, unless there is none."""
        if not self.overheads.asks:
            return 0.0
        return self.overheads.flag_s + (0.0 if is_empty else self.pull(self.partial_bytes))

    def beside(self, copied: float) -> float:
        """What a copy takes from the step beside it: the processors that its programs keep while it lasts, and the
        bytes in the device's memory."""
        programs, processors = self.overheads.copy_programs, self.hardware.processors
        if not programs:
            return 0.0
        share = min(1.0, programs / processors) if processors else 0.0
        return self.copy(copied) * share + copied / self.hardware.hbm_achieved

"""The YAML configuration: what may be written, what it means and where every number comes from.

A key is declared once, below: its type, its default, a `Rule` (the sentence a user reads when the value is
wrong, and the function that enforces it) and a docstring that ends with the source of the number. The error
messages and docs/configuration.md follow from that declaration.

Papers: ScoutAttention is arXiv 2603.27138, Quest is arXiv 2406.10774, StreamingLLM is arXiv 2309.17453,
HGCA is arXiv 2507.03153, HeadInfer is arXiv 2502.12574, DuoAttention is arXiv 2410.10819, CLO is arXiv 2511.14510.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, model_validator
from pydantic.fields import FieldInfo

from hybrid_backend.config.methods import MethodSections
from hybrid_backend.config.rules import (
    BOOL,
    MOST,
    SIZE,
    Rule,
    auto_or,
    check_patterns,
    choice,
    either,
    fail,
    integer,
    integer_of,
    list_of,
    named,
    number,
    refuse,
    show,
)
from hybrid_backend.config.section import Section

MOST_THREADS = 1024
"""Limit of worker threads of one rank."""
MOST_SECONDS = 86_400
"""Limit of a wait: a day. Timers of the system overflow at larger numbers."""


def names_of(model_name: str) -> tuple[str, ...]:
    """Lower-case names a model goes by: its id or path, the last part, and the id inside a hub cache path."""
    full = model_name.strip().rstrip("/").lower()
    names = [full, full.rpartition("/")[2]]
    cached = re.search(r"(?:^|/)models--([^/]+)", full)
    if cached:
        names += [cached[1].replace("--", "/"), cached[1].rpartition("--")[2]]
    return tuple(names)


class ModelMatch(Section):
    """Which models a file is for."""

    match: Annotated[
        str | tuple[str, ...], Rule("a name pattern such as *qwen3-8b*, or a list of them", check_patterns)
    ] = "*"
    """Shell pattern(s), compared without case to the Hugging Face id and to the directory name; the file with
    the longest literal text in its matching pattern wins. Source: default (any model)."""

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.match,) if isinstance(self.match, str) else self.match

    def specificity(self, model_name: str) -> int | None:
        """Literal characters of the longest pattern that matches the model; None when none does."""
        names = names_of(model_name)
        scores = [
            len(re.sub(r"\[[^]]*\]|[*?]", "", pattern))
            for pattern in self.patterns
            if any(fnmatch.fnmatchcase(name, pattern.lower()) for name in names)
        ]
        return max(scores, default=None)


class SelectionConfig(Section):
    """How pages are scored and chosen."""

    granularity: Annotated[Literal["layer", "kv_head"], choice("layer", "kv_head")] = "layer"
    """One selection per layer or one per KV head. Source: measured (SmolLM2-135M, budget 1024: layer covers 0.953 of
    the attention mass, per head 0.954 with more for the CPU, docs/measurements.md; Quest selects per head)."""
    digest: Annotated[
        Literal["auto", "minmax", "minmax_int8", "codes"], choice("auto", "minmax", "minmax_int8", "codes")
    ] = "auto"
    """Page summary: channel-wise min and max of K, in the cache's type (Quest) or in bytes, which halves what a
    selection reads, or codes of every token's key (RaBitQ), which take what min and max take in bf16 and select much
    better, but cost the CPU more; auto is bytes, for quest where scores combine by softmax, or by sum per layer, else
    minmax. Source: measured (SmolLM2-135M:
    docs/measurements.md)."""
    aggregate: Annotated[Literal["softmax", "sum", "max"], choice("softmax", "sum", "max")] = "softmax"
    """How the scores of query heads combine. softmax: every head's scores become shares, which are added up; sum, max:
    of the raw scores of a group's heads; granularity layer then sums over the KV heads.
    Source: measured (SmolLM2-135M, budget 1024: docs/measurements.md; Quest scores every head by itself)."""
    bound: Annotated[float, number(0, 1)] = 0.5
    """What a page's digest is taken to say of its largest logit: the middle of the range that it allows plus this
    share of half of its width. Source: measured (SmolLM2-135M: docs/measurements.md; Quest: 1, the upper end)."""
    candidates: Annotated[int, integer(0)] = 8
    """Pages whose digests are scored per page of budget in a sequence so long that two levels read less than one:
    spans of 8 pages first, then the pages of the best spans; 0 scores all pages. Of method quest, with digests in
    bytes.
    Source: measured (SmolLM2-135M: 8 costs at most 0.2 points of mass, docs/cpu-kernels.md)."""
    interval: Annotated[int | Literal["auto"], auto_or(integer(1))] = "auto"
    """Tokens of a request between two looks of a layer at all pages, layers in turn: between them it selects among the
    best of the last look, at most four times the budget, and newer pages; with codes, at every second token, among
    twice the budget, the best of the token before. auto: 8 for method quest, else 1, which is all that the others
    know. Source: measured (SmolLM2-135M: docs/measurements.md; LServe, arXiv
    2502.14866, attends a selection again for 4 steps)."""

    @property
    def steps_between_looks(self) -> int:
        """Return `interval` as method quest takes it."""
        return 8 if self.interval == "auto" else self.interval


class LookaheadConfig(Section):
    """Working one layer ahead with a predicted query."""

    enabled: Annotated[bool, BOOL] = True
    """Predict the query of layer l+1 at the input of layer l, so that the selection, the CPU and copies start one layer
    early. Of methods scout, infinigen and clo. Source: ScoutAttention (layer-ahead CPU pre-computation)."""
    partial_query: Annotated[Literal["predicted", "real"], choice("predicted", "real")] = "predicted"
    """Query of the CPU's partial: the predicted one overlaps with the device, the real one is exact but known
    later. Source: ScoutAttention (predicted; its stated source of loss)."""
    skip_layers: Annotated[tuple[int, ...], list_of(integer(0), ordered=True, unique=True)] = ()
    """Layers whose own query selects, when it is known: for those that the input of the layer before predicts badly.
    The device waits for the CPU there. Source: default (none; `hybrid profile` measures them per model)."""


class RecallConfig(Section):
    """Asynchronous copies of newly important pages to the device tier."""

    enabled: Annotated[bool, BOOL] = True
    """Recall pages at all; without it the resident pages of a request stay as prefill left them.
    Source: ScoutAttention (asynchronous periodic recall)."""
    intervals: Annotated[
        int | tuple[int, ...],
        either(integer(1), list_of(integer(1), empty=False)),
    ] = 8
    """Decode steps between recalls; a list holds one interval per layer of the model.
    Source: default (measured on SmolLM2-135M: a selection 16 steps old covers 0.911, a fresh one 0.919)."""


class WorkersConfig(Section):
    """The CPU workers."""

    kernel: Annotated[str, named(r"[a-z][a-z0-9_-]*", "auto, or a lowercase kernel name")] = "auto"
    """CPU attention kernel; auto takes the fastest one that is installed. Source: default."""
    threads: Annotated[int | Literal["auto"], auto_or(integer(1, MOST_THREADS))] = "auto"
    """Worker threads of each rank; auto is one per CPU in workers.cpus. Source: default."""
    cpus: Annotated[tuple[int, ...] | Literal["auto"], auto_or(list_of(integer(0), unique=True, empty=False))] = "auto"
    """CPU numbers the workers of every rank may run on; auto takes one per physical core that no thread of the engine
    is pinned to, each rank its share. Source: default."""
    numa: Annotated[int | Literal["auto"], auto_or(integer(0))] = "auto"
    """NUMA node whose CPUs the workers take when workers.cpus is auto; auto is that of the GPU, or of the
    engine's own threads. Source: default."""
    deadline_seconds: Annotated[float, number(0, MOST_SECONDS)] = 30.0
    """Longest wait for a CPU partial before the step fails with an error instead of hanging.
    Source: default."""


class HostPoolConfig(Section):
    """The host pool: all pages of all sequences, in DRAM."""

    size: Annotated[int | Literal["auto"], auto_or(SIZE)] = "auto"
    """Memory of the host pool on this rank; auto is half of what the weights leave of the memory at hand.
    Source: default."""

    @property
    def size_bytes(self) -> int | None:
        """Bytes, or None for auto."""
        return None if isinstance(self.size, str) else self.size


class MetricsConfig(Section):
    """What the backend reports about its own approximations."""

    sample_interval: Annotated[int, integer(0)] = 256
    """Decode steps between a layer's samples of predicted-query cosine and attention-mass recall, which read all keys
    of one sequence; layers take turns. 0 turns them off. Source: default."""


class QualityConfig(Section):
    """A promise instead of a budget."""

    min_mass: Annotated[float | Literal["none"], auto_or(number(0, 1), "none")] = "none"
    """Share of the attention mass that rows under pressure keep, in the mean of the samples: the running server raises
    the budget where they fall below, attends everything where the largest budget does not suffice, and lowers the
    budget where less than half of the loss is used. budget_tokens is where it begins: `hybrid profile` finds the
    smallest (once, twice or four times budget_tokens) that keeps it. Needs metrics.sample_interval, which says how fast
    it follows; methods scout and quest. Source: default (none)."""
    max_kl: Annotated[float | Literal["none"], auto_or(number(0), "none")] = "none"
    """Nats per token by which answers may differ from dense attention's (KL), in the mean of texts' continuations and
    of lookups: `hybrid profile` finds the budget (once, twice or four times budget_tokens) and the exact layers that
    keep it with the fewest attended tokens, and writes the attention mass that goes with it, min_mass, which the
    running server keeps. Source: default (none)."""

    @property
    def promise(self) -> float:
        """0: none."""
        return 0.0 if isinstance(self.min_mass, str) else self.min_mass


PAGE_SIZES = (16, 32, 64, 128)
AUTO_EXACT_LAYERS = 2
"""Number of layers that ``exact_layers: auto`` stands for: Quest keeps the first two layers dense."""
MOST_FRAMES = 512
"""Of a layer, that a request takes of free memory: a program sorts all of them in registers
(`Operations.plan_recall`)."""


class HybridConfig(MethodSections):
    """One model's configuration. Immutable; build it with the functions below to get readable errors."""

    model: ModelMatch = ModelMatch()
    method: Annotated[str, named(r"[a-z][a-z0-9_]*", "auto, or a lowercase method name such as scout")] = "auto"
    """The published method that places, selects and computes. auto: quest on a CPU that the native kernels know, where
    the pages are attended in place; scout on a GPU. Source: measured (docs/measurements.md)."""
    page_size: Annotated[int, integer_of(*PAGE_SIZES)] = 32
    """Tokens of a page, which is the engine's KV block. Source: ScoutAttention (32); Quest uses 16."""
    budget_tokens: Annotated[int, integer(16)] = 2048
    """Tokens attended per sequence, layer and decode step; a multiple of page_size, and more pages than
    sinks + recent. Source: ScoutAttention (evaluated at 1024 and 2048)."""
    budget_factors: Annotated[tuple[float, ...], list_of(number(0, 16))] = ()
    """What each layer attends in proportion to the others, one number per layer of the model: budget_tokens is the mean
    over the layers that select. In whole pages, at least sinks + recent + 1; a larger budget has more frames. Without
    them all layers are alike. Of methods scout and quest.
    Source: default (none; `hybrid profile` measures them per model)."""
    sinks: Annotated[int, integer(0)] = 1
    """First pages of a sequence that are always attended.
    Source: default (StreamingLLM keeps the first 4 tokens)."""
    recent: Annotated[int, integer(1)] = 2
    """Last pages that are always attended, the growing tail page among them.
    Source: default (Quest: the last page is not up for selection)."""
    sparse: Annotated[Literal["auto", "always", "never"], choice("auto", "always", "never")] = "auto"
    """auto: exact while the whole context fits the frames, with method quest the budget; always: sparse beyond the
    budget; never: exact.
    Source: default."""
    frames_per_request: Annotated[int | Literal["auto"], auto_or(integer(1))] = "auto"
    """Pages of the device tier per running request and layer, at least sinks + recent + 1; a layer with a larger budget
    than budget_tokens (budget_factors) has as many more. auto is budget + recent + 1 pages on the CPU.
    Source: default."""
    staging_tokens: Annotated[int | Literal["auto"], auto_or(integer(16))] = "auto"
    """Tokens of all KV heads that each of the two staging buffers of the device tier holds; what is longer passes
    through in pieces. auto is 4096, for headinfer its first group threshold, and never more than the host pool.
    Source: default."""
    device_kernels: Annotated[
        Literal["auto", "native", "torch", "triton", "flashinfer"],
        choice("auto", "native", "torch", "triton", "flashinfer"),
    ] = "auto"
    """Which implementation of the decode step's operations runs on the device tier: native C++, Triton (a GPU, and CUDA
    graphs can hold it), or plain torch, the slow oracle of both. flashinfer is Triton, but for prompts, and outside of
    graphs where the host knows how much is attended: there FlashInfer attends. auto is flashinfer on a GPU where it can
    be used (pip install 'hybrid-backend[cuda]'), else triton, elsewhere native where workers.kernel is. Source:
    default."""
    exact_layers: Annotated[
        tuple[int, ...] | Literal["auto"], auto_or(list_of(integer(0), ordered=True, unique=True))
    ] = ()
    """Layers that always attend every token; auto: the first two layers without a sliding window. Layers that keep no
    keys and values are not counted. Source: default (none; default.yaml says auto, which is Quest's; `hybrid profile`
    measures them per model)."""
    whole_layers: Annotated[
        tuple[int, ...] | Literal["auto"], auto_or(list_of(integer(0), ordered=True, unique=True))
    ] = "auto"
    """Those of the exact layers whose whole KV also lies on the device tier, page by page of the host pool, so that the
    device attends them alone; auto: on a GPU as many as its memory allows, elsewhere none. Of other exact layers the
    CPU attends what the frames cannot hold, and the device waits for it. Source: default (simulated, Qwen3-14B, 64k x
    32: two exact layers beyond the frames take longer than all sparse layers together)."""
    selection: SelectionConfig = SelectionConfig()
    lookahead: LookaheadConfig = LookaheadConfig()
    recall: RecallConfig = RecallConfig()
    workers: WorkersConfig = WorkersConfig()
    host_pool: HostPoolConfig = HostPoolConfig()
    metrics: MetricsConfig = MetricsConfig()
    quality: QualityConfig = QualityConfig()

    @model_validator(mode="after")
    def _check_pages(self) -> HybridConfig:
        page, budget, always = self.page_size, self.budget_tokens, self.sinks + self.recent
        least = (always + 1) * page
        if least > MOST:
            key = max(("sinks", "recent"), key=lambda name: getattr(self, name))
            fits = MOST // page - 1 - (always - getattr(self, key))
            refuse(key, getattr(self, key), f"pages of fewer than {MOST} tokens in all", f"write {fits} or less")
        if budget % page:
            near = [n for n in (budget // page * page, (budget // page + 1) * page) if n >= least] or [least]
            fix = f"write {' or '.join(map(str, near))}"
            refuse("budget_tokens", budget, f"a multiple of page_size {page}", fix)
        if budget < least:
            expected = f"more than the sinks {self.sinks} + recent {self.recent} pages, always attended"
            refuse("budget_tokens", budget, expected, f"write {least} or more at page_size {page}")
        if isinstance(self.frames_per_request, int) and self.frames_per_request <= always:
            expected = f"auto, or an integer >= sinks {self.sinks} + recent {self.recent} + 1"
            refuse("frames_per_request", self.frames_per_request, expected, f"write {always + 1} or more")
        exact = self.exact_layers if self.exact_layers != "auto" else ()
        if self.whole_layers != "auto" and (sparse := set(self.whole_layers) - set(exact)):
            expected = f"auto, or layers that exact_layers lists: {show(list(exact))}"
            refuse("whole_layers", list(self.whole_layers), expected, f"remove {show(sorted(sparse))}")
        if self.quality.promise and not self.metrics.sample_interval:
            refuse("metrics.sample_interval", 0, "1 or more where quality.min_mass is given", "write 64, or remove it")
        return self

    @property
    def budget_pages(self) -> int:
        return self.budget_tokens // self.page_size

    @property
    def automatic_frames(self) -> int:
        """Frames per request that `auto` means on the CPU: the budget, a recent window, one page in flight."""
        return self.budget_pages + self.recent + 1

    def for_layers(self, windows: Sequence[int | None]) -> HybridConfig:
        """Return the configuration of a model, with layers in the place of ``exact_layers: auto``.

        Args:
            windows: sliding window of each attention layer in tokens; None for full attention.

        Raises:
            ConfigError: a key names a layer that the model does not have, or has not one entry per layer.
        """
        self.validate_for(len(windows))
        if self.exact_layers != "auto":
            return self
        full_layers = [layer for layer, window in enumerate(windows) if window is None]
        return self.model_copy(update={"exact_layers": tuple(full_layers[:AUTO_EXACT_LAYERS])})

    def is_exact(self, layer: int) -> bool:
        """Tell whether a layer attends every token. The layers must be known (`for_layers`)."""
        assert self.exact_layers != "auto", "for_layers() has not chosen the exact layers yet"
        return layer in self.exact_layers

    def is_predicted(self, layer: int) -> bool:
        """Tell whether a layer's query is predicted, if the method looks ahead and the engine can predict it."""
        return not self.is_exact(layer) and layer not in self.lookahead.skip_layers

    def is_sampled(self, step: int, layer: int) -> bool:
        """Whether the layer's approximation is measured in decode step ``step``."""
        interval = self.metrics.sample_interval
        if not interval:
            return False
        # One step earlier from round to round: selections after looks of every age are sampled, where looks are rare.
        earlier = step // interval if self.selection.steps_between_looks > 1 else 0
        return (step + layer + earlier) % interval == 0

    def recall_interval(self, layer: int) -> int:
        """Decode steps between two recalls of this layer."""
        intervals = self.recall.intervals
        if isinstance(intervals, int):
            return intervals
        if not 0 <= layer < len(intervals):
            fail(
                f"recall.intervals: got {len(intervals)} intervals, but layer {layer} was asked for; "
                "write one interval per layer, or a single integer"
            )
        return intervals[layer]

    def check_page_size(self, found: int, name: str, flag: str) -> None:
        """Raise ConfigError unless the engine's own, its ``name`` as ``block size``, is `page_size`."""
        if found != self.page_size:
            other = f" or set page_size: {found}" if found in PAGE_SIZES else ""
            fail(
                f"page_size: {self.page_size} is unlike the engine's {name} {found}; "
                f"start the engine with {flag} {self.page_size}{other}"
            )

    def validate_for(self, num_layers: int, source: str = "config") -> None:
        """Raise ConfigError unless the per-layer keys fit a model with `num_layers` layers."""
        exact = self.exact_layers if self.exact_layers != "auto" else ()
        for key, layers in (("exact_layers", exact), ("lookahead.skip_layers", self.lookahead.skip_layers)):
            outside = [layer for layer in layers if layer >= num_layers]
            if outside:
                fail(
                    f"{source}: {key}: got {show(outside[0])}, expected layers 0..{num_layers - 1} "
                    f"of a model with {num_layers} layers (remove {show(outside)})"
                )
        intervals = self.recall.intervals
        if not isinstance(intervals, int) and len(intervals) != num_layers:
            fail(
                f"{source}: recall.intervals: got a list of {len(intervals)}, expected {num_layers}, "
                "one per layer of the model (or write a single integer for all layers)"
            )
        factors = self.budget_factors
        if factors and len(factors) != num_layers:
            fail(
                f"{source}: budget_factors: got a list of {len(factors)}, expected {num_layers}, one per layer of the "
                "model (or remove it: all layers alike)"
            )


def iter_keys(model: type[BaseModel] = HybridConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every dotted key with its declaration; the sections of single methods come last."""
    fields = sorted(model.model_fields.items(), key=lambda item: item[0] in MethodSections.model_fields)
    for name, field in fields:
        section = section_of(field)
        if section is None:
            yield prefix + name, field
        else:
            yield from iter_keys(section, f"{prefix}{name}.")


def section_of(field: FieldInfo | None) -> type[Section] | None:
    kind = field.annotation if field else None
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None

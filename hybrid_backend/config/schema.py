"""Schema of the YAML configuration: keys, their ranges, their meaning and the source of each number.

A key is declared once, with its type, its default, a `Rule` and a docstring that ends with the source of the default.
The rule has the sentence that a user reads when the value is wrong, and the function that enforces it. The error
messages and docs/reference/configuration.md follow from that declaration. `sections` and `methods` declare the
sections.

Papers: ScoutAttention is arXiv 2603.27138, Quest is arXiv 2406.10774, StreamingLLM is arXiv 2309.17453,
HGCA is arXiv 2507.03153, HeadInfer is arXiv 2502.12574, DuoAttention is arXiv 2410.10819, CLO is arXiv 2511.14510.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, model_validator
from pydantic.fields import FieldInfo

from hybrid_backend.config.methods import MethodSections
from hybrid_backend.config.rules import (
    MOST,
    auto_or,
    choice,
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
from hybrid_backend.config.sections import (
    HostPoolConfig,
    LookaheadConfig,
    MetricsConfig,
    ModelMatch,
    QualityConfig,
    RecallConfig,
    SelectionConfig,
    WorkersConfig,
)

PAGE_SIZES = (16, 32, 64, 128)
AUTO_EXACT_LAYERS = 2
"""Number of layers that ``exact_layers: auto`` stands for: Quest keeps the first two layers dense."""
MOST_FRAMES = 512
"""Limit of frames of one request and layer, because a GPU program sorts all of them in registers
(`Operations.plan_recall`)."""


class HybridConfig(MethodSections):
    """Configuration of one model, immutable. `load.config_from_mapping` builds it with readable errors."""

    model: ModelMatch = ModelMatch()
    method: Annotated[str, named(r"[a-z][a-z0-9_]*", "auto, or a lowercase method name such as scout")] = "auto"
    """Published method that places, selects and computes. auto: quest on a CPU whose native kernels know the model's
    shape, else scout. Source: measured (docs/lab/measurements.md)."""
    page_size: Annotated[int, integer_of(*PAGE_SIZES)] = 32
    """Tokens of a page, the engine's KV block. Source: ScoutAttention (32); Quest uses 16."""
    kv_dtype: Annotated[Literal["auto", "int8"], choice("auto", "int8")] = "auto"
    """Type in which pages hold K and V. auto: the model's. int8: 8 bits, with a scale per token and KV head, which
    vLLM's ``--kv-cache-dtype int8_per_token_head`` sets as well. A prompt's chunk attends itself as the model computed
    it, and earlier chunks and cached prefixes in 8 bits. For all methods; on a GPU not of models with sliding windows.
    Source: default (llama.cpp's q8_0 and vLLM's int8_per_token_head lose little; users choose to lose)."""
    budget_tokens: Annotated[int, integer(16)] = 2048
    """Tokens attended per sequence, layer and decode step; a multiple of page_size, and more pages than
    sinks + recent. Source: ScoutAttention (evaluated at 1024 and 2048)."""
    budget_factors: Annotated[tuple[float, ...], list_of(number(0, 16))] = ()
    """Relative budget of each layer, one number per layer of the model; budget_tokens is the mean of the layers that
    select. A layer's budget is rounded to whole pages, at least sinks + recent + 1. A larger budget has more
    frames. An empty list gives all layers the same budget. For methods scout and quest.
    Source: default (none; `hybrid profile` measures them per model)."""
    sinks: Annotated[int, integer(0)] = 1
    """First pages of a sequence that are always attended.
    Source: default (StreamingLLM keeps the first 4 tokens)."""
    recent: Annotated[int, integer(1)] = 2
    """Last pages that are always attended, the growing tail page among them.
    Source: default (Quest: the last page is not up for selection)."""
    sparse: Annotated[Literal["auto", "always", "never"], choice("auto", "always", "never")] = "auto"
    """Condition under which pages are left out. auto: beyond the frames, with method quest beyond the budget. always:
    beyond the budget. never: attention is exact.
    Source: default."""
    frames_per_request: Annotated[int | Literal["auto"], auto_or(integer(1))] = "auto"
    """Pages that a running request has on the device tier in each layer, at least sinks + recent + 1. A layer whose
    budget exceeds budget_tokens (budget_factors) has as many more. auto: budget + recent + 1 pages on a CPU, and what
    memory allows on a GPU.
    Source: default."""
    staging_tokens: Annotated[int | Literal["auto"], auto_or(integer(16))] = "auto"
    """Tokens of all KV heads that each of the two staging buffers of the device tier holds. A longer context passes
    through in pieces. auto: 4096, for headinfer its first group threshold, and never more than the host pool.
    Source: default."""
    device_kernels: Annotated[
        Literal["auto", "native", "torch", "triton", "flashinfer"],
        choice("auto", "native", "torch", "triton", "flashinfer"),
    ] = "auto"
    """Implementation of the decode step's operations on the device tier. native: C++. triton: for a GPU, also in CUDA
    graphs. torch: plain PyTorch, the slow oracle of both. flashinfer: triton, but FlashInfer attends prompts, and
    decode rows outside of graphs where the host knows the attended lengths. auto: flashinfer on a GPU where it is
    installed (pip install 'hybrid-backend[cuda]'), else triton; on a CPU native where workers.kernel is, else torch.
    Source: default."""
    exact_layers: Annotated[
        tuple[int, ...] | Literal["auto"], auto_or(list_of(integer(0), ordered=True, unique=True))
    ] = ()
    """Layers that always attend every token; auto: the first two layers without a sliding window. Layers that keep no
    keys and values are not counted. Source: default (none; default.yaml says auto, which is Quest's; `hybrid profile`
    measures them per model)."""
    whole_layers: Annotated[
        tuple[int, ...] | Literal["auto"], auto_or(list_of(integer(0), ordered=True, unique=True))
    ] = "auto"
    """Exact layers whose KV also lies on the device for every page of the host pool, so that the device attends them
    alone. auto: on a GPU as many as its memory allows, elsewhere none. In other exact layers the CPU attends what the
    frames cannot hold, and the device waits for it. Source: default (simulated, Qwen3-14B, 64k x
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
        """`budget_tokens` in pages."""
        return self.budget_tokens // self.page_size

    @property
    def automatic_frames(self) -> int:
        """Frames per request that ``auto`` stands for on a CPU: the budget, the recent pages and a page in flight."""
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
        """Tell whether a layer's approximation is measured in decode step ``step``."""
        interval = self.metrics.sample_interval
        if not interval:
            return False
        # Sampling begins one step earlier in each round, so that it meets selections of all ages between two scans.
        earlier = step // interval if self.selection.steps_between_looks > 1 else 0
        return (step + layer + earlier) % interval == 0

    def recall_interval(self, layer: int) -> int:
        """Return the decode steps between two recalls of a layer."""
        intervals = self.recall.intervals
        if isinstance(intervals, int):
            return intervals
        if not 0 <= layer < len(intervals):
            fail(
                f"recall.intervals: got {len(intervals)} intervals, but layer {layer} was asked for; "
                "write one interval per layer, or a single integer"
            )
        return intervals[layer]

    def check_page_size(self, engine_size: int, name: str, flag: str) -> None:
        """Check that the engine's page size is `page_size`.

        Args:
            engine_size: tokens of the engine's pages.
            name: the engine's word for its page size, such as block size.
            flag: flag of the engine that sets it.

        Raises:
            ConfigError: the two sizes differ.
        """
        if engine_size != self.page_size:
            alternative = f" or set page_size: {engine_size}" if engine_size in PAGE_SIZES else ""
            fail(
                f"page_size: {self.page_size} is unlike the engine's {name} {engine_size}; "
                f"start the engine with {flag} {self.page_size}{alternative}"
            )

    def validate_for(self, num_layers: int, source: str = "config") -> None:
        """Raise ConfigError unless the per-layer keys fit a model with ``num_layers`` layers."""
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
    """Return the section that a field holds; None for a plain key."""
    kind = field.annotation if field else None
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None

"""Sections of the configuration whose keys several methods read (`schema` says how a key is declared)."""

from __future__ import annotations

import fnmatch
import re
from typing import Annotated, Literal

from hybrid_backend.config.rules import (
    BOOL,
    SIZE,
    Rule,
    auto_or,
    check_patterns,
    choice,
    either,
    integer,
    list_of,
    named,
    number,
)
from hybrid_backend.config.section import Section

MOST_THREADS = 1024
"""Limit of worker threads of one rank."""
MOST_SECONDS = 86_400
"""Limit of a wait: a day. Timers of the system overflow at larger numbers."""


def names_of(model_name: str) -> tuple[str, ...]:
    """Return a model's lower-case names: its id or path, the last part, and the id inside a hub cache path."""
    full = model_name.strip().rstrip("/").lower()
    names = [full, full.rpartition("/")[2]]
    cached = re.search(r"(?:^|/)models--([^/]+)", full)
    if cached:
        names += [cached[1].replace("--", "/"), cached[1].rpartition("--")[2]]
    return tuple(names)


class ModelMatch(Section):
    """The models that a file is for."""

    match: Annotated[
        str | tuple[str, ...], Rule("a name pattern such as *qwen3-8b*, or a list of them", check_patterns)
    ] = "*"
    """Shell pattern(s), compared without case to the Hugging Face id and to the directory name; the file with
    the longest literal text in its matching pattern wins. Source: default (any model)."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """`match` as a tuple."""
        return (self.match,) if isinstance(self.match, str) else self.match

    def specificity(self, model_name: str) -> int | None:
        """Count the literal characters of the longest pattern that matches the model; None when none does."""
        names = names_of(model_name)
        scores = [
            len(re.sub(r"\[[^]]*\]|[*?]", "", pattern))
            for pattern in self.patterns
            if any(fnmatch.fnmatchcase(name, pattern.lower()) for name in names)
        ]
        return max(scores, default=None)


class SelectionConfig(Section):
    """Scores of pages, and the choice of the pages that a layer attends."""

    granularity: Annotated[Literal["layer", "kv_head"], choice("layer", "kv_head")] = "layer"
    """Scope of a selection: all KV heads of a layer share one, or each KV head has its own. Source: measured
    (SmolLM2-135M, budget 1024: layer covers 0.953 of the attention mass, kv_head 0.954 with more work for the CPU,
    docs/lab/measurements.md; Quest selects per head)."""
    digest: Annotated[
        Literal["auto", "minmax", "minmax_int8", "codes"], choice("auto", "minmax", "minmax_int8", "codes")
    ] = "auto"
    """Summary of a page that is scored. minmax: channel-wise minimum and maximum of K in the cache's type (Quest).
    minmax_int8: the same in bytes, which halves what a selection reads. codes: codes of each token's key (RaBitQ),
    which take as much memory as minmax in bf16, select better and cost the CPU more. auto: minmax_int8, but minmax for
    method quest where selection.aggregate is max, or sum with granularity kv_head. Source: measured (SmolLM2-135M:
    docs/lab/measurements.md)."""
    aggregate: Annotated[Literal["softmax", "sum", "max"], choice("softmax", "sum", "max")] = "softmax"
    """Combination of the scores of query heads. softmax: each head's scores become shares of 1, which are added. sum,
    max: the raw scores of the query heads of one KV head are combined, and granularity layer adds those of the KV
    heads. Source: measured (SmolLM2-135M, budget 1024: docs/lab/measurements.md; Quest scores each head by itself)."""
    bound: Annotated[float, number(0, 1)] = 0.5
    """Position of a page's score in the range of logits that its digest allows: 0 is the middle of the range, 1 its
    upper end. Source: measured (SmolLM2-135M: docs/lab/measurements.md; Quest: 1)."""
    candidates: Annotated[int, integer(0)] = 8
    """Pages whose digests are scored per page of budget in long sequences: spans of 8 pages are scored first, then the
    pages of the best spans. Shorter sequences, in which that would read more, score all pages; 0: all sequences do. For
    method quest with digests in bytes. Source: measured (SmolLM2-135M: 8 costs at most 0.2 points of mass,
    docs/lab/cpu-kernels.md)."""
    interval: Annotated[int | Literal["auto"], auto_or(integer(1))] = "auto"
    """Tokens of a request between two selections of a layer among all pages. Between them method quest selects among
    newer pages and the best pages of the last time, at most four times the budget. With codes it does so at each second
    token, among twice the budget, the best pages of the token before. Methods scout and infinigen attend the selected
    pages again, at most until the next page begins. auto: 8 for method quest, else 1, the only value that other methods
    accept. Source: measured (SmolLM2-135M: docs/lab/measurements.md; LServe, arXiv 2502.14866, attends a selection
    again for 4 steps)."""

    @property
    def steps_between_looks(self) -> int:
        """`interval` as method quest takes it."""
        return 8 if self.interval == "auto" else self.interval

    @property
    def steps_per_selection(self) -> int:
        """`interval` as methods take it that attend a selection again."""
        return 1 if self.interval == "auto" else self.interval


class LookaheadConfig(Section):
    """Work that starts one layer ahead, with a predicted query."""

    enabled: Annotated[bool, BOOL] = True
    """Predict the query of layer l+1 at the input of layer l, so that the selection, the CPU and copies start one layer
    early. For methods scout, infinigen and clo. Source: ScoutAttention (layer-ahead CPU pre-computation)."""
    partial_query: Annotated[Literal["predicted", "real"], choice("predicted", "real")] = "predicted"
    """Query of the CPU's partial. predicted: the CPU computes while the device does. real: exact, but the CPU starts
    later. Source: ScoutAttention (predicted; its stated source of loss)."""
    skip_layers: Annotated[tuple[int, ...], list_of(integer(0), ordered=True, unique=True)] = ()
    """Layers that select with their own query, because the input of the layer before predicts it badly. The device
    waits for the CPU in these layers. Source: default (none; `hybrid profile` measures them per model)."""


class RecallConfig(Section):
    """Asynchronous copies of newly important pages to the device tier."""

    enabled: Annotated[bool, BOOL] = True
    """Copy newly important pages to the device. If false, the resident pages of a request stay as the prompt left them.
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
    """CPU numbers that the workers of all ranks may run on. auto: one per physical core that no thread of the engine is
    pinned to, divided among the ranks; beside GPUs less the cores of the engine's own processes, which are one per
    rank, one for the API server and one for the engine core, and a quarter of the cores at most. Source: default."""
    numa: Annotated[int | Literal["auto"], auto_or(integer(0))] = "auto"
    """NUMA node whose CPUs the workers take when workers.cpus is auto; auto is that of the GPU, or of the
    engine's own threads. Source: default."""
    deadline_seconds: Annotated[float, number(0, MOST_SECONDS)] = 30.0
    """Longest wait for a CPU partial before the step fails with an error instead of hanging.
    Source: default."""


class HostPoolConfig(Section):
    """The host pool: all pages of all sequences, in DRAM."""

    size: Annotated[int | Literal["auto"], auto_or(SIZE)] = "auto"
    """Memory of the host pool on this rank; auto is half of the available memory without the weights.
    Source: default."""

    @property
    def size_bytes(self) -> int | None:
        """`size` in bytes; None for auto."""
        return None if isinstance(self.size, str) else self.size


class MetricsConfig(Section):
    """Samples that measure how good the backend's approximations are."""

    sample_interval: Annotated[int, integer(0)] = 256
    """Decode steps between two samples of a layer: the cosine of the predicted query, and the attention mass of the
    selected pages. A sample reads all keys of one sequence, and the layers take turns. 0 turns samples off. Source:
    default."""


class QualityConfig(Section):
    """A promised quality in place of a fixed budget."""

    min_mass: Annotated[float | Literal["none"], auto_or(number(0, 1), "none")] = "none"
    """Share of the attention mass that sparse rows keep, as a mean of the samples. The server raises the budget when
    samples fall below the share, and attends all pages when the largest budget does not suffice. It lowers the budget
    when less than half of the permitted loss is used. `hybrid profile` finds the smallest budget to begin with: once,
    twice or four times budget_tokens. Needs metrics.sample_interval; for methods scout and quest. Source: default
    (none)."""
    max_kl: Annotated[float | Literal["none"], auto_or(number(0), "none")] = "none"
    """Mean KL in nats per token by which answers may differ from dense attention's, in continuations of texts and in
    lookups. `hybrid profile` finds the budget (once, twice or four times budget_tokens) and the exact layers that keep
    it with the fewest attended tokens. It writes the attention mass that goes with it as min_mass, which the server
    keeps. Source: default (none)."""

    @property
    def promise(self) -> float:
        """`min_mass` as a number; 0 for none."""
        return 0.0 if isinstance(self.min_mass, str) else self.min_mass

"""A small engine for runtime tests: real page tables, real K/V, an fp64 answer for every query."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hybrid_backend.batch import Batch, ModelSpec, Step
from hybrid_backend.config import HybridConfig, config_from_mapping
from hybrid_backend.kernels.kv_format import KvFormat
from hybrid_backend.runtime import HybridRuntime
from hybrid_backend.step.driver import StepDriver
from tests.support.attended import Attended, Witness
from tests.support.far_device import views
from tests.support.gpu import DEVICE, ON_GPU
from tests.support.opened import OPENED

PAGE = 16
WITNESSED = 2e-5  # of outputs in fp32, against fp64
INT8_ERROR = 3e-4  # the same over pages in 8 bits: kernels of VNNI keep 16 bits of queries and weights
METHODS: dict[str, dict[str, Any]] = {
    "quest": {"method": "quest"},
    "scout": {"method": "scout"},
    "dense": {"method": "dense"},
    "hgca": {"method": "hgca"},
    "clo": {"method": "clo"},
    "infinigen": {"method": "infinigen"},
    "headinfer": {
        "method": "headinfer",
    },
    "apex": {"method": "apex", "apex": {"strategy": "lockstep"}},
}
"""Keys of `config` for each method; all are exact while the context is short."""


def config(**keys: object) -> HybridConfig:
    """A scout configuration with small pages; ``keys`` override."""
    base: dict[str, object] = {
        "method": "scout",
        "page_size": PAGE,
        "budget_tokens": 4 * PAGE,
        "sinks": 1,
        "recent": 1,
        "workers": {"threads": 2, "deadline_seconds": 20},
    }
    return config_from_mapping({**base, **keys}, "test")


def spec(
    layers: int = 3, windows: tuple[int | None, ...] = (), dtype: torch.dtype = torch.float32, sinks: bool = False
) -> ModelSpec:
    """``sinks``: all heads of all layers have one, as large as a few keys or larger than all of them."""
    model = ModelSpec(layers, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, dtype=dtype, windows=windows)
    rows = torch.randn(layers, 4, generator=torch.Generator().manual_seed(layers)) * 3 + 3
    return replace(model, sinks=tuple(rows)) if sinks else model


@dataclass
class Sequence:
    """One request: its pages and, per layer, all K and V that it ever wrote (``[tokens, kv_heads, 2, dim]``)."""

    name: str
    prompt: int
    pages: list[int]
    kv: list[list[Tensor]]
    tokens: int = 0  # computed so far
    budget: int = 0  # tokens that it asks for (`Batch.budgets`)
    donor: Sequence | None = None  # whose next token is the last of a page that this one begins with


@dataclass(eq=False)
class Engine:
    """Hands out pages, builds batches, drives the runtime through whole steps and checks every output."""

    cfg: HybridConfig
    model: ModelSpec
    num_pages: int = 256
    max_requests: int = 8
    seed: int = 0
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    is_witnessed: bool = False  # every decoding row is checked against what the method says that it attended
    query_scale: float = 1.0  # of the random queries: larger ones make attention more peaked
    speculates: bool = False  # several tokens of a request whose prompt is computed are a decode row with drafts
    sequences: dict[str, Sequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = torch.Generator().manual_seed(self.seed)
        if ON_GPU and self.cfg.device_kernels == "triton":  # which the interpreter runs on the host elsewhere
            self.device = DEVICE
        m = self.model
        # Garbage, not zeros: nothing may rely on fresh memory.
        self.kv = [self._garbage(layer) for layer in range(m.num_layers)]
        seen = views(self.kv, self.device)
        self.runtime = HybridRuntime(self.cfg, m, self.kv, self.max_requests, self.device, seen)
        self.witness = Witness(self.runtime) if self.is_witnessed else None
        self.free = list(range(self.num_pages - 1, 0, -1))
        self.refs = [0] * self.num_pages
        OPENED.append(self)

    def _garbage(self, layer: int) -> Tensor:
        """Pages of a layer as nobody wrote them; in 8 bits many scales are NaN."""
        kv = self._format(layer)
        if not kv.is_int8:
            return self._random(layer, self.num_pages, 2, kv.page_size)
        return torch.randint(-128, 128, kv.shape(self.num_pages), generator=self.rng, dtype=torch.int8)

    def _format(self, layer: int) -> KvFormat:
        _, kv_heads, head_dim, _ = self.model.shape(layer)
        return KvFormat(kv_heads, self.cfg.page_size, head_dim, self.model.kv_dtype or self.model.dtype)

    def _stored(self, layer: int, x: Tensor) -> Tensor:
        """New keys or values as pages hold them: in the model's type, or decoded in fp32."""
        kv = self._format(layer)
        return kv.stored(x.float() if kv.is_int8 else x)

    def _random(self, layer: int, count: int, *inner: int) -> Tensor:
        """Random keys or values of a layer, ``[count, kv_heads, *inner, head_dim]``."""
        _, kv_heads, head_dim, _ = self.model.shape(layer)
        return torch.randn(count, kv_heads, *inner, head_dim, generator=self.rng).to(self.model.dtype)

    def _queries(self, tokens: int) -> list[Tensor]:
        """Random queries ``[tokens, heads, head_dim]`` of each layer."""
        m = self.model
        if m.window_shape is None:
            drawn = list(torch.randn(m.num_layers, tokens, m.num_heads, m.head_dim, generator=self.rng))
        else:
            shapes = [(m.shape(layer).num_heads, m.shape(layer).head_dim) for layer in range(m.num_layers)]
            drawn = [torch.randn(tokens, *shape, generator=self.rng) for shape in shapes]
        return [(q * self.query_scale).to(m.dtype) for q in drawn]

    # --- requests ---

    def add(self, name: str, prompt: int, shared_with: str | None = None, filling: bool = False) -> Sequence:
        """A new request; ``shared_with`` donates its whole pages as a cached prefix (never all of the prompt), the one
        among them whose last token it decodes in the next step (``filling``)."""
        sequence = Sequence(name, prompt, [], [[] for _ in range(self.model.num_layers)])
        if shared_with is not None:
            donor = self.sequences[shared_with]
            whole = min(donor.tokens + filling, prompt - 1) // self.cfg.page_size
            sequence.donor = donor if filling else None
            sequence.pages = donor.pages[:whole]
            sequence.tokens = whole * self.cfg.page_size
            for layer in range(self.model.num_layers):
                sequence.kv[layer] = donor.kv[layer][: sequence.tokens]
            for page in sequence.pages:
                self.refs[page] += 1
        self.sequences[name] = sequence
        return sequence

    def admit(self, name: str, prompt: int, chunk: int = 10**6, shared_with: str | None = None) -> Sequence:
        """Add a request and compute its prompt in chunks of ``chunk`` tokens."""
        sequence = self.add(name, prompt, shared_with)
        self.prefill(name, chunk)
        return sequence

    def add_twin(self, name: str, donor: str, tokens: int) -> Sequence:
        """Add a request whose ``tokens`` so far lie in the pages of ``donor``, which fills the last of them in the next
        step."""
        first, twin = self.sequences[donor], self.add(name, tokens)
        twin.donor, twin.pages, twin.tokens = first, list(first.pages), tokens
        twin.kv = [list(layer) for layer in first.kv]
        for page in twin.pages:
            self.refs[page] += 1
        return twin

    def add_imported(self, name: str, tokens: int, prompt: int) -> Sequence:
        """A new request whose first ``tokens`` (whole pages) another engine computed; ``prompt`` are in its prompt."""
        request = self.add(name, prompt)
        size, model = self.cfg.page_size, self.model
        assert tokens % size == 0 and tokens < prompt
        request.pages = [self.free.pop() for _ in range(tokens // size)]
        for page in request.pages:
            self.refs[page] = 1
        pages = torch.tensor(request.pages)
        for layer in range(model.num_layers):
            kv, where = self._random(layer, tokens, 2), torch.arange(tokens)
            self._format(layer).write(self.kv[layer], pages[where // size], where % size, kv[:, :, 0], kv[:, :, 1])
            request.kv[layer] = list(self._stored(layer, kv))
        self.runtime.imported(pages)
        request.tokens = tokens
        return request

    def drop(self, name: str) -> None:
        """Finish, abort or preempt: the runtime is told, the pages go back."""
        self.runtime.release([name])
        for page in self.sequences.pop(name).pages:
            self.refs[page] -= 1
            if self.refs[page] == 0:
                self.free.append(page)

    def preempt(self, name: str) -> None:
        """The engine takes everything away and will compute the request again from its first token."""
        prompt, budget = self.sequences[name].tokens, self.sequences[name].budget
        self.drop(name)
        self.add(name, max(prompt, 1)).budget = budget

    # --- one step ---

    def step(
        self, work: dict[str, int], lookahead_noise: float = 0.0, tolerance: float | None = 1e-4
    ) -> dict[str, Tensor]:
        """Run ``{request: query tokens}`` through all layers.

        Returns the outputs of the last layer per request. With a ``tolerance``, every layer's output is checked
        against dense attention in fp64. The predicted query is the true one plus ``lookahead_noise``. An engine that is
        witnessed also checks every prompt chunk against dense attention and every decoding row against attention in
        fp64 of exactly what the method says that it attended.
        """
        m = self.model
        tolerance = tolerance if tolerance is None or m.kv_dtype is None else max(tolerance, INT8_ERROR)
        if self.witness is not None:
            self.witness.begin()
        step, query_start = self._begin(work)
        total = query_start[-1]
        queries = self._queries(total)
        outs = {}
        for layer in range(m.num_layers):
            if layer + 1 < m.num_layers:
                self._look_ahead(layer + 1, step, queries, lookahead_noise)
            kv = self._random(layer, total, 2)
            out = torch.full_like(queries[layer], float("nan"))
            k, v = kv[:, :, 0].contiguous(), kv[:, :, 1].contiguous()
            there = [x.to(self.device) for x in (queries[layer], k, v, out)]
            self.runtime.forward(layer, step, *there)
            out = there[-1].cpu()
            # A request whose page another one fills in this step has that one's token, wherever its row is.
            for r, name in sorted(enumerate(work), key=lambda row: self.sequences[row[1]].donor is not None):
                mine = slice(query_start[r], query_start[r + 1])
                sequence = self.sequences[name]
                if sequence.donor is not None:
                    sequence.kv[layer] = sequence.donor.kv[layer][: sequence.tokens]
                stored = self._stored(layer, kv[mine])
                is_decoding = step.decode is not None and name in step.decode.request_ids
                new = stored if is_decoding else kv[mine].to(stored)
                sequence.kv[layer] = sequence.kv[layer] + list(new)
                outs[name] = out[mine]
                assert not out[mine].isnan().any(), f"{name}: layer {layer} left output unwritten"
                if tolerance is not None:
                    expected = self.dense(name, layer, queries[layer][mine])
                    self._compare(name, layer, out[mine], expected, tolerance, "dense attention")
                if self.witness is not None:
                    attended = self._attended(self.witness, layer, step, name)
                    if tolerance is None or (attended is not None and not attended.is_everything):
                        expected = self.dense(name, layer, queries[layer][mine], attended)
                        limit = WITNESSED if m.kv_dtype is None else INT8_ERROR
                        self._compare(name, layer, out[mine], expected, limit, "attention of what it attended")
                if self.model.kv_dtype is not None:  # A prompt chunk attends itself as computed, later ones as stored.
                    sequence.kv[layer][-len(stored) :] = list(stored)
        self.runtime.end_step(step)
        self.ran = step
        for name, count in work.items():
            self.sequences[name].tokens += count
            self.sequences[name].donor = None
        return outs

    def _attended(self, witness: Witness, layer: int, step: Step, name: str) -> Attended | None:
        """None: everything before each token (a prompt chunk, a sliding window)."""
        if self.model.window(layer) is not None or step.decode is None or name not in step.decode.request_ids:
            return None
        return witness.of(layer, step, step.decode.request_ids.index(name))

    @staticmethod
    def _compare(name: str, layer: int, out: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
        error = (out.double() - expected).abs().max()
        assert error < tolerance, f"{name}: layer {layer} is off by {error} from {what}"

    def reject(self, name: str, drafts: int) -> None:
        """Reject the last ``drafts`` tokens of a request. Its pages stay, and its next step writes over the tokens."""
        sequence = self.sequences[name]
        sequence.tokens -= drafts
        for layer in range(self.model.num_layers):
            sequence.kv[layer] = sequence.kv[layer][: sequence.tokens]

    def begin_and_die(self, name: str, is_told: bool) -> None:
        """Start a decode step of one request whose forward raises after the first lookahead; the engine retries it.
        ``is_told``: the runtime hears of it at once, else when the next step begins."""
        step, _ = self._begin({name: 1})
        m = self.model
        if self.runtime.wants_lookahead(0, step):
            self.runtime.lookahead(0, step, torch.randn(1, m.num_heads, m.head_dim, generator=self.rng).to(m.dtype))
        if is_told:
            self.runtime.abandon(step)

    def _begin(self, work: dict[str, int]) -> tuple[Step, list[int]]:
        page_size = self.cfg.page_size
        query_start, slots = [0], []
        for name, count in work.items():
            s = self.sequences[name]
            while len(s.pages) * page_size < s.tokens + count:
                page = self.free.pop()
                self.refs[page] = 1
                s.pages.append(page)
            for t in range(s.tokens, s.tokens + count):
                slots.append(s.pages[t // page_size] * page_size + t % page_size)
            query_start.append(query_start[-1] + count)
        width = max(len(self.sequences[name].pages) for name in work) + 1
        table = torch.zeros(len(work), width, dtype=torch.int32)
        decode, seq_lens = [], []
        for r, (name, count) in enumerate(work.items()):
            s = self.sequences[name]
            table[r, : len(s.pages)] = torch.tensor(s.pages, dtype=torch.int32)
            decode.append((count == 1 or self.speculates) and s.tokens >= s.prompt)
            seq_lens.append(s.tokens + count)
        there = table.to(self.device), torch.tensor(slots).to(self.device)
        budgets = [self.sequences[name].budget for name in work]
        batch = Batch(list(work), query_start, seq_lens, decode, *there, budgets=budgets)
        return self.runtime.begin_step(batch), query_start

    def _look_ahead(self, layer: int, step: Step, queries: Items[Tensor], noise: float) -> None:
        if self.runtime.wants_lookahead(layer, step) and step.decode is not None:
            real = step.decode.gather(queries[layer])
            jitter = torch.randn(real.shape, generator=self.rng) * noise
            self.runtime.lookahead(layer, step, (real + jitter.to(real.dtype)).to(self.device))

    def dense(self, name: str, layer: int, q: Tensor, attended: Attended | None = None) -> Tensor:
        """fp64 causal attention of the last ``len(q)`` tokens over everything that the request wrote, or of the last
        one over what was ``attended``."""
        m = self.model
        heads, kv_heads, _, scale = m.shape(layer)
        group = heads // kv_heads
        kv = torch.stack(self.sequences[name].kv[layer]).double()
        k, v = (kv[:, :, i].repeat_interleave(group, 1) for i in (0, 1))
        logits = torch.einsum("qhd,thd->hqt", q.double(), k) * scale
        position = torch.arange(len(kv) - len(q), len(kv))[:, None]
        key = torch.arange(len(kv))[None]
        seen = key <= position
        window = m.window(layer)
        if window is not None:
            seen &= key > position - window
        if attended is not None:
            if attended.guess is not None:
                guessed = torch.einsum("hd,thd->ht", attended.guess.double(), k)[:, None] * scale
                logits = torch.where(attended.guessed.repeat_interleave(group, 0)[:, None], guessed, logits)
            seen = seen & attended.tokens.repeat_interleave(group, 0)[:, None]
        logits, sinks = logits.masked_fill(~seen, float("-inf")), m.sink(layer)
        if sinks is not None:  # one more key, whose value is 0
            logits = torch.cat([logits, sinks.double()[:, None, None].expand(-1, len(q), -1)], 2)
        weights = logits.softmax(-1)[..., : len(kv)]
        return torch.einsum("hqt,thd->qhd", weights, v)

    def prefill(self, name: str, chunk: int = 10**6) -> None:
        s = self.sequences[name]
        while s.tokens < s.prompt:
            self.step({name: min(chunk, s.prompt - s.tokens)})

    def decode(self, *names: str, steps: int = 1, noise: float = 0.0, tolerance: float | None = 1e-4) -> Tensor:
        """Decode one token of each request in each of ``steps`` steps.

        Returns:
            The outputs of the last layer, ``[steps, names, heads, head_dim]``.
        """
        outs = [self.step(dict.fromkeys(names, 1), noise, tolerance) for _ in range(steps)]
        return torch.stack([torch.cat([out[name] for name in names]) for out in outs])

    def close(self) -> None:
        """Stop the runtime's threads. A second call does nothing."""
        if self in OPENED:
            OPENED.remove(self)
            self.runtime.close()


def decode_step(engine: Engine) -> StepDriver:
    executor = engine.runtime.executor
    assert isinstance(executor, StepDriver)
    return executor


def resident(engine: Engine, name: str, layer: int) -> set[int]:
    """Logical pages of a request that the device tier holds now: in a frame, or all where the layer needs none."""
    frames = engine.runtime.tiers.frames
    if not frames.size or layer in engine.runtime.tiers.whole.stores:
        return set(range(-(-engine.sequences[name].tokens // engine.cfg.page_size)))
    index = frames.index(name)
    if index is None:
        return set()
    executor = decode_step(engine)
    held = executor.buffers.maps.page_of[executor.buffers.layers[layer].position, index :: frames.requests].cpu()
    return {page for page in held.tolist() if page >= 0}


def watch(
    owner: Any, name: str, *, before: Callable[..., object] | None = None, after: Callable[..., object] | None = None
) -> None:
    """Call ``before(*args)`` and ``after(result, *args)`` around every later call of ``owner.name``."""
    call = getattr(owner, name)

    def watched(*args: Any, **keys: Any) -> Any:
        if before is not None:
            before(*args, **keys)
        result = call(*args, **keys)
        if after is not None:
            after(result, *args, **keys)
        return result

    setattr(owner, name, watched)

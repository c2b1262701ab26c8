"""A small model with weights, and an engine that decodes it through the runtime: rows may wait from one step to the
next, as vLLM lets them. Its answers are compared with the model's own, attended densely."""

from __future__ import annotations

import itertools
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybrid_backend.batch import Batch, ModelSpec, Step, captured_step
from hybrid_backend.config import HybridConfig
from hybrid_backend.methods.apex import Apex
from hybrid_backend.runtime import HybridRuntime
from hybrid_backend.step.driver import StepDriver
from tests.support.far_device import busy, views
from tests.support.gpu import ON_GPU
from tests.support.opened import OPENED

HIDDEN, HEADS, KV_HEADS, DIM, VOCAB = 24, 4, 2, 16, 50


def random_prompt(length: int, seed: int = 0) -> list[int]:
    rng = torch.Generator().manual_seed(length + 1000 * seed)
    tokens: list[int] = torch.randint(VOCAB, (length,), generator=rng).tolist()
    return tokens


class TinyModel:
    """Decoder layers as vLLM's: each takes hidden states and a residual, and hands both on. Attention has sinks."""

    def __init__(self, layers: int, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)

        def weights(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng) / shape[-2] ** 0.5

        self.layers = layers
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=rng)
        self.qkv = weights(layers, HIDDEN, (HEADS + 2 * KV_HEADS) * DIM)
        self.out = weights(layers, HEADS * DIM, HIDDEN)
        self.head = weights(HIDDEN, VOCAB)
        self.sinks = torch.randn(layers, HEADS, generator=rng) + 3

    def spec(self, parks: bool) -> ModelSpec:
        return ModelSpec(
            self.layers, HEADS, KV_HEADS, DIM, DIM**-0.5, torch.float32, hidden=HIDDEN, parks=parks,
            layer_weight_bytes=4 * (self.qkv[0].numel() + self.out[0].numel()), sinks=tuple(self.sinks),
        )  # fmt: skip

    def to(self, device: torch.device) -> TinyModel:
        """The same weights there."""
        there = copy(self)
        for name in ("embedding", "qkv", "out", "head", "sinks"):
            setattr(there, name, getattr(self, name).to(device))
        return there

    def project(self, layer: int, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``(residual, q, k, v)``"""
        residual = hidden if residual is None else hidden + residual
        normed = residual / residual.norm(dim=-1, keepdim=True) * HIDDEN**0.5
        q, k, v = (normed @ self.qkv[layer]).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1)
        return residual, q.view(-1, HEADS, DIM), k.view(-1, KV_HEADS, DIM), v.view(-1, KV_HEADS, DIM)

    def next_tokens(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return ((hidden + residual) @ self.head).argmax(-1)

    def follow(self, tokens: list[int]) -> list[int]:
        """The token that comes greedily after each of these, by dense attention."""
        hidden, residual = self.embedding[tokens], None
        future = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
        for layer in range(self.layers):
            residual, q, k, v = self.project(layer, hidden, residual)
            k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
            logits = torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
            sinks = self.sinks[layer, :, None, None].expand(-1, len(tokens), -1)
            shares = torch.cat([logits.masked_fill(future, float("-inf")), sinks], 2).softmax(-1)[..., :-1]
            attended = torch.einsum("hqk,khd->qhd", shares, v)
            hidden = attended.reshape(len(tokens), -1) @ self.out[layer]
        assert residual is not None
        found: list[int] = self.next_tokens(hidden, residual).tolist()
        return found


@dataclass
class Request:
    tokens: list[int]
    prompt: int
    computed: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt :]


@dataclass(eq=False)
class TinyEngine:
    """Continuous batching with greedy decoding. What rows compute that yield no token becomes NaN."""

    cfg: HybridConfig
    model: TinyModel
    parks: bool = True
    max_requests: int = 8
    num_pages: int = 256
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    def __post_init__(self) -> None:
        shape = (self.num_pages, KV_HEADS, 2, self.cfg.page_size, DIM)
        self.kv = [torch.full(shape, float("nan")) for _ in range(self.model.layers)]
        self.weights = self.model.to(self.device)
        spec = self.weights.spec(self.parks)
        seen = views(self.kv, self.device)
        self.runtime = HybridRuntime(self.cfg, spec, self.kv, self.max_requests, self.device, seen)
        self.free = list(range(self.num_pages - 1, -1, -1))
        self.requests: dict[str, Request] = {}
        self.steps = 0
        self.failed: list[str] = []
        OPENED.append(self)

    @property
    def executor(self) -> StepDriver:
        assert isinstance(self.runtime.executor, StepDriver)
        return self.runtime.executor

    @property
    def method(self) -> Apex:
        assert isinstance(self.runtime.method, Apex)
        return self.runtime.method

    def add(self, name: str, prompt: list[int]) -> None:
        self.requests[name] = Request(list(prompt), len(prompt))

    def drop(self, name: str) -> Request:
        """It ended or was aborted."""
        self.runtime.release([name])
        request = self.requests.pop(name)
        self.free += request.pages
        return request

    def preempt(self, name: str) -> None:
        """Everything is taken away, and computed again as a prompt."""
        request = self.drop(name)
        request.computed, request.pages = 0, []
        self.requests[name] = request

    def step(self, names: list[str] | None = None) -> list[str]:
        """Run these requests (None: all) through all layers; returns those that got a token."""
        names = list(self.requests) if names is None else names
        step, counts = self._begin(names)
        tokens = torch.tensor([t for name in names for t in self._scheduled(name)])
        sampled = self.forward(step, tokens.to(self.device))
        self.runtime.end_step(step)
        self.steps += 1
        return self._finish(step, names, counts, sampled)

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def check_answers(self) -> None:
        """Check that every request has the tokens that the model itself gives it."""
        for name, request in self.requests.items():
            if request.answer:
                expected = self.model.follow(request.tokens)[request.prompt - 1 : -1]
                assert request.answer == expected, f"{name} is wrong"

    def forward(self, step: Step, tokens: Tensor) -> Tensor:
        """``[tokens]`` in, on the device; what comes greedily after each. Does not wait for the device."""
        hidden, residual = self.weights.embedding[tokens], None
        for layer in range(self.model.layers):
            if self.parks:
                self.runtime.layer_input(layer, step, hidden, residual)
            if layer + 1 < self.model.layers and self.runtime.wants_lookahead(layer + 1, step):
                assert step.decode is not None
                predicted = step.decode.gather(self.weights.project(layer + 1, hidden, residual)[1])
                self.runtime.lookahead(layer + 1, step, predicted.contiguous())
            residual, *qkv = self.weights.project(layer, hidden, residual)
            q, k, v = (x.contiguous() for x in qkv)
            out = torch.full_like(q, float("nan"))
            self.runtime.forward(layer, step, q, k, v, out)
            rows = out.reshape(len(tokens), -1)
            hidden = (rows @ self.weights.out[layer]).masked_fill((rows == 0).all(-1)[:, None], float("nan"))
        assert residual is not None
        return self.weights.next_tokens(hidden, residual)

    def _finish(self, step: Step, names: list[str], counts: list[int], sampled: Tensor) -> list[str]:
        unfinished, found = self.runtime.unfinished(step), sampled.tolist()
        failure = self.runtime.failure(step)
        failed = [] if failure is None else failure.request_ids
        got, last = [], -1
        for name, count in zip(names, counts, strict=True):
            last += count
            request = self.requests[name]
            if name in unfinished or name in failed:
                continue
            request.computed += count
            if request.computed == len(request.tokens):
                request.tokens.append(found[last])
                got.append(name)
        for name in failed:
            self.preempt(name)
        self.failed += failed
        return got

    def _scheduled(self, name: str) -> list[int]:
        request = self.requests[name]
        return request.tokens[request.computed :]

    def _begin(self, names: list[str]) -> tuple[Step, list[int]]:
        page, query_start, slots, seq_lens, decode = self.cfg.page_size, [0], [], [], []
        for name in names:
            request = self.requests[name]
            seq_len = len(request.tokens)
            while len(request.pages) * page < seq_len:
                request.pages.append(self.free.pop())
            slots += [request.pages[t // page] * page + t % page for t in range(request.computed, seq_len)]
            query_start.append(query_start[-1] + seq_len - request.computed)
            seq_lens.append(seq_len)
            decode.append(seq_len - request.computed == 1 and request.computed >= request.prompt)
        width = max(len(self.requests[name].pages) for name in names) + 1
        table = torch.zeros(len(names), width, dtype=torch.int32)
        for r, name in enumerate(names):
            table[r, : len(self.requests[name].pages)] = torch.tensor(self.requests[name].pages, dtype=torch.int32)
        there = table.to(self.device), torch.tensor(slots).to(self.device)
        counts = [end - start for start, end in itertools.pairwise(query_start)]
        return self.runtime.begin_step(Batch(names, query_start, seq_lens, decode, *there)), counts

    def close(self) -> None:
        """Stop the runtime's threads. A second call does nothing."""
        if self in OPENED:
            OPENED.remove(self)
            self.runtime.close()


@dataclass(eq=False)
class CapturedEngine(TinyEngine):
    """On a device: decoding steps replay one graph of the whole model, with as many rows as there can be. Without
    ``captures`` they are launched like prompts."""

    captures: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.prepare()
        self.graph: torch.cuda.CUDAGraph | None = None
        if self.captures:
            self.tokens = torch.zeros(self.max_requests, dtype=torch.int64, device=self.device)
            made, step = torch.cuda.CUDAGraph(), captured_step(self.max_requests)
            if ON_GPU:  # Triton compiles a kernel when it is first launched
                super().forward(step, self.tokens)
            with torch.cuda.graph(made):
                self.sampled = super().forward(step, self.tokens)
            self.graph = made

    def prepare(self) -> None:
        """Before anything is captured."""

    def forward(self, step: Step, tokens: Tensor) -> Tensor:
        if self.graph is None or step.prefill:
            return super().forward(step, tokens)
        with busy():
            self.tokens[: len(tokens)].copy_(tokens)
            self.graph.replay()
        return self.sampled[: len(tokens)]

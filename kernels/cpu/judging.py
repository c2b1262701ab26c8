"""Prompts that native threads judge in the background (`contract.judging`), while they have no other work."""

from __future__ import annotations

import ctypes

import torch

from hybrid_backend.errors import WorkerError
from hybrid_backend.kernels.cpu import library as lib
from hybrid_backend.kernels.cpu.arguments import address
from hybrid_backend.kernels.cpu.partial import Pool
from hybrid_backend.kernels.kv_format import head_dim_of
from hybrid_backend.kernels.operations import Judgement, LayerToJudge, PromptToJudge


class NativeJudging:
    """A submitted prompt. Threads of the pool leave it for any partial, and go on with it afterwards.

    Args:
        pool: pool whose threads judge.
        prompt: the prompt. Its tensors must not change until `result` returns it or `close` is called.
        what: name of the prompt in error messages.

    Raises:
        ValueError: tensors that do not fit together.
        WorkerError: the pool is closed, a page id that a layer lacks, or a shape that the kernels lack.
    """

    def __init__(self, pool: Pool, prompt: PromptToJudge, what: str) -> None:
        self._what, self._prompt = what, prompt
        self._handle: int | None = None
        first = prompt.layers[0]
        kv_heads, size = first.host.shape[1], first.host.shape[3]
        if prompt.pages.numel() * size < prompt.tokens or not 0 <= prompt.first <= prompt.older <= prompt.tokens:
            raise ValueError(f"{prompt.pages.numel()} pages or spans do not fit {prompt.tokens} tokens")
        count, judged = len(prompt.layers), prompt.older - prompt.first
        self._result = Judgement(
            torch.zeros(count, kv_heads, judged, dtype=torch.bool),
            torch.empty(count, kv_heads, prompt.tokens - prompt.older),
            torch.zeros(count, kv_heads, dtype=torch.int32),
        )
        layers = (lib.JudgeLayer * count)(*(_layer(layer, first, judged) for layer in prompt.layers))
        args = lib.JudgeArgs()
        heads, head_dim = first.q.shape[1], head_dim_of(first.host)
        args.model = lib.model_of(
            first.q.dtype, kv_heads, heads, head_dim, size, prompt.scale, kv_dtype=first.host.dtype
        )
        args.cache = lib.cache_of(first.host)
        args.cache.pages = min(len(layer.host) for layer in prompt.layers)
        args.layers, args.layer_count = ctypes.addressof(layers), count
        args.pages = address(prompt.pages, torch.int32)
        args.tokens, args.first, args.older, args.threshold = (
            prompt.tokens, prompt.first, prompt.older, prompt.threshold,
        )  # fmt: skip
        args.keep_mask, args.recent, args.counts = (x.data_ptr() for x in self._result)
        self._native = lib.native()
        self._handle = pool.adopt(self, self._native.hb_judge, ctypes.byref(args))

    def result(self) -> Judgement | None:
        """Return the judgement; None while threads have work left.

        Raises:
            WorkerError: a thread failed, or the prompt was given up.
        """
        if self._handle is None:
            raise WorkerError(f"{self._what} was given up")
        state = self._native.hb_judging_state(self._handle)
        if state == lib.ERROR:
            raise WorkerError(f"a CPU worker failed on {self._what}: {lib.failure()}")
        return None if state == lib.TIMEOUT else self._result

    @property
    def steps(self) -> int:
        """Number of steps that the threads have done, which grows while they work."""
        return 0 if self._handle is None else int(self._native.hb_judging_steps(self._handle))

    @property
    def seconds(self) -> float:
        """Time that the threads have worked, summed over threads."""
        return 0.0 if self._handle is None else float(self._native.hb_judging_seconds(self._handle))

    def close(self) -> None:
        """Give up what is left. Waits for the threads that work on the prompt, each of which does one more step."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._native.hb_judging_free(handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()


def _layer(layer: LayerToJudge, first: LayerToJudge, judged: int) -> tuple[int, int, int, int]:
    """Return the members of `lib.JudgeLayer`.

    Raises:
        ValueError: the layer has another shape than ``first``, or a store without room for ``judged`` tokens.
    """
    host, store = layer.host, layer.store
    query_dtype, kv_dtype = first.q.dtype, first.host.dtype
    if kv_dtype not in (query_dtype, torch.int8):
        raise ValueError(f"queries of {query_dtype} do not fit pages of {kv_dtype}")
    has_room = len(store) * host.shape[3] >= judged
    if host.shape[1:] != first.host.shape[1:] or store.shape[1:] != host.shape[1:] or not has_room:
        raise ValueError(f"pages {tuple(host.shape)} do not fit a store {tuple(store.shape)} of {judged} tokens")
    if layer.q.shape[1:] != (first.q.shape[1], head_dim_of(host)):
        raise ValueError(f"queries {tuple(layer.q.shape)} do not fit pages {tuple(host.shape)}")
    return address(layer.q, query_dtype), len(layer.q), address(host, kv_dtype), address(store, kv_dtype)

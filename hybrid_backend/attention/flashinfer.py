"""FlashInfer's kernels for attention on a GPU: prompts, and decode rows whose list lengths the host knows.

FlashInfer (https://github.com/flashinfer-ai/flashinfer, Apache-2.0) plans on the host, from the lengths of all lists.
Triton kernels therefore attend lists whose lengths only the device knows, such as resident pages, and run in captured
CUDA graphs. FlashInfer's LSE has base 2 and is converted in this module. `Operations.merge_partials` merges partials in
fp32, because FlashInfer's `merge_state` takes 16-bit outputs only.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hybrid_backend.attention.partial import Partial
from hybrid_backend.attention.prefill import KVBlock
from hybrid_backend.attention.prompts import Prompts
from hybrid_backend.batch import ModelSpec, sent
from hybrid_backend.kernels.operations import Operations

FIX = "pip install 'hybrid-backend[cuda]'"
"""Command that installs FlashInfer."""
KNOWN = "0.7.0 to 0.7.2"
"""FlashInfer versions whose API is known to fit."""
HEAD_DIMS = (64, 128, 256)
"""Values of head_dim that FlashInfer serves on sm_80 and sm_90 (include/flashinfer/utils.cuh, flashinfer/utils.py)."""
_WORKSPACE_BYTES = 128 << 20
"""Device workspace for partials of split lists, as FlashInfer's documentation recommends."""
_PLAN_BYTES = 8 << 20
"""Device memory that each FlashInfer wrapper allocates for its schedule."""
_MAX_ERROR = 5e-2
"""Largest accepted difference to fp32 attention, for 16-bit values with standard deviation 1."""

_RAGGED, _DECODE = "BatchPrefillWithRaggedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"
_PAGED = "BatchPrefillWithPagedKVCacheWrapper"
_PLANNED = ("num_qo_heads", "num_kv_heads", "sm_scale", "q_data_type")
_PAGES = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
USED_API: dict[str, tuple[str, ...]] = {
    "single_prefill_with_kv_cache": ("q", "k", "v", "causal", "sm_scale", "return_lse"),
    _RAGGED: ("float_workspace_buffer", "kv_layout"),
    f"{_RAGGED}.plan": ("self", "qo_indptr", "kv_indptr", "head_dim_qk", "causal", "disable_split_kv", *_PLANNED),
    f"{_RAGGED}.run": ("self", "q", "k", "v", "return_lse"),
    _PAGED: ("float_workspace_buffer", "kv_layout"),
    f"{_PAGED}.plan": ("self", "qo_indptr", *_PAGES, "head_dim_qk", "page_size", "causal", *_PLANNED),
    f"{_PAGED}.run": ("self", "q", "paged_kv_cache", "return_lse"),
    _DECODE: ("float_workspace_buffer", "kv_layout", "use_tensor_cores"),
    f"{_DECODE}.plan": ("self", "indptr", "indices", "last_page_len", "head_dim", "page_size", *_PLANNED),
    f"{_DECODE}.run": ("self", "q", "paged_kv_cache", "return_lse"),
}
"""FlashInfer's functions that this module calls, and the parameters that the calls pass by name."""


def is_installed() -> bool:
    """Tell whether the package ``flashinfer`` is installed, without importing it."""
    return find_spec("flashinfer") is not None


def missing_api(module: ModuleType) -> list[str]:
    """Return the entries of `USED_API` that the installed FlashInfer ``module`` does not support, as text."""
    missing = []
    for name, parameters in USED_API.items():
        function: Any = module
        for attribute in name.split("."):
            function = getattr(function, attribute, None)
        if function is None:
            missing.append(f"no {name}")
            continue
        try:
            inspect.signature(function).bind(**dict.fromkeys(parameters))
        except TypeError as error:
            missing.append(f"{name}: {error}")
    return missing


def faults() -> list[str]:
    """Return the import error of the installed FlashInfer, or the API that it lacks, as text; empty: it can be used."""
    try:
        module = import_module("flashinfer")
    # Importing FlashInfer loads libraries and calls the driver, so any exception is possible.
    except Exception as error:
        return [" ".join(f"{type(error).__name__}: {error}".split())]
    return missing_api(module)


def why_unfit(model: ModelSpec) -> str | None:
    """Return the reason why FlashInfer cannot attend for a model, as text; None if FlashInfer can."""
    if model.dtype not in (torch.float16, torch.bfloat16):
        return f"it attends fp16 and bf16, not {str(model.dtype).removeprefix('torch.')}"
    if model.head_dim not in HEAD_DIMS:
        return f"it attends heads of {', '.join(map(str, HEAD_DIMS))} channels, not of {model.head_dim}"
    return None


def device_bytes() -> int:
    """Return the device memory of a `FlashInfer` instance, in bytes."""
    return _WORKSPACE_BYTES + 3 * _PLAN_BYTES


class FlashInfer:
    """FlashInfer's attention on one rank: ``prompts`` for prefill chunks, ``decode`` for decode rows."""

    def __init__(self, module: ModuleType, operations: Operations, model: ModelSpec, device: torch.device) -> None:
        """Allocate the workspace on ``device`` and make the wrappers of the package ``module``."""
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.prompts = FlashInferPrompts(module, workspace, operations, model)
        self.decode = PagedDecode(module, workspace, model)

    @classmethod
    def try_create(cls, operations: Operations, model: ModelSpec, device: torch.device) -> FlashInfer | str:
        """Create a `FlashInfer` if its results equal PyTorch's attention; otherwise return the reason, as text.

        FlashInfer compiles missing kernels during the comparison, so that no request waits for a compiler.
        """
        if (reason := why_unfit(model)) is not None:
            return reason
        try:
            module = import_module("flashinfer")
            if missing := missing_api(module):
                return f"its version {version(module)} is unlike {KNOWN}: {'; '.join(missing)}"
            instance = cls(module, operations, model, device)
            error = instance._error(device)
        # FlashInfer is optional, so any exception of its import, of nvcc or of ninja is only reported.
        except Exception as failure:
            return " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
        return instance if error < _MAX_ERROR else f"it is off by {error:.3f} from PyTorch's attention in a trial"

    def _error(self, device: torch.device) -> float:
        """Return the largest difference to fp32 attention, in prefill chunks and in two decode steps with one plan."""
        model, generator = self.decode.model, torch.Generator().manual_seed(0)
        heads, kv_heads, dim, page = model.num_heads, model.num_kv_heads, model.head_dim, 16

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, dim, generator=generator).to(model.dtype)

        q, kv, earlier = random(5, heads), random(5, kv_heads, 2), random(kv_heads, 2, 20)
        device_kv = kv.to(device)
        own = self.prompts.own(q.to(device), device_kv[:, :, 0], device_kv[:, :, 1], [(0, 2), (2, 5)])[1]
        block = KVBlock(tuple(range(kv_heads)), *earlier.to(device).unbind(1))
        out = self.prompts.attend(q[2:].to(device), own, [block])
        k, v = (torch.cat([earlier[:, i].transpose(0, 1), kv[2:, :, i]]) for i in range(2))
        errors = [_difference(out, q[2:], k, v, model.scale, first=20)]
        pages, counts = random(6, kv_heads, 2, page), torch.tensor([2 * page, page + 3])
        listed = [torch.tensor(ids, dtype=torch.int32).to(device) for ids in ([4, 1], [0, 5])]
        rows = [(0, 2), (2, 5)], [(ids, page + 3) for ids in listed]
        partials = self.prompts.over_pages(q.to(device), pages.to(device), *rows)
        for (start, end), (ids, count), partial in zip(*rows, partials, strict=True):
            k, v = (pages[ids.cpu().long(), :, i].transpose(1, 2).flatten(0, 1)[:count] for i in range(2))
            errors.append(_difference(partial.out, q[start:end], k, v, model.scale, first=count - (end - start)))
        for ids in (torch.tensor([[5, 1], [2, 0]]), torch.tensor([[3, 4], [0, 2]])):
            lists = ids.int()[:, None].to(device)
            out, _ = self.decode.attend(q[:2].to(device), pages.to(device), lists, counts)
            for row, count in enumerate(counts.tolist()):
                k, v = (pages[ids[row], :, i].transpose(1, 2).flatten(0, 1)[:count] for i in range(2))
                errors.append(_difference(out[row, :, 0][None], q[row : row + 1], k, v, model.scale, first=count - 1))
        # The maximum of a tensor is NaN if one of its elements is, unlike Python's `max`.
        return float(torch.tensor(errors).max())


def version(module: ModuleType) -> str:
    """Return the version of FlashInfer, or ``unknown``."""
    return str(getattr(module, "__version__", "unknown"))


class FlashInferPrompts(Prompts):
    """Attention of prefill chunks by FlashInfer.

    All chunks of a step attend themselves in one launch, which is planned once for all layers. Chunks whose sequences
    lie in pages on the device attend these in one launch, the earlier tokens included. Each block of other earlier
    tokens is another launch, without a plan.
    """

    head_axis = 1

    def __init__(self, module: ModuleType, workspace: Tensor, operations: Operations, model: ModelSpec) -> None:
        super().__init__(operations, model)
        self._over: Callable[..., tuple[Tensor, Tensor]] = module.single_prefill_with_kv_cache
        self._own = _Planned(getattr(module, _RAGGED)(float_workspace_buffer=workspace, kv_layout="NHD"))
        self._paged = _Planned(getattr(module, _PAGED)(float_workspace_buffer=workspace, kv_layout="HND"))
        self._indices = torch.empty(0)  # Pages of the current plan, which keeps a reference to the tensor.

    def own(self, q: Tensor, k: Tensor, v: Tensor, chunks: Sequence[tuple[int, int]]) -> list[Partial]:
        # Decode rows between two chunks are attended as one more chunk, and the result is not used.
        first, last = chunks[0][0], chunks[-1][1]
        bounds = sorted({bound - first for chunk in chunks for bound in chunk})
        indptr, model = torch.tensor(bounds, dtype=torch.int32), self._model
        wrapper = self._own.planned(
            tuple(bounds), qo_indptr=indptr, kv_indptr=indptr, num_qo_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads, head_dim_qk=model.head_dim, causal=True, sm_scale=model.scale,
            q_data_type=model.dtype, disable_split_kv=True,
        )  # fmt: skip
        q, k, v = (x[first:last].contiguous() for x in (q, k, v))
        out, lse = _to_natural_log(*wrapper.run(q, k, v, return_lse=True))
        return [Partial(out[start - first : end - first], lse[start - first : end - first]) for start, end in chunks]

    def over_pages(
        self, q: Tensor, kv: Tensor, chunks: Sequence[tuple[int, int]], lists: Sequence[tuple[Tensor, int]]
    ) -> list[Partial]:
        model, page_size, bounds = self._model, kv.shape[3], [0]
        for start, end in chunks:
            bounds.append(bounds[-1] + end - start)
        tokens = torch.tensor([count for _, count in lists])
        pages = -(-tokens // page_size)
        key = (page_size, *bounds, *tokens.tolist())
        if not self._paged.is_planned(key):
            self._indices = torch.empty(int(pages.sum()), dtype=torch.int32, device=q.device)
        torch.cat([ids for ids, _ in lists], out=self._indices)
        wrapper = self._paged.planned(
            key, qo_indptr=torch.tensor(bounds, dtype=torch.int32),
            paged_kv_indptr=torch.cat([pages.new_zeros(1), pages.cumsum(0)]).int(), paged_kv_indices=self._indices,
            paged_kv_last_page_len=(tokens - (pages - 1) * page_size).int(), num_qo_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads, head_dim_qk=model.head_dim, page_size=page_size, causal=True,
            sm_scale=model.scale, q_data_type=model.dtype,
        )  # fmt: skip
        queries = torch.cat([q[start:end] for start, end in chunks])
        out, lse = _to_natural_log(*wrapper.run(queries, (kv[:, :, 0], kv[:, :, 1]), return_lse=True))
        return [Partial(out[start:end], lse[start:end]) for start, end in pairwise(bounds)]

    def over(self, q: Tensor, block: KVBlock) -> Partial:
        k, v = block.k.transpose(0, 1), block.v.transpose(0, 1)
        scale = self._model.scale
        return Partial(*_to_natural_log(*self._over(q, k, v, causal=False, sm_scale=scale, return_lse=True)))


class PagedDecode:
    """Attention of decode rows over page lists whose lengths the host knows.

    Layers with lists of the same lengths share a plan, even if their pages differ.
    """

    def __init__(self, module: ModuleType, workspace: Tensor, model: ModelSpec) -> None:
        self.model = model
        # FlashInfer's kernels without tensor cores serve only some numbers of query heads per KV head.
        wrapper = getattr(module, _DECODE)(float_workspace_buffer=workspace, kv_layout="HND", use_tensor_cores=True)
        self._wrapper = _Planned(wrapper)
        self._positions = self._indices = torch.empty(0)
        """The plan's positions of listed pages in the flattened ``ids``, and the pages at these positions."""

    def attend(self, q: Tensor, kv: Tensor, ids: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Attend the listed pages with one query per row.

        Args:
            q: ``[rows, heads, head_dim]``.
            kv: ``[pages, kv_heads, 2, page_size, head_dim]``.
            ids: ``[rows, lists, n]`` int32 pages of ``kv``, any stride. Of each row, only the first list is read, up to
                the row's tokens.
            tokens: ``[rows]`` int64 tokens of each list, on the host, at least 1.

        Returns:
            ``(out [rows, heads, 1, head_dim] in the dtype of q, lse [rows, heads, 1] fp32)``.
        """
        model, page_size, columns = self.model, kv.shape[3], ids.shape[2]
        key, counts = (page_size, columns, *tokens.tolist()), -(-tokens // page_size)
        if not self._wrapper.is_planned(key):
            offsets = torch.arange(len(counts)) * columns - (counts.cumsum(0) - counts)
            self._positions = sent(torch.arange(int(counts.sum())) + offsets.repeat_interleave(counts), q.device)
            self._indices = torch.empty(len(self._positions), dtype=torch.int32, device=q.device)
        # FlashInfer's plan keeps a reference to the indices, so each call writes to the same tensor.
        torch.index_select(ids[:, 0].reshape(-1), 0, self._positions, out=self._indices)
        wrapper = self._wrapper.planned(
            key, indptr=torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int(), indices=self._indices,
            last_page_len=(tokens - (counts - 1) * page_size).int(), num_qo_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads, head_dim=model.head_dim, page_size=page_size, sm_scale=model.scale,
            q_data_type=model.dtype,
        )  # fmt: skip
        out, lse = _to_natural_log(*wrapper.run(q, (kv[:, :, 0], kv[:, :, 1]), return_lse=True))
        return out[:, :, None], lse[:, :, None]


class _Planned:
    """A FlashInfer wrapper with the key of its current plan.

    FlashInfer writes a plan to pinned memory and lets the device copy it. The next plan waits for that copy, because it
    overwrites the same memory.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._key: Hashable = None
        self._copied: torch.cuda.Event | None = None

    def is_planned(self, key: Hashable) -> bool:
        """Tell whether the current plan has the key ``key``."""
        return key == self._key

    def planned(self, key: Hashable, **arguments: Any) -> Any:
        """Return the wrapper after planning with ``arguments``, unless the current plan has the key ``key``."""
        if not self.is_planned(key):
            if self._copied is not None:
                self._copied.synchronize()
            self._wrapper.plan(**arguments)
            self._key, self._copied = key, torch.cuda.current_stream().record_event()
        return self._wrapper


def _to_natural_log(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Convert an LSE of base 2 to the natural logarithm."""
    return out, lse * math.log(2)


def _difference(out: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, first: int) -> float:
    """Return the largest difference of ``out`` to causal fp32 attention, where ``q`` begins at position ``first``.

    ``q`` is ``[chunk, heads, head_dim]``; ``k`` and ``v`` are ``[tokens, kv_heads, head_dim]``, all on the host.
    """
    k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    logits = torch.einsum("qhd,thd->hqt", q.float(), k) * scale
    hidden = torch.arange(len(k)) > torch.arange(first, first + len(q))[:, None]
    expected = torch.einsum("hqt,thd->qhd", logits.masked_fill(hidden, -math.inf).softmax(-1), v)
    return float((out.cpu().float() - expected).abs().max())

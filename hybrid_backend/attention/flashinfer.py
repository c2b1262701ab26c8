"""FlashInfer's kernels (https://github.com/flashinfer-ai/flashinfer, Apache-2.0) as attention of the CUDA tier:
prompts, and those partials of decoding rows whose lengths the host knows.

FlashInfer plans on the host: it reads the lengths of all sequences and sends the device a schedule. So whatever the
device decides by itself (which pages are resident, how many the CPU attends), and all that a captured graph replays, is
attended by our Triton kernels. Its log-sum-exp has base 2: it is converted here, nowhere else. Its `merge_state` takes
16-bit outputs only, which would round after every block: partials are merged by `Operations.merge_partials`, in fp32.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from importlib import import_module
from importlib.util import find_spec
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
KNOWN = "0.7.0 to 0.7.2"
"""Versions whose sources were read."""
HEAD_DIMS = (64, 128, 256)
"""That its kernels for sm_80 and sm_90 both have (include/flashinfer/utils.cuh, flashinfer/utils.py)."""
_WORKSPACE = 128 << 20  # what its documentation recommends: partials of lists that it splits
_PLAN = 8 << 20  # what each wrapper takes on the device for its schedule
_CLOSE = 5e-2  # of values of standard deviation 1 in bf16, a few of which may have all the weight

_RAGGED, _DECODE = "BatchPrefillWithRaggedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"
_PLANNED = ("num_qo_heads", "num_kv_heads", "sm_scale", "q_data_type")
LEANS: dict[str, tuple[str, ...]] = {
    "single_prefill_with_kv_cache": ("q", "k", "v", "causal", "sm_scale", "return_lse"),
    _RAGGED: ("float_workspace_buffer", "kv_layout"),
    f"{_RAGGED}.plan": ("self", "qo_indptr", "kv_indptr", "head_dim_qk", "causal", "disable_split_kv", *_PLANNED),
    f"{_RAGGED}.run": ("self", "q", "k", "v", "return_lse"),
    _DECODE: ("float_workspace_buffer", "kv_layout", "use_tensor_cores"),
    f"{_DECODE}.plan": ("self", "indptr", "indices", "last_page_len", "head_dim", "page_size", *_PLANNED),
    f"{_DECODE}.run": ("self", "q", "paged_kv_cache", "return_lse"),
}
"""What we call, and the parameters that we give, by name."""


def is_installed() -> bool:
    return find_spec("flashinfer") is not None


def lacks(module: ModuleType) -> list[str]:
    """What of `LEANS` does not hold, in words."""
    found = []
    for name, parameters in LEANS.items():
        called: Any = module
        for part in name.split("."):
            called = getattr(called, part, None)
        if called is None:
            found.append(f"no {name}")
            continue
        try:
            inspect.signature(called).bind(**dict.fromkeys(parameters))
        except TypeError as error:
            found.append(f"{name}: {error}")
    return found


def faults() -> list[str]:
    """Why what is installed cannot be imported, or what of `LEANS` it lacks; empty: it is as we know it."""
    try:
        module = import_module("flashinfer")
    except Exception as error:  # it loads libraries, and asks the driver
        return [" ".join(f"{type(error).__name__}: {error}".split())]
    return lacks(module)


def why_unfit(model: ModelSpec) -> str | None:
    """Why a model cannot be attended by it; None: it can."""
    if model.dtype not in (torch.float16, torch.bfloat16):
        return f"it attends fp16 and bf16, not {str(model.dtype).removeprefix('torch.')}"
    if model.head_dim not in HEAD_DIMS:
        return f"it attends heads of {', '.join(map(str, HEAD_DIMS))} channels, not of {model.head_dim}"
    return None


def device_bytes() -> int:
    """That `FlashInfer` holds."""
    return _WORKSPACE + 2 * _PLAN


class FlashInfer:
    """The wrappers of one rank. ``prompts``, ``decode``: what there is to call."""

    def __init__(self, module: ModuleType, operations: Operations, model: ModelSpec, device: torch.device) -> None:
        workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
        self.prompts = FlashInferPrompts(module, workspace, operations, model)
        self.decode = PagedDecode(module, workspace, model)

    @classmethod
    def try_create(cls, operations: Operations, model: ModelSpec, device: torch.device) -> FlashInfer | str:
        """It, or why it cannot be used. It compiles its kernels now, where it has none that fit, and must give the
        numbers that we expect, so that nothing is found out in the middle of a request."""
        if (reason := why_unfit(model)) is not None:
            return reason
        try:
            module = import_module("flashinfer")
            if missing := lacks(module):
                return f"its version {version(module)} is unlike {KNOWN}: {'; '.join(missing)}"
            made = cls(module, operations, model, device)
            error = made._error(device)
        # Whatever its import, nvcc, ninja or its checks raise: nothing depends on it.
        except Exception as failure:
            return " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
        return made if error < _CLOSE else f"it is off by {error:.3f} from PyTorch's attention in a trial"

    def _error(self, device: torch.device) -> float:
        """Largest difference to attention in fp32, over prompts, and over two page lists that share a plan."""
        model, chance = self.decode.model, torch.Generator().manual_seed(0)
        heads, kv_heads, dim, page = model.num_heads, model.num_kv_heads, model.head_dim, 16

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, dim, generator=chance).to(model.dtype)

        q, kv, before = drawn(5, heads), drawn(5, kv_heads, 2), drawn(kv_heads, 2, 20)
        there = kv.to(device)
        own = self.prompts.own(q.to(device), there[:, :, 0], there[:, :, 1], [(0, 2), (2, 5)])[1]
        block = KVBlock(tuple(range(kv_heads)), *before.to(device).unbind(1))
        found = self.prompts.attend(q[2:].to(device), own, [block])
        k, v = (torch.cat([before[:, i].transpose(0, 1), kv[2:, :, i]]) for i in range(2))
        errors = [_difference(found, q[2:], k, v, model.scale, first=20)]
        pages, counts = drawn(6, kv_heads, 2, page), torch.tensor([2 * page, page + 3])
        for ids in (torch.tensor([[5, 1], [2, 0]]), torch.tensor([[3, 4], [0, 2]])):
            lists = ids.int()[:, None].to(device)
            parts, _ = self.decode.attend(q[:2].to(device), pages.to(device), lists, counts)
            for row, count in enumerate(counts.tolist()):
                k, v = (pages[ids[row], :, i].transpose(1, 2).flatten(0, 1)[:count] for i in range(2))
                errors.append(_difference(parts[row, :, 0][None], q[row : row + 1], k, v, model.scale, first=count - 1))
        return float(torch.tensor(errors).max())  # NaN, if one is


def version(module: ModuleType) -> str:
    return str(getattr(module, "__version__", "unknown"))


class FlashInferPrompts(Prompts):
    """All chunks of a step in one launch, planned once for all layers; each block of earlier tokens in one more, which
    needs no plan."""

    head_axis = 1

    def __init__(self, module: ModuleType, workspace: Tensor, operations: Operations, model: ModelSpec) -> None:
        super().__init__(operations, model)
        self._over: Callable[..., tuple[Tensor, Tensor]] = module.single_prefill_with_kv_cache
        self._own = _Planned(getattr(module, _RAGGED)(float_workspace_buffer=workspace, kv_layout="NHD"))

    def own(self, q: Tensor, k: Tensor, v: Tensor, chunks: Sequence[tuple[int, int]]) -> list[Partial]:
        """Decoding rows between two chunks are attended as a chunk, for nothing."""
        first, last = chunks[0][0], chunks[-1][1]
        bounds = sorted({bound - first for chunk in chunks for bound in chunk})
        indptr, model = torch.tensor(bounds, dtype=torch.int32), self._model
        wrapper = self._own.planned(
            tuple(bounds), qo_indptr=indptr, kv_indptr=indptr, num_qo_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads, head_dim_qk=model.head_dim, causal=True, sm_scale=model.scale,
            q_data_type=model.dtype, disable_split_kv=True,
        )  # fmt: skip
        q, k, v = (x[first:last].contiguous() for x in (q, k, v))
        out, lse = _natural(*wrapper.run(q, k, v, return_lse=True))
        return [Partial(out[start - first : end - first], lse[start - first : end - first]) for start, end in chunks]

    def over(self, q: Tensor, block: KVBlock) -> Partial:
        k, v = block.k.transpose(0, 1), block.v.transpose(0, 1)  # views: a token's channels are together
        scale = self._model.scale
        return Partial(*_natural(*self._over(q, k, v, causal=False, sm_scale=scale, return_lse=True)))


class PagedDecode:
    """Attention of decoding rows over lists of pages whose tokens the host knows. Planned once for all layers in which
    the rows attend as many, whatever their pages are."""

    def __init__(self, module: ModuleType, workspace: Tensor, model: ModelSpec) -> None:
        self.model = model
        # Its kernels without tensor cores know some sizes of groups only.
        made = getattr(module, _DECODE)(float_workspace_buffer=workspace, kv_layout="HND", use_tensor_cores=True)
        self._wrapper = _Planned(made)
        self._pages = self._indices = torch.empty(0)  # of the plan: which entries of the lists count, and what they are

    def attend(self, q: Tensor, kv: Tensor, ids: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Args:
            q: ``[rows, heads, head_dim]``; kv: ``[pages, kv_heads, 2, page_size, head_dim]``, read as it lies.
            ids: ``[rows, 1, n]`` int32, any stride; what lies beyond the tokens is not read.
            tokens: ``[rows]`` on the host, at least one of each.

        Returns:
            ``(out [rows, heads, 1, head_dim] in the type of q, lse [rows, heads, 1] fp32)``.
        """
        model, page_size, columns = self.model, kv.shape[3], ids.shape[2]
        key, counts = (page_size, columns, *tokens.tolist()), -(-tokens // page_size)
        if not self._wrapper.is_planned(key):
            before = torch.arange(len(counts)) * columns - (counts.cumsum(0) - counts)
            self._pages = sent(torch.arange(int(counts.sum())) + before.repeat_interleave(counts), q.device)
            self._indices = torch.empty(len(self._pages), dtype=torch.int32, device=q.device)
        # In place: the plan keeps the tensor that it was given.
        torch.index_select(ids[:, 0].reshape(-1), 0, self._pages, out=self._indices)
        wrapper = self._wrapper.planned(
            key, indptr=torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int(), indices=self._indices,
            last_page_len=(tokens - (counts - 1) * page_size).int(), num_qo_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads, head_dim=model.head_dim, page_size=page_size, sm_scale=model.scale,
            q_data_type=model.dtype,
        )  # fmt: skip
        out, lse = _natural(*wrapper.run(q, (kv[:, :, 0], kv[:, :, 1]), return_lse=True))
        return out[:, :, None], lse[:, :, None]


class _Planned:
    """A wrapper, and what it is planned for. A plan is written to pinned memory, from which the device copies it: a
    later one must wait until that copy is done, or it would spoil it."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._key: Hashable = None
        self._copied: torch.cuda.Event | None = None

    def is_planned(self, key: Hashable) -> bool:
        return key == self._key

    def planned(self, key: Hashable, **arguments: Any) -> Any:
        if not self.is_planned(key):
            if self._copied is not None:
                self._copied.synchronize()
            self._wrapper.plan(**arguments)
            self._key, self._copied = key, torch.cuda.current_stream().record_event()
        return self._wrapper


def _natural(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """From base 2."""
    return out, lse * math.log(2)


def _difference(found: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, first: int) -> float:
    """To attention in fp32 of ``q`` ``[chunk, heads, head_dim]``, of tokens ``first ..``, over ``k``, ``v`` ``[tokens,
    kv_heads, head_dim]``, all on the host."""
    k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    logits = torch.einsum("qhd,thd->hqt", q.float(), k) * scale
    hidden = torch.arange(len(k)) > torch.arange(first, first + len(q))[:, None]
    expected = torch.einsum("hqt,thd->qhd", logits.masked_fill(hidden, -math.inf).softmax(-1), v)
    return float((found.cpu().float() - expected).abs().max())

"""FlashInfer as far as we call it, in PyTorch: its documented shapes, layouts and strides, log-sum-exp with base 2.

Signatures are those of the version below (tests/slow/test_flashinfer.py compares them where it is installed). As the
real one, a plan reads lengths on the host, writes them to pinned memory, and the device works by what it copied from
there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__version__ = "0.7.2.post1"


def single_prefill_with_kv_cache(
    q: Tensor, k: Tensor, v: Tensor, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None,
    packed_custom_mask=None, causal=False, kv_layout="NHD", pos_encoding_mode="NONE", use_fp16_qk_reduction=False,
    sm_scale=None, window_left=-1, logits_soft_cap=None, rope_scale=None, rope_theta=None, backend="auto",
    return_lse=False, kv_cache_sf=None, k_scale=None, v_scale=None,
) -> Any:  # fmt: skip
    assert kv_layout == "NHD" and return_lse and not causal
    _check(q, k, v)
    seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
    return _attention(q, k, v, seen, sm_scale)


class BatchPrefillWithRaggedKVCacheWrapper:
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None, kv_indptr_buf=None,
        custom_mask_buf=None, mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
        variant_owns_mask=False,
    ) -> None:  # fmt: skip
        assert kv_layout == "NHD" and not use_cuda_graph
        self._plan = _Plan(float_workspace_buffer)

    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, custom_mask=None,
        packed_custom_mask=None, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, window_left=-1,
        logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None, q_data_type="float16",
        kv_data_type=None, o_data_type=None, non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None,
        token_pos_in_items_len=0, max_item_len_ptr=None, fixed_split_size=None, disable_split_kv=False, seq_lens=None,
        seq_lens_q=None, max_token_per_sequence=None, max_sequence_kv=None, v_indptr=None, o_indptr=None,
        uniform_q_len=None,
    ) -> None:  # fmt: skip
        assert causal and torch.equal(qo_indptr, kv_indptr) and int(qo_indptr[0]) == 0
        self._heads, self._scale, self._total = (num_qo_heads, num_kv_heads, head_dim_qk), sm_scale, int(qo_indptr[-1])
        self._dtype = q_data_type
        self._plan.write(qo_indptr)

    def run(
        self, q, k, v, *args, q_scale=None, k_scale=None, v_scale=None, o_scale=None, out=None, lse=None,
        return_lse=False, lse_base="log2", lse_layout="NH", enable_pdl=None, kv_cache_sf=None,
    ) -> Any:  # fmt: skip
        assert return_lse and len(q) == len(k) == self._total and q.dtype == self._dtype
        assert (q.shape[1], k.shape[1], q.shape[2]) == self._heads
        _check(q, k, v)
        (indptr,) = self._plan.read()
        token = torch.arange(len(q), device=q.device)
        sequence = (token[:, None] >= indptr[1:]).sum(1)
        return _attention(q, k, v, (sequence[:, None] == sequence) & (token[:, None] >= token), self._scale)


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None,
        mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None, variant_owns_mask=False,
    ) -> None:  # fmt: skip
        assert kv_layout == "HND" and not use_cuda_graph
        self._plan = _Plan(float_workspace_buffer)

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None,
        non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0,
        max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None,
        max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False, uniform_q_len=None,
    ) -> None:  # fmt: skip
        assert causal and int(qo_indptr[0]) == 0 and len(paged_kv_indices) == int(paged_kv_indptr[-1])
        assert bool((paged_kv_indptr[1:] > paged_kv_indptr[:-1]).all())
        assert bool(((paged_kv_last_page_len > 0) & (paged_kv_last_page_len <= page_size)).all())
        self._heads, self._total = (num_qo_heads, num_kv_heads, head_dim_qk), int(qo_indptr[-1])
        self._page_size = page_size
        self._dtype, self._scale = q_data_type, sm_scale
        self._indices = paged_kv_indices.to(self._plan.device, non_blocking=True)
        self._plan.write(qo_indptr, paged_kv_indptr, paged_kv_last_page_len)

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,
        return_lse=False, lse_base="log2", lse_layout="NH", enable_pdl=None, window_left=None, sinks=None,
        kv_cache_sf=None, skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None, uses_spcompress=None,
    ) -> Any:  # fmt: skip
        k, v = paged_kv_cache
        assert return_lse and k.shape == v.shape and k.stride() == v.stride() and k.stride(-1) == 1
        assert (q.shape[1], k.shape[1], q.shape[2]) == self._heads and k.shape[2] == self._page_size
        assert q.dtype == k.dtype == self._dtype and q.stride(2) == 1 and len(q) == self._total
        first, indptr, last = self._plan.read()
        at = torch.arange(len(self._indices), device=q.device)
        owner = (at[:, None] >= indptr[1:]).sum(1)
        offset = torch.arange(self._page_size, device=q.device)
        place = (at - indptr.index_select(0, owner))[:, None] * self._page_size + offset
        tokens = (indptr[1:] - indptr[:-1] - 1) * self._page_size + last
        token = torch.arange(len(q), device=q.device)
        row = (token[:, None] >= first[1:]).sum(1)
        # The last query attends all tokens of its list, the one before it all but one.
        limit = tokens.index_select(0, row) - first.index_select(0, row + 1) + token + 1
        seen = (row[:, None] == owner)[..., None] & (place < limit[:, None, None])
        pages = [x.index_select(0, self._indices).transpose(1, 2).flatten(0, 1) for x in (k, v)]
        return _attention(q, *pages, seen.flatten(1), self._scale)


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, backend="auto",
        jit_args=None,
    ) -> None:  # fmt: skip
        assert kv_layout == "HND" and use_tensor_cores and not use_cuda_graph
        self._plan = _Plan(float_workspace_buffer)

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        *deprecated_positional_args, **kwargs,
    ) -> None:  # fmt: skip
        assert not deprecated_positional_args and kwargs.keys() == {"sm_scale", "q_data_type"}
        assert len(indices) == int(indptr[-1]) and bool((indptr[1:] > indptr[:-1]).all())
        assert bool(((last_page_len > 0) & (last_page_len <= page_size)).all())
        self._heads, self._page_size = (num_qo_heads, num_kv_heads, head_dim), page_size
        self._dtype, self._scale = kwargs["q_data_type"], kwargs["sm_scale"]
        self._indices = indices.to(self._plan.device, non_blocking=True)
        self._plan.write(indptr, last_page_len)

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,
        return_lse=False, enable_pdl=None, window_left=None, sinks=None, q_len_per_req=None,
        skip_softmax_threshold_scale_factor=None, kv_cache_sf=None,
    ) -> Any:  # fmt: skip
        k, v = paged_kv_cache
        assert return_lse and k.shape == v.shape and k.stride() == v.stride() and k.stride(-1) == 1
        assert (q.shape[1], k.shape[1], q.shape[2]) == self._heads and k.shape[2] == self._page_size
        assert q.dtype == k.dtype == self._dtype and q.is_contiguous()
        indptr, last = self._plan.read()
        at = torch.arange(len(self._indices), device=q.device)
        row = (at[:, None] >= indptr[1:]).sum(1)
        tokens = torch.where(at == indptr[1:].index_select(0, row) - 1, last.index_select(0, row), self._page_size)
        offset = torch.arange(self._page_size, device=q.device)
        seen = (row == torch.arange(len(q), device=q.device)[:, None])[..., None] & (offset < tokens[:, None])
        pages = [x.index_select(0, self._indices).transpose(1, 2).flatten(0, 1) for x in (k, v)]
        return _attention(q, *pages, seen.flatten(1), self._scale)


class _Plan:
    """Numbers that the host writes and the device reads."""

    def __init__(self, workspace: Tensor) -> None:
        assert workspace.dtype == torch.uint8
        self.device = workspace.device
        self._there = torch.zeros(3, 64, dtype=torch.int32, device=self.device)
        self._pinned = torch.zeros(3, 64, dtype=torch.int32, pin_memory=True)
        self._sizes: list[int] = []

    def write(self, *numbers: Tensor) -> None:
        assert all(x.device.type == "cpu" and x.dtype == torch.int32 for x in numbers), "it would wait for the device"
        self._sizes = [len(x) for x in numbers]
        for row, x in enumerate(numbers):
            self._pinned[row, : len(x)] = x
        self._there.copy_(self._pinned, non_blocking=True)

    def read(self) -> list[Tensor]:
        return [self._there[row, :size] for row, size in enumerate(self._sizes)]


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
    assert k.shape == v.shape and q.shape[2] == k.shape[2] and q.shape[1] % k.shape[1] == 0
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1


def _attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``seen``: ``[queries, keys]``. Keys that nobody sees may be anything, but for NaN."""
    k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    logits = q.float().transpose(0, 1) @ k.permute(1, 2, 0) * scale
    logits = logits.masked_fill(~seen, -math.inf)
    out = logits.softmax(-1) @ v.transpose(0, 1)
    return out.transpose(0, 1).to(q.dtype).contiguous(), (logits.logsumexp(-1) / math.log(2)).T.contiguous()

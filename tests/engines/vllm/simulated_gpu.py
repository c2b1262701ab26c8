"""vLLM's CUDA engine on the simulated device (tests/support/far_device.py), for machines without a GPU.

What runs is vLLM's own: platform, worker, model runners, scheduler, its Triton kernels under the interpreter; CUDA
graphs are captured and replayed. What stands in: the driver's answers, compiled operators, and torch.compile, which is
left out. For a process of its own, which is changed for good.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support import far_device
from tests.support.far_device import Far, _pinned
from tests.support.far_guard import build_guard
from tests.support.interpreter import interpret_triton
from tests.support.streams import STREAMS, Event, current_stream

FREE, TOTAL = 139 << 30, 140 << 30
_DEVICE = types.SimpleNamespace(
    name="NVIDIA H200", uuid="GPU-0", major=9, minor=0, multi_processor_count=4, warp_size=32, total_memory=TOTAL,
    is_integrated=False, shared_memory_per_block_optin=232448, L2_cache_size=50 << 20,
)  # fmt: skip


def prepare(folder: Path) -> None:
    """Before vLLM is imported: what it looks for at import time is there."""
    assert "vllm" not in sys.modules
    interpret_triton()
    build_guard(folder)
    _keep_python_operators()
    _pretend_driver()
    for name in ("_C_stable_libtorch", "_moe_C"):
        sys.modules[f"vllm.{name}"] = types.ModuleType(name)
    for name in ("vllm_flash_attn", "vllm_flash_attn.flash_attn_interface"):
        sys.modules[f"vllm.{name}"] = _Absent(name)
    sys.modules["vllm.cumem_allocator"] = None  # type: ignore[assignment]  # of CUDA builds: needs the driver
    torch.inference_mode = far_device._without_gradients

    import vllm.platforms

    from hybrid_backend.engines.vllm.cuda_platform import HybridCudaPlatform
    from hybrid_backend.engines.vllm.plugin import register

    HybridCudaPlatform.dist_backend = "gloo"
    vllm.platforms._current_platform = HybridCudaPlatform()
    register()
    _pretend_operators()


@contextmanager
def simulated_gpu() -> Iterator[None]:
    """The device is there; make engines within."""
    with far_device.far_device():
        torch.cuda.get_device_properties = lambda *_: _DEVICE
        Far.data_ptr = _address
        _leave_out()
        yield


def card_of(size: int) -> None:
    """The driver says that the GPU has so many bytes."""
    import vllm.third_party.pynvml as nvml

    _answer(nvml, {"nvmlDeviceGetMemoryInfo": types.SimpleNamespace(total=size, free=size, used=0)})


def _address(self: Far) -> int:
    """vLLM makes tables of addresses. What lies there must stay: the device may come to it late."""
    far_device.addressed.append(self.inner)
    return self.inner.data_ptr()


class _Absent(types.ModuleType):
    """A compiled package that nothing here calls."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: False


def _keep_python_operators() -> None:
    register = torch.library.Library.impl

    def impl(self: torch.library.Library, name: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        far_device.PYTHON_OPERATORS[f"{self.ns}::{name}"] = function
        return register(self, name, function, *args, **kwargs)

    torch.library.Library.impl = impl


def _pretend_driver() -> None:
    """One GPU, its memory, its streams; gloo would be NCCL. Streams and graphs are far_device's."""
    from triton.backends import backends

    backends["cpu"] = types.SimpleNamespace(driver=types.SimpleNamespace(is_active=lambda: True))

    import vllm.third_party.pynvml as nvml

    answers: dict[str, Any] = {
        "nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetCount": 1, "nvmlDeviceGetHandleByIndex": object(),
        "nvmlDeviceGetCudaComputeCapability": (9, 0), "nvmlDeviceGetName": _DEVICE.name,
        "nvmlDeviceGetUUID": _DEVICE.uuid,
    }  # fmt: skip
    _answer(nvml, answers)
    card_of(TOTAL)
    memory_of = (FREE, TOTAL)
    _answer(torch._C, {"_cuda_getDeviceCount": 1})
    _answer(torch.accelerator, {
        "device_count": 1, "current_device_index": 0, "get_memory_info": memory_of, "memory_stats": {},
        **dict.fromkeys(("memory_reserved", "memory_allocated", "max_memory_allocated", "max_memory_reserved"), 0),
        **dict.fromkeys(("set_device_index", "empty_cache", "empty_host_cache"), None),
        "reset_peak_memory_stats": None, "current_stream": current_stream(),
    })  # fmt: skip
    _answer(torch.cuda, {
        "device_count": 1, "_device_count_nvml": 1, "current_device": 0, "mem_get_info": memory_of,
        "max_memory_allocated": 0, "graph_pool_handle": (0, 0), "cudart": _Registers(),
        **dict.fromkeys(("set_device", "empty_cache", "manual_seed", "manual_seed_all"), None),
        "reset_peak_memory_stats": None, "_sleep": None,
    })  # fmt: skip
    torch.profiler.profile = lambda *_, **__: nullcontext(types.SimpleNamespace(key_averages=list))
    torch.cuda.set_stream = lambda stream: setattr(STREAMS, "current", stream.name)
    _answer(torch.cuda.memory, {"get_allocator_backend": "none"})
    torch.cuda.synchronize = torch.accelerator.synchronize = lambda *_: STREAMS.finish()
    torch.Event = Event
    tensor = torch.tensor
    torch.utils._device._device_constructors()  # remembers what a default device is given to, torch.tensor among it

    def pinned_tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = tensor(*args, **kwargs)
        return made.pin_memory() if pin_memory else made

    torch.tensor = pinned_tensor
    new = torch.nn.Parameter.__new__
    torch.nn.Parameter.__new__ = staticmethod(
        lambda kind, data=None, requires_grad=True, **_: (
            _parameter(kind, data) if isinstance(data, Far) else new(kind, data, requires_grad)
        )
    )


def _answer(module: Any, answers: dict[str, Any]) -> None:
    for name, value in answers.items():
        setattr(module, name, lambda *_, _value=value, **__: _value)


class _Registers:
    """``torch.cuda.cudart()``"""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        _pinned[address] = None
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del _pinned[address]
        return 0


@cache
def _kind_of_parameter(kind: Any) -> Any:
    data: Any = Tensor.data

    def replace(self: Any, value: Far) -> None:
        data.__set__(self, value)
        self.inner = value.inner

    plain = {
        "__torch_function__": torch._C._disabled_torch_function_impl,
        "__new__": object.__new__,
        "data": property(data.__get__, replace),
    }
    return type(kind)(kind.__name__, (Far, kind), plain)


def _parameter(kind: Any, data: Far) -> Tensor:
    """A weight on the device, of vLLM's class ``kind``: those know how they are loaded."""
    x = data.inner
    made: Any = Tensor._make_wrapper_subclass(
        _kind_of_parameter(kind), x.shape, strides=x.stride(), dtype=x.dtype, device=far_device.DEVICE
    )
    made.inner = x
    return made


def _pretend_operators() -> None:
    def rms_norm(out: Tensor, x: Tensor, weight: Tensor, epsilon: float) -> None:
        wide = x.float()
        out.copy_((wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype) * weight)

    def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
        rms_norm(x, residual.add_(x), weight, epsilon)

    operators: Any = torch.ops._C
    operators.rms_norm, operators.fused_add_rms_norm = rms_norm, fused_add_rms_norm
    operators.get_cuda_view_from_cpu_tensor = Far
    operators.weak_ref_tensor = lambda x: x
    for name in ("silu_and_mul", "gelu_tanh_and_mul", "rotary_embedding"):  # taken, but custom operators are off
        setattr(operators, name, None)
    for name in ("scaled_mm_supports_block_fp8", "scaled_mm_supports_fp8", "group_gemm_supported"):
        setattr(operators, f"cutlass_{name}", lambda *_: False)
    _pretend_experts()


def _pretend_experts() -> None:
    """The compiled operators around vLLM's Triton kernel of experts (csrc/moe), which runs as it is."""

    def topk_softmax(
        weights: Tensor, experts: Tensor, _: Tensor, logits: Tensor, renormalize: bool, bias: object, padding: Any
    ) -> None:
        """``logits``: ``[tokens, experts]``; fills ``weights`` and ``experts``: ``[tokens, top_k]``. Tokens that are
        ``padding`` go to expert -1."""
        assert bias is None
        values, chosen = logits.float().softmax(-1).topk(weights.shape[1])
        weights.copy_(values / values.sum(-1, keepdim=True) if renormalize else values)
        experts.copy_(chosen if padding is None else chosen.masked_fill(padding[:, None], -1))

    def moe_align_block_size(
        chosen: Tensor, experts: int, block: int, ordered: Tensor, of_block: Tensor, total: Tensor, *absent: object
    ) -> None:
        """The routes ``chosen``, ``[tokens, top_k]``, by expert; each expert's fill whole blocks with the number
        of routes for what is none. Those to expert -1 are left out."""
        assert absent == (None, None)
        route, device = chosen.flatten().long(), chosen.device
        route = torch.where(route < 0, experts, route)  # they come last
        counts = (route[:, None] == torch.arange(experts + 1, device=device)).sum(0)
        filled = (counts + block - 1) // block * block
        ends = filled.cumsum(0)
        order = route.argsort(stable=True)
        expert = route[order]
        rank = torch.arange(len(route), device=device) - (counts.cumsum(0) - counts)[expert]
        place = torch.where(expert < experts, (ends - filled)[expert] + rank, len(ordered))
        made = torch.full((len(ordered) + 1,), len(route), dtype=torch.int32, device=device)
        ordered.copy_(made.scatter(0, place, order.int())[:-1])
        first = torch.arange(len(of_block), device=device) * block
        of_block.copy_((first[:, None] >= ends[:experts]).sum(1))
        total.copy_(ends[experts - 1])

    def moe_sum(parts: Tensor, out: Tensor, *absent: object) -> None:
        assert absent == (None, None)
        out.copy_(parts.sum(1))

    def swigluoai_and_mul(out: Tensor, x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> None:
        gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
        out.copy_((up + 1) * gate * torch.sigmoid(gate * alpha))

    operators: Any = torch.ops._moe_C
    operators.topk_softmax, operators.moe_align_block_size = topk_softmax, moe_align_block_size
    operators.moe_sum = moe_sum
    activations: Any = torch.ops._C
    activations.swigluoai_and_mul = swigluoai_and_mul


def _leave_out() -> None:
    """Kernels that the interpreter cannot run or that need packages which are not here; greedy sampling needs none."""
    import vllm.utils.torch_utils
    from vllm import SamplingParams
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    vllm.utils.torch_utils._current_stream_tls.value = current_stream()
    gpu_worker.kernel_warmup = lambda *_: None
    topk_topp_sampler.apply_top_k_top_p_triton = lambda logits, k, p, **_: topk_topp_sampler.apply_top_k_top_p_pytorch(
        logits, k, p
    )
    StructuredOutputsWorker.apply_grammar_bitmask = lambda *_, **__: None
    SamplingParams.for_sampler_warmup = staticmethod(lambda: SamplingParams(temperature=0))
    torch.Generator = _Generator


class _OfTheHost(type):
    make = torch.Generator

    def __call__(cls, device: Any = None) -> Any:
        return cls.make()

    def __or__(cls, other: Any) -> Any:  # in annotations
        return Any


class _Generator(metaclass=_OfTheHost):
    """``torch.Generator`` for any device: the host's."""

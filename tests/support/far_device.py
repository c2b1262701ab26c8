"""A device that is not the host, for machines without a GPU.

Its tensors say ``cuda:0`` and keep their values in host memory. They obey the rules that a real one's obey: whatever
mixes them with the host's tensors is an error (but for copies, scalars and indices), so is an operator that has no CUDA
kernel, and a Triton kernel (which runs under the interpreter) may touch the device's tensors and pinned ones only, and
store in the memory of those that it was given only.
A graph keeps what was launched while it was captured, kernel by kernel, and launches that again on the same memory.

The device may be `late`: then what is launched waits until the host waits for it, and is done in any order that streams
and events allow (`streams`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.support import gpu, streams
from tests.support.far_attention import CUDA_ONLY
from tests.support.interpreter import stores_within, traffic
from tests.support.streams import STREAMS, Event, Graph, Spin, Stream

DEVICE = torch.device("cuda:0")


class Far(Tensor):
    """A tensor of the device; ``inner`` holds its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Far:
        made: Far = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE,
        )  # fmt: skip
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = _run(func, args, kwargs or {})
        return out if func._schema.returns else None

    def data_ptr(self) -> int:
        raise AssertionError("the address of device memory was asked for on the host")

    def tolist(self) -> Any:
        assert not _forbids(), "tolist waits for the device"
        STREAMS.finish(STREAMS.current)
        return self.inner.tolist()

    def __repr__(self, *_: object, **__: object) -> str:
        return f"Far({self.inner})"


_pinned: dict[int, object] = {}  # by its address, pinned memory; kept, so that nothing else comes to lie there
# Whether steps must be fit to be captured, and whether nothing may wait for the device.
_state = SimpleNamespace(capturing=False, busy=False)
_EMPTY = ("new_empty", "empty_like", "new_empty_strided")  # memory alone: no launch
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "_unique2")
addressed: list[Tensor] = []  # the device's tensors whose addresses kernels are given
# Custom operators that are written in Python, by name: they run as they are, on the device's tensors.
PYTHON_OPERATORS: dict[str, Callable[..., Any]] = {}


@contextmanager
def _while(**state: Any) -> Iterator[None]:
    before = dict(vars(_state))
    vars(_state).update(state)
    try:
        yield
    finally:
        vars(_state).update(before)


def capture() -> AbstractContextManager[None]:
    """Nothing may wait for the device, and what crosses over must be a plain copy to or from pinned memory. (A GPU's
    graph cannot end with a layer, whose copies go on beside it: there the layer is launched.)"""
    return nullcontext() if gpu.ON_GPU else _while(capturing=True)


def busy() -> AbstractContextManager[None]:
    """The device has much to do: who waits for it loses a step. What crosses over must be pinned and not waited for."""
    return gpu.busy() if gpu.ON_GPU else _while(busy=True)


def calm() -> AbstractContextManager[None]:
    """Within `busy`: here the device may be waited for, where it is no GPU."""
    return _while(busy=False)


@contextmanager
def late() -> Iterator[None]:
    """The device does nothing before the host waits for it. Meanwhile the host may write what was not read yet. A GPU
    is as late as it is."""
    if gpu.ON_GPU:
        yield
        return
    before, STREAMS.late = STREAMS.late, True
    try:
        yield
        STREAMS.finish()
    finally:
        STREAMS.late = before


def _forbids() -> bool:
    return _captures() or _state.busy


def _captures() -> bool:
    return _state.capturing or STREAMS.graph is not None


def _near(x: Any) -> Any:
    return x.inner if isinstance(x, Far) else x


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if (python := PYTHON_OPERATORS.get(func._schema.name)) is not None:
        with _Rules():
            return python(*args, **kwargs)
    name = func._schema.name.removeprefix("aten::")
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    has_far = any(isinstance(x, Far) for x in tensors)
    if has_far and not _at_once() and func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        with _Rules():  # it may be a view, or a copy: its parts say which
            return func.decompose(*args, **kwargs)
    if has_far:
        _check(name, args, tensors)
    to_device, wanted = has_far, dict(kwargs)
    if wanted.get("device") is not None:
        to_device = torch.device(wanted["device"]).type == "cuda"
        crosses = has_far != to_device and bool(tensors)
        assert not (_captures() and crosses), f"{name} crosses over while a graph is captured"
        # PyTorch pins by itself what it brings to the host without waiting.
        is_ready = not crosses or (kwargs.get("non_blocking") and (has_far or _is_pinned(tensors[0])))
        assert not _state.busy or is_ready, f"{name} waits for the device"
        wanted["device"] = torch.device("cpu")
    elif name == "copy_":
        to_device = isinstance(args[0], Far)
    if has_far or to_device:
        return _launch(func, name, args, wanted, has_far, to_device)
    if name == "is_pinned":
        return _is_pinned(args[0])
    pins = name in ("pin_memory", "_pin_memory")
    pins_result = wanted.pop("pin_memory", False) or pins
    out = args[0].clone() if pins else func(*args, **wanted)
    if pins_result:
        pin(out)
    return out


def _at_once() -> bool:
    return not STREAMS.late and STREAMS.graph is None


def _launch(func: Any, name: str, args: Any, kwargs: dict[str, Any], has_far: bool, to_device: bool) -> Any:
    """An operator of the device: done at once, or launched, if the device is late or a graph is captured."""
    call = CUDA_ONLY.get(name, func)
    near, options = tree_map(_snapshot if STREAMS.late and to_device else _near, (args, kwargs))
    goes_on = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])

    def now() -> Any:
        out = call(*near, **options)
        if not to_device and goes_on:
            pin(out)
        if name in _EMPTY:
            _unwritten(out)
        return tree_map(lambda x: Far(x) if to_device and isinstance(x, Tensor) else x, out)

    is_made_there = (not has_far and name not in ("_to_copy", "copy_")) or name in _EMPTY
    waits = name in _WAITS or not (to_device or goes_on)
    if waits:
        STREAMS.finish(STREAMS.current)
    if func._schema.is_mutable:
        given = args[0] if name.endswith("_") else kwargs["out"]
        if _at_once() or waits:
            now()
        else:
            STREAMS.launch(lambda: call(*near, **options), name)
        return given
    if _at_once() or waits or is_made_there or func.is_view:
        return now()
    on_meta = {**options, "device": "meta"} if options.get("device") is not None else options
    try:
        made = tree_map(_space_for, call(*tree_map(_on_meta, near), **tree_map(_on_meta, on_meta)))
    except NotImplementedError:  # its shape is not known before its values are, as of an index that is a mask
        assert not _forbids(), f"{name} waits for the device"
        STREAMS.finish(STREAMS.current)
        return now()

    def work() -> None:
        for space, result in zip(tree_leaves(made), tree_leaves(call(*near, **options)), strict=True):
            if isinstance(space, Tensor):
                space.copy_(result)

    STREAMS.launch(work, name)
    if to_device:
        return tree_map(lambda x: Far(x) if isinstance(x, Tensor) else x, made)
    pin(made)
    return made


def _snapshot(x: Any) -> Any:
    """An argument as a late device sees it: memory that is not pinned as it is now, pinned memory as it will be."""
    if isinstance(x, Tensor) and not isinstance(x, Far) and not _is_pinned(x):
        return x.clone()
    return _near(x)


def _on_meta(x: Any) -> Any:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def _space_for(x: Any) -> Any:
    return _unwritten(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)) if isinstance(x, Tensor) else x


def _unwritten(x: Tensor) -> Tensor:
    """Whoever reads it too early is wrong (NaN), and does not crash (index 0)."""
    return x.fill_(float("nan") if x.is_floating_point() else 0)


def views(layers: list[Tensor], device: torch.device = DEVICE) -> list[Tensor]:
    """KV memory of the host as the device sees it, where that is not the host; on a GPU, ``layers`` become pinned
    copies."""
    if device.type == "cpu":
        return []
    if gpu.ON_GPU:
        return gpu.views(layers)
    for layer in layers:
        pin(layer)
    return [Far(layer) for layer in layers]


def pin(x: Tensor) -> None:
    """``x`` lies in pinned memory."""
    _pinned[x.untyped_storage().data_ptr()] = x


def _is_pinned(x: Tensor) -> bool:
    return not isinstance(x, Far) and x.untyped_storage().data_ptr() in _pinned


def _check(name: str, args: Any, tensors: list[Tensor]) -> None:
    """What a real device would refuse."""
    assert not name.endswith(("_for_cpu", "_cpu")), f"{name} has no CUDA kernel"
    assert not (_forbids() and name in _WAITS), f"{name} waits for the device"
    if name in ("_to_copy", "copy_"):
        _check_crossing(name, args)
        return
    if name.rstrip("_") in ("index", "index_put") and isinstance(args[0], Far) and not _forbids():
        tensors = [args[0], *(x for x in tree_leaves(args[2:]) if isinstance(x, Tensor))]  # indices may be the host's
    strangers = [tuple(x.shape) for x in tensors if not isinstance(x, Far) and x.dim()]
    assert not strangers, f"{name} mixes the device's tensors with the host's: {strangers}"


def _check_crossing(name: str, args: Any) -> None:
    """A copy to the host whose sides are not contiguous, or that converts there, goes through pageable memory: it waits
    for the device, and a graph would replay it without its second half. One that nobody waits for converts on the
    device (PyTorch's aten/src/ATen/native/cuda/Copy.cu)."""
    if name == "_to_copy" or all(isinstance(x, Far) for x in args[:2]):
        return
    to, source = args[:2]
    goes_on = len(args) > 2 and args[2]
    plain = (
        (to.dtype == source.dtype or goes_on)
        and to.is_contiguous()
        and source.is_contiguous()
        and to.shape == source.shape
    )
    assert plain or isinstance(to, Far), f"a copy to the host of {tuple(source.shape)} needs temporaries"
    if _forbids():
        host = source if isinstance(to, Far) else to
        assert plain and _is_pinned(host), "a copy that nobody waits for needs pinned memory"
        assert goes_on, "a copy that is not non_blocking waits for the device"


class _Rules(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = _run(func, args, kwargs or {})
        return out if func._schema.returns else None


def _kernel_arguments(launch: Any) -> Any:
    """A launch under the interpreter that sees what a kernel on the device could see."""

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and not isinstance(x, Far) and x.numel():
                assert _is_pinned(x), (
                    f"{self.fn.__name__} was given a tensor {tuple(x.shape)} that the device cannot see"
                )
        near = [*map(_near, args)], {name: _near(x) for name, x in kwargs.items()}
        if callable(self.grid):
            self.grid = _that_chooses_arguments(self.grid)
        tensors = [x for x in tree_leaves(near) if isinstance(x, Tensor)]

        name, pinned = self.fn.__name__, [x for x in tensors if _is_pinned(x)]
        if self.fn.__module__.startswith("hybrid_backend.kernels"):
            STREAMS.variants.add((name, *_compiled_for(self, args, kwargs)))
        if isinstance(self.grid, tuple):
            STREAMS.programs[name] = max(STREAMS.programs.get(name, 0), prod(self.grid))

        def now() -> None:
            counts = STREAMS.measured
            measuring = nullcontext() if counts is None or not pinned else traffic(pinned, counts)
            with stores_within([*tensors, *addressed]), measuring:
                launch(self, *near[0], **near[1])

        STREAMS.launch(now, name, _spin(dict(zip(self.arg_names, near[0], strict=False))))

    return launched


def _spin(arguments: dict[str, Any]) -> Spin | None:
    """What a kernel waits for whose rows wait for pages on their way to frames (`operations.AwaitedPages`)."""
    expected, arrived = arguments.get("expected"), arguments.get("arrived")
    if expected is None or arrived is None:
        return None
    pages, requests = arguments["pages"], arguments["requests"]
    return Spin(lambda: all(expected[requests[pages >= 0].long()] <= arrived))


def _compiled_for(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Hashable]:
    """What a kernel of ours (`kernels.triton.common.kernel`) is compiled anew for: constants, types, what is absent."""
    from hybrid_backend.kernels.triton.common import constants  # late: the interpreter is chosen before Triton is

    known = constants(kernel.fn)
    for name, x in [*zip(kernel.arg_names, args, strict=False), *kwargs.items()]:
        yield name, x if name in known or x is None else getattr(x, "dtype", type(x))


def _that_chooses_arguments(grid: Any) -> Any:
    """A grid's function may put other tensors among the kernel's arguments, as vLLM's convolutions do."""
    from triton.runtime.interpreter import _implicit_cvt

    def chosen(arguments: dict[str, Any]) -> Any:
        found = grid(arguments)
        arguments |= {name: _implicit_cvt(_near(x)) for name, x in arguments.items() if isinstance(x, Tensor)}
        return found

    return chosen


def _without_gradients(mode: Any = True) -> Any:
    """``torch.inference_mode``, as a context or around a function."""
    if callable(mode):
        return torch.no_grad()(mode)
    return torch.no_grad() if mode else nullcontext()


@contextmanager
def far_device() -> Iterator[torch.device]:
    """The device is there."""
    from triton.runtime.interpreter import GridExecutor

    cuda, patch = torch.cuda, pytest.MonkeyPatch()
    patch.setattr(torch, "inference_mode", _without_gradients)  # which wrapped tensors do not know
    patch.setattr(Tensor, "pin_memory", torch._C.TensorBase.pin_memory)  # vLLM for the CPU replaces it
    patch.setattr(cuda, "_lazy_init", lambda: None)
    patch.setattr(cuda, "is_available", lambda: True)
    patch.setattr(cuda, "Stream", Stream)
    patch.setattr(cuda, "Event", Event)
    patch.setattr(cuda, "CUDAGraph", Graph)
    patch.setattr(cuda, "graph", streams.graph)
    patch.setattr(cuda, "current_stream", streams.current_stream)
    patch.setattr(cuda, "stream", lambda stream: nullcontext() if stream is None else stream)
    patch.setattr(cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=4))
    patch.setattr(GridExecutor, "__call__", _kernel_arguments(GridExecutor.__call__))
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) is a copy that the rules see
    try:
        with torch.no_grad(), _Rules():
            yield DEVICE
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
        patch.undo()
        _pinned.clear()

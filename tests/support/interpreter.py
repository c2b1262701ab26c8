"""Triton's interpreter, for machines without a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def interpret_triton() -> None:
    """Choose the interpreter where no GPU is. It must be chosen before Triton is first imported; the processes that
    this one starts are not to inherit it."""
    import torch  # late: whoever divides the cores does so before

    if torch.cuda.is_available():
        return
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton
    except ImportError:
        pass  # no wheel for this platform
    else:
        triton.knobs.runtime.interpret = True
        _patch_once_per_launch()
        _build_types_once()
        _leave_out_overflow_checks()
        _leave_out_overlap()
        _take_any_mask()
        _round_to_bfloat16()
    finally:
        del os.environ["TRITON_INTERPRET"]


def _leave_out_overflow_checks() -> None:
    """The interpreter computes each sum, difference and product of integers again in 64 bits to see whether it
    overflowed, which took a third of its time. A GPU does not either, and a test's memory is too small to overflow."""
    from triton.runtime import interpreter

    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)


def _leave_out_overlap() -> None:
    """The interpreter does not know how a kernel lets the next one begin; here none begins before another ends."""
    from triton.language.extra import cuda

    for name in ("gdc_wait", "gdc_launch_dependents"):
        setattr(cuda, name, lambda: None)


def _take_any_mask() -> None:
    """A scalar's comparison and a vector's make a mask of numbers, which the interpreter refuses and a GPU does not."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def of_bools(mask: Any) -> Any:
        return TensorHandle(mask.data.astype(bool), mask.dtype)

    InterpreterBuilder.create_masked_load = lambda self, ptrs, mask, *args: load(self, ptrs, of_bools(mask), *args)
    InterpreterBuilder.create_masked_store = lambda self, ptrs, value, mask, *args: store(
        self, ptrs, value, of_bools(mask), *args
    )


def _round_to_bfloat16() -> None:
    """The interpreter cuts the lower half of fp32 off to make bf16, where a GPU rounds to nearest even."""
    import numpy as np
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def rounding_cast(self: Any, source: Any, to: Any) -> Any:
        if source.dtype.scalar != float32 or to.scalar != bfloat16:
            return cast(self, source, to)
        bits = source.data.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
        return TensorHandle(np.where(np.isnan(source.data), 0x7FC0, rounded).astype(np.uint16), bfloat16)

    InterpreterBuilder.cast_impl = rounding_cast


def _memory(tensors: Iterable[Tensor]) -> set[tuple[int, int]]:
    """First address and end of each tensor's storage."""
    storages = [x.untyped_storage() for x in tensors]
    return {(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages}


@contextmanager
def stores_within(tensors: Iterable[Tensor]) -> Iterator[None]:
    """A kernel that stores outside of all memory of ``tensors`` is an error, as on a GPU whose memory that is. Under
    the interpreter it would spoil the process's own."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    memory, store = _memory(tensors), InterpreterBuilder.create_masked_store

    def checked(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any) -> Any:
        written = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)]
        if written.size:
            first, last = int(written.min()), int(written.max())
            assert any(begin <= first and last < end for begin, end in memory), "a kernel stores where it has no memory"
        return store(self, ptrs, value, mask, *args)

    InterpreterBuilder.create_masked_store = checked
    try:
        yield
    finally:
        InterpreterBuilder.create_masked_store = store


@contextmanager
def traffic(tensors: Iterable[Tensor], counts: list[int]) -> Iterator[None]:
    """Adds the bytes that kernels read of the memory of ``tensors``, and that they write there, to the two counts."""
    from triton.runtime.interpreter import InterpreterBuilder

    memory = _memory(tensors)
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def moved(ptrs: Any, mask: Any) -> int:
        first = int(ptrs.data.flat[0])
        if not any(begin <= first < end for begin, end in memory):
            return 0
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        return size * int(mask.data.sum()) * (ptrs.data.size // mask.data.size)

    def loads(self: Any, ptrs: Any, mask: Any, *args: Any) -> Any:
        counts[0] += moved(ptrs, mask)
        return load(self, ptrs, mask, *args)

    def stores(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any) -> Any:
        counts[1] += moved(ptrs, mask)
        return store(self, ptrs, value, mask, *args)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = loads, stores
    try:
        yield
    finally:
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store


def _patch_once_per_launch() -> None:
    """The interpreter changes triton.language for each call of a function within a kernel, which took half of its
    time; once for each launch is enough."""
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    launches: list[tuple[Any, set[str]]] = []  # the one that runs: what restores the language, and what was changed
    wanted: dict[Any, frozenset[str]] = {}  # modules that a function knows

    class Launch(interpreter._LangPatchScope):  # type: ignore[misc]
        def restore(self) -> None:
            launches.clear()
            super().restore()

    def modules(function: Any) -> frozenset[str]:
        if function not in wanted:
            seen = {id(x) for x in function.__globals__.values()}
            names = (module.__name__ for module in (language, language.core) if id(module) in seen)
            wanted[function] = frozenset(names)
        return wanted[function]

    def patched(function: Any) -> Any:
        if not launches:
            launches.append((Launch(), set()))
        launch, done = launches[0]
        if not modules(function) <= done:
            launch._changes += patch(function)._changes
            done |= modules(function)
        return launch

    interpreter._patch_lang = patched


def _build_types_once() -> None:
    """Of each value that a kernel computes the interpreter builds type and shape anew, which took a quarter of its
    time: the same ones for all values of a shape are enough."""
    from triton.language import core
    from triton.runtime import interpreter

    build, of_numpy = core.block_type.__init__, interpreter._get_np_dtype
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}
    of_elements: dict[Any, Any] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(int(core._unwrap_if_constexpr(size)) for size in shape))
        if key not in types:
            build(self, element_ty, shape)
            types[key] = vars(self).copy()
        vars(self).update(types[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes:
            shape = core.tuple([core.constexpr(size) for size in sizes])
            shapes[sizes] = shape, core.constexpr(prod(sizes))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[sizes]

    def numpy_type(of: Any) -> Any:
        element = of.element_ty if isinstance(of, core.block_type) else of
        if element.name not in of_elements:
            of_elements[element.name] = of_numpy(of)
        return of_elements[element.name]

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    interpreter._get_np_dtype = numpy_type

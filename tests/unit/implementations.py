"""The implementations of `kernels.operations.Operations`, as the contract suite calls them: with tensors on the CPU."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.gpu import ON_GPU  # else Triton's kernels run under its interpreter (tests/support/interpreter.py)

MODULES = {
    "oracle": "hybrid_backend.kernels.oracle",
    "native": "hybrid_backend.kernels.cpu.operations",
    "triton": "hybrid_backend.kernels.triton.operations",
}
EXAMPLES = {"oracle": 60, "native": 60, "triton": 60 if ON_GPU else 16}
NAMES = [pytest.param(name, marks=pytest.mark.gpu if name == "triton" and ON_GPU else ()) for name in MODULES]


def module_of(name: str) -> ModuleType:
    """Skips where an implementation cannot run; fails where it could and does not."""
    if name == "triton":
        pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    if name == "native":
        from hybrid_backend.kernels import cpu

        compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
        if not cpu.available() and not compiler:
            pytest.skip("no C++ compiler on this machine")
        assert cpu.available(), cpu.why_unavailable()
    return import_module(MODULES[name])


@cache
def implementation(name: str) -> Any:
    """An object with all operations, which take and return tensors on the CPU."""
    module = module_of(name)
    return _OnGpu(module) if name == "triton" and ON_GPU else module


def over_implementations(
    share: float = 1.0, names: Sequence[Any] = NAMES, **drawn: st.SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[[str], None]]:
    """Run ``case(operations, ...)`` over examples, with each of ``names``: a ``share`` of its `EXAMPLES`."""

    def test_of(case: Callable[..., None]) -> Callable[[str], None]:
        @pytest.mark.parametrize("name", names)
        def test(name: str) -> None:
            examples = given(operations=st.just(implementation(name)), **drawn)(case)
            settings(max_examples=round(share * EXAMPLES[name]))(examples)()

        test.__name__, test.__qualname__, test.__doc__ = case.__name__, case.__qualname__, case.__doc__
        return test

    return test_of


class _OnGpu:
    """Calls a module with copies on the GPU, and copies back what it changed. Whole storages travel, so that strides
    and views of one tensor stay what they are."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: Any, **named: Any) -> Any:
            storages: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
            originals: dict[int, tuple[Tensor, Tensor]] = {}

            def there(x: Any) -> Any:
                if isinstance(x, Tensor):
                    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
                    key = whole.data_ptr(), x.dtype
                    if key not in storages:
                        storages[key] = whole, whole.cuda()
                    copy = storages[key][1].as_strided(x.shape, x.stride(), x.storage_offset())
                    originals[id(copy)] = copy, x
                    return copy
                return _mapped(there, x)

            def here(x: Any) -> Any:
                """What was given, or lies in memory that was given, is that here, too."""
                if not isinstance(x, Tensor):
                    return _mapped(here, x)
                if id(x) in originals:
                    return originals[id(x)][1]
                given = x.dtype, x.untyped_storage().data_ptr()
                return (
                    origins[given].as_strided(x.shape, x.stride(), x.storage_offset()) if given in origins else x.cpu()
                )

            result = getattr(self._module, name)(*there(args), **{key: there(x) for key, x in named.items()})
            for whole, copy in storages.values():
                whole.copy_(copy)
            origins = {(copy.dtype, copy.data_ptr()): whole for whole, copy in storages.values() if len(whole)}
            return here(result)

        return call


def _mapped(function: Callable[[Any], Any], x: Any) -> Any:
    """``function`` of a tuple's parts; anything else as it is."""
    if not isinstance(x, tuple):
        return x
    parts = [function(part) for part in x]
    return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)

"""Puts the simulated GPU (tests/engines/vllm/simulated_gpu.py) into every process that finds this folder on its path.

Python imports ``sitecustomize`` at its start. The simulation begins when a process first imports one of `MODULES`, so
it reaches servers, their engine processes and offline engines alike. Their own code knows nothing of it.
"""

from __future__ import annotations

import atexit
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

MODULES = ("vllm", "bench.gpu_kernels")
_simulation = ExitStack()
atexit.register(_simulation.close)  # The first that is registered runs last: engines give their memory back before.


class _AtFirstImport(MetaPathFinder):
    """Finder that begins the simulation before one of `MODULES` is imported, and leaves all else to other finders."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in MODULES:
            return None
        sys.meta_path.remove(self)
        _simulate()
        module = sys.modules.get(name)
        if module is None:
            return None
        # The simulation has imported the module. Python would load it again by the module's own specification.
        imported, module.__spec__ = _Imported(module.__spec__), None
        return ModuleSpec(name, imported)


class _Imported(Loader):
    """Loader of a module that is imported already, with the specification ``spec``."""

    def __init__(self, spec: ModuleSpec | None) -> None:
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _simulate() -> None:
    from tests.engines.vllm import simulated_gpu

    folder = _simulation.enter_context(tempfile.TemporaryDirectory(prefix="simulated-gpu-"))
    simulated_gpu.prepare(Path(folder))
    _simulation.enter_context(simulated_gpu.simulated_gpu())


sys.meta_path.insert(0, _AtFirstImport())

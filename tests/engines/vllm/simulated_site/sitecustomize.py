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
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

MODULES = ("vllm", "bench.gpu_kernels")
_simulation = ExitStack()
atexit.register(_simulation.close)  # The first that is registered runs last: engines give their memory back before.


class _AtFirstImport(MetaPathFinder):
    """Finder of `MODULES`, which whoever imports one of them loads through `_Simulating`."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in MODULES else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Simulating(spec.loader)
        return spec


class _Simulating(Loader):
    """Loader that begins the simulation, then loads as ``loader`` does what the simulation has not imported itself."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._imported: ModuleType | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if _finder in sys.meta_path:
            sys.meta_path.remove(_finder)
            _simulate()
        self._imported = sys.modules.get(spec.name)
        return self._imported or self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if self._imported is None:
            self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader


def _simulate() -> None:
    from tests.engines.vllm import simulated_gpu

    folder = _simulation.enter_context(tempfile.TemporaryDirectory(prefix="simulated-gpu-"))
    simulated_gpu.prepare(Path(folder))
    _simulation.enter_context(simulated_gpu.simulated_gpu())


_finder = _AtFirstImport()
sys.meta_path.insert(0, _finder)

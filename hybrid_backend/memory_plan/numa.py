"""NUMA nodes that the memory of vLLM's ranks comes from on a CPU, as vLLM picks them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hybrid_backend.host_memory import System, numbers

KVCACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""vLLM's variable for the GiB of a rank's pool, which overrules ``--kv-cache-memory-bytes``."""


def rank_nodes(
    ranks: int,
    env: Mapping[str, str],
    cpus: Collection[int],
    system: System,
    engines: int = 1,
    engines_apart: bool = False,
) -> list[int | None]:
    """Return the NUMA node of each rank's first CPU (vllm/v1/worker/cpu_worker.py).

    The CPUs of a rank are those that vLLM binds it to (vllm/utils/ompmultiprocessing.py).

    Args:
        ranks: ranks on this machine, those of one engine after those of another.
        env: environment of the process that will serve.
        cpus: CPUs that the process may run on.
        system: the machine.
        engines: engines of data parallelism.
        engines_apart: vLLM binds the ranks of each engine to nodes of their own, as 0.33 does unless told otherwise.
            Earlier versions bind the ranks of all engines to the same nodes.

    Returns:
        a node for each rank; None if the kernel tells of no nodes.
    """
    nodes, allowed_cpus = system.nodes(), sorted(cpus)
    node_of = {cpu: number for number, node in nodes.items() for cpu in node.cpus}
    visible = [node for node in system.allowed_nodes() if node in nodes] or list(nodes)
    is_simulated = env.get("VLLM_CPU_SIM_MULTI_NUMA", "0") != "0"
    listed = env.get("CPU_VISIBLE_MEMORY_NODES")
    if listed and "VLLM_CPU_SIM_MULTI_NUMA" not in env:
        visible = [node for node in numbers(listed) if node in visible] or visible
    binding = env.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    if binding == "auto" and is_simulated:
        ordered, share = sorted(allowed_cpus, key=lambda cpu: node_of.get(cpu, 0)), max(1, len(allowed_cpus) // ranks)
        rank_cpus = [sorted(ordered[rank * share : (rank + 1) * share]) for rank in range(ranks)]
    elif binding == "auto":
        bound_nodes = visible[:ranks] if engines_apart else visible[: ranks // engines] * engines
        rank_cpus = [[cpu for cpu in allowed_cpus if node_of.get(cpu) == node] for node in bound_nodes]
    else:
        lists = [] if binding == "nobind" else binding.split("|")[:ranks]
        rank_cpus = [[cpu for cpu in numbers(text) if cpu in allowed_cpus] for text in lists]
    rank_cpus += [[]] * (ranks - len(rank_cpus))
    first_nodes = [node_of.get((own or allowed_cpus)[0]) for own in rank_cpus]
    # vLLM falls back on the first visible node if a CPU's own node gives no memory.
    return [node if node in visible else next(iter(visible), None) for node in first_nodes]

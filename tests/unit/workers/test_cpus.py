"""Which CPUs the workers take, on machines that are drawn as the kernel draws them, and on this one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_backend.config import WorkersConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.host_memory import System
from hybrid_backend.kernels import cpu as native
from hybrid_backend.workers import NativePool, Rank, make_pool
from hybrid_backend.workers.cpus import Bound, Places, Topology, cpu_quota, spare_cpus, within_quota


def draw(root: Path, cores: list[str], nodes: dict[int, str]) -> Topology:
    """Writes /sys/devices/system: ``cores`` as sibling lists, ``nodes`` as CPU lists."""
    for siblings in cores:
        for cpu in re.findall(r"\d+", siblings):
            path = root / f"cpu/cpu{cpu}/topology"
            path.mkdir(parents=True)
            (path / "thread_siblings_list").write_text(siblings + "\n")
    (root / "cpu/cpuidle").mkdir(parents=True, exist_ok=True)
    for node, cpus in nodes.items():
        path = root / f"node/node{node}"
        path.mkdir(parents=True)
        (path / "cpulist").write_text(cpus + "\n")
    return Topology.read(root)


def cpus(first: int, last: int) -> frozenset[int]:
    return frozenset(range(first, last + 1))


@pytest.fixture
def server(tmp_path: Path) -> Topology:
    """Two sockets of 96 cores with two threads each: 384 CPUs, siblings 192 apart."""
    nodes = {0: "0-95,192-287", 1: "96-191,288-383"}
    return draw(tmp_path, [f"{core},{core + 192}" for core in range(192)], nodes)


ALL = cpus(0, 383)


def test_a_gpu_rank_takes_every_core_of_its_gpus_node_once(server: Topology) -> None:
    rank = Rank(on_gpu=True, node=1)
    assert spare_cpus(Bound(ALL), server, rank=rank) == list(range(96, 192))
    assert spare_cpus(Bound(ALL), server, 0, rank) == list(range(96)), "workers.numa wins"
    assert len(spare_cpus(Bound(ALL), server, rank=Rank(on_gpu=True))) == 192, "the machine does not say which node"


def test_a_gpu_engine_that_is_bound_to_a_node_leaves_its_cores_to_the_workers(server: Topology) -> None:
    node = cpus(0, 95) | cpus(192, 287)
    assert spare_cpus(Bound(ALL, node), server, rank=Rank(on_gpu=True, node=0)) == list(range(96))


def places(bound: Bound, topology: Topology, rank: Rank) -> Places:
    return Places.of(spare_cpus(bound, topology, rank=rank), bound, topology, rank)


def test_a_gpu_ranks_mailboxes_are_watched_from_a_core_of_the_workers_node(server: Topology) -> None:
    """And its first cores are left to the engine: no thread of ours, nor on their siblings."""
    found = places(Bound(ALL), server, Rank(on_gpu=True, node=1))
    assert found == Places(tuple(range(99, 191)), 191, 1e-3)
    nodes = [0, 0, 0, 0, 1, 1, 1, 1]
    each = [places(Bound(ALL), server, Rank(i, 8).with_gpus(nodes)) for i in range(8)]
    taken = [cpu for rank in each for cpu in (*rank.workers, rank.server)]
    assert len(set(taken)) == len(taken) == 8 * 22 and None not in taken


@pytest.mark.parametrize(
    ("cores", "ranks", "left"),
    [
        (192, 1, 3),  # API server, engine core and the rank's own thread
        (96, 2, 4),  # the two ranks' threads, API server and engine core
        (128, 8, 16),  # each rank leaves one for its thread and its part of the other two, which is no less than one
        (16, 1, 3),
        (8, 1, 2),  # a quarter at most: fewer workers would attend less than the engine gains
        (4, 1, 1),
        (3, 1, 0),
        (8, 2, 2),
    ],
)
def test_an_engine_on_gpus_keeps_cores_for_its_own_processes(tmp_path: Path, cores: int, ranks: int, left: int) -> None:
    """On a node of so many cores with two threads each; no thread of ours is on one of these or on another's."""
    drawn = draw(tmp_path, [f"{core},{core + cores}" for core in range(cores)], {0: f"0-{2 * cores - 1}"})
    bound = Bound(cpus(0, 2 * cores - 1))
    each = [places(bound, drawn, Rank(i, ranks).with_gpus([0] * ranks)) for i in range(ranks)]
    taken = [cpu for rank in each for cpu in (*rank.workers, rank.server)]
    assert len(set(taken)) == len(taken) and max(taken) < cores
    assert cores - len(taken) == left
    assert all(place.spin_seconds > 0 for place in each) == (left > 0)


def test_threads_spin_only_beside_a_gpu_and_where_the_engine_keeps_a_core(tmp_path: Path, server: Topology) -> None:
    small = draw(tmp_path / "small", ["0,2", "1,3"], {0: "0-3"})
    gpu = Rank(on_gpu=True, node=0)
    assert places(Bound(cpus(0, 3)), small, gpu) == Places((0,), 1, 0.0), "a sibling is no core"
    assert places(Bound(frozenset({0})), small, gpu) == Places((0,), 0, 0.0)
    assert places(Bound(ALL), server, Rank()) == Places(tuple(range(192)), None, 0.0)
    chosen = Places.of([5, 4, 7, 6], Bound(ALL), server, gpu, chosen=True)
    assert chosen == Places((5, 4, 7), 6, 1e-3), "whoever names CPUs has left out what the engine needs"
    assert Places.of(range(96), Bound(cpus(0, 95)), server, gpu, chosen=True).spin_seconds == 0


def test_eight_gpu_ranks_share_out_the_cores_of_their_nodes(server: Topology) -> None:
    nodes = [0, 0, 0, 0, 1, 1, 1, 1]
    taken = [spare_cpus(Bound(ALL), server, rank=Rank(i, 8).with_gpus(nodes)) for i in range(8)]
    assert [len(each) for each in taken] == [24] * 8
    assert sorted(cpu for each in taken for cpu in each) == list(range(192))


def test_cpu_ranks_on_nodes_of_their_own_take_what_each_left_on_its_node(server: Topology) -> None:
    """vLLM's own binding: the second thread of every core of node i but the last two."""
    first, second = cpus(192, 285), cpus(288, 381)
    assert spare_cpus(Bound(ALL, first, (), (second,)), server, rank=Rank(0, 2)) == [94, 95]
    assert spare_cpus(Bound(ALL, second, (first,), ()), server, rank=Rank(1, 2)) == [190, 191]


def test_cpu_ranks_on_one_node_do_not_take_each_others_cores(server: Topology) -> None:
    first, second = cpus(0, 31), cpus(32, 63)
    one = spare_cpus(Bound(ALL, first, (), (second,)), server)
    two = spare_cpus(Bound(ALL, second, (first,), ()), server)
    assert one == list(range(64, 80)) and two == list(range(80, 96))


def test_siblings_of_the_engines_own_cores_are_the_last_that_is_spare(server: Topology) -> None:
    first, second = cpus(0, 47), cpus(48, 95)
    assert spare_cpus(Bound(ALL, first, (), (second,)), server) == list(range(192, 240))
    assert spare_cpus(Bound(ALL, second, (first,), ()), server) == list(range(240, 288))


def test_a_laptop_whose_cores_have_one_thread_or_two(tmp_path: Path) -> None:
    laptop = draw(tmp_path, ["0-1", "2-3", "4", "5"], {0: "0-5"})
    assert spare_cpus(Bound(cpus(0, 5)), laptop) == [0, 2, 4, 5]
    assert spare_cpus(Bound(cpus(0, 5), frozenset({1})), laptop) == [2, 4, 5]


def test_a_container_that_may_use_few_cpus(server: Topology) -> None:
    """Its CPUs may be second threads alone, or both of one core."""
    assert spare_cpus(Bound(frozenset({200, 300, 108})), server) == [108, 200]
    assert spare_cpus(Bound(frozenset({200})), server, rank=Rank(3, 8)) == [200], "more ranks than cores"
    with pytest.raises(ConfigError, match=r"workers\.numa: this process may use no CPU of node 1; write auto"):
        spare_cpus(Bound(frozenset({200})), server, 1)
    assert spare_cpus(Bound(frozenset({200})), server, rank=Rank(on_gpu=True, node=1)) == [200]


def test_nodes_without_memory_or_without_cpus_and_kernels_without_nodes(tmp_path: Path) -> None:
    nodes = draw(tmp_path / "a", ["0", "1", "2", "3"], {0: "0-1", 1: "2-3", 2: ""})
    assert spare_cpus(Bound(cpus(0, 3)), nodes, 1) == [2, 3]
    assert spare_cpus(Bound(cpus(0, 3)), nodes, rank=Rank(on_gpu=True, node=2)) == [0, 1, 2, 3]
    bare = Topology.read(tmp_path / "nothing")
    assert spare_cpus(Bound(cpus(0, 3), frozenset({1})), bare) == [0, 2, 3]


def test_where_the_engine_has_every_cpu_the_workers_share_them(tmp_path: Path) -> None:
    small = draw(tmp_path, ["0", "1"], {0: "0-1"})
    assert spare_cpus(Bound(cpus(0, 1), cpus(0, 1)), small) == [0, 1]
    assert spare_cpus(Bound(cpus(0, 1), frozenset({0}), (), (frozenset({1}),)), small) == [0]
    assert spare_cpus(Bound(cpus(0, 1), frozenset({1}), (frozenset({0}),), ()), small) == [1]


@given(data=st.data())
def test_ranks_never_share_a_core_nor_take_a_pinned_one_while_there_is_enough(data: st.DataObject) -> None:
    count, threads = data.draw(st.integers(1, 24)), data.draw(st.sampled_from([1, 2]))
    cores = tuple(frozenset(core + count * thread for thread in range(threads)) for core in range(count))
    everything = frozenset().union(*cores)
    topology = Topology(cores, {0: everything})
    allowed = frozenset(data.draw(st.sets(st.sampled_from(sorted(everything)), min_size=1)))
    ranks = data.draw(st.integers(1, 4))
    owner = {cpu: data.draw(st.integers(-1, ranks - 1)) for cpu in sorted(allowed)}  # -1: not pinned
    pinned = [frozenset(cpu for cpu in allowed if owner[cpu] == rank) for rank in range(ranks)]
    if not all(pinned):
        pinned = [frozenset()] * ranks
    bounds = [Bound(allowed, pinned[i], tuple(pinned[:i]), tuple(pinned[i + 1 :])) for i in range(ranks)]
    taken = [spare_cpus(bound, topology, rank=Rank(i, ranks)) for i, bound in enumerate(bounds)]
    free = [core for core in cores if core & allowed and not core & frozenset().union(*pinned)]
    for mine in taken:
        assert mine and set(mine) <= allowed
        assert len({cpu % count for cpu in mine}) == len(mine), "two threads on a core"
    if len(free) >= ranks:
        every = [cpu % count for mine in taken for cpu in mine]
        assert sorted(every) == sorted(min(core) for core in free)


# --- this machine ---

CHILD = """
import os, threading
from pathlib import Path
from hybrid_backend.workers.cpus import Bound, name_thread
cpus = sorted(os.sched_getaffinity(0))
ready, end = threading.Barrier(3), threading.Event()
def engine():
    os.sched_setaffinity(0, cpus[1:2])
    ready.wait(); end.wait()
def worker():
    name_thread()
    os.sched_setaffinity(0, cpus[:1])
    ready.wait(); end.wait()
for run in (engine, worker):
    threading.Thread(target=run, daemon=True).start()
ready.wait()
print(sorted(Bound.read().pinned), flush=True)
input()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: no thread can be pinned to fewer")
def test_pinned_threads_of_all_processes_of_the_engine_are_seen_but_not_the_workers() -> None:
    command, pipe = [sys.executable, "-c", CHILD], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None and child.stdin is not None
        second = sorted(os.sched_getaffinity(0))[1]
        assert child.stdout.readline() == f"[{second}]\n"
        assert frozenset({second}) in Bound.read().after, "another process of this group pins a thread to it"
        child.stdin.write("\n")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: no process can be bound to fewer")
@pytest.mark.parametrize("program", ["", "exec -a engine "], ids=["a shell", "a shell by another name"])
def test_workers_stay_on_the_cpus_that_a_shell_has_bound_its_command_to(program: str) -> None:
    look = "from hybrid_backend.workers.cpus import Bound; print(sorted(Bound.read().allowed))"
    last = max(os.sched_getaffinity(0))
    line = f"({program}taskset -c {last} {sys.executable} -c '{look}'); true"
    assert subprocess.check_output(["bash", "-c", line], text=True) == f"[{last}]\n"


@pytest.mark.parametrize("error", [FileNotFoundError, ProcessLookupError, PermissionError])
def test_processes_that_end_while_they_are_looked_at_do_no_harm(
    error: type[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> None:
        raise error

    monkeypatch.setattr("hybrid_backend.workers.cpus._pinned", ended)
    assert Bound.read().pinned == frozenset()


@pytest.mark.parametrize(
    ("quota", "ranks", "expected"), [(None, 1, 8), (6.5, 1, 6), (6.5, 2, 3), (0.5, 1, 1), (16.0, 1, 8)]
)
def test_there_are_no_more_workers_than_a_container_s_quota_has_cpus(quota: float, ranks: int, expected: int) -> None:
    assert within_quota(list(range(8)), quota, ranks) == list(range(expected))


def test_cpus_that_the_user_names_win_and_are_checked() -> None:
    may = sorted(os.sched_getaffinity(0))
    pool = make_pool(WorkersConfig(cpus=(may[0],), threads=3))
    assert pool.cpus == may[:1] and pool.threads == 3
    pool.close()
    with pytest.raises(ConfigError, match=r"workers\.cpus: this process may not use 4711; it may use \d"):
        make_pool(WorkersConfig(cpus=(may[0], 4711)))


@pytest.mark.skipif(not native.available(), reason=str(native.why_unavailable()))
def test_the_threads_of_a_gpus_pool_are_where_they_were_placed() -> None:
    """Those of the pool and, once there are mailboxes, the one that serves them."""
    may = sorted(os.sched_getaffinity(0))
    before = set(Path("/proc/self/task").iterdir())
    pool = make_pool(WorkersConfig(cpus=tuple(may)), Rank(on_gpu=True))
    assert isinstance(pool, NativePool)
    layer = torch.zeros(1, 1, 2, 16, 16)
    with native.Mailboxes(pool.native, {0: layer}, native.QueryShape(1, layer.dtype), 1, {0: (1, 1)}, 1.0):
        ours = [int(task.name) for task in set(Path("/proc/self/task").iterdir()) - before]
        wanted = sorted([*may[: max(1, len(may) - 1)], may[-1]])
        until = time.monotonic() + 20  # a thread pins itself when it begins
        while sorted(min(os.sched_getaffinity(task)) for task in ours) != wanted and time.monotonic() < until:
            time.sleep(0.01)
        assert sorted(sorted(os.sched_getaffinity(task)) for task in ours) == [[each] for each in wanted]
    pool.close()


def test_threads_that_cannot_be_started_are_one_clear_error() -> None:
    """Without room for their stacks; the interpreter lives on."""
    program = """
import resource
from hybrid_backend.config import WorkersConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.workers import make_pool
make_pool(WorkersConfig(threads=1)).close()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), -1))
try:
    make_pool(WorkersConfig(threads=64))
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "workers.threads: 64 threads cannot be started" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("group", "files"),
    [
        ("0::/system.slice/vllm.service", {"system.slice/vllm.service/cpu.max": "200000 100000"}),
        ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}),
        ("4:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}),
    ],
    ids=["its own", "one above", "version 1"],
)
def test_the_quota_of_a_group_counts_where_the_root_has_none(tmp_path: Path, group: str, files: dict[str, str]) -> None:
    for name, text in {"proc/self/cgroup": group, **{f"cgroup/{name}": text for name, text in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert cpu_quota(System(tmp_path / "proc", tmp_path / "cgroup")) == 2

"""`hybrid serve` chooses dtype and cores on a CPU by what the CPU can do, and only where the user chose nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hybrid_backend.engines import cpu_defaults
from hybrid_backend.engines.cpu_defaults import (
    compiler_lacks,
    cores_to_bind,
    float32_is_better,
    float32_line,
    has_bf16,
    intel_openmp,
    starts_eager,
)

GIB = 2**30
# The `flags` line of /proc/cpuinfo, shortened to what matters.
AVX2_DESKTOP = "fpu sse4_2 avx avx2 fma f16c bmi2"
SKYLAKE = f"{AVX2_DESKTOP} avx512f avx512bw avx512dq avx512vl"
ZEN4 = f"{SKYLAKE} avx512_vnni avx512_bf16"
SAPPHIRE_RAPIDS = f"{ZEN4} amx_bf16 amx_tile amx_int8"
SIERRA_FOREST = f"{AVX2_DESKTOP} avx_vnni avx_ne_convert"


def cpuinfo(folder: Path, flags: str, key: str = "flags") -> Path:
    path = folder / "cpuinfo"
    path.write_text(f"processor\t: 0\nmodel name\t: a CPU\n{key}\t\t: {flags}\nbogomips\t: 1\n\nprocessor\t: 1\n")
    return path


@pytest.mark.parametrize(
    ("flags", "expected"),
    [(AVX2_DESKTOP, False), (SKYLAKE, False), (ZEN4, True), (SAPPHIRE_RAPIDS, True), (SIERRA_FOREST, False)],
)
def test_bf16_is_known_by_its_instructions(tmp_path: Path, flags: str, expected: bool) -> None:
    assert has_bf16(cpuinfo(tmp_path, flags)) is expected


def test_an_arm_cpu_names_its_features_otherwise(tmp_path: Path) -> None:
    assert has_bf16(cpuinfo(tmp_path, "fp asimd i8mm bf16", "Features"))
    assert not has_bf16(cpuinfo(tmp_path, "fp asimd", "Features"))


def test_where_the_cpu_does_not_say_nothing_is_changed(tmp_path: Path) -> None:
    assert has_bf16(tmp_path / "missing")


def test_without_bf16_instructions_half_precision_is_served_in_fp32() -> None:
    for dtype in ("bfloat16", "float16"):
        assert float32_is_better(dtype, GIB, 16 * GIB, emulates_bf16=True)
        assert not float32_is_better(dtype, GIB, 16 * GIB, emulates_bf16=False)
    assert not float32_is_better("float32", GIB, 16 * GIB, emulates_bf16=True)


def test_weights_that_would_fill_the_memory_in_fp32_stay_as_they_are() -> None:
    assert float32_is_better("bfloat16", 2 * GIB, 12 * GIB, emulates_bf16=True)
    assert not float32_is_better("bfloat16", 2 * GIB, 11 * GIB, emulates_bf16=True)
    assert not float32_is_better("bfloat16", 0, 16 * GIB, emulates_bf16=True), "nobody knows how large they are"


def says(**more: Any) -> SimpleNamespace:
    """An engine's copy of a config.json."""
    return SimpleNamespace(to_dict=lambda: {"torch_dtype": "bfloat16", **more})


@pytest.mark.parametrize(
    ("has_instructions", "changes", "available", "expected"),
    [
        (False, {}, 2**20, True),
        (True, {}, 2**20, False),
        (False, {}, 2**12, False),  # no room
        (False, {"quantization": "awq"}, 2**20, False),
        (False, {"dtype": torch.float32}, 2**20, False),
        (False, {"hf_config": says(text_config={"linear_num_value_heads": 4})}, 2**20, False),  # its kernel wants bf16
        (False, {"hf_config": says(linear_num_value_heads=4, layer_types=["full_attention"])}, 2**20, True),
    ],
)
def test_both_engines_ask_one_rule_by_their_own_configuration(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_instructions: bool,
    changes: Any,
    available: int,
    expected: bool,
) -> None:
    monkeypatch.setattr(cpu_defaults, "has_bf16", lambda: has_instructions)
    save_file({"a": torch.zeros(1000, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    model = SimpleNamespace(dtype=torch.bfloat16, hf_config=says(), revision=None, quantization=None)
    vars(model).update(changes)
    line = float32_line(model, str(tmp_path), available)
    assert (line is not None) is expected
    assert line is None or line.startswith("dtype float32 instead of bfloat16")


def test_a_small_machine_keeps_no_core_free() -> None:
    assert cores_to_bind([0, 1], {}) == "0,1"
    assert cores_to_bind([6, 2, 4, 0], {}) == "0,2,4,6"
    assert cores_to_bind(range(5), {}) is None
    assert cores_to_bind([0], {}) is None


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_CPU_NUM_OF_RESERVED_CPU",
        "VLLM_CPU_SIM_MULTI_NUMA",
        "CPU_VISIBLE_MEMORY_NODES",
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_users_own_binding_stays(name: str, ranks: int) -> None:
    assert cores_to_bind([0, 1], {name: "1"}, ranks) is None


def test_ranks_that_have_a_numa_node_each_are_bound_by_the_engine() -> None:
    assert cores_to_bind(range(16), {}, ranks=2, nodes=2) is None


def test_ranks_of_one_numa_node_get_cores_of_their_own() -> None:
    assert cores_to_bind([0, 1], {}, ranks=2) == "0|1"
    assert cores_to_bind([0, 2, 4], {}, ranks=2) == "0|2,4"
    assert cores_to_bind(range(12), {}, ranks=2) == "0,1,2,3,4|6,7,8,9,10"


def test_replicas_get_cores_of_their_own() -> None:
    """vLLM binds all of them to the first nodes, however many there are."""
    assert cores_to_bind(range(8), {}, ranks=2, engines=2, nodes=2) == "0,1,2,3|4,5,6,7"
    assert cores_to_bind(range(8), {}, ranks=4, engines=2, nodes=2) == "0,1|2,3|4,5|6,7"


def test_more_ranks_than_cores_share_them() -> None:
    assert cores_to_bind([3], {}, ranks=2) == "3|3"


def test_a_small_machine_answers_before_it_would_have_compiled() -> None:
    assert starts_eager(2, {"--port", "--dtype"}) and starts_eager(4, ())
    assert not starts_eager(8, ())


@pytest.mark.parametrize("flag", ["--no-enforce-eager", "--enforce-eager", "-O3", "-cc.mode", "--optimization-level"])
def test_whoever_says_how_to_compile_is_heard(flag: str) -> None:
    assert not starts_eager(2, {"--port", flag})


def test_what_compiling_needs_and_is_not_here_is_named(tmp_path: Path) -> None:
    assert "C++ compiler (no-such-compiler" in str(compiler_lacks({"CXX": "no-such-compiler -O2"}))
    assert "C++ compiler (CXX='g++ \"' is no command line" in str(compiler_lacks({"CXX": 'g++ "'}))
    assert "C++ compiler (g++" in str(compiler_lacks({"PATH": str(tmp_path)}))
    here = {"CXX": sys.executable, "PATH": "/usr/bin"}
    assert "Python's headers" in str(compiler_lacks(here, str(tmp_path)))
    (tmp_path / "Python.h").touch()
    assert compiler_lacks(here, str(tmp_path)) is None


def test_without_intels_openmp_none_is_preloaded() -> None:
    assert intel_openmp({}, distribution="no-such-distribution") == {}
    assert intel_openmp({}, distribution="pytest") == {}


@pytest.mark.parametrize("own", ["/usr/lib/libgomp.so.1", "/a/libtcmalloc.so:/b/libiomp5.so", "libomp.so"])
def test_whoever_preloads_an_openmp_keeps_it(own: str) -> None:
    assert intel_openmp({"LD_PRELOAD": own}) == {}

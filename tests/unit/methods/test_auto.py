"""The method that ``method: auto`` stands for."""

from __future__ import annotations

import pytest
import torch

from hybrid_backend.config import config_from_mapping
from hybrid_backend.errors import ConfigError
from hybrid_backend.kernels import cpu
from hybrid_backend.methods import method_names, resolve_method, with_method

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NATIVE = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_unavailable()))


def chosen(device: torch.device, heads: int = 9, kv_heads: int = 3, head_dim: int = 64, **keys: object) -> str:
    return with_method(config_from_mapping(keys, "test"), heads, kv_heads, head_dim, device).method


@NATIVE
def test_auto_is_quest_on_a_cpu_and_scout_on_a_gpu() -> None:
    assert (chosen(CPU), chosen(GPU)) == ("quest", "scout")


@NATIVE
@pytest.mark.parametrize(
    "keys",
    [
        {"workers": {"kernel": "torch"}},
        {"device_kernels": "torch"},
        {"heads": 48, "kv_heads": 1},
        {"head_dim": 120},
        {"selection": {"digest": "minmax_int8", "aggregate": "max"}},
    ],
    ids=str,
)
def test_auto_is_scout_on_a_cpu_where_the_native_kernels_cannot_serve(keys: dict[str, object]) -> None:
    assert chosen(CPU, **keys) == "scout"  # type: ignore[arg-type]


@pytest.mark.parametrize("name", method_names())
def test_a_method_that_is_named_stays(name: str) -> None:
    assert chosen(CPU, method=name) == chosen(GPU, method=name) == name


def test_quest_on_a_gpu_is_refused_with_the_method_that_serves_there() -> None:
    config = config_from_mapping({"method": "quest", "device_kernels": "triton"}, "test")
    with pytest.raises(ConfigError, match=r"method: quest .* not on a GPU; write method: scout"):
        resolve_method("quest").check(config, GPU, 3, 3)

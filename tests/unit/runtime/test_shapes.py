"""Models whose shape the native kernels lack are served by PyTorch, as is said at start."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_backend.batch import ModelSpec
from hybrid_backend.errors import ConfigError
from hybrid_backend.step.operations import fitted
from tests.support.harness import METHODS, PAGE, Engine, config

SHAPES = {"48 query heads per KV head": (48, 1, 32), "heads of 120": (8, 1, 120), "heads of 528": (4, 2, 528)}

SERVING = {name: keys for name, keys in METHODS.items() if name != "quest"} | {"auto": {"method": "auto"}}


def model(heads: int, kv_heads: int, dim: int) -> ModelSpec:
    return ModelSpec(2, heads, kv_heads, dim, scale=dim**-0.5, dtype=torch.float32)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("keys", SERVING.values(), ids=SERVING)
def test_every_method_serves_what_the_native_kernels_lack(keys: dict[str, Any], shape: tuple[int, int, int]) -> None:
    engine = Engine(config(**keys), model(*shape), num_pages=16)
    engine.admit("a", 2 * PAGE - 1)
    engine.decode("a", steps=3)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_quest_refuses_what_the_native_kernels_lack(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=r"quest needs .* the native kernels have none for .* write method: scout"):
        Engine(config(method="quest"), model(*shape), num_pages=16)


@pytest.mark.parametrize("keys", [{"workers": {"kernel": "native"}}, {"device_kernels": "native"}], ids=str)
def test_native_kernels_that_are_asked_for_and_lack_the_shape_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"native has no kernels for 48 query heads on 1 KV heads of 32 .* write auto"
    ):
        fitted(config(**keys), model(48, 1, 32), torch.device("cpu"))


def test_a_gpu_whose_questions_nobody_could_answer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no CPU kernel serves .* use the engine's own backend"):
        fitted(config(), model(48, 1, 32), torch.device("cuda"))


def test_a_shape_that_the_native_kernels_have_is_left_to_them() -> None:
    cfg = config()
    assert fitted(cfg, model(48, 3, 64), torch.device("cpu")) is cfg

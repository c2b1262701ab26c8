"""Numbers that the schema allows and a machine cannot hold: refused with a number that fits, or harmless."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator

import pytest
import torch

from hybrid_backend.batch import Batch
from hybrid_backend.config import HybridConfig, Rule, apply_overrides, config_from_mapping, iter_keys
from hybrid_backend.config.rules import MOST
from hybrid_backend.errors import ConfigError, EngineError
from hybrid_backend.methods.host_room import check_room
from tests.support.harness import METHODS, PAGE, Engine, config, spec

MEMORY = 16 << 30
PAGES = 64


def largest(rule: Rule) -> int | list[int] | None:
    """The largest number that a rule accepts, alone or in a list; None where it takes no integers."""
    numbers = [*(1 << n for n in range(31)), MOST]
    if alone := [number for number in numbers if accepts(rule, number)]:
        return max(alone)
    if listed := [number for number in numbers if accepts(rule, [number])]:
        return [max(listed)]
    return None


def accepts(rule: Rule, value: object) -> bool:
    try:
        rule.check(value)
    except Exception:
        return False
    return True


def integer_keys() -> dict[str, int | list[int]]:
    """Every key that takes an integer, with the largest one. A host pool is checked by the engines."""
    rules = {key: next(item for item in field.metadata if isinstance(item, Rule)) for key, field in iter_keys()}
    numbers = {key: largest(rule) for key, rule in rules.items() if key != "host_pool.size"}
    return {key: number for key, number in numbers.items() if number is not None} | {"budget_tokens": MOST - PAGE + 1}


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """An allocation of more than 16 GiB fails, and does not take the machine with it."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def configured(method: str, key: str, value: object) -> HybridConfig:
    base = {"page_size": PAGE, "budget_tokens": 4 * PAGE, "sinks": 1, "recent": 1, "workers": {"threads": 2}}
    return config_from_mapping(apply_overrides({**base, **METHODS[method]}, [f"{key}={value}"]), "test")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_integer_at_its_largest_starts_or_is_refused_by_its_key(method: str, bounded_memory: None) -> None:
    keys = integer_keys()
    assert {"workers.threads", "hgca.window_tokens", "budget_tokens", "selection.candidates"} < keys.keys()
    for key, value in keys.items():
        try:
            engine = Engine(configured(method, key, value), spec(), PAGES)
        except ConfigError as error:
            assert key in str(error) and "\n" not in str(error), f"{key}: {error}"
            continue
        engine.add("a", 10 * PAGE)
        engine.step({"a": 10 * PAGE}, tolerance=None)
        engine.step({"a": 1}, tolerance=None)
        engine.runtime.close()


@pytest.mark.parametrize(
    ("method", "key", "available"),
    [
        ("scout", "budget_tokens", 40 << 20),
        ("scout", "frames_per_request", 40 << 20),
        ("hgca", "hgca.window_tokens", 40 << 20),
        ("hgca", "hgca.window_tokens", 12 << 20),
        ("clo", "budget_tokens", 40 << 20),
    ],
)
def test_the_number_that_a_refusal_names_fits_and_starts(method: str, key: str, available: int) -> None:
    def check(value: int) -> HybridConfig:
        config = configured(method, key, value)
        check_room(config, spec(), PAGES, 8, torch.device("cpu"), available)
        return config

    with pytest.raises(ConfigError, match=rf"^{key}: 2147483\d+ needs more memory than the .* available") as error:
        check(MOST - PAGE + 1)
    named = int(re.search(r"write (\d+) or less", str(error.value))[1])
    assert named > 0
    Engine(check(named), spec(), PAGES).runtime.close()


@pytest.mark.parametrize("method", ["scout", "infinigen"])
def test_a_row_that_decodes_two_tokens_in_a_step_is_refused_by_name(method: str) -> None:
    engine = Engine(config(method=method), spec(), num_pages=20)
    table, slots = (
        torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        torch.tensor([PAGE + 3, 3 * PAGE + 3, 3 * PAGE + 4]),
    )
    batch = Batch(["a", "b"], [0, 1, 3], [4, 5], [True, True], table, slots)
    with pytest.raises(EngineError, match="request b decodes 2 tokens in one step"):
        engine.runtime.begin_step(batch)

"""A method is added by its own file and its registration: so that of examples/add_method.py serves and is planned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from examples.add_method import FirstAndLast
from hybrid_backend.cli import app
from hybrid_backend.errors import ConfigError
from hybrid_backend.methods import method_names, register, resolve_method, unregister
from hybrid_backend.methods.registry import ENTRY_POINTS, register_installed
from tests.support.harness import PAGE, Engine, config, spec
from tests.support.scenario import play
from tests.support.tiny_engine import TinyEngine, TinyModel, random_prompt

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture
def registered() -> Iterator[None]:
    register(FirstAndLast)
    yield
    unregister(FirstAndLast)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_budget_of_the_whole_context_answers_as_dense_attention(kernels: str) -> None:
    """Requests of a model with weights arrive, decode, grow over pages, are preempted and end."""
    engine = TinyEngine(config(method="first_and_last", device_kernels=kernels, budget_tokens=32 * PAGE), TinyModel(3))
    engine.add("a", random_prompt(3 * PAGE + 5))
    engine.advance(4)
    engine.add("b", random_prompt(PAGE, 1))
    engine.advance(PAGE)
    engine.preempt("a")
    engine.advance(4)
    engine.check_answers()
    assert len(engine.drop("a").answer) > PAGE
    engine.advance(3)
    engine.check_answers()


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("keys", [{}, {"exact_layers": [1]}, {"sparse": "never"}], ids=str)
def test_every_output_is_attention_of_the_first_and_last_pages(kernels: str, keys: dict[str, object]) -> None:
    played = Engine(
        config(method="first_and_last", device_kernels=kernels, **keys), spec(sinks=True), is_witnessed=True
    )
    play([played])
    assert played.witness is not None
    assert (played.witness.sparse_rows > 0) == (keys.get("sparse") != "never")


def test_its_memory_is_planned_and_its_times_are_left_open() -> None:
    arguments = ["plan", "smollm2-135m", "--machine=h200", "--ram=64GiB", "--method=first_and_last", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    row = next(row for row in json.loads(result.stdout)["rows"] if row["name"] == "first_and_last")
    assert row["fits"] and row["tokens_per_s"] is None


def test_two_methods_cannot_have_one_name() -> None:
    assert resolve_method("first_and_last") is FirstAndLast and "first_and_last" in method_names()
    register(FirstAndLast)  # once more changes nothing

    class Other(FirstAndLast):
        """Another method."""

    with pytest.raises(ConfigError, match="method: the name 'first_and_last' is taken; give Other another name"):
        register(Other)
    unregister(FirstAndLast)
    with pytest.raises(ConfigError, match="unknown method 'first_and_last'; known are auto, apex"):
        resolve_method("first_and_last")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The entry points of an installed package; what it registers is forgotten afterwards."""
    unregister(FirstAndLast)
    folder = tmp_path / "another_package-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: another-package\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    register_installed.cache_clear()
    yield folder / "entry_points.txt"
    register_installed.cache_clear()


def test_a_method_that_an_installed_package_names_is_known(installed: Path) -> None:
    installed.write_text(f"[{ENTRY_POINTS}]\nany = examples.add_method:FirstAndLast\n")
    assert resolve_method("first_and_last") is FirstAndLast and "first_and_last" in method_names()


def test_a_method_that_fails_to_load_is_named(installed: Path) -> None:
    installed.write_text(f"[{ENTRY_POINTS}]\nany = examples.add_method:Other\n")
    with pytest.raises(ConfigError, match=r"method: examples\.add_method:Other, which a package names, fails to load"):
        method_names()

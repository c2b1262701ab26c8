"""What is kept of a run, and what the report says of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_backend.errors import ConfigError
from hybrid_backend.tools.bench.accuracy.client import Answer
from hybrid_backend.tools.bench.accuracy.fidelity import compare
from hybrid_backend.tools.bench.accuracy.report import Report
from hybrid_backend.tools.bench.accuracy.store import DenseAnswers, Key, Result, Results, same_settings

KEY = Key("m", "stock", 0, "vt", 1024, 0, "prompt", "p0")


def result(method: str, task: str, sample: int, score: float, kl: float | None = None) -> Result:
    budget = 0 if method in ("stock", "dense") else 256
    key = Key("m", method, budget, task, 1024, sample, "prompt", f"{task}{sample}")
    return Result(key, score, "text", kl, None if kl is None else 0.9, 5, 0.95 if method == "scout" else None)


RESULTS = [
    *(result("stock", "vt", i, 1.0) for i in range(4)),
    *(result("stock", "cwe", i, 0.1) for i in range(4)),
    *(result("dense", "vt", i, 1.0, 0.001) for i in range(4)),
    *(result("scout", "vt", i, [1.0, 1.0, 1.0, 0.0][i], 0.02 * (i + 1)) for i in range(4)),
    *(result("scout", "cwe", i, 0.3, 0.05) for i in range(4)),
]


def test_results_are_found_again_and_a_half_written_line_is_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    first = Results(file)
    for r in RESULTS:
        first.add(r)
    with file.open("a") as more:
        more.write('{"key": {"model": "m", "met')
    again = Results(file)
    assert list(again.by_key.values()) == RESULTS
    again.add(result("scout", "fwe", 0, 0.5))
    assert [json.loads(line)["score"] for line in file.read_text().splitlines()][-2:] == [0.3, 0.5]


def test_a_line_that_is_no_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"score": 1}\n')
    with pytest.raises(ConfigError, match="line 1 is not a result"):
        Results(tmp_path / "results.jsonl")


def test_results_of_different_settings_are_not_mixed(tmp_path: Path) -> None:
    same_settings(tmp_path, {"dtype": "bfloat16", "overrides": {}})
    same_settings(tmp_path, {"dtype": "bfloat16", "overrides": {}})
    with pytest.raises(ConfigError, match="holds results with dtype bfloat16; give the same again, or another --out"):
        same_settings(tmp_path, {"dtype": "float32", "overrides": {}})


def test_dense_answers_come_back_as_they_were(tmp_path: Path) -> None:
    answers = DenseAnswers(tmp_path)
    assert KEY not in answers
    answers.put(KEY, Answer([5, 6], [{5: -0.1, 7: -2.5}, {6: -0.2}]))
    assert KEY in DenseAnswers(tmp_path)
    assert DenseAnswers(tmp_path).get(KEY) == Answer([5, 6], [{5: -0.1, 7: -2.5}, {6: -0.2}])
    assert replace(KEY, method="scout", budget=256) in answers  # the same prompt of the same model


def test_fidelity_leaves_the_prompts_own_position_out_unless_the_question_was_decoded() -> None:
    dense, ours = [{1: -0.01}, {2: -0.01}], [{9: -0.01, 1: -5.0}, {2: -0.01}]
    assert compare(dense, ours, first=1).agreement == 1.0 and compare(dense, ours, first=1).positions == 1
    assert compare(dense, ours, first=0).agreement == 0.5
    assert compare(dense[:1], ours[:1], first=1).positions == 0


def test_a_task_that_dense_fails_is_shown_as_such_and_kept_out_of_the_tasks_that_it_can_do() -> None:
    report = Report(RESULTS)
    can, everything = report.methods["scout", 256, 1024]
    assert (can.tasks, everything.tasks) == (1, 2)
    assert can.score is not None and can.score.mean == 0.75 and can.dense is not None
    assert can.difference is not None and can.difference.mean == -0.25 and can.difference.low < -0.25
    assert everything.difference is not None and everything.difference.mean == pytest.approx(-0.025)
    text = report.markdown("title")
    assert "| cwe (dense fails) | 4 | 0.10" in text and "| vt | 4 | 1.00" in text


def test_fidelity_stands_beside_the_scores_with_exact_methods_named() -> None:
    text = Report(RESULTS).markdown("title")
    assert "0.90 / 0.0500 / 0.950" in text and "0.90 / 0.0010 / -" in text
    assert "-0.25 [-0.75, +0.00]" in text


def test_without_dense_answers_there_are_scores_only(tmp_path: Path) -> None:
    only = [result("http://h:1/v1", "vt", i, 1.0) for i in range(3)]
    ((can, everything),) = Report(only).methods.values()
    assert everything.score is not None and everything.score.mean == 1.0 and everything.difference is None
    assert can.score is None
    assert "Fidelity" not in Report(only).markdown("title")
    assert not Report(only).plot(tmp_path / "none.png")


def test_the_json_holds_every_interval_and_the_plot_is_drawn(tmp_path: Path) -> None:
    found = json.loads(Report(RESULTS).json({"model": "m"}))
    assert {m["method"] for m in found["methods"]} == {"dense", "scout"} and len(found["tasks"]) == 5
    assert Report(RESULTS).plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")

"""LongBench's format, read from small files written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybrid_backend.errors import ConfigError
from hybrid_backend.tools.bench.accuracy.longbench import DATASETS, DEFAULT, load
from hybrid_backend.tools.bench.accuracy.scoring import METRICS, score
from tests.unit.bench_accuracy.conftest import Pieces

CONTEXT = " ".join(f"Sentence {i} tells of nothing." for i in range(200))


def written(folder: Path, name: str, *records: dict[str, Any] | str) -> None:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def record(**changes: Any) -> dict[str, Any]:
    """A line with all the keys that LongBench's files have."""
    base = {
        "input": "Who wrote it?", "context": "Anna wrote it.", "answers": ["Anna", "Anna B."], "length": 3,
        "dataset": "qasper", "language": "en", "all_classes": None, "_id": "1f",
    }  # fmt: skip
    return {**base, **changes}


def test_the_default_is_the_eight_datasets_of_the_paper() -> None:
    """ScoutAttention, section 4.2."""
    named = ("qasper", "narrativeqa", "2wikimqa", "dureader", "gov_report", "qmsum", "samsum", "passage_retrieval_en")
    assert named == tuple(DEFAULT.split(",")) and set(named) <= set(DATASETS)
    assert all(dataset.metric in METRICS for dataset in DATASETS.values())


@pytest.mark.parametrize("name", DATASETS)
def test_every_dataset_is_asked_with_its_context_and_input_and_judged(
    name: str, tmp_path: Path, pieces: Pieces
) -> None:
    metric = DATASETS[name].metric
    classes = ["Person", "Place"] if metric == "classification" else None
    answers = {
        "classification": ["Person"],
        "retrieval": ["Paragraph 7"],
        "rouge_l_characters": ["安娜写的"],
    }.get(metric, ["Anna", "Anna B."])
    written(tmp_path, name, record(answers=answers, all_classes=classes), record(input="Why?"), record(input="When?"))
    first, second = load(tmp_path, [name], 600, pieces, samples=2)
    assert "Anna wrote it." in first.prompt
    if "{input}" in DATASETS[name].tail:
        assert "Who wrote it?" in first.prompt[first.question_index :] and "Why?" in second.prompt
    assert first.prompt.startswith("<user>") == DATASETS[name].is_chat
    assert score(first, answers[0]) == 1.0 and score(first, "something else") == 0.0
    assert first.max_tokens == DATASETS[name].max_tokens


def test_a_context_that_is_too_long_loses_its_middle(tmp_path: Path, pieces: Pieces) -> None:
    written(tmp_path, "qasper", record(context=CONTEXT))
    (task,) = load(tmp_path, ["qasper"], 800, pieces, samples=9)
    assert 780 <= len(pieces.ids(task.prompt)) <= 800
    assert "Sentence 0 " in task.prompt and "Sentence 199 " in task.prompt and "Sentence 100 " not in task.prompt


def test_a_chinese_context_without_spaces_loses_its_middle_too(tmp_path: Path, pieces: Pieces) -> None:
    context = "".join(chr(0x4E00 + i) for i in range(2000))
    written(tmp_path, "dureader", record(context=context))
    (task,) = load(tmp_path, ["dureader"], 800, pieces, samples=9)
    assert 795 <= len(pieces.ids(task.prompt)) <= 800
    assert context[:50] in task.prompt and context[-50:] in task.prompt and context[1000] not in task.prompt


def test_the_authors_prompts_and_lengths_apply_if_they_are_there(tmp_path: Path, pieces: Pieces) -> None:
    written(tmp_path, "qasper", record(context="in {braces}"))
    (tmp_path / "dataset2prompt.json").write_text(json.dumps({"qasper": "Text: {context}\n Q: {input}\nA:"}))
    (tmp_path / "dataset2maxlen.json").write_text(json.dumps({"qasper": 7}))
    (task,) = load(tmp_path, ["qasper"], 600, pieces, samples=1)
    assert task.content == "Text: in {braces}\n Q: Who wrote it?\nA:" and task.max_tokens == 7


def test_missing_files_are_named_with_where_to_get_them(tmp_path: Path, pieces: Pieces) -> None:
    written(tmp_path, "qasper", record())
    with pytest.raises(ConfigError, match=r"lacks hotpotqa.jsonl, trec.jsonl; get LongBench's data.zip"):
        load(tmp_path, ["hotpotqa", "qasper", "trec"], 600, pieces, samples=1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "line 2: record: Invalid JSON"),
        ("[]", "line 2: record: Input should be an object"),
        (json.dumps({"input": "", "answers": ["a"]}), "line 2: context: Field required"),
        (json.dumps(record(answers=[])), "line 2: answers: List should have at least 1 item"),
    ],
)
def test_a_bad_line_is_named(line: str, message: str, tmp_path: Path, pieces: Pieces) -> None:
    written(tmp_path, "qasper", record(), line)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, ["qasper"], 600, pieces, samples=5)


def test_a_hopeless_length_is_refused(tmp_path: Path, pieces: Pieces) -> None:
    written(tmp_path, "qasper", record())
    with pytest.raises(ConfigError, match="too short even without a context"):
        load(tmp_path, ["qasper"], 20, pieces, samples=1)

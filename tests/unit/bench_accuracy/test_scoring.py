"""Scores against values worked out by hand."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_backend.tools.bench.accuracy.scoring import (
    classification,
    field_f1,
    match_all,
    match_any,
    retrieval,
    rouge_l,
    rouge_l_characters,
    score,
    token_f1,
)
from hybrid_backend.tools.bench.accuracy.task import Task

WORDS = st.lists(st.sampled_from(["red", "green", "blue", "sea"]), min_size=1, max_size=8)


def test_match_all_is_the_share_of_answers_found() -> None:
    assert match_all(["1234", "5678"], "They are 1234 and 999.") == 0.5
    assert match_all(["Alpha"], "ALPHA!") == 1.0


def test_match_any_needs_one() -> None:
    assert match_any(["Rome", "Roma"], "in roma.") == 1.0 and match_any(["Rome"], "Paris") == 0.0


def test_token_f1_ignores_case_articles_and_punctuation() -> None:
    assert token_f1("The red sea", "red SEA.") == 1.0
    assert token_f1("red sea", "the red house by the sea") == pytest.approx(2 * (2 / 4) * 1 / (2 / 4 + 1))
    assert token_f1("red", "") == 0.0


def test_rouge_l_is_the_f1_of_the_longest_common_subsequence() -> None:
    # Lin 2004: "police killed the gunman" against "the gunman police killed": a subsequence of 2 of 4 words.
    assert rouge_l("police killed the gunman", "the gunman police killed") == 0.5
    assert rouge_l("police killed the gunman", "police kill the gunman") == 0.75
    assert rouge_l("a b c d e", "a c e") == pytest.approx(2 * 1 * 0.6 / 1.6)


@given(WORDS, WORDS)
def test_rouge_l_equals_a_subsequence_search(a: list[str], b: list[str]) -> None:
    subsequences = [tuple(w for i, w in enumerate(a) if mask >> i & 1) for mask in range(2 ** len(a))]

    def within(part: tuple[str, ...]) -> bool:
        rest = iter(b)
        return all(word in rest for word in part)

    longest = max(len(part) for part in subsequences if within(part))
    assert rouge_l(" ".join(a), " ".join(b)) == pytest.approx(2 * longest / (len(a) + len(b)))


def test_chinese_is_compared_by_characters() -> None:
    # 3 of 4 characters in order, of 6 given.
    assert rouge_l_characters("安娜写的", "安娜 写了一本") == pytest.approx(2 * 3 / (4 + 6))
    assert rouge_l_characters("安娜", "安 娜") == 1.0 and rouge_l_characters("安娜", "") == 0.0


def test_retrieval_is_the_share_of_the_numbers_that_are_right() -> None:
    assert retrieval("Paragraph 7", "Paragraph 7") == 1.0
    assert retrieval("Paragraph 7", "7 or 17") == 0.5
    assert retrieval("Paragraph 7", "the seventh") == 0.0


def test_classification_counts_named_classes_but_no_class_inside_another() -> None:
    classes = ["Number", "Number of people", "Place"]
    assert classification("Number of people", "Type: Number of people", classes) == 1.0
    assert classification("Number", "Number or Place", classes) == 0.5
    assert classification("Number", "Number of people", classes) == 0.0
    assert classification("Place", "nothing", classes) == 0.0


RECORDS = [{"order": 1, "town": "Wem", "count": 3}, {"order": 2, "town": "Ely", "count": 4}]


def fields(given: object) -> float:
    return field_f1([json.dumps(record) for record in RECORDS], given if isinstance(given, str) else json.dumps(given))


def test_field_f1_compares_every_field_of_every_record() -> None:
    assert fields(RECORDS) == 1.0
    assert fields(RECORDS[::-1]) == 1.0
    assert fields(RECORDS[:1]) == pytest.approx(2 * 1 * 0.5 / 1.5)
    assert fields([RECORDS[0], {**RECORDS[1], "count": 5}]) == 0.75
    assert fields([RECORDS[0], {**RECORDS[1], "order": 7}]) == 0.5
    assert fields([{**record, "count": str(record["count"])} for record in RECORDS]) == 1.0


def test_field_f1_reads_what_is_whole_in_an_answer_that_was_cut_off() -> None:
    whole = json.dumps(RECORDS)
    assert fields(f"Here you are: {whole[:-5]}") == pytest.approx(2 / 3)
    assert fields("{{{ no JSON") == 0.0
    assert fields("[" * 100_000 + "{" * 3000) == 0.0


def test_the_beginning_of_a_json_answer_that_the_prompt_gives_counts() -> None:
    task = Task("extraction", "", 0, "", '[{"order": 1,', (json.dumps(RECORDS[0]),), "field_f1", 9)
    assert score(task, ' "town": "Wem", "count": 3}]') == 1.0


def test_line_metrics_read_the_first_line_only() -> None:
    task = Task("triviaqa", "", 0, "", "", ("Rome",), "f1_line", 9)
    assert score(task, "\nRome\nQuestion: and then?") == 1.0

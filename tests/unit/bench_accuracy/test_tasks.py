"""Every generated task: the same for the same seed, as long as asked for, solvable by reading, with one answer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_backend.errors import ConfigError
from hybrid_backend.tools.bench.accuracy.needles import GENERATORS as NEEDLES
from hybrid_backend.tools.bench.accuracy.scoring import score
from hybrid_backend.tools.bench.accuracy.task import TOLERANCE, ModelTokenizer, Task
from hybrid_backend.tools.bench.accuracy.tasks import GENERATORS
from hybrid_backend.tools.bench.accuracy.words import prose
from tests.unit.bench_accuracy.conftest import Pieces
from tests.unit.bench_accuracy.solvers import SOLVERS

ALL = pytest.mark.parametrize("name", GENERATORS)
SEEDS, BUDGETS = st.integers(0, 2**31), st.integers(900, 1600)
FEW = settings(max_examples=4)


def made(name: str, seed: int, budget: int) -> Task:
    return GENERATORS[name](seed, budget, Pieces())


def test_there_are_rulers_thirteen_tasks_and_extraction() -> None:
    assert len(GENERATORS) == 14 and "extraction" in GENERATORS and set(GENERATORS) == set(SOLVERS)


@ALL
@FEW
@given(seed=SEEDS, budget=BUDGETS)
def test_the_same_seed_gives_the_same_task_and_another_seed_another(name: str, seed: int, budget: int) -> None:
    task = made(name, seed, budget)
    assert task == made(name, seed, budget)
    assert task.prompt != made(name, seed + 1, budget).prompt


@ALL
@FEW
@given(seed=SEEDS, budget=BUDGETS)
def test_a_prompt_fills_its_budget_to_a_few_tokens_and_never_exceeds_it(name: str, seed: int, budget: int) -> None:
    length = len(Pieces().ids(made(name, seed, budget).prompt))
    assert budget - TOLERANCE <= length <= budget


@ALL
@FEW
@given(seed=SEEDS, budget=BUDGETS)
def test_reading_the_prompt_is_enough_to_answer_it(name: str, seed: int, budget: int) -> None:
    task = made(name, seed, budget)
    assert score(task, SOLVERS[name](task.prompt)) == 1.0


@ALL
@FEW
@given(seed=SEEDS, budget=BUDGETS)
def test_another_tasks_answer_scores_nothing(name: str, seed: int, budget: int) -> None:
    """So no score comes from the form of an answer. (Words of a language may by chance be common in two lists.)"""
    task, other = made(name, seed, budget), made(name, seed + 1, budget)
    assert score(task, SOLVERS[name](other.prompt)) <= (0.3 if name in ("cwe", "extraction") else 0.0)


@pytest.mark.parametrize("name", NEEDLES)
@FEW
@given(seed=SEEDS, budget=BUDGETS)
def test_each_value_of_a_haystack_stands_there_once_and_distractors_differ_from_answers(
    name: str, seed: int, budget: int
) -> None:
    task = made(name, seed, budget)
    values = re.findall(r"special \w+ of \S+ is: (\S+)\.", task.prompt)
    assert len(values) == len(set(values))
    assert all(task.prompt.count(answer) == 1 for answer in task.answers)
    distractors = {"niah_multikey_1": 3, "niah_multikey_2": 5, "niah_multikey_3": 3}.get(name, 0)
    assert len(values) - len(task.answers) >= distractors


@pytest.mark.parametrize("name", ["qa_1", "qa_2", "fwe", "niah_single_2"])
@FEW
@given(seed=SEEDS)
def test_answers_are_in_no_filler(name: str, seed: int) -> None:
    assert not any(answer.lower() in prose().lower() for answer in made(name, seed, 1000).answers)


@pytest.mark.parametrize(("name", "least"), [("qa_1", 4), ("qa_2", 4)])
def test_questions_have_distractors_that_never_hold_the_answer(name: str, least: int) -> None:
    for seed in range(5):
        task = made(name, seed, 1500)
        holding = [
            d for d in re.split(r"Document \d+:", task.prompt.split("Answer with the help")[0]) if task.answers[0] in d
        ]
        assert len(holding) == 1
        assert task.prompt.count("Document ") >= least + 2


def test_an_uncommon_word_never_scores_as_a_common_one() -> None:
    for seed in range(5):
        task = made("cwe", seed, 1500)
        listed = set(re.findall(r"\d+\. (\w+)", task.prompt)) - set(task.answers)
        assert listed and score(task, " ".join(listed)) == 0.0


@ALL
def test_with_a_real_tokenizer_and_its_chat_template(name: str, model_dir: Path) -> None:
    tokenizer = ModelTokenizer(str(model_dir))
    task = GENERATORS[name](3, 1024, tokenizer)
    assert 1024 - TOLERANCE <= len(tokenizer.ids(task.prompt)) <= 1024
    assert task.prompt.startswith("<|im_start|>system") and task.prompt.endswith(
        f"<|im_start|>assistant\n{task.prefix}"
    )
    assert task.content in task.prompt and task.prompt[task.question_index :].count("<|im_end|>") == 1
    assert score(task, SOLVERS[name](task.prompt)) == 1.0
    assert not any(answer in task.prompt[task.question_index :] for answer in task.answers)
    assert task.max_tokens > len(tokenizer.ids(SOLVERS[name](task.prompt)))


def test_long_prompts_have_enough_of_everything(pieces: Pieces) -> None:
    """Keys, words and records do not run out or repeat."""
    for name in ("niah_multikey_2", "cwe", "extraction"):
        task = GENERATORS[name](0, 40_000, pieces)
        assert 40_000 - TOLERANCE <= len(pieces.ids(task.prompt)) <= 40_000
        assert score(task, SOLVERS[name](task.prompt)) == 1.0
    orders = [json.loads(answer)["order"] for answer in task.answers]
    assert len(orders) == len(set(orders)) == 64


def test_a_length_that_is_too_short_is_refused_with_the_shortest_possible(pieces: Pieces) -> None:
    with pytest.raises(ConfigError, match=r"task vt: length 100 is too short, its smallest prompt has \d+ tokens"):
        GENERATORS["vt"](0, 100, pieces)

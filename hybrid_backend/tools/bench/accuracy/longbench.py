"""LongBench (arXiv 2308.14508), if the user has its files: one JSONL file per dataset, as its authors publish them.

Each line has ``input``, ``context``, ``answers`` and, for classification, ``all_classes``. The prompts are reworded,
unless the folder also has the authors' ``dataset2prompt.json`` (and ``dataset2maxlen.json``). A context that is too
long loses its middle, as in LongBench's own scripts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from hybrid_backend.config.reading import read_text, reading
from hybrid_backend.errors import ConfigError
from hybrid_backend.tools.bench.accuracy.task import Draft, ModelTokenizer, Task, finished, largest

_QUESTION = "Answer in a few words, without an explanation.\n\nQuestion: {input}\nAnswer:"
_QASPER = 'Answer in a few words; write "unanswerable" if the article does not tell.\n\nQuestion: {input}\nAnswer:'
_PARAGRAPH = 'Summary: {input}\n\nAnswer with the number of its paragraph alone, as in "Paragraph 1".\nAnswer:'


@dataclass(frozen=True)
class Dataset:
    """Prompt and metric of one dataset.

    The prompt is ``head``, context, ``joint`` and ``tail``, as a user's turn if ``is_chat``. A context is cut at
    ``separator``; where that is empty, at any character.
    """

    metric: str
    max_tokens: int
    head: str
    tail: str
    is_chat: bool = True
    joint: str = "\n\n"
    separator: str = " "


class _Record(BaseModel):
    """A line of a dataset."""

    model_config = ConfigDict(coerce_numbers_to_str=True)
    input: str
    context: str
    answers: list[str] = Field(min_length=1)
    all_classes: list[str] | None = None


def _question(kind: str, max_tokens: int, tail: str = _QUESTION) -> Dataset:
    head = f"Read the following {kind}, then answer a question about it in a few words, without an explanation.\n\n"
    return Dataset("f1", max_tokens, head, tail)


def _summary(kind: str, tail: str) -> Dataset:
    return Dataset("rouge_l", 512, f"Read the following {kind}.\n\n", tail)


def _few_shot(metric: str, max_tokens: int, order: str) -> Dataset:
    # LongBench, too, leaves out the chat template for sets with examples.
    return Dataset(metric, max_tokens, f"{order}, as in these examples.\n\n", "{input}", is_chat=False)


# Metrics and lengths of answers: LongBench, table 1 and its configuration.
DATASETS = {
    "narrativeqa": _question("story", 128),
    "qasper": _question("scientific article", 128, _QASPER),
    "multifieldqa_en": _question("text", 64),
    "hotpotqa": _question("passages", 32),
    "2wikimqa": _question("passages", 32),
    "musique": _question("passages", 32),
    "dureader": Dataset(
        metric="rouge_l_characters", max_tokens=128, head="请阅读以下文章，然后回答问题。\n\n",
        tail="请根据以上文章简短地回答。\n\n问题：{input}\n回答：", separator="",
    ),
    "gov_report": _summary("report of a government agency", "Summarize the report on one page."),
    "qmsum": _summary("transcript of a meeting", "Answer in some sentences: {input}\nAnswer:"),
    "multi_news": _summary("news articles", "Summarize all of these articles on one page."),
    "trec": _few_shot("classification", 64, "Name the type of a question"),
    "triviaqa": _few_shot("f1_line", 32, "Answer a question about a passage"),
    "samsum": _few_shot("rouge_l_line", 128, "Summarize a dialogue"),
    "passage_retrieval_en": Dataset(
        "retrieval", 32, "Find out which of these paragraphs is summarized at the end.\n\n", _PARAGRAPH
    ),
}  # fmt: skip
DEFAULT = "qasper,narrativeqa,2wikimqa,dureader,gov_report,qmsum,samsum,passage_retrieval_en"
"""ScoutAttention's eight datasets (arXiv 2603.27138, section 4.2), which names no language of passage retrieval."""


def load(folder: Path, names: Sequence[str], budget: int, tokenizer: ModelTokenizer, samples: int) -> list[Task]:
    """Return the first ``samples`` tasks of each dataset, with prompts of at most ``budget`` tokens.

    Raises:
        ConfigError: a file is missing, or a line is not LongBench's; names file and line.
    """
    missing = [f"{name}.jsonl" for name in names if not (folder / f"{name}.jsonl").is_file()]
    if missing:
        raise ConfigError(
            f"--longbench {folder}: lacks {', '.join(missing)}; get LongBench's data.zip "
            "(huggingface.co/datasets/THUDM/LongBench) and unpack it there, or choose fewer with --longbench-datasets"
        )
    prompts, lengths = _mapping(folder / "dataset2prompt.json", str), _mapping(folder / "dataset2maxlen.json", int)
    tasks = []
    for name in names:
        dataset = replace(DATASETS[name], max_tokens=lengths.get(name) or DATASETS[name].max_tokens)
        if name in prompts:
            head, _, tail = prompts[name].partition("{context}")
            dataset = replace(dataset, head=head, tail=tail, joint="")
        for record in _records(folder / f"{name}.jsonl", samples):
            tasks.append(_task(name, dataset, record, budget, tokenizer))
    return tasks


def _records(file: Path, samples: int) -> Iterator[_Record]:
    with reading(file, "get the file anew"), file.open(encoding="utf-8") as lines:
        for number, line in enumerate(islice(lines, samples), 1):
            try:
                yield _Record.model_validate_json(line)
            except ValidationError as error:
                name, message = "".join(map(str, error.errors()[0]["loc"][:1])), error.errors()[0]["msg"]
                fix = "give files in LongBench's format"
                raise ConfigError(f"{file}: line {number}: {name or 'record'}: {message}; {fix}") from None


def _mapping(file: Path, value: type[Any]) -> dict[str, Any]:
    """Return the JSON object in a file, with values of one type; empty where there is no file."""
    fix = "take the file from LongBench's repository or remove it"
    if not file.exists():
        return {}
    with reading(file, fix, form="prompts or lengths"):
        return TypeAdapter(dict[str, value]).validate_json(read_text(file, fix), strict=True)  # type: ignore[valid-type]


def _task(name: str, dataset: Dataset, record: _Record, budget: int, tokenizer: ModelTokenizer) -> Task:
    context, separator = record.context, dataset.separator
    words = context.split(separator) if separator else list(context)
    tail, answers = dataset.tail.replace("{input}", record.input), tuple(record.answers)

    def build(count: int) -> Task:
        """Make the task with ``count`` words (or characters) of the context, half of them from each end."""
        ends = [*words[: count - count // 2], *words[len(words) - count // 2 :]] if count < len(words) else words
        draft = Draft(dataset.head + separator.join(ends), tail, "", answers, dataset.joint)
        task = finished(name, draft, tokenizer, dataset.metric, dataset.max_tokens, dataset.is_chat)
        return replace(task, classes=tuple(record.all_classes or ()))

    def is_fitting(count: int) -> bool:
        return count <= len(words) and len(tokenizer.ids(build(count).prompt)) <= budget

    if is_fitting(len(words)):
        return build(len(words))
    if not is_fitting(0):
        raise ConfigError(f"{name}: length {budget} is too short even without a context; give a longer one")
    return build(largest(is_fitting, 0))

"""LongBench (arXiv 2308.14508), if the user has its files: one JSONL file per dataset, as its authors publish them.

Each line holds ``input``, ``context``, ``answers`` and, for classification, ``all_classes``. Prompts are our own
wording, unless the folder also holds the authors' ``dataset2prompt.json`` (and ``dataset2maxlen.json``), which then
apply. A context that is too long loses its middle, as in LongBench's own scripts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from hybrid_backend.config.reading import parse_json, read_object, reading
from hybrid_backend.config.rules import show
from hybrid_backend.errors import ConfigError
from hybrid_backend.tools.bench.accuracy.task import Draft, Task, Tokenizer, finished

_DOCUMENT = "Read the following {kind}, then answer a question about it in a few words, without an explanation.\n\n"
_QUESTION = "Answer in a few words, without an explanation.\n\nQuestion: {input}\nAnswer:"
_QASPER = 'Answer in a few words; write "unanswerable" if the article does not tell.\n\nQuestion: {input}\nAnswer:'


@dataclass(frozen=True)
class Dataset:
    """How one dataset is asked and judged. ``head + context + tail`` is the prompt; ``chat``: as a user's turn."""

    metric: str
    max_tokens: int
    head: str
    tail: str
    chat: bool = True
    joint: str = "\n\n"  # between context and tail
    between_words: str = " "  # where a context may be cut; empty: Chinese, anywhere


def _reading(kind: str, tail: str = _QUESTION, max_tokens: int = 32) -> Dataset:
    return Dataset("f1", max_tokens, _DOCUMENT.format(kind=kind), tail)


# Metrics and lengths of answers: LongBench, table 1 and its configuration. Few-shot sets are prompted without a chat
# template, and their answer ends with the line, as LongBench does.
DATASETS = {
    "narrativeqa": _reading("story", max_tokens=128),
    "qasper": _reading("scientific article", _QASPER, max_tokens=128),
    "multifieldqa_en": _reading("text", max_tokens=64),
    "hotpotqa": _reading("passages"),
    "2wikimqa": _reading("passages"),
    "musique": _reading("passages"),
    "dureader": Dataset(
        "rouge_l_characters",
        128,
        "请阅读以下文章，然后回答问题。\n\n",
        "请根据以上文章简短地回答。\n\n问题：{input}\n回答：",
        between_words="",
    ),
    "gov_report": Dataset(
        "rouge_l", 512, "Read the following report of a government agency.\n\n", "Summarize the report on one page."
    ),
    "qmsum": Dataset(
        "rouge_l", 512, "Read the following transcript of a meeting.\n\n", "Answer in some sentences: {input}\nAnswer:"
    ),
    "multi_news": Dataset(
        "rouge_l", 512, "Read the following news articles.\n\n", "Summarize all of these articles on one page."
    ),
    "trec": Dataset("classification", 64, "Name the type of a question, as in these examples.\n\n", "{input}", False),
    "triviaqa": Dataset(
        "f1_line", 32, "Answer a question about a passage, as in these examples.\n\n", "{input}", False
    ),
    "samsum": Dataset("rouge_l_line", 128, "Summarize a dialogue, as in these examples.\n\n", "{input}", False),
    "passage_retrieval_en": Dataset(
        "retrieval",
        32,
        "Find out which of these paragraphs is summarized at the end.\n\n",
        'Summary: {input}\n\nAnswer with the number of its paragraph alone, as in "Paragraph 1".\nAnswer:',
    ),
}
# ScoutAttention's eight (arXiv 2603.27138, section 4.2). It says "PassageRetrieval", not in which language.
DEFAULT = (
    "qasper",
    "narrativeqa",
    "2wikimqa",
    "dureader",
    "gov_report",
    "qmsum",
    "samsum",
    "passage_retrieval_en",
)


def load(folder: Path, names: Sequence[str], budget: int, tokenizer: Tokenizer, samples: int) -> list[Task]:
    """The first ``samples`` tasks of each dataset, prompts of at most ``budget`` tokens.

    Raises:
        ConfigError: A dataset is unknown, its file is missing, or a line is not LongBench's; names file and line.
    """
    for name in names:
        if name not in DATASETS:
            raise ConfigError(f"--longbench-datasets: no dataset {name!r}; there are {', '.join(DATASETS)}")
    missing = [name for name in names if not (folder / f"{name}.jsonl").is_file()]
    if missing:
        files = ", ".join(f"{name}.jsonl" for name in missing)
        raise ConfigError(
            f"--longbench {folder}: lacks {files}; get LongBench's data.zip (huggingface.co/datasets/THUDM/LongBench) "
            "and unpack it there, or choose fewer with --longbench-datasets"
        )
    prompts, lengths = _mapping(folder / "dataset2prompt.json", str), _mapping(folder / "dataset2maxlen.json", int)
    tasks = []
    for name in names:
        dataset = _official(DATASETS[name], prompts.get(name), lengths.get(name))
        for record in _records(folder / f"{name}.jsonl", samples):
            tasks.append(_task(name, dataset, record, budget, tokenizer))
    return tasks


def _official(dataset: Dataset, prompt: str | None, length: int | None) -> Dataset:
    dataset = replace(dataset, max_tokens=length or dataset.max_tokens)
    if prompt is None:
        return dataset
    head, _, tail = prompt.partition("{context}")
    return replace(dataset, head=head, tail=tail, joint="")


def _records(file: Path, samples: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with reading(file, "get the file anew"), file.open(encoding="utf-8") as lines:
        for number, line in enumerate(islice(lines, samples), 1):
            source = f"{file}: line {number}"
            record = parse_json(line, source, "get the file anew")
            if not isinstance(record, dict):
                raise ConfigError(f"{source} is not a JSON object; get the file anew")
            absent = {"input", "context", "answers"} - record.keys()
            if absent or not record["answers"]:
                lacks = ", ".join(sorted(absent)) or "answers"
                raise ConfigError(f"{source} lacks {lacks}; give files in LongBench's format")
            for key in ("answers", "all_classes"):
                if not isinstance(record.get(key) or [], list):
                    raise ConfigError(f"{source}: {key} is not a list; give files in LongBench's format")
            found.append(record)
    return found


def _mapping(file: Path, kind: type[Any]) -> dict[str, Any]:
    """Return the JSON object in a file, with only values of ``kind``; empty where there is no file."""
    fix = "take the file from LongBench's repository or remove it"
    if not file.exists():
        return {}
    mapping = read_object(file, fix)
    for name, value in mapping.items():
        if not isinstance(value, kind):
            raise ConfigError(f"{file}: {show(name)}: got {show(value)}, expected {kind.__name__}; {fix}")
    return mapping


def _task(name: str, dataset: Dataset, record: dict[str, Any], budget: int, tokenizer: Tokenizer) -> Task:
    context, space = str(record["context"]), dataset.between_words
    words = context.split(space) if space else context

    def cut(kept: int) -> str:
        """The context with ``kept`` words (or characters), half from each end."""
        if kept >= len(words):
            return context
        return space.join([*words[: kept - kept // 2], *words[len(words) - kept // 2 :]])

    def made(kept: int) -> Task:
        tail = dataset.tail.replace("{input}", str(record["input"]))
        draft = Draft(f"{dataset.head}{cut(kept)}", tail, "", tuple(map(str, record["answers"])), dataset.joint)
        classes = tuple(map(str, record.get("all_classes") or ()))
        how = tokenizer if dataset.chat else _Plain(tokenizer)
        return finished(name, draft, how, dataset.metric, dataset.max_tokens, classes)

    def fits(kept: int) -> bool:
        return len(tokenizer.ids(made(kept).prompt)) <= budget

    if fits(len(words)):
        return made(len(words))
    if not fits(0):
        raise ConfigError(f"{name}: length {budget} is too short even without a context; give a longer one")
    low, high = 0, len(words)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return made(low)


@dataclass(frozen=True)
class _Plain:
    """The same tokens without a chat template."""

    of: Tokenizer

    def ids(self, text: str) -> list[int]:
        return self.of.ids(text)

    def render(self, user: str, prefix: str) -> str:
        return user + prefix

"""README and the pages of docs/start and docs/guides can be read at once, and the commands in them run.

Links are checked by `make docs`, which fails at one that leads nowhere.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from typer.testing import CliRunner

from hybrid_backend.cli import app
from hybrid_backend.config import config_from_mapping, resolve_config
from hybrid_backend.errors import ConfigError
from tests.support.pages import PAGES, ROOT, Block, Command, blocks, commands, name_of, prose, sentences

LONGEST_README, LONGEST_SENTENCE = 700, 30
MAKEFILE = (ROOT / "Makefile").read_text()
BLOCKS, COMMANDS = blocks(), commands()
pages = pytest.mark.parametrize("page", PAGES, ids=name_of)


# -- prose --


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= LONGEST_README


@pages
def test_no_sentence_is_long(page: Path) -> None:
    all_sentences = [sentence for part in prose(page.read_text()) for sentence in sentences(part)]
    assert [sentence for sentence in all_sentences if len(sentence.split()) > LONGEST_SENTENCE] == []


@pages
def test_no_parenthesis_is_in_a_parenthesis(page: Path) -> None:
    assert [part for part in prose(page.read_text()) if re.search(r"\([^()]*\(", part)] == []


def test_sentences_are_told_apart() -> None:
    text = (
        "# A title\n\nIt is `a. B`, version 0.32. Then 3 more! See [the page. Or not](x.md) (now). "
        "`hybrid` runs\non.\n\n"
        "```bash\nhybrid. Not prose.\n```\n\n* one\n* two. Three\n\n| a | b c |\n| --- | --- |\n| d. E | |\n"
    )
    found = [sentence for part in prose(text) for sentence in sentences(part)]
    assert found == [
        "A title", "It is `code`, version 0.32.", "Then 3 more!", "See the page.", "Or not (now).", "`code` runs on.",
        "one", "two.", "Three", "a", "b c", "d.", "E",
    ]  # fmt: skip


# -- blocks of code --


@pages
def test_every_block_says_its_language(page: Path) -> None:
    """Indented blocks say none, and nobody would run what is in them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    assert not re.search(r"\n\n {4,}\S", re.sub(r"\n *[*-] .*(\n {2,}.*)*", "", text)), "a block without a fence"
    languages = {block.language for block in BLOCKS if block.page == name_of(page)}
    assert languages <= {"bash", "python", "yaml", "text"}


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=lambda block: block.page)
def test_a_configuration_is_one(block: Block) -> None:
    config_from_mapping(yaml.safe_load(block.text), block.page)


def test_the_only_python_is_the_first_answer() -> None:
    """`tests.engines.promises` runs it on every server; a second block needs a test that runs it, too."""
    (block,) = [block for block in BLOCKS if block.language == "python"]
    assert block.page == "README.md"
    ast.parse(block.text)


# -- commands --


def hybrid(command: Command) -> None:
    """Parse it, and run it if it needs no server, model or measurement."""
    words = list(command.words[1:])
    runs = words[0] in ("doctor", "version", "--help") or (
        words[0] == "plan" and not {"MODEL", "hardware.json"} & {*words}
    )
    if runs:
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0 or words == ["doctor"], result.output
        assert words[0] != "doctor" or re.search(r"\d+ ok, \d+ warning", result.stdout), result.output
        return
    group: Any = typer.main.get_command(app)
    while named := getattr(group, "commands", None):
        assert words[0] in named, words[0]
        group, words = named[words[0]], words[1:]
    # `serve` takes what it does not know for an engine's flags, so these must stand behind `--`.
    own = words[: words.index("--")] if "--" in words else words
    options = {option for parameter in group.params for option in parameter.opts + parameter.secondary_opts}
    assert {word.partition("=")[0] for word in own if word.startswith("--")} <= options
    group.make_context(group.name, list(words))
    settings = [word.removeprefix("--set=") for word in own if word.startswith("--set=")]
    settings += [after for before, after in pairwise(own) if before == "--set"]
    resolve_config("MODEL", None, {}, settings)


def make(command: Command) -> None:
    targets = re.findall(r"^([a-z-]+):", MAKEFILE, re.M)
    for word in command.words[1:]:
        name, is_variable, _ = word.partition("=")
        assert re.search(rf"^{name} +\?=", MAKEFILE, re.M) if is_variable else name in targets, word


def pip(command: Command) -> None:
    assert command.words[1] == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in command.words[2:]:
        if word.startswith((".", "hybrid-backend")):
            assert {*re.findall(r"[\w-]+", word.partition("[")[2])} <= {*extras}


def curl(command: Command) -> None:
    """Check the address and the JSON body; the engines' tests ask the same addresses."""
    assert re.search(
        r"(localhost|127\.0\.0\.1):\d+/(v1/(models|(chat/)?completions)|hybrid/status.json)$",
        " ".join(command.words[:3]).split(" -H")[0],
    )
    for before, body in pairwise(command.words):
        if before == "-d":
            assert {"model"} < {*json.loads(body)}


def python(command: Command) -> None:
    """Check that it is an example or an engine's server; `tests.engines.test_documented_flags` parses its flags."""
    if command.words[1].startswith("examples/"):
        assert (ROOT / command.words[1]).exists()
        return
    assert command.words[1:3] in {("-m", "vllm.entrypoints.openai.api_server"), ("-Pm", "sglang.launch_server")}


def elsewhere(command: Command) -> None:
    """Run nothing: the program is not here, or changes the machine. The files that it names are."""
    for word in command.words[1:]:
        if re.match(r"(docker|configs|recipes|tests|requirements|docs)/", word):
            assert (ROOT / word).exists(), word


def source(command: Command) -> None:
    assert command.words[1] in (".venv/bin/activate", ".venv-sglang/bin/activate", ".venv-cuda/bin/activate")


def ssh(command: Command) -> None:
    """Only the tunnel to the status page, whose port is that of `hybrid top`."""
    options = {option.name: option.default for option in typer.main.get_command(app).commands["top"].params}  # type: ignore[attr-defined]
    assert command.words[1:] == ("-L", f"{options['port']}:localhost:{options['port']}", "HOST")


ELSEWHERE = ("docker", "podman", "buildah", "kubectl", "helm", "apt-get", "sudo", "lm_eval", "jq", "mkdir", "pytest")
CHECKS: dict[str, Callable[[Command], None]] = {
    "hybrid": hybrid, "make": make, "pip": pip, "curl": curl, "python": python, "source": source, "ssh": ssh,
    **dict.fromkeys(ELSEWHERE, elsewhere),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_can_be_typed(command: Command) -> None:
    program = command.words[0]
    assert program in CHECKS, f"{program}: say here how a test knows that this command is right"
    CHECKS[program](command)


@pytest.mark.parametrize(
    "words",
    [
        "rm -rf build",
        "hybrid serve M --sett a=1",
        "hybrid serve M --set budgettokens=1024",
        "hybrid serv M",
        "hybrid plan M --contxt 1",
        "make sreve",
        "make serve PRT=1",
        "pip install hybrid-backend[nothing]",
        "docker build -f docker/Dockerfile.none",
        "curl localhost:8000/v2/completions",
    ],
)
def test_a_wrong_command_and_one_of_no_category_fail(words: str) -> None:
    with pytest.raises((AssertionError, ConfigError)):
        test_a_command_can_be_typed(Command("a page", (), tuple(words.split())))


# -- messages --


def test_every_message_of_the_troubleshooting_page_is_one_of_ours() -> None:
    """A message's fixed parts, between the ellipses, stand in one string of the sources."""
    page = (ROOT / "docs" / "guides" / "troubleshoot.md").read_text()
    messages = [
        text
        for cell in re.findall(r"^\| (.*?) \|", page, re.M)
        for text in re.findall(r"`([^`]*…[^`]*|the engine [^`]*)`", cell)
    ]
    assert len(messages) > 20
    texts = strings()
    for message in messages:
        fixed = [part.strip() for part in message.split("…") if part.strip(" :;,.")]
        assert any(all(part in text for part in fixed) for text in texts), message


def strings() -> list[str]:
    """Every string of the package's sources; in an f-string what is filled in is left out."""
    texts = []
    for path in [*(ROOT / "hybrid_backend").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts

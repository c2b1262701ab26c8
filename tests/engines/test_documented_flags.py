"""The engine's flags in README, docs/start and docs/guides are flags of the engine that is installed."""

from __future__ import annotations

import argparse

import pytest

from tests.engines.installed import ENGINE
from tests.support.pages import Command, commands

pytestmark = pytest.mark.engine


def flags_of(command: Command) -> tuple[str, list[str]]:
    """Return the engine's name and its flags in a command; no flags if it names none."""
    words = list(command.words)
    if words[:2] == ["hybrid", "serve"] and "--" in words:
        own = words[: words.index("--")]
        return ("sglang" if "sglang" in own else "vllm"), words[words.index("--") + 1 :]
    if words[:2] == ["make", "serve"]:
        engine = "sglang" if "ENGINE=sglang" in words else "vllm"
        return engine, [flag for word in words if word.startswith("ARGS=") for flag in word[5:].split()]
    if words[0] == "python" and words[1].endswith("m"):  # -m; others are examples
        return words[2].partition(".")[0], words[3:]
    return "", []


def parser() -> argparse.ArgumentParser:
    if ENGINE.NAME == "vllm":
        from hybrid_backend.engines.vllm.serve import _parser

        return _parser()
    from sglang.srt.server_args import ServerArgs

    result = argparse.ArgumentParser()
    ServerArgs.add_cli_args(result)
    return result


def test_the_engine_knows_every_flag() -> None:
    documented = [
        (command, flags)
        for command in commands()
        for engine, flags in [flags_of(command)]
        if flags and engine == ENGINE.NAME
    ]
    assert documented
    known = parser()
    names = {option for action in known._actions for option in action.option_strings}
    for command, flags in documented:
        used = {flag.partition("=")[0] for flag in flags if flag.startswith("--")}
        assert used <= names, f"{command}: {used - names}"

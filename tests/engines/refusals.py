"""Many command lines in one process, because importing the engine takes most of a refused start's time.

Reads a JSON list of jobs, runs them one after another and prints a JSON list of answers. A job is
``{"command": [...]}`` for ``hybrid COMMAND...`` or ``{"engine": [...]}`` for vLLM's own flags, of which the engine
configuration is created as vLLM does it; its answer then holds our part of that configuration. ``environment`` is
set for one job.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import psutil

from hybrid_backend.cli import app


def main() -> None:
    answers = [_answer(job) for job in json.load(sys.stdin)]
    json.dump(answers, sys.stdout)


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"code": 0, "config": None}
    environment = dict(os.environ)
    os.environ.update(job.get("environment", {}))
    files, children = set(os.listdir(tempfile.gettempdir())), _children()
    with tempfile.TemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as log:
        with _printing_to(log):
            try:
                if "command" in job:
                    sys.argv = ["hybrid", *job["command"]]  # vLLM looks at it
                    app()
                else:
                    answer["config"] = _engine_config(job["engine"])
            except SystemExit as error:
                answer["code"] = error.code
            except BaseException:
                answer["code"] = -1
                traceback.print_exc()
        log.seek(0)
        answer["output"] = log.read().decode()
    os.environ.clear()
    os.environ.update(environment)
    answer["left"] = sorted(set(os.listdir(tempfile.gettempdir())) - files) + sorted(_children() - children)
    return answer


def _engine_config(flags: list[str]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(flags)
    return AsyncEngineArgs.from_cli_args(parsed).create_engine_config().additional_config["hybrid"]


def _children() -> set[str]:
    """Child processes, without the helper that Python's own multiprocessing keeps."""
    lines = {child.pid: " ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)}
    return {f"process {pid}: {line}" for pid, line in lines.items() if "resource_tracker" not in line}


@contextmanager
def _printing_to(log: IO[bytes]) -> Iterator[None]:
    """File descriptors, so that what other libraries and processes print is caught too."""
    saved = [os.dup(1), os.dup(2)]
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, number)
            os.close(copy)


if __name__ == "__main__":
    main()

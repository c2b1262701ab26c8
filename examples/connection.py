"""The connection of the examples with a server: options, a client, and errors in one line."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openai import APIConnectionError, APIStatusError, OpenAI

URL = "http://localhost:8000/v1"
DOCUMENT = str(Path(__file__).parents[1] / "docs" / "reference" / "vllm.md")
"""A text of about 3,400 tokens."""


def parser(description: str | None) -> ArgumentParser:
    """Return a parser with the option ``--url``, whose help begins with the docstring of a script."""
    options = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    options.add_argument("--url", default=URL, help="the server's address (default: %(default)s)")
    return options


def text(path: str) -> str:
    """Return the text of a file that the command line names."""
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ArgumentTypeError(f"{path}: {error.strerror}") from None


@contextmanager
def connect(url: str) -> Iterator[tuple[OpenAI, str]]:
    """Yield a client of the server at ``url`` and the name of its model.

    The key is that of the environment variable ``OPENAI_API_KEY``. An error of the server ends the program with one
    line.
    """
    client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "unused"), max_retries=0)
    try:
        yield client, client.models.list().data[0].id
    except APIConnectionError:
        sys.exit(f"error: no server answers at {url}; start one with `make serve`, or give another address by --url")
    except APIStatusError as error:
        sys.exit(f"error: {url} answers with status {error.status_code}: {error.message}")

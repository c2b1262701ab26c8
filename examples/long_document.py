"""Ask two questions about one long document, and print how long the first token of each answer takes.

The document comes first in both prompts. The server computes it once: for the second question the keys and values of
the document are in the prefix cache.

    python examples/long_document.py
    python examples/long_document.py report.txt "Who wrote it?" "What does it ask for?"
"""

from __future__ import annotations

import time

from connection import DOCUMENT, connect, parser, text
from openai import OpenAI

QUESTIONS = ["How is the host pool's size chosen?", "What ends a server?"]


def ask(client: OpenAI, model: str, document: str, question: str, max_tokens: int) -> tuple[float, str]:
    """Return the seconds until the first token of the answer to ``question`` about ``document``, and the answer."""
    begin, first_token_seconds, answer = time.perf_counter(), 0.0, ""
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": document}, {"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
    ):
        piece = chunk.choices[0].delta.content or ""
        if piece and not answer:
            first_token_seconds = time.perf_counter() - begin
        answer += piece
    return first_token_seconds, answer


def main() -> None:
    """Ask the questions of the command line one after another."""
    options = parser(__doc__)
    options.add_argument("document", nargs="?", type=text, default=DOCUMENT, help="text file (default: %(default)s)")
    options.add_argument("questions", nargs="*", default=QUESTIONS)
    options.add_argument("--max-tokens", type=int, default=64, help="most tokens of an answer (default: %(default)s)")
    arguments = options.parse_args()
    with connect(arguments.url) as (client, model):
        for question in arguments.questions:
            seconds, answer = ask(client, model, arguments.document, question, arguments.max_tokens)
            print(f"{question}\n  first token after {seconds:.2f} s: {answer}\n")


if __name__ == "__main__":
    main()

"""Chat with a running server. Answers are streamed, and each question is asked with the conversation before it.

python examples/chat.py                                                 # Ctrl-D ends it
echo "What is the capital of Japan?" | python examples/chat.py
"""

from __future__ import annotations

import sys

from connection import connect, parser
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam


def answer(client: OpenAI, model: str, conversation: list[ChatCompletionMessageParam], max_tokens: int) -> str:
    """Print the answer to the last message of ``conversation`` as it comes, and return it."""
    text = ""
    for chunk in client.chat.completions.create(
        model=model, messages=conversation, max_tokens=max_tokens, temperature=0, stream=True
    ):
        piece = chunk.choices[0].delta.content or ""
        print(piece, end="", flush=True)
        text += piece
    print()
    return text


def main() -> None:
    """Read questions from the standard input until it ends."""
    options = parser(__doc__)
    options.add_argument("--max-tokens", type=int, default=256, help="most tokens of an answer (default: %(default)s)")
    arguments = options.parse_args()
    conversation: list[ChatCompletionMessageParam] = []
    with connect(arguments.url) as (client, model):
        while True:
            try:
                question = input(f"\n{model}> " if sys.stdin.isatty() else "")
            except EOFError:
                return
            conversation.append({"role": "user", "content": question})
            text = answer(client, model, conversation, arguments.max_tokens)
            conversation.append({"role": "assistant", "content": text})


if __name__ == "__main__":
    main()

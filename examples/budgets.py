"""Send one prompt several times at once, each time with a budget of its own, and print the answers.

A budget is the number of tokens that a sparse layer attends in a decode step. A request names its own in `vllm_xargs`;
one that names none gets the budget of the server's configuration. vLLM only: SGLang does not hand it on.

    python examples/budgets.py
    python examples/budgets.py --budgets 128 4096 --prompt-file report.txt
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from connection import DOCUMENT, connect, parser, text
from openai import OpenAI


def ask(client: OpenAI, model: str, prompt: str, budget_tokens: int | None, max_tokens: int) -> str:
    """Return the answer to ``prompt`` within ``budget_tokens``; None: within the server's own budget."""
    extra = {} if budget_tokens is None else {"vllm_xargs": {"budget_tokens": budget_tokens}}
    completion = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=0,
        extra_body=extra,
    )
    return completion.choices[0].message.content or ""


def main() -> None:
    """Ask with all budgets at once: requests of one batch may have different ones."""
    options = parser(__doc__)
    options.add_argument("--budgets", nargs="+", type=int, default=[128, 1024, 100_000], help="default: %(default)s")
    options.add_argument("--prompt-file", type=text, default=DOCUMENT, help="text to summarise (default: %(default)s)")
    options.add_argument("--max-tokens", type=int, default=48, help="most tokens of an answer (default: %(default)s)")
    arguments = options.parse_args()
    prompt = "Summarise:\n" + arguments.prompt_file
    budgets = [*arguments.budgets, None]
    with connect(arguments.url) as (client, model), ThreadPoolExecutor(len(budgets)) as pool:
        answers = pool.map(lambda budget: ask(client, model, prompt, budget, arguments.max_tokens), budgets)
        for budget, answer in zip(budgets, answers, strict=True):
            print(f"budget {budget or 'of the server'}: {' '.join(answer.split())}")


if __name__ == "__main__":
    main()

"""Compare a sparse answer with an exact one: print where they first differ, and the log-probabilities there.

Both answers come from one server: the sparse one attends `--budget` tokens in each step and layer, the exact one the
whole context. With `--exact-url` the exact answer comes from a second server, as of `hybrid serve MODEL --set
method=dense`. Sums in another order round differently, so two exact answers in bf16 may also part now and then.

    python examples/compare.py
    python examples/compare.py --budget 512 --prompt-file report.txt
"""

from __future__ import annotations

from connection import DOCUMENT, connect, parser, text
from openai.types.chat import ChatCompletionTokenLogprob

WHOLE_CONTEXT = 1_000_000_000


def answer(url: str, prompt: str, budget_tokens: int, max_tokens: int) -> list[ChatCompletionTokenLogprob]:
    """Return the tokens of the most probable answer within ``budget_tokens``, with their log-probabilities."""
    with connect(url) as (client, model):
        completion = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=max_tokens,
            temperature=0,
            logprobs=True,
            extra_body={"vllm_xargs": {"budget_tokens": budget_tokens}},
        )
    logprobs = completion.choices[0].logprobs
    return logprobs.content or [] if logprobs else []


def report(exact: list[ChatCompletionTokenLogprob], sparse: list[ChatCompletionTokenLogprob]) -> None:
    """Print the tokens that both answers share, and the first two that differ."""
    pairs = list(zip(exact, sparse, strict=False))
    shared = next((i for i, (a, b) in enumerate(pairs) if a.token != b.token), len(pairs))
    gap = max((abs(a.logprob - b.logprob) for a, b in pairs[:shared]), default=0.0)
    print(f"The same {shared} tokens: {''.join(token.token for token in exact[:shared])!r}")
    print(f"Largest difference of their log-probabilities: {gap:.4f}")
    if shared == max(len(exact), len(sparse)):
        print("The answers do not differ.")
        return
    for name, tokens in (("exact", exact), ("sparse", sparse)):
        if shared < len(tokens):
            print(f"Then {name}: {tokens[shared].token!r}, log-probability {tokens[shared].logprob:.4f}")
        else:
            print(f"Then {name} ends.")


def main() -> None:
    """Ask for both answers, the exact one first."""
    options = parser(__doc__)
    options.add_argument("--exact-url", help="another server for the exact answer")
    options.add_argument("--budget", type=int, default=128, help="of the sparse answer (default: %(default)s)")
    options.add_argument("--prompt-file", type=text, default=DOCUMENT, help="text to summarise (default: %(default)s)")
    options.add_argument("--max-tokens", type=int, default=64, help="most tokens of an answer (default: %(default)s)")
    arguments = options.parse_args()
    prompt = "Summarise:\n" + arguments.prompt_file
    exact = answer(arguments.exact_url or arguments.url, prompt, WHOLE_CONTEXT, arguments.max_tokens)
    report(exact, answer(arguments.url, prompt, arguments.budget, arguments.max_tokens))


if __name__ == "__main__":
    main()

"""Ask a model one question offline: vLLM's `LLM` class with the hybrid backend, without a server.

python examples/offline.py
python examples/offline.py "What is the capital of Peru?" --model Qwen/Qwen3-0.6B
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping


def main(description: str | None, config: Mapping[str, object] | None = None) -> None:
    """Read the command line, start the engine, and print the answer.

    Args:
        description: first lines of the help.
        config: keys of the configuration (docs/reference/configuration.md); None: the shipped file of the model.
    """
    options = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    options.add_argument("question", nargs="?", default="What is the capital of Japan?")
    options.add_argument("--model", default="smollm2-135m-instruct", help="name or folder (default: %(default)s)")
    arguments = options.parse_args()

    # These imports take seconds, so that --help does not wait for them.
    from vllm import LLM, SamplingParams

    from hybrid_backend.tools.hub import resolve_model

    llm = LLM(
        resolve_model(arguments.model),
        attention_backend="CUSTOM",
        enforce_eager=True,  # starts a minute sooner
        max_model_len=2048,
        kv_cache_memory_bytes=2**29,  # the host pool
        additional_config={"hybrid": config} if config else {},
    )
    question = [{"role": "user", "content": arguments.question}]
    (answer,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=32))
    print(answer.outputs[0].text)


if __name__ == "__main__":  # vLLM's worker processes import this file.
    main(__doc__)

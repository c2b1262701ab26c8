"""Prefill of one prompt at a time, a model's shape with random weights: seconds until the first token, by length."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.gpu_session.case import Context

ROUNDS = 2


def measure(options: Mapping[str, Any], context: Context) -> None:
    """Time prompts of each length, the shortest first, after a warm-up; each prompt has other tokens."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from bench.gpu_decode import engine_options
    from bench.model_configs import SHAPES
    from bench.shapes import write_config

    contexts, kind = sorted(options["contexts"]), options["kind"]
    engine = engine_options(kind, options["card_gb"], options["host_bytes"], options["engine"], {})
    rng, vocabulary = random.Random(0), SHAPES[options["shape"]]["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        model = str(write_config(options["shape"], Path(folder)))
        llm = LLM(model, max_num_seqs=1, max_model_len=contexts[-1] + 64, **engine)
        context.emit(kind=kind, start_seconds=round(time.perf_counter() - began, 1))

        def first_token(tokens: int) -> float:
            prompt = [rng.randrange(vocabulary) for _ in range(tokens)]
            began = time.perf_counter()
            sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
            llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
            return time.perf_counter() - began

        first_token(contexts[0])
        for tokens in contexts:
            times = sorted(first_token(tokens) for _ in range(ROUNDS))
            context.emit(
                kind=kind, card_gb=options["card_gb"], context=tokens, seconds=times[0], slowest_seconds=times[-1],
                tokens_per_second=tokens / times[0],
            )  # fmt: skip

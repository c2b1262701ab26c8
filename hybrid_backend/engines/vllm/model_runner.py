"""Patches of vLLM's model runners: the requests of a V2 batch, and rows that yield no token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def watch_batches(runner: Any, set_batch: Callable[[Any], None]) -> None:
    """Have ``set_batch`` called with the input batch of each step, if the runner is V2.

    The V1 runner keeps its input batch (``GPUModelRunner.input_batch``). The V2 runner has one per step, which it hands
    to the model's state (v1/worker/gpu/model_states/interface.py, ``ModelState.prepare_attn``). Some model states do
    not pass it on to the builders.
    """
    if hasattr(runner, "input_batch"):
        return
    prepare = runner.model_state.prepare_attn

    def prepare_attn(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        set_batch(input_batch)
        return prepare(input_batch, *args, **kwargs)

    runner.model_state.prepare_attn = prepare_attn


@contextmanager
def without_tokens(runner: Any, request_ids: Sequence[str]) -> Iterator[None]:
    """Have the V1 runner drop the tokens that it samples in the context for rows of these requests.

    ``GPUModelRunner._bookkeeping_sync`` (v1/worker/gpu_model_runner.py) drops tokens of rows in
    ``discard_request_mask``, which is made for prompts in chunks. It also sets their generators back, which a CPU's
    generators refuse; so these are taken out of the batch meanwhile. Prompts' log-probabilities are taken out as well,
    because they would be returned with a token that does not exist.
    """
    if not request_ids:
        yield
        return
    batch, prompt_logprobs = runner.input_batch, runner.num_prompt_logprobs
    rows = [batch.req_id_to_index[request_id] for request_id in request_ids]
    runner.discard_request_mask.np[rows] = True
    generators = {row: batch.generators.pop(row) for row in rows if row in batch.generators}
    removed = {name: prompt_logprobs.pop(name) for name in request_ids if name in prompt_logprobs}
    try:
        yield
    finally:
        batch.generators.update(generators)
        prompt_logprobs.update(removed)

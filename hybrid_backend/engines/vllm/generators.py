"""Seeded requests whose prompts come in chunks, in vLLM's V1 model runner on a CPU.

The runner samples for every row. ``GPUModelRunner._bookkeeping_sync`` (v1/worker/gpu_model_runner.py) drops the token
of a prompt that is not computed to its end (``discard_request_mask``), and sets the row's generator back by
``Generator.set_offset``. PyTorch's CPU generator has no offset: "CPU Generator does not use offset" ends the engine.
A row without a generator in ``InputBatch.generators`` is sampled like an unseeded one, and no generator is set back.
docs/lab/upstream.md reports the defect. Delete this file when vLLM has corrected it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def without_generators_of_chunks(runner: Any) -> Iterator[None]:
    """Take generators that cannot be set back out of the batch, for rows whose token is dropped, while vLLM samples.

    Args:
        runner: vLLM's model runner. The V2 runner has no ``discard_request_mask``, and is left alone.
    """
    has_mask = hasattr(runner, "discard_request_mask")
    generators: dict[int, torch.Generator] = runner.input_batch.generators if has_mask else {}
    dropped = [row for row in generators if runner.discard_request_mask.np[row]]
    removed = {row: generators.pop(row) for row in dropped if not has_offset(generators[row])}
    try:
        yield
    finally:
        generators.update(removed)


def has_offset(generator: torch.Generator) -> bool:
    """Tell whether a generator can be set back by its offset, which depends on its device and on PyTorch."""
    try:
        generator.get_offset()
    except RuntimeError:
        return False
    return True

"""A vLLM logits processor that makes a request begin with a given text (``vllm_xargs: {"forced": [token ids]}``).

What comes after the text is free. vLLM reports log-probabilities before logits processors run, so two servers that
follow the same text can be compared position by position. Start the server with
``--logits-processors hybrid_backend.tools.bench.accuracy.teacher:Forced``, on a GPU with VLLM_USE_V2_MODEL_RUNNER=0.
"""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class _Follow:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_ids) >= len(self.tokens):
            return logits
        forced = torch.full_like(logits, float("-inf"))
        forced[self.tokens[len(output_ids)]] = 0.0
        return forced


class Forced(AdapterLogitsProcessor):
    """Per request: begin with ``extra_args["forced"]``, if given."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> _Follow | None:
        tokens = (params.extra_args or {}).get("forced")
        return _Follow([int(token) for token in tokens]) if tokens else None

"""A vLLM logits processor that makes a request follow a given text (``vllm_xargs: {"forced": [token ids]}``).

vLLM reports log-probabilities before logits processors run, so two servers that follow the same text can be compared
position by position. Start the server with ``--logits-processors bench.teacher:Forced``.
"""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class _Follow:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(logits, float("-inf"))
        forced[self.tokens[min(len(output_ids), len(self.tokens) - 1)]] = 0.0
        return forced


class Forced(AdapterLogitsProcessor):
    """Per request: follow ``extra_args["forced"]``, if given."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> _Follow | None:
        tokens = (params.extra_args or {}).get("forced")
        return _Follow([int(token) for token in tokens]) if tokens else None

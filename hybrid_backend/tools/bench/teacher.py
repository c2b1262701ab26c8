"""A vLLM logits processor that makes an answer begin with a forced text (``vllm_xargs: {"forced": [token ids]}``).

vLLM reports log-probabilities before logits processors run, so two servers that follow the same text can be compared
position by position. Start the server with `fidelity.FIDELITY_FLAGS`, on a GPU also with `FIDELITY_ENVIRONMENT`.
"""

from __future__ import annotations

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class _Follow:
    """Logits processor of one request, which allows only the next forced token until all are generated."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_ids) >= len(self.tokens):
            return logits
        forced = torch.full_like(logits, float("-inf"))
        forced[self.tokens[len(output_ids)]] = 0.0
        return forced


class Forced(AdapterLogitsProcessor):
    """Logits processor of a server: a request with ``extra_args["forced"]`` begins with these tokens."""

    def is_argmax_invariant(self) -> bool:
        """Return False: forcing changes the most likely token."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> _Follow | None:
        """Return the logits processor of a request, None if the request forces nothing."""
        tokens = (params.extra_args or {}).get("forced")
        return _Follow([int(token) for token in tokens]) if tokens else None

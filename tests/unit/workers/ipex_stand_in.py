"""Runs `ipex_process.py` with a stand-in for IPEX's operator, so that everything around it is tested everywhere."""

from __future__ import annotations

import runpy
import sys
import types
from pathlib import Path

import torch
from torch import Tensor

PROGRAM = Path(__file__).parents[3] / "hybrid_backend" / "workers" / "ipex_process.py"


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attention_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The operator's contract: ``[batch, heads, queries, head_dim]`` in and out, lse ``[batch, heads, queries]``."""
    assert scale is not None and attention_mask is None
    logits = query.float() @ key.float().transpose(2, 3) * scale
    return (logits.softmax(-1) @ value.float()).to(query.dtype), logits.logsumexp(-1)


if __name__ == "__main__":
    stand_in = types.ModuleType("intel_extension_for_pytorch")
    stand_in.__dict__["__version__"] = "stand-in"
    sys.modules["intel_extension_for_pytorch"] = stand_in
    library = torch.library.Library("torch_ipex", "DEF")
    library.define(
        "flash_attention(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, "
        "Tensor? attention_mask=None, float? scale=None) -> (Tensor, Tensor)"
    )
    library.impl("flash_attention", flash_attention, "CPU")
    runpy.run_path(str(PROGRAM), run_name="__main__")

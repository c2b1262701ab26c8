"""Models of a real model's shape without its weights, and a KV cache that is full without a prefill.

vLLM's DecodeBenchConnector fills the KV pages of a prompt with random numbers instead of computing them, so that
decoding at a long context can be timed on a machine on which the prefill would take an hour.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import (
    DecodeBenchConnector,
    DecodeBenchConnectorMetadata,
)

from bench.model_configs import SHAPES
from hybrid_backend.tools.hub import fetch

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext

EXTRA = {"fill_mean": 0.0, "fill_std": 1.0}
CONNECTOR = {
    "kv_connector": "FilledKV",
    "kv_connector_module_path": "bench.shapes",
    "kv_role": "kv_both",
    "kv_connector_extra_config": EXTRA,
}
FLAGS = ("--load-format", "dummy", "--kv-transfer-config", json.dumps(CONNECTOR))


def write_config(name: str, folder: Path) -> Path:
    """Write a model directory with the shape's configuration alone, for engines that need no tokenizer."""
    target = folder / f"{name}-shape"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(SHAPES[name]))
    return target


def write_shape(name: str, folder: Path, tokenizer_folder: Path | None = None) -> Path:
    """Write a model directory with the shape's configuration and a tokenizer, by default the demo model's.

    The tokenizer only has to have a name for each id that random weights may choose.
    """
    target = write_config(name, folder)
    for file in (tokenizer_folder or fetch("smollm2-135m-instruct")).iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "vocab", "merges")):
            shutil.copy(file, target)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first = 1 + max(*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"]))
    vocabulary.update({f"<unused{i}>": i for i in range(first, SHAPES[name]["vocab_size"])})
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    return target


def peak(model: nn.Module) -> None:
    """Fill a model with random weights that make attention peaked; with vLLM's own every page is as good as any other.

    Both numbers are chosen, not taken from a trained model. Logits over filled pages have a standard deviation of 2.
    Tokens' embeddings have a common part, so that hidden states of consecutive steps have a cosine of about 0.9, which
    CLO (arXiv 2511.14510, section 2.3) reports between queries.
    """
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if not weight.is_floating_point():
                continue
            sharp = 2.0 if any(name in path for name in ("qkv_proj", "q_norm", "k_norm")) else 1.0
            if weight.dim() == 1:
                weight.fill_(0.0 if path.endswith("bias") else sharp)
            else:
                weight.normal_(0.0, sharp * weight.shape[-1] ** -0.5)
            if "embed_tokens" in path:
                weight.add_(3 * torch.randn(weight.shape[1], device=weight.device, dtype=weight.dtype) * weight.std())


class FilledKV(DecodeBenchConnector):  # type: ignore[misc]
    """DecodeBenchConnector that also brings the digests of the pages it filled up to date."""

    updates_digests = True

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        metadata = self._connector_metadata
        assert isinstance(metadata, DecodeBenchConnectorMetadata)
        runtimes = {
            id(runtime): runtime
            for layer in forward_context.no_compile_layers.values()
            if (runtime := getattr(getattr(layer, "impl", None), "runtime", None)) is not None
        }
        spread = self._kv_transfer_config.get_from_extra_config("page_spread", 0.0)
        for groups, _ in metadata.reqs_to_fill.values():
            for runtime in runtimes.values():
                for pages in map(torch.tensor, groups):
                    if spread:
                        spread_pages(runtime.tiers.host.views, pages, spread)
                    runtime.imported(pages)


def spread_pages(layers: Sequence[Tensor], pages: Tensor, spread: float) -> None:
    """Scale the keys of each page by exp(N(0, ``spread``)), so that some pages matter more than others to any query.

    Pages of random numbers are all alike, and a selection among them changes with every query. The spread is a choice
    of the share that stays resident, not a measurement of a trained model: with 0.03, 64 of 1,024 pages and 142 frames,
    90 % of what independent queries select is resident (with 0: 63 %). ScoutAttention (section 4.2) reports 92 %.
    """
    for layer, memory in enumerate(layers):
        if len(memory):
            rng = torch.Generator().manual_seed(layer)
            scale = torch.exp(spread * torch.randn(len(memory), generator=rng))[pages]
            there = pages.to(memory.device)
            keys = memory[there, :, 0] * scale.to(memory.device, memory.dtype)[:, None, None, None]
            memory[there, :, 0] = keys

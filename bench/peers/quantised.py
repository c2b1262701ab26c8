"""The model as vLLM reads quantised weights: compressed-tensors, made from the catalogue's safetensors.

vLLM's CPU kernels: ``W8A8`` (oneDNN, with AMX its own), ``W4A16`` (AVX-512; with AMX it quantises inputs, too, unless
``VLLM_CPU_INT4_W4A8=0``). The output layer stays in the model's dtype: vLLM has no quantised one that is tied to the
embedding, as SmolLM2's and Qwen's.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from bench.peers.files import made_once
from hybrid_backend.tools.hub import fetch

GROUP = 32
"""Inputs that share a scale of 4-bit weights: as in GGUF's Q4_0, and as widths that 128 does not divide need it."""
_BESIDE = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def quantised_folder(model: str, scheme: str) -> Path:
    """Return the catalogue's ``model`` with weights of ``scheme`` (W8A8, W4A16), made beside its safetensors once."""
    from transformers import AutoModelForCausalLM

    from tests.support.quantised import save_quantised

    folder = fetch(model)

    def make(work: Path) -> Path:
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        made = save_quantised(loaded, work / "model", scheme, GROUP if scheme == "W4A16" else None)
        for name in _BESIDE:
            if (folder / name).exists():
                shutil.copy(folder / name, made / name)
        return made

    return made_once(folder.parent / f"{folder.name}.{scheme}", make)

"""Conversion of a GGUF file of the catalog to a Hugging Face model directory (architectures ``llama`` and ``qwen2``).

transformers dequantises the weights, gives them their Hugging Face names and undoes llama.cpp's order of query and key
rows. The tokenizer is built here, because transformers' GGUF reader does not split digits for the ``smollm``
pre-tokenizer. The catalog's digest says which file comes, so a file is not examined beyond what the catalog has.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from hybrid_backend.config.reading import full_disk
from hybrid_backend.errors import ModelError

_CONTROL, _USER_DEFINED = 3, 4
"""Values of ``tokenizer.ggml.token_type``."""
_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens by the names of transformers and of GGUF."""
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern of Qwen2's pre-tokenizer (its tokenizer.json)."""
Fields = Mapping[str, Any]
"""Key-value part of a GGUF file."""


def convert(source: Path, target: Path, *, name: str, sampling: Mapping[str, float] | None = None) -> None:
    """Write the GGUF file ``source`` as a model directory into the existing, empty directory ``target``.

    `fetch.CONVERTER_VERSION` must be raised when the result changes.

    Args:
        source: the file.
        target: the directory.
        name: the model's hub id, which becomes ``_name_or_path`` in config.json.
        sampling: values for generation_config.json.

    Raises:
        ModelError: a model or a tokenizer of a kind that the catalog does not have.
        OSError: the disk is full.
    """
    fields = {key: field.contents() for key, field in gguf.GGUFReader(source).fields.items()}
    architecture, tokenizer = fields["general.architecture"], fields.get("tokenizer.ggml.pre")
    if architecture not in ("llama", "qwen2") or tokenizer not in ("smollm", "qwen2"):
        raise ModelError(f"a GGUF of architecture {architecture!r}, tokenizer {tokenizer!r} cannot be converted")
    config = read_config(fields)
    tensors = read_tensors(source, config)
    ids = {token: fields.get(f"tokenizer.ggml.{key}_token_id") for token, key in _TOKENS.items()}
    try:
        write_tokenizer(fields, ids, config["max_position_embeddings"], target)
        tokens = {f"{token}_token_id": ids[token] for token in ("bos", "eos", "pad")}
        content = {
            "_name_or_path": name,
            "architectures": [f"{architecture.capitalize()}ForCausalLM"],
            **config,
            "tie_word_embeddings": "lm_head.weight" not in tensors,
            "torch_dtype": "bfloat16",
            **tokens,
        }
        _write_json(target / "config.json", content)
        named_tokens = {key: token for key, token in tokens.items() if token is not None}
        _write_json(target / "generation_config.json", {**named_tokens, **(sampling or {})})
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    except Exception as error:
        # safetensors and tokenizers have exceptions of their own for a full disk.
        raise full_disk(str(error)) or error from None
    # safetensors makes the file private. A cache can be shared, so the file gets the mode of the others.
    shutil.copymode(target / "config.json", target / "model.safetensors")


def read_config(fields: Fields) -> dict[str, Any]:
    """Return the sizes of the model by transformers' names."""
    kind = fields["general.architecture"]
    sizes = {key.removeprefix(f"{kind}."): value for key, value in fields.items() if key.startswith(f"{kind}.")}
    heads, hidden = int(sizes["attention.head_count"]), int(sizes["embedding_length"])
    return {
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(sizes["feed_forward_length"]),
        "max_position_embeddings": int(sizes["context_length"]),
        "num_attention_heads": heads,
        "num_hidden_layers": int(sizes["block_count"]),
        "num_key_value_heads": int(sizes.get("attention.head_count_kv", heads)),
        "rms_norm_eps": _short(sizes["attention.layer_norm_rms_epsilon"]),
        "rope_scaling": None,
        "rope_theta": _short(sizes.get("rope.freq_base", 10000.0)),
        "use_cache": True,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "model_type": kind,
        **({"attention_bias": False, "head_dim": hidden // heads, "mlp_bias": False} if kind == "llama" else {}),
    }


def read_tensors(source: Path, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return all weights in bfloat16; without an output projection where the embeddings serve as one.

    Raises:
        ModelError: the file lacks a tensor.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    tensors = load_gguf_checkpoint(source, return_tensors=True, model_to_load=model)["tensors"]
    if missing := model.state_dict().keys() - tensors.keys() - {"lm_head.weight"}:
        raise ModelError(f"the GGUF lacks {min(missing)!r}; it cannot be converted")
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def write_tokenizer(fields: Fields, ids: Mapping[str, int | None], context: int, target: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, with the chat template."""
    tokens = fields["tokenizer.ggml.tokens"]
    build_tokenizer(fields).save(str(target / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": None if index is None else tokens[index] for name, index in ids.items()},
        "chat_template": fields.get("tokenizer.chat_template"),
    }
    _write_json(target / "tokenizer_config.json", {key: value for key, value in config.items() if value is not None})


def build_tokenizer(fields: Fields) -> Tokenizer:
    """Return the byte-level BPE tokenizer that the fields describe."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    if fields["tokenizer.ggml.pre"] == "smollm":
        splitters = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated")
        splitters = [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])
    return tokenizer


def _short(value: float) -> float:
    """Return the shortest decimal of a float32 (1e-05 and not 9.999999747378752e-06)."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

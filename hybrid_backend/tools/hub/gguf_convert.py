"""Conversion of a GGUF file to a Hugging Face model directory (architectures ``llama`` and ``qwen2``).

transformers dequantises the weights, gives them their Hugging Face names and undoes llama.cpp's order of query and key
rows. The tokenizer is built here, because transformers' GGUF reader does not split digits for the ``smollm``
pre-tokenizer. Whatever is not supported is refused, because a model that is silently wrong is worse than none.
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

from hybrid_backend.config.reading import full_disk, reading
from hybrid_backend.errors import ModelError
from hybrid_backend.tools.counts import counted

_CONTROL, _USER_DEFINED = 3, 4
"""Values of ``tokenizer.ggml.token_type``."""
_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens by the names of transformers and of GGUF."""
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern of Qwen2's pre-tokenizer (its tokenizer.json)."""
Tensors = dict[str, torch.Tensor]


class Metadata:
    """Key-value part of a GGUF file."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields
        self.kind = self.require("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, in which ``ARCH`` stands for the architecture."""
        field = self._fields.get(key.replace("ARCH", getattr(self, "kind", "")))
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        """Return a value that must be there."""
        value = self.get(key)
        if value is None:
            raise ModelError(f"the GGUF has no {key.replace('ARCH', self.kind)!r}; it cannot be converted")
        return value

    def token_id(self, name: str) -> int | None:
        """Return the id of a special token, named as in transformers."""
        index: int | None = self.get(f"tokenizer.ggml.{_TOKENS[name]}_token_id")
        return index


def convert(source: Path, target: Path, *, name: str, sampling: Mapping[str, float] | None = None) -> None:
    """Write the GGUF file ``source`` as a model directory into the existing, empty directory ``target``.

    `fetch.CONVERTER_VERSION` must be raised when the result changes.

    Args:
        source: the file.
        target: the directory.
        name: the model's hub id, which becomes ``_name_or_path`` in config.json.
        sampling: values for generation_config.json.

    Raises:
        ModelError: the file is damaged, or not supported.
        OSError: the disk is full.
    """
    try:
        # A damaged file can raise any exception in any of these steps.
        with reading(source.name, "fetch the model again", ModelError, "GGUF"):
            reader = gguf.GGUFReader(source)
            metadata = Metadata(reader)
            config = read_config(metadata)
            write_tokenizer(metadata, config["max_position_embeddings"], target)
            tensors, is_tied = read_tensors(source, config, len(reader.tensors))
            write_config(metadata, config, target, name, is_tied, sampling or {})
            save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    except ModelError as error:
        # safetensors and tokenizers have exceptions of their own for a full disk.
        raise full_disk(str(error.__cause__)) or error from None
    # safetensors makes the file private. A cache can be shared, so the file gets the mode of the others.
    shutil.copymode(target / "config.json", target / "model.safetensors")


def read_config(metadata: Metadata) -> dict[str, Any]:
    """Return the sizes of the model by transformers' names.

    Raises:
        ModelError: an architecture or a variant that is not supported.
    """
    if metadata.kind not in ("llama", "qwen2"):
        raise ModelError(f"the GGUF's architecture is {metadata.kind!r}; only 'llama' and 'qwen2' can be converted")
    heads = int(metadata.require("ARCH.attention.head_count"))
    hidden = int(metadata.require("ARCH.embedding_length"))
    head_dim = int(metadata.get("ARCH.attention.key_length", hidden // heads))
    unsupported = {
        "uses RoPE scaling": metadata.get("ARCH.rope.scaling.type", "none") != "none",
        "is a mixture of experts": metadata.get("ARCH.expert_count", 0),
        "rotates only a part of each head": metadata.get("ARCH.rope.dimension_count", head_dim) != head_dim,
    }
    for what, is_so in unsupported.items():
        if is_so:
            raise ModelError(f"the GGUF {what}, which the converter does not support")
    return {
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(metadata.require("ARCH.feed_forward_length")),
        "max_position_embeddings": int(metadata.require("ARCH.context_length")),
        "num_attention_heads": heads,
        "num_hidden_layers": int(metadata.require("ARCH.block_count")),
        "num_key_value_heads": int(metadata.get("ARCH.attention.head_count_kv", heads)),
        "rms_norm_eps": _short(metadata.require("ARCH.attention.layer_norm_rms_epsilon")),
        "rope_scaling": None,
        "rope_theta": _short(metadata.get("ARCH.rope.freq_base", 10000.0)),
        "use_cache": True,
        "vocab_size": len(metadata.require("tokenizer.ggml.tokens")),
        "model_type": metadata.kind,
        **({"attention_bias": False, "head_dim": head_dim, "mlp_bias": False} if metadata.kind == "llama" else {}),
    }


def read_tensors(source: Path, config: Mapping[str, Any], count: int) -> tuple[Tensors, bool]:
    """Return all weights in bfloat16, and whether the embeddings are the output projection too.

    Args:
        source: the GGUF file.
        config: see `read_config`.
        count: tensors in the file.

    Raises:
        ModelError: a tensor is unknown, missing or has another shape than the configuration says.
    """
    if config["num_hidden_layers"] > count:
        raise ModelError(
            f"the GGUF has {counted(count, 'tensor')}, fewer than its {config['num_hidden_layers']} layers"
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    tensors: Tensors = load_gguf_checkpoint(source, return_tensors=True, model_to_load=model)["tensors"]
    if len(tensors) < count:
        raise ModelError(f"the GGUF has {counted(count - len(tensors), 'tensor')} that the converter does not know")
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    missing = expected.keys() - tensors.keys() - {"lm_head.weight"}
    if missing:
        raise ModelError(f"the GGUF lacks {counted(len(missing), 'tensor')}, among them {min(missing)!r}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name]:
            raise ModelError(f"tensor {name!r} is {tuple(tensor.shape)}, expected {expected[name]}")
        tensors[name] = tensor.to(torch.bfloat16)
    return tensors, "lm_head.weight" not in tensors


def write_config(
    metadata: Metadata, config: Mapping[str, Any], target: Path, name: str, is_tied: bool, sampling: Mapping[str, float]
) -> None:
    """Write config.json and generation_config.json."""
    tokens = {f"{token}_token_id": metadata.token_id(token) for token in ("bos", "eos", "pad")}
    architecture = f"{metadata.kind.capitalize()}ForCausalLM"
    _write_json(
        target / "config.json",
        {
            "_name_or_path": name,
            "architectures": [architecture],
            **config,
            "tie_word_embeddings": is_tied,
            "torch_dtype": "bfloat16",
            **tokens,
        },
    )
    named_tokens = {key: token for key, token in tokens.items() if token is not None}
    _write_json(target / "generation_config.json", {**named_tokens, **sampling})


def write_tokenizer(metadata: Metadata, context: int, target: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, with the chat template."""
    tokens: list[str] = metadata.require("tokenizer.ggml.tokens")
    build_tokenizer(metadata, tokens).save(str(target / "tokenizer.json"))
    ids = {name: metadata.token_id(name) for name in _TOKENS}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": None if index is None else tokens[index] for name, index in ids.items()},
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
    _write_json(target / "tokenizer_config.json", {key: value for key, value in config.items() if value is not None})


def build_tokenizer(metadata: Metadata, tokens: list[str]) -> Tokenizer:
    """Return the byte-level BPE tokenizer that the metadata describes.

    Raises:
        ModelError: a tokenizer of another kind.
    """
    model, flavour = metadata.require("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2" or flavour not in ("smollm", "gpt-2", "qwen2"):
        raise ModelError(f"the GGUF's tokenizer is {model}/{flavour}; only gpt2 with smollm, gpt-2 and qwen2 is known")
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        raise ModelError("the GGUF's tokenizer adds a BOS token, which the converter does not support")
    merges = [tuple(merge.split(" ")) for merge in metadata.require("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    splitters: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if flavour == "smollm":
        splitters.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif flavour == "qwen2":
        words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated")
        splitters = [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitters[0] if len(splitters) == 1 else pre_tokenizers.Sequence(splitters)
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    for token, kind in zip(tokens, types, strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])
    return tokenizer


def _short(value: float) -> float:
    """Return the shortest decimal of a float32 (1e-05 and not 9.999999747378752e-06)."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

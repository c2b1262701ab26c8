"""GGUF -> a Hugging Face model directory, for the architectures `llama` and `qwen2` with a byte-level BPE tokenizer.

Weights are dequantised by gguf's own code and stored in bfloat16. llama.cpp interleaves the rows of every
query and key head of a llama (its rotary embedding turns neighbouring pairs, Hugging Face's turns halves); that is
undone here. The tokenizer is built with `tokenizers` directly, because transformers' own GGUF reader does not
split digits for the `smollm` pre-tokenizer. What the converter does not know it refuses: a model that is
quietly wrong is worse than none.

`fetch.CONVERTER_VERSION` must be raised when this module writes something else than before.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from hybrid_backend.config.reading import full_disk, reading
from hybrid_backend.errors import ModelError
from hybrid_backend.tools.counts import counted

_CONTROL, _USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`."""

_GLOBAL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    **{f"attn_{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"},  # of qwen2
}

_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2's tokenizer splits text (its tokenizer.json)."""

Array = npt.NDArray[Any]
OnTensor = Callable[[int, int], None]


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of the model, read from the metadata."""

    architecture: str  # llama or qwen2
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rms_eps: float
    rope_theta: float


class Metadata:
    """The key-value part of a GGUF file; a missing key is a `ModelError`."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(f"the GGUF has no {key!r}; it cannot be converted")
        return value


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    """A reader that refuses to read beyond the end of the file, where gguf's own returns nothing and goes on."""

    def _get(self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: Any = None) -> Array:
        values: Array = super()._get(offset, dtype, count, override_order)
        if len(values) < count:
            raise ValueError("the file is cut short")
        return values


def convert(
    source: Path,
    target: Path,
    *,
    name: str,
    sampling: Mapping[str, float] | None = None,
    on_tensor: OnTensor | None = None,
) -> None:
    """Write the GGUF `source` as a model directory into the existing, empty directory `target`.

    `name` becomes config.json's `_name_or_path`, `sampling` is added to generation_config.json;
    `on_tensor(done, total)` is called after every tensor.

    Raises:
        ModelError: the file is damaged, or not supported.
        OSError: the disk is full.
    """
    try:
        # Parsed data is read in all steps, so a damaged file can be noticed in each of them.
        with reading(source.name, "fetch the model again", ModelError, "GGUF"):
            reader = _Reader(source)
            metadata = Metadata(reader)
            shape = read_shape(metadata)
            # The tokenizer first: it is quick, and most of what can be unsupported is there.
            write_tokenizer(metadata, shape, target)
            tensors = read_tensors(reader, shape, on_tensor)
            tied = "lm_head.weight" not in tensors
            write_config(metadata, shape, target, name=name, tied=tied, sampling=sampling or {})
            save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    except ModelError as error:
        # Both libraries that write here, safetensors and tokenizers, have errors of their own for a full disk.
        raise full_disk(str(error.__cause__)) or error from None
    # safetensors makes the file private; give it the mode of the others, so that a cache can be shared.
    shutil.copymode(target / "config.json", target / "model.safetensors")


def read_shape(metadata: Metadata) -> LlamaShape:
    """The sizes of a `llama` or `qwen2` GGUF; anything else is refused."""
    kind = metadata.require("general.architecture")
    if kind not in ("llama", "qwen2"):
        raise ModelError(f"the GGUF's architecture is {kind!r}; only 'llama' and 'qwen2' can be converted")
    if metadata.get(f"{kind}.rope.scaling.type", "none") != "none":
        raise ModelError("the GGUF uses RoPE scaling, which the converter does not support")
    if metadata.get(f"{kind}.expert_count", 0):
        raise ModelError("the GGUF is a mixture of experts, which the converter does not support")
    heads = int(metadata.require(f"{kind}.attention.head_count"))
    hidden = int(metadata.require(f"{kind}.embedding_length"))
    head_dim = int(metadata.get(f"{kind}.attention.key_length", hidden // heads))
    if int(metadata.get(f"{kind}.rope.dimension_count", head_dim)) != head_dim:
        raise ModelError("the GGUF rotates only a part of each head, which the converter does not support")
    return LlamaShape(
        architecture=kind,
        layers=int(metadata.require(f"{kind}.block_count")),
        hidden=hidden,
        intermediate=int(metadata.require(f"{kind}.feed_forward_length")),
        heads=heads,
        kv_heads=int(metadata.get(f"{kind}.attention.head_count_kv", heads)),
        head_dim=head_dim,
        vocab=len(metadata.require("tokenizer.ggml.tokens")),
        context=int(metadata.require(f"{kind}.context_length")),
        rms_eps=_short(metadata.require(f"{kind}.attention.layer_norm_rms_epsilon")),
        rope_theta=_short(metadata.get(f"{kind}.rope.freq_base", 10000.0)),
    )


def read_tensors(
    reader: gguf.GGUFReader, shape: LlamaShape, on_tensor: OnTensor | None = None
) -> dict[str, torch.Tensor]:
    """All weights in bfloat16 under their Hugging Face names; a missing or unknown tensor is refused."""
    if shape.layers > len(reader.tensors):
        raise ModelError(f"the GGUF has {counted(len(reader.tensors), 'tensor')}, fewer than its {shape.layers} layers")
    expected = _expected_shapes(shape)
    tensors: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        name = _hub_name(tensor.name)
        if name not in expected:
            raise ModelError(f"the GGUF has a tensor {tensor.name!r} that the converter does not know")
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if shape.architecture == "llama" and name.endswith("q_proj.weight"):
            values = unpermute(values, shape.heads)
        elif shape.architecture == "llama" and name.endswith("k_proj.weight"):
            values = unpermute(values, shape.kv_heads)
        if values.shape != expected[name]:
            raise ModelError(f"tensor {tensor.name!r} is {values.shape}, expected {expected[name]}")
        tensors[name] = torch.tensor(values).to(torch.bfloat16)
        if on_tensor is not None:
            on_tensor(done, len(reader.tensors))
    missing = expected.keys() - tensors.keys() - {"lm_head.weight"}
    if missing:
        raise ModelError(f"the GGUF lacks {counted(len(missing), 'tensor')}, among them {min(missing)!r}")
    return tensors


def unpermute(weight: Array, heads: int) -> Array:
    """Undo llama.cpp's reordering of a query or key projection [heads * head_dim, hidden].

    llama.cpp stores row i of a head's first half next to row i of its second half: (a0 b0 a1 b1 ...). Hugging
    Face keeps the halves apart: (a0 a1 ... b0 b1 ...).
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def write_config(
    metadata: Metadata, shape: LlamaShape, target: Path, *, name: str, tied: bool, sampling: Mapping[str, float]
) -> None:
    """Write config.json and generation_config.json."""
    tokens = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    of_llama = {"attention_bias": False, "head_dim": shape.head_dim, "mlp_bias": False}
    config = {
        "_name_or_path": name,
        "architectures": [f"{shape.architecture.capitalize()}ForCausalLM"],
        "model_type": shape.architecture,
        **(of_llama if shape.architecture == "llama" else {}),
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.context,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.rms_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab,
        **tokens,
    }
    _write_json(target / "config.json", config)
    named_tokens = {name: token for name, token in tokens.items() if token is not None}
    _write_json(target / "generation_config.json", {**named_tokens, **sampling})


def write_tokenizer(metadata: Metadata, shape: LlamaShape, target: Path) -> None:
    """tokenizer.json and tokenizer_config.json, with the chat template."""
    tokens: list[str] = metadata.require("tokenizer.ggml.tokens")
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    build_tokenizer(metadata, tokens, types).save(str(target / "tokenizer.json"))

    def spelled(key: str) -> str | None:
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return None if index is None else tokens[index]

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.context,
        "clean_up_tokenization_spaces": False,
        "bos_token": spelled("bos"),
        "eos_token": spelled("eos"),
        "unk_token": spelled("unknown"),
        "pad_token": spelled("padding"),
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
    _write_json(target / "tokenizer_config.json", {k: v for k, v in config.items() if v is not None})


def build_tokenizer(metadata: Metadata, tokens: list[str], types: list[int]) -> Tokenizer:
    """The byte-level BPE tokenizer that the metadata describes."""
    model = metadata.require("tokenizer.ggml.model")
    flavour = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2" or flavour not in ("smollm", "gpt-2", "qwen2"):
        raise ModelError(f"the GGUF's tokenizer is {model}/{flavour}; only gpt2 with smollm, gpt-2 and qwen2 is known")
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        raise ModelError("the GGUF's tokenizer adds a BOS token, which the converter does not support")
    merges = [tuple(merge.split(" ")) for merge in metadata.require("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if flavour == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif flavour == "qwen2":
        words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.NFC(), pre_tokenizers.Sequence([words, plain])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            special = kind == _CONTROL
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    return tokenizer


def _hub_name(name: str) -> str:
    """A tensor's Hugging Face name; the GGUF name itself where there is none."""
    if name in _GLOBAL_TENSORS:
        return _GLOBAL_TENSORS[name]
    prefix, _, rest = name.partition(".")
    layer, _, kind = rest.partition(".")
    if prefix == "blk" and kind in _LAYER_TENSORS:
        return f"model.layers.{layer}.{_LAYER_TENSORS[kind]}"
    return name


def _expected_shapes(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the model, by Hugging Face name."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (shape.hidden,),
        "self_attn.q_proj.weight": (query, shape.hidden),
        "self_attn.k_proj.weight": (key, shape.hidden),
        "self_attn.v_proj.weight": (key, shape.hidden),
        "self_attn.o_proj.weight": (shape.hidden, query),
        "post_attention_layernorm.weight": (shape.hidden,),
        "mlp.gate_proj.weight": (shape.intermediate, shape.hidden),
        "mlp.up_proj.weight": (shape.intermediate, shape.hidden),
        "mlp.down_proj.weight": (shape.hidden, shape.intermediate),
    }
    if shape.architecture == "qwen2":
        layer |= {f"self_attn.{x}_proj.bias": (query if x == "q" else key,) for x in "qkv"}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab, shape.hidden),
        "model.norm.weight": (shape.hidden,),
        "lm_head.weight": (shape.vocab, shape.hidden),
    }
    for index in range(shape.layers):
        shapes.update({f"model.layers.{index}.{name}": size for name, size in layer.items()})
    return shapes


def _short(value: float) -> float:
    """The shortest decimal of a float32 (1e-05 and not 9.999999747378752e-06)."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

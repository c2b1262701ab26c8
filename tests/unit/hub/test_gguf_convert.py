"""The converter on small synthetic GGUF files, where every tensor is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from hybrid_backend.errors import ModelError
from hybrid_backend.tools.hub.gguf_convert import convert

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS = 4, 2, 8, 32, 2
TOKENS = ["<|end|>", "<tool>", "a", "b", "ab", "Ġ", "1", "2"]
CONTROL, USER_DEFINED = 3, 4


def llama_cpp_permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """As in llama.cpp's convert_hf_to_gguf.py."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(
    path: Path, state: dict[str, torch.Tensor], metadata: dict[str, Any] | None = None, kind: str = "llama"
) -> Path:
    """A state dict as llama.cpp would store it; `metadata` overrides keys, None removes one."""
    writer = gguf.GGUFWriter(path, kind)
    keys: dict[str, Any] = {
        "llama.block_count": LAYERS,
        "llama.context_length": 64,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": 48,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.rope.freq_base": 5000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
    for key, value in (keys | (metadata or {})).items():
        key = key.replace("llama.", f"{kind}.")
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
    writer.add_array("tokenizer.ggml.tokens", TOKENS)
    writer.add_array("tokenizer.ggml.token_type", [CONTROL, USER_DEFINED, 1, 1, 1, 1, 1, 1])
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
        "self_attn.": "attn_",
        "mlp.": "ffn_",
        "_proj": "",
    }
    for name, tensor in state.items():
        values = tensor.float().numpy()
        if kind == "llama" and "q_proj" in name:
            values = llama_cpp_permute(values, HEADS)
        if kind == "llama" and "k_proj" in name:
            values = llama_cpp_permute(values, KV_HEADS)
        for old, new in names.items():
            name = name.replace(old, new)
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def small_llama(*, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=64,
        rope_theta=5000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
    )
    # bfloat16, so that the conversion loses nothing
    return LlamaForCausalLM(config).to(torch.bfloat16)


def small_qwen2() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(TOKENS), hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=64, rope_theta=5000.0,
        rms_norm_eps=1e-6, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
    return model.to(torch.bfloat16)


def state_of(model: Any) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return dict(state)


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_is_the_original(tmp_path: Path, tied: bool) -> None:
    original = small_llama(tied=tied)
    target = tmp_path / "model"
    target.mkdir()
    source = write_gguf(tmp_path / "m.gguf", state_of(original))
    convert(source, target, name="org/small")

    stored = load_file(target / "model.safetensors")
    assert stored.keys() == state_of(original).keys()
    for name, tensor in state_of(original).items():
        assert torch.equal(stored[name], tensor), name

    config = json.loads((target / "config.json").read_text())
    assert config["tie_word_embeddings"] is tied
    assert config["rope_theta"] == 5000.0
    assert config["rms_norm_eps"] == 1e-6
    assert config["pad_token_id"] is None
    tokens = torch.tensor([[2, 3, 4, 5, 6, 7, 2, 2]])
    with torch.inference_mode():
        loaded = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
        expected = original.float()(tokens).logits
        torch.testing.assert_close(loaded(tokens).logits, expected)


def test_a_converted_qwen2_is_the_original_biases_and_all(tmp_path: Path) -> None:
    """Nothing is permuted there; digits and contractions are split as its tokenizer does."""
    original, target = small_qwen2(), tmp_path / "model"
    target.mkdir()
    source = write_gguf(tmp_path / "m.gguf", state_of(original), {"tokenizer.ggml.pre": "qwen2"}, "qwen2")
    convert(source, target, name="org/small")
    tokens = torch.tensor([[2, 3, 4, 5, 6, 7, 2, 2]])
    with torch.inference_mode():
        loaded = Qwen2ForCausalLM.from_pretrained(target, dtype=torch.float32)
        torch.testing.assert_close(loaded(tokens).logits, original.float()(tokens).logits)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    assert [TOKENS[i] for i in tokenizer("ab 12<|end|>").input_ids] == ["ab", "Ġ", "1", "2", "<|end|>"]


def test_the_tokenizer_keeps_special_and_added_tokens_whole(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    convert(write_gguf(tmp_path / "m.gguf", state_of(small_llama(tied=True))), target, name="org/small")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    ids = tokenizer("ab 12<tool>a<|end|>").input_ids
    assert [TOKENS[i] for i in ids] == ["ab", "Ġ", "1", "2", "<tool>", "a", "<|end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab 12<tool>a"
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.bos_token is None
    assert tokenizer.chat_template


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gemma"}, "architecture 'gemma', tokenizer 'smollm' cannot"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "architecture 'llama', tokenizer 'llama-bpe' cannot"),
        ({"llama.block_count": 3}, r"lacks 'model\.layers\.2\..*'; it cannot"),
    ],
)
def test_what_the_catalog_does_not_have_is_refused(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    source = write_gguf(tmp_path / "m.gguf", state_of(small_llama(tied=True)), metadata)
    with pytest.raises(ModelError, match=message) as error:
        convert(source, tmp_path, name="org/small")
    assert "\n" not in str(error.value)

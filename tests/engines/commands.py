"""Commands that must refuse: run to their end, and what they said and left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hybrid_backend.tools.hub import fetch
from tests.engines.server import MODEL, executable

DEADLINE = 300
TORCH_CACHE = "torchinductor_"  # torch makes this folder at import; it is a cache, and empty

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


def _like_llama(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    return {**_LLAMA, "architectures": [f"{architecture}ForCausalLM"], "model_type": model_type, **more}


TINY_MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "many-heads": {**_LLAMA, "hidden_size": 512, "num_attention_heads": 32},
    "all-sliding": _like_llama("Mistral", "mistral", sliding_window=64),
    "some-sliding": _like_llama(
        "Gemma3", "gemma3_text", num_hidden_layers=4, head_dim=16, sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "shared-kv": _like_llama(
        "Gemma4", "gemma4_text", num_hidden_layers=4, head_dim=16, global_head_dim=16, sliding_window=64,
        num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "unlike-full": _like_llama(
        "Gemma4", "gemma4_text", head_dim=16, sliding_window=64, num_kv_shared_layers=0,
        layer_types=["full_attention"] * 2, per_layer_config={"1": {"head_dim": 32}},
    ),
    "llama4": _like_llama(
        "Llama4", "llama4_text", intermediate_size_mlp=128, num_local_experts=2, num_experts_per_tok=1,
        attention_chunk_size=64,
    ),
    "lfm2": _like_llama("Lfm2", "lfm2", conv_L_cache=3, layer_types=["conv", "full_attention"]),
    "delta-nets": _like_llama(
        "Qwen3Next", "qwen3_next", head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=16, num_hidden_layers=4, num_experts=0,
        layer_types=["linear_attention", "full_attention"] * 2,
    ),
    "mla": _like_llama(
        "DeepseekV2", "deepseek_v2", num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=32, qk_nope_head_dim=32,
        qk_rope_head_dim=16, v_head_dim=32, moe_intermediate_size=32, n_routed_experts=2, num_experts_per_tok=1,
        first_k_dense_replace=2,
    ),
}  # fmt: skip
"""Configurations without weights: they are refused before any weight is read."""


@dataclass(frozen=True)
class Answer:
    code: int
    output: str
    left: list[str]
    config: dict[str, Any] | None = None

    @property
    def remains(self) -> list[str]:
        return [name for name in self.left if not name.startswith(TORCH_CACHE)]

    @property
    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("error:")]

    def check_refusal(self, *words: str) -> None:
        """One line, not zero, no traceback, nothing left; the line holds all the words."""
        assert self.code not in (0, -1), self.output
        assert len(self.errors) == 1 and "Traceback" not in self.output, self.output
        assert self.output.rstrip().splitlines()[-1] == self.errors[0], "the reason must come last"
        missing = [word for word in words if word not in self.errors[0]]
        assert not missing, f"no {missing} in {self.errors[0]!r}"
        assert not self.remains


def write_models(folder: Path) -> dict[str, str]:
    """The demo model's directory and those of the tiny models, by name."""
    demo = fetch(MODEL)
    for name, config in TINY_MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo / file, folder / name / file)
    return {MODEL: str(demo)} | {name: str(folder / name) for name in TINY_MODELS}


def run_jobs(jobs: Mapping[str, dict[str, Any]], temporary: Path) -> dict[str, Answer]:
    """Jobs of refusals.py, all in one process. ``-P``: the repository's ``kernels`` must not hide the package of that
    name, which SGLang imports."""
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name("refusals.py"))],
        input=json.dumps(list(jobs.values())),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env=_environment(temporary),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(jobs, (Answer(**answer) for answer in json.loads(done.stdout)), strict=True))


def run_command(command: list[str], folder: Path) -> Answer:
    """Run a command to its end; its temporary files and its processes are its own."""
    temporary = folder / "tmp"
    temporary.mkdir()
    if command[0] == "hybrid":
        command = [executable("hybrid"), *command[1:]]
    with (folder / "output").open("wb") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True, env=_environment(temporary)
        )
        code = process.wait(DEADLINE)
    left = [path.name for path in temporary.iterdir()]
    for other in psutil.process_iter():
        try:
            if os.getsid(other.pid) == process.pid:
                left.append(" ".join(other.cmdline()))
        except (ProcessLookupError, psutil.Error):
            continue
    return Answer(code, (folder / "output").read_text(), left)


def _environment(temporary: Path) -> dict[str, str]:
    theirs = ("PROMETHEUS_", "VLLM_CPU_KVCACHE_SPACE", "VLLM_RPC_BASE_PATH")
    ours = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    fixed = {"TMPDIR": str(temporary), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "NO_COLOR": "1"}
    return ours | fixed

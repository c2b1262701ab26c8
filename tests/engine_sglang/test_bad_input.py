"""Bad input is refused before any process runs: one line says why and what to do, and nothing stays behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybrid_backend.hub import fetch
from tests.engine import test_bad_input as vllm_cases
from tests.engine.server import MODEL, free_port
from tests.engine.test_bad_input import Answer

pytestmark = pytest.mark.engine
DEADLINE = 300
STOCK = "leave out --attention-backend hybrid"
TINY_MODELS: dict[str, dict[str, Any]] = {
    **{name: vllm_cases.TINY_MODELS[name] for name in ("mla", "all-sliding")},
    "phi3": {
        **vllm_cases.TINY_MODELS["llama"],
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "pad_token_id": 0,
    },
}
# What the promise is -> model, options of `hybrid serve`, engine flags, words of the one line.
REFUSED: dict[str, tuple[str, list[str], list[str], list[str]]] = {
    "a host pool larger than the memory": (MODEL, ["--set=host_pool.size=64TiB"], [], ["host_pool.size: 64TiB", "GiB"]),
    "an exact layer beyond the model": (MODEL, ["--set=exact_layers=[0, 30]"], [], ["exact_layers", "got 30", "0..29"]),
    "fewer slots than the budget of a method that keeps it resident": (
        MODEL,
        ["--set=method=infinigen", "--set=slots_per_request=20"],
        [],
        ["slots_per_request: 20", "write auto, or 129"],
    ),
    "a page size unlike the engine's": (MODEL, [], ["--page-size", "64"], ["page_size: 16", "--page-size 16"]),
    "another backend for decode": (MODEL, [], ["--decode-attention-backend", "torch_native"], ["prefill and decode"]),
    "PD disaggregation": (MODEL, [], ["--disaggregation-mode", "prefill"], ["PD", "leave out --disaggregation-mode"]),
    "HiCache": (MODEL, [], ["--enable-hierarchical-cache"], ["HiCache", "leave out --enable-hierarchical-cache"]),
    "speculative decoding": (
        MODEL,
        [],
        ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"],
        ["speculative", "leave out --speculative-algorithm"],
    ),
    "a quantised KV cache": (MODEL, [], ["--kv-cache-dtype", "fp8_e5m2"], ["fp8_e5m2", "use --kv-cache-dtype auto"]),
    "tensor parallelism": (MODEL, [], ["--tp-size", "2"], ["use --tp-size 1"]),
    "pipeline parallelism": (MODEL, [], ["--pp-size", "2"], ["use --pp-size 1"]),
    "data parallelism": (MODEL, [], ["--dp-size", "2"], ["use --dp-size 1"]),
    "a CUDA device": (MODEL, [], ["--device", "cuda"], ["'cuda'", "not", "--device cpu"]),
    "LoRA with the lookahead": (
        MODEL,
        ["--set=lookahead.enabled=true"],
        ["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj"],
        ["lookahead: {enabled: false}", "--enable-lora"],
    ),
    "the lookahead of an unknown model type": (
        "phi3",
        ["--set=lookahead.enabled=true"],
        [],
        ["'phi3'", "lookahead: {enabled: false}"],
    ),
    "an MLA model": ("mla", [], [], ["MLA", STOCK]),
    "a model with sliding windows": ("all-sliding", [], [], ["sliding-window", STOCK]),
    "an engine flag that does not exist": (MODEL, [], ["--no-such-flag"], ["unrecognized arguments: --no-such-flag"]),
    "an engine flag of the wrong type": (MODEL, [], ["--page-size", "many"], ["--page-size", "'many'"]),
    "a context longer than the model's": (MODEL, [], ["--context-length", "99999"], ["99999", "8192"]),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """Every refusal of the table, in one process."""
    demo, folder = fetch(MODEL), tmp_path_factory.mktemp("models")
    models = {MODEL: str(demo)}
    for name, config in TINY_MODELS.items():
        models[name] = str(folder / name)
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo / file, folder / name / file)
    port = str(free_port())
    jobs = {
        name: {"command": ["serve", models[model], "--engine", "sglang", *options, "--", "--port", port, *flags]}
        for name, (model, options, flags, _) in REFUSED.items()
    }
    jobs["help"] = {"command": ["serve", MODEL, "--engine", "sglang", "--", "--port", port, "--help"]}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HYBRID_CONFIG")}
    environment |= {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "TMPDIR": str(tmp_path_factory.mktemp("tmp"))}
    done = subprocess.run(
        [sys.executable, "-P", str(Path(vllm_cases.__file__).with_name("refusals.py"))],
        input=json.dumps(list(jobs.values())),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(jobs, (Answer(**answer) for answer in json.loads(done.stdout)), strict=True))


@pytest.mark.parametrize("promise", REFUSED)
def test_is_refused_in_one_line(answers: dict[str, Answer], promise: str) -> None:
    answers[promise].check_refusal(*REFUSED[promise][3])


def test_the_engine_s_own_help_is_shown(answers: dict[str, Answer]) -> None:
    assert answers["help"].code == 0 and "--chunked-prefill-size" in answers["help"].output, answers["help"].output

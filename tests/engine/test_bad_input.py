"""Bad input is refused before anything runs: one line says why and what to do, and nothing stays behind."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from hybrid_backend.config import HybridConfig, find_config, load_config
from hybrid_backend.engines.vllm import BACKEND, CPU_WORKER
from hybrid_backend.hub import fetch
from tests.engine.server import MODEL, executable, free_port

pytestmark = pytest.mark.engine

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
TINY_MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "all-sliding": {
        **_LLAMA,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 64,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 49152,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "n_positions": 512,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 2,
    },
    "mla": {
        **_LLAMA,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "moe_intermediate_size": 32,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "first_k_dense_replace": 2,
    },
}
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


_NGRAM = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'
_CONNECTOR = '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'

# What the promise is -> model, options of `hybrid serve`, engine flags, words of the one line.
REFUSED: dict[str, tuple[str, list[str], list[str], list[str]]] = {
    "a host pool larger than the memory": (MODEL, ["--set=host_pool.size=64TiB"], [], ["host_pool.size: 64TiB", "GiB"]),
    "a host pool of vLLM's flag larger than the memory": (
        MODEL,
        [],
        ["--kv-cache-memory-bytes", str(2**46)],
        ["--kv-cache-memory-bytes: 64TiB", "GiB", "choose at most"],
    ),
    "a host pool of vLLM's variable larger than the memory": (
        MODEL,
        [],
        [],
        ["VLLM_CPU_KVCACHE_SPACE: 64TiB", "GiB", "choose at most"],
    ),
    "a host pool of vLLM's flag smaller than one sequence": (
        MODEL,
        [],
        ["--kv-cache-memory-bytes", str(2**26)],
        ["--kv-cache-memory-bytes: 64MiB", "--max-model-len 8192 (181 MiB)", "--max-model-len 2896 or less"],
    ),
    "a host pool smaller than one sequence": (
        MODEL,
        ["--set=host_pool.size=64MiB"],
        [],
        ["host_pool.size: 64MiB", "one sequence", "--max-model-len 8192", "181 MiB"],
    ),
    "an exact layer beyond the model": (
        MODEL,
        ["--set=exact_layers=[0, 30]"],
        [],
        ["exact_layers", "got 30", "0..29"],
    ),
    "an exact layer beyond the model, beside another plugin's settings": (
        MODEL,
        ["--set=exact_layers=[0, 30]"],
        ["--additional-config.other", "1"],
        ["exact_layers", "got 30"],
    ),
    "a list of recall intervals that is too short": (
        MODEL,
        ["--set=recall.intervals=[8, 8]"],
        [],
        ["recall.intervals", "a list of 2", "expected 30"],
    ),
    "fewer slots than the budget of a method that keeps it resident": (
        MODEL,
        ["--set=method=infinigen", "--set=slots_per_request=20"],
        [],
        ["slots_per_request: 20", "128 pages", "write auto, or 129"],
    ),
    "a head that the model lacks": (
        MODEL,
        ["--set=method=headinfer", "--set=headinfer.resident_heads=['3:1', '30:0']"],
        [],
        ["headinfer.resident_heads", "30:0", "layers 0..29"],
    ),
    "byte digests where nothing selects by them": (
        MODEL,
        ["--set=tiers=separate", "--set=selection.digest=minmax_int8"],
        [],
        ["selection.digest", "write auto or minmax"],
    ),
    "a page size unlike the engine's": (MODEL, [], ["--block-size", "64"], ["page_size: 16", "block size 64"]),
    "a memory size that the environment overrules": (
        MODEL,
        ["--set=host_pool.size=1GiB"],
        [],
        ["host_pool.size: 1GiB", "VLLM_CPU_KVCACHE_SPACE"],
    ),
    "speculative decoding": (MODEL, [], ["--speculative-config", _NGRAM], ["leave out --speculative-config"]),
    "pipeline parallelism": (MODEL, [], ["--pipeline-parallel-size", "2"], ["use --pipeline-parallel-size 1"]),
    "decode context parallelism": (
        "llama",
        [],
        ["--tensor-parallel-size=2", "--decode-context-parallel-size=2"],
        ["use --decode-context-parallel-size 1"],
    ),
    "a quantised KV cache": (MODEL, [], ["--kv-cache-dtype", "fp8"], ["quantised", "use --kv-cache-dtype auto"]),
    "a KV connector": (MODEL, [], ["--kv-transfer-config", _CONNECTOR], ["leave out --kv-transfer-config"]),
    "LoRA with the lookahead": (
        MODEL,
        ["--set=lookahead.enabled=true"],
        ["--enable-lora"],
        ["lookahead: {enabled: false}", "--enable-lora"],
    ),
    "the lookahead of an unknown model type": (
        "gpt2",
        ["--set=lookahead.enabled=true"],
        [],
        ["'gpt2'", "lookahead: {enabled: false}"],
    ),
    "an MLA model": ("mla", [], [], ["MLA", "leave out --attention-backend CUSTOM"]),
    "a model whose layers all slide": ("all-sliding", [], [], ["64 tokens", "leave out --attention-backend CUSTOM"]),
    "another worker": (MODEL, [], ["--worker-cls", "vllm.v1.worker.cpu_worker.CPUWorker"], [CPU_WORKER]),
    "an additional config that is not JSON": (
        MODEL,
        [],
        ["--additional-config", "garbage"],
        ["--additional-config", "'garbage'", "JSON object"],
    ),
    "an additional config with a typing error": (
        MODEL,
        [],
        ["--additional-config", '{"hybrid": {"methd": "scout"}}'],
        ["--additional-config", "methd", "did you mean method?"],
    ),
    "an additional config that is no mapping": (
        MODEL,
        [],
        ["--additional-config", '{"hybrid": 5}'],
        ["--additional-config", "got 5", "a mapping"],
    ),
    "an additional config that names a missing file": (
        MODEL,
        [],
        ["--additional-config", '{"hybrid": "/nowhere/hybrid.yaml"}'],
        ["/nowhere/hybrid.yaml", "no such file"],
    ),
    "an engine flag that does not exist": (MODEL, [], ["--no-such-flag"], ["unrecognized arguments: --no-such-flag"]),
    "an engine flag of the wrong type": (MODEL, [], ["--max-model-len", "many"], ["--max-model-len", "'many'"]),
    "a context longer than the model's": (MODEL, [], ["--max-model-len", "99999"], ["99999", "8192"]),
    "a missing chat template": (MODEL, [], ["--chat-template", "/nowhere/chat.jinja"], ["/nowhere/chat.jinja"]),
    "a missing engine configuration": (MODEL, [], ["--config", "/nowhere/engine.yaml"], ["/nowhere/engine.yaml"]),
    "an unknown tool parser": (
        MODEL,
        [],
        ["--enable-auto-tool-choice", "--tool-call-parser", "no-such-parser"],
        ["no-such-parser"],
    ),
    "a hub model that does not exist": ("nobody/no-such-model", [], [], ["nobody/no-such-model"]),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The demo model's directory and those of the tiny models, by name."""
    demo, folder = fetch(MODEL), tmp_path_factory.mktemp("models")
    for name, config in TINY_MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo / file, folder / name / file)
    return {MODEL: str(demo)} | {name: str(folder / name) for name in TINY_MODELS}


@pytest.fixture(scope="module")
def answers(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """Every refusal of the table, and the command lines of vLLM itself, in one process."""
    port = str(free_port())
    jobs: dict[str, dict[str, Any]] = {}
    for name, (model, options, flags, _) in REFUSED.items():
        model = models[model] if model in TINY_MODELS else model
        jobs[name] = {"command": ["serve", model, *options, "--", "--port", port, *flags]}
    jobs["a memory size that the environment overrules"]["environment"] = {"VLLM_CPU_KVCACHE_SPACE": "2"}
    jobs["a host pool of vLLM's variable larger than the memory"]["environment"] = {
        "VLLM_CPU_KVCACHE_SPACE": str(2**16)
    }
    jobs["help"] = {"command": ["serve", MODEL, "--", "--port", port, "--help=max-model-len"]}
    bare = ["--model", models[MODEL], "--attention-backend", BACKEND]
    jobs["bare, no worker"] = {"engine": bare}
    jobs["bare, worker"] = {"engine": [*bare, "--worker-cls", CPU_WORKER]}
    file = tmp_path_factory.mktemp("config") / "hybrid.yaml"
    file.write_text("budget_tokens: 512\nmethod: dense\n")
    settings = json.dumps({"hybrid": str(file), "another": "plugin"})
    jobs["bare, file"] = {"engine": [*bare, "--worker-cls", CPU_WORKER, "--additional-config", settings]}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("refusals.py"))],
        input=json.dumps(list(jobs.values())),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env=_environment(tmp_path_factory.mktemp("tmp")),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(jobs, (Answer(**answer) for answer in json.loads(done.stdout)), strict=True))


@pytest.mark.parametrize("promise", REFUSED)
def test_is_refused_in_one_line(answers: dict[str, Answer], promise: str) -> None:
    answers[promise].check_refusal(*REFUSED[promise][3])


def test_the_engine_s_own_help_is_shown(answers: dict[str, Answer]) -> None:
    assert answers["help"].code == 0 and "--max-model-len" in answers["help"].output, answers["help"].output


def test_vllm_alone_accepts_the_backend_with_its_worker_and_finds_the_model_s_configuration(
    answers: dict[str, Answer],
) -> None:
    answer = answers["bare, worker"]
    assert answer.code == 0 and not answer.remains, answer.output
    assert answer.config is not None
    config = HybridConfig.model_validate({**answer.config, "exact_layers": tuple(answer.config["exact_layers"])})
    assert config == load_config(find_config("smollm2-135m-instruct"))


def test_vllm_alone_reads_the_configuration_that_additional_config_names(answers: dict[str, Answer]) -> None:
    answer = answers["bare, file"]
    assert answer.code == 0, answer.output
    assert answer.config is not None
    assert (answer.config["budget_tokens"], answer.config["method"]) == (512, "dense")


# -- as a user sees it: one process each ---------------------------------------------------------------------


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


def test_hybrid_serve_refuses_a_page_size_unlike_the_engine_s(tmp_path: Path) -> None:
    port = str(free_port())
    answer = run_command(["hybrid", "serve", MODEL, "--", "--port", port, "--block-size", "64"], tmp_path)
    answer.check_refusal("page_size: 16", "--block-size 16")


def test_hybrid_serve_refuses_a_busy_port(tmp_path: Path, busy_port: int) -> None:
    answer = run_command(["hybrid", "serve", MODEL, "--", "--port", str(busy_port)], tmp_path)
    answer.check_refusal(f"--port: {busy_port} is already in use")
    assert answer.output.count("\n") == 1


def test_hybrid_serve_refuses_an_unknown_key_with_a_suggestion(tmp_path: Path) -> None:
    file = tmp_path / "hybrid.yaml"
    file.write_text(yaml.safe_dump({"budget_token": 1024}))
    answer = run_command(["hybrid", "serve", MODEL, "--config", str(file)], tmp_path)
    answer.check_refusal("hybrid.yaml", "'budget_token'", "did you mean budget_tokens?")
    assert answer.output.count("\n") == 1


def test_vllm_alone_refuses_to_start_without_the_worker_and_names_the_flag(
    models: dict[str, str], answers: dict[str, Answer], tmp_path: Path
) -> None:
    flag = f"--worker-cls {CPU_WORKER}"
    assert flag in answers["bare, no worker"].output
    module = ["-m", "vllm.entrypoints.openai.api_server"]
    flags = ["--model", models[MODEL], "--attention-backend", BACKEND, "--port", str(free_port())]
    answer = run_command([sys.executable, *module, *flags], tmp_path)
    assert answer.code != 0 and not answer.remains
    assert [line for line in answer.output.splitlines() if "EngineError" in line and flag in line], answer.output


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
    theirs = ("HYBRID_CONFIG", "PROMETHEUS_", "VLLM_CPU_KVCACHE_SPACE", "VLLM_RPC_BASE_PATH")
    ours = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    fixed = {"TMPDIR": str(temporary), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "NO_COLOR": "1"}
    return ours | fixed

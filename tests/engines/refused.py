"""What either engine with our backend refuses: one table with a column for each engine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from hybrid_backend.engines.vllm import CPU_WORKER, OWN_BACKEND
from tests.engines.server import MODEL

Column = tuple[str, ...]
"""Engine flags, and words of the one line."""


class Row(NamedTuple):
    """A promise's columns, and what is the same for both engines.

    Attributes:
        both: the column of both engines.
        options: options of `hybrid serve`.
        model: the demo model, or a name in `commands.TINY_MODELS`.
    """

    vllm: Column = ()
    sglang: Column = ()
    both: Column = ()
    options: str = ""
    model: str = MODEL
    environment: Mapping[str, str] = MappingProxyType({})

    def of(self, engine: str) -> Column:
        """Return an engine's column; empty if it does not refuse this."""
        return self.both or (self.vllm if engine == "vllm" else self.sglang)


def _transfer(connector: str, role: str = "kv_consumer") -> str:
    extra = {"shared_storage_path": "/nowhere/kv"}
    value = {"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": extra}
    return f"--kv-transfer-config {shlex.quote(json.dumps(value))}"


def _additional(value: str) -> str:
    return f"--additional-config {shlex.quote(value)}"


_NGRAM = """--speculative-config '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'"""
OVERLAP = "--set=method=apex --set=apex.strategy=overlap --set=apex.device_tokens=96"
SGLANG_S_OWN = "use SGLang's own attention backend for this model"

REFUSED: dict[str, Row] = {
    "a host pool larger than the memory": Row(
        both=("", "host_pool.size: 64TiB", "GiB"), options="--set=host_pool.size=64TiB"
    ),
    "a host pool of vLLM's flag larger than the memory": Row(
        vllm=("--kv-cache-memory-bytes 70368744177664", "--kv-cache-memory-bytes: 64TiB", "GiB", "choose at most")
    ),
    "a host pool of vLLM's variable larger than the memory": Row(
        vllm=("", "VLLM_CPU_KVCACHE_SPACE: 64TiB", "GiB", "choose at most"),
        environment={"VLLM_CPU_KVCACHE_SPACE": "65536"},
    ),
    "a host pool of vLLM's flag smaller than one sequence": Row(
        vllm=(
            "--kv-cache-memory-bytes 67108864 --dtype bfloat16",
            "--kv-cache-memory-bytes: 64MiB",
            "--max-model-len 8192 (181 MiB)",
            "--max-model-len 2896 or less",
        )
    ),
    "a host pool smaller than one sequence": Row(
        vllm=("--dtype bfloat16", "host_pool.size: 64MiB", "one sequence", "--max-model-len 8192", "181 MiB"),
        options="--set=host_pool.size=64MiB",
    ),
    "an exact layer beyond the model": Row(
        both=("", "exact_layers", "got 30", "0..29"), options="--set=exact_layers=[0,30]"
    ),
    "an exact layer beyond the model, beside another plugin's settings": Row(
        vllm=("--additional-config.other 1", "exact_layers", "got 30"), options="--set=exact_layers=[0,30]"
    ),
    "a list of recall intervals that is too short": Row(
        vllm=("", "recall.intervals", "a list of 2", "expected 30"), options="--set=recall.intervals=[8,8]"
    ),
    "fewer frames than the budget of a method that keeps it resident": Row(
        vllm=("", "frames_per_request: 20", "128 pages", "write auto, or 129"),
        sglang=("", "frames_per_request: 20", "write auto, or 129"),
        options="--set=method=infinigen --set=frames_per_request=20",
    ),
    "a head that the model lacks": Row(
        vllm=("", "headinfer.resident_heads", "30:0", "layers 0..29"),
        options="--set=method=headinfer --set=headinfer.resident_heads=[\"'3:1'\",\"'30:0'\"]",
    ),
    "byte digests that the native decoder cannot combine": Row(
        vllm=("", "selection.digest", "not max with layer", "write auto or minmax"),
        options="--set=method=quest --set=selection.digest=minmax_int8 --set=selection.aggregate=max",
    ),
    "a page size unlike the engine's": Row(
        vllm=("--block-size 64", "page_size: 16", "block size 64"),
        sglang=("--page-size 64", "page_size: 16", "--page-size 16"),
    ),
    "a memory size that the environment overrules": Row(
        vllm=("", "host_pool.size: 1GiB", "VLLM_CPU_KVCACHE_SPACE"),
        options="--set=host_pool.size=1GiB",
        environment={"VLLM_CPU_KVCACHE_SPACE": "2"},
    ),
    "another backend than ours": Row(
        vllm=("--attention-backend CPU_ATTN", "leave it out", "python -m vllm.entrypoints.openai.api_server --model"),
        sglang=("--attention-backend torch_native", "leave it out", "sglang serve"),
    ),
    "speculative decoding with a method that does not attend in place": Row(
        vllm=(_NGRAM, "method: scout", "leave out --speculative-config, or serve method quest or dense on a CPU"),
        options="--set=method=scout",
    ),
    "speculative decoding by another proposer than n-grams of the prompt": Row(
        vllm=(_NGRAM.replace("ngram", "ngram_gpu"), "method: ngram_gpu", 'write "method": "ngram"')
    ),
    "speculative decoding of models with layers of other kinds than attention": Row(
        vllm=(_NGRAM, "leave out --speculative-config"), model="lfm2"
    ),
    "speculative decoding": Row(
        sglang=(
            "--speculative-algorithm NGRAM --speculative-num-draft-tokens 4",
            "speculative",
            "leave out --speculative-algorithm",
        )
    ),
    "pipeline parallelism": Row(
        vllm=("--pipeline-parallel-size 2", "use --pipeline-parallel-size 1"), sglang=("--pp-size 2", "use --pp-size 1")
    ),
    "decode context parallelism": Row(
        vllm=("--tensor-parallel-size=2 --decode-context-parallel-size=2", "use --decode-context-parallel-size 1"),
        model="llama",
    ),
    "a quantised KV cache": Row(
        vllm=("--kv-cache-dtype fp8", "fp8", "use --kv-cache-dtype auto"),
        sglang=("--kv-cache-dtype fp8_e5m2", "fp8_e5m2", "use --kv-cache-dtype auto"),
    ),
    "a KV cache of another type than the model's": Row(
        vllm=(
            "--dtype float32 --kv-cache-dtype bfloat16",
            "another type than the model's",
            "bfloat16 instead of float32",
            "use --kv-cache-dtype auto",
        )
    ),
    "a dtype that the kernels of gated delta nets lack": Row(
        vllm=("--dtype float32", "--dtype float32", "gated delta nets", "use --dtype bfloat16"), model="delta-nets"
    ),
    "gRPC": Row(vllm=("--grpc", "--grpc", "leave it out")),
    "several API servers": Row(vllm=("--api-server-count 2", "--api-server-count", "leave it out")),
    "prefixes that end within a block of a model that keeps a state": Row(
        vllm=("--prefix-match-unit 16", "leave out --prefix-match-unit"), model="lfm2"
    ),
    "a KV connector that is not known": Row(
        vllm=(
            _transfer("DecodeBenchConnector"),
            "DecodeBenchConnector",
            "choose ExampleConnector or NixlConnector in --kv-transfer-config",
        )
    ),
    "KV offloading by vLLM": Row(vllm=("--kv-offloading-size 1", "leave out --kv-offloading-size")),
    "handing its own KV over": Row(
        vllm=(_transfer("ExampleConnector", "kv_both"), "kv_role: kv_both", "write kv_role: kv_consumer"),
        options="--set=page_size=32",
    ),
    "pages that no prefill server has": Row(
        vllm=(_transfer("ExampleConnector"), "page_size: 16", "set page_size: 32 here, --block-size 32 there")
    ),
    "a folder for KV that is not there": Row(
        vllm=(_transfer("ExampleConnector"), "shared_storage_path: '/nowhere/kv' is no folder", "the prefill server"),
        options="--set=page_size=32",
    ),
    "ranks that would read the same file": Row(
        vllm=(
            _transfer("ExampleConnector") + " --tensor-parallel-size 2",
            "--tensor-parallel-size 2",
            "use --tensor-parallel-size 1",
        ),
        model="llama",
    ),
    "a KV connector and layers that slide": Row(
        vllm=(_transfer("ExampleConnector"), "beside full attention", "leave out --kv-transfer-config"),
        model="some-sliding",
    ),
    "LoRA with the lookahead": Row(
        vllm=("--enable-lora", "lookahead: {enabled: false}", "--enable-lora"),
        sglang=(
            "--enable-lora --max-lora-rank 8 --lora-target-modules q_proj",
            "lookahead: {enabled: false}",
            "--enable-lora",
        ),
        options="--set=method=scout",
    ),
    "rows that wait, and the V2 model runner": Row(
        vllm=("", "apex.strategy: overlap", "V2 model runner", "set VLLM_USE_V2_MODEL_RUNNER=0"),
        options=OVERLAP,
        environment={"VLLM_USE_V2_MODEL_RUNNER": "1"},
    ),
    "rows that wait, and tensor parallelism": Row(
        vllm=(
            "--tensor-parallel-size 2",
            "apex.strategy: overlap",
            "use --tensor-parallel-size 1, or write auto or lockstep",
        ),
        options=OVERLAP,
        model="llama",
    ),
    "rows that wait, and LoRA": Row(
        vllm=("--enable-lora", "apex.strategy: overlap", "leave out --enable-lora, or write auto or lockstep"),
        options=OVERLAP,
    ),
    "rows that wait, and layers that slide": Row(
        vllm=("", "apex.strategy: overlap", "sliding-window layers", "write auto or lockstep"),
        options=OVERLAP,
        model="some-sliding",
    ),
    "rows that wait, and layers that attend chunks": Row(
        vllm=("", "apex.strategy: overlap", "chunked local attention", "write auto or lockstep"),
        options=OVERLAP,
        model="llama4",
    ),
    "rows that wait, and another scheduler": Row(
        vllm=("--scheduler-cls vllm.v1.core.sched.scheduler.Scheduler", "leave out --scheduler-cls"), options=OVERLAP
    ),
    "native kernels for a shape that they lack": Row(
        both=("", "workers.kernel: native has no kernels for 32 query heads on 1 KV heads", "write auto or torch"),
        options="--set=workers.kernel=native",
        model="many-heads",
    ),
    "an MLA model": Row(vllm=("", "MLA", OWN_BACKEND), sglang=("", "MLA", SGLANG_S_OWN), model="mla"),
    "a model whose layers all slide": Row(vllm=("", "64 tokens", OWN_BACKEND), model="all-sliding"),
    "a model whose attention is in chunks": Row(sglang=("", "layers of other kinds", SGLANG_S_OWN), model="llama4"),
    "pages that do not divide a model's chunks": Row(
        vllm=("", "page_size: 128", "attention_chunk_size, 64", "set page_size: 32"),
        options="--set=page_size=128",
        model="llama4",
    ),
    "a model whose layers share another's KV": Row(
        vllm=("", "num_kv_shared_layers: 2", OWN_BACKEND),
        sglang=("", "sliding-window", SGLANG_S_OWN),
        model="shared-kv",
    ),
    "a model whose layers with full attention have different shapes": Row(
        vllm=("", "4 query heads on 1 KV heads of 16 and 4 query heads on 1 KV heads of 32", OWN_BACKEND),
        model="unlike-full",
    ),
    "another worker": Row(
        vllm=(
            "--worker-cls vllm.v1.worker.cpu_worker.CPUWorker",
            CPU_WORKER,
            "instead of vllm.v1.worker.cpu_worker.CPUWorker",
            "leave it out",
        )
    ),
    "an additional config that is not JSON": Row(
        vllm=("--additional-config garbage", "--additional-config", "'garbage'", "JSON object")
    ),
    "an additional config with a typing error": Row(
        vllm=(_additional('{"hybrid": {"methd": "scout"}}'), "--additional-config", "methd", "did you mean method?")
    ),
    "an additional config that is no mapping": Row(
        vllm=(_additional('{"hybrid": 5}'), "--additional-config", "got 5", "a mapping")
    ),
    "an additional config that names a missing file": Row(
        vllm=(_additional('{"hybrid": "/nowhere/hybrid.yaml"}'), "/nowhere/hybrid.yaml", "no such file")
    ),
    "an engine flag that does not exist": Row(both=("--no-such-flag", "unrecognized arguments: --no-such-flag")),
    "an engine flag of the wrong type": Row(
        vllm=("--max-model-len many", "--max-model-len", "'many'"), sglang=("--page-size many", "--page-size", "'many'")
    ),
    "a context longer than the model's": Row(
        vllm=("--max-model-len 99999", "99999", "8192"), sglang=("--context-length 99999", "99999", "8192")
    ),
    "a missing chat template": Row(vllm=("--chat-template /nowhere/chat.jinja", "/nowhere/chat.jinja")),
    "a missing engine configuration": Row(vllm=("--config /nowhere/engine.yaml", "/nowhere/engine.yaml")),
    "an unknown tool parser": Row(
        vllm=("--enable-auto-tool-choice --tool-call-parser no-such-parser", "no-such-parser")
    ),
    "a hub model that does not exist": Row(vllm=("", "nobody/no-such-model"), model="nobody/no-such-model"),
    "chunks of prompts that end within a page": Row(
        sglang=("--chunked-prefill-size 1000", "--chunked-prefill-size: got 1000", "page_size 16", "write 1008")
    ),
    "another backend for decode": Row(sglang=("--decode-attention-backend torch_native", "prefill and decode")),
    "a model in Transformers' implementation": Row(sglang=("--model-impl transformers", "leave out --model-impl")),
    "FlexKV": Row(sglang=("--enable-flexkv", "FlexKV", "leave out --enable-flexkv")),
    "the canary of the KV cache": Row(sglang=("--kv-canary log", "canary", "leave out --kv-canary")),
    "what SGLang itself refuses only when it starts": Row(
        sglang=(
            "--schedule-conservativeness -1",
            "SGLang cannot serve",
            "schedule_conservativeness must be non-negative",
        )
    ),
    "PD disaggregation": Row(sglang=("--disaggregation-mode prefill", "PD", "leave out --disaggregation-mode")),
    "HiCache": Row(sglang=("--enable-hierarchical-cache", "HiCache", "leave out --enable-hierarchical-cache")),
    "tensor parallelism": Row(sglang=("--tp-size 2", "use --tp-size 1")),
    "data parallelism": Row(sglang=("--dp-size 2", "use --dp-size 1")),
    "a CUDA device": Row(sglang=("--device cuda", "'cuda'", "not", "--device cpu")),
    "rows that wait from one step to the next": Row(
        sglang=("", "apex.strategy: overlap", "write auto or lockstep"),
        options="--set=method=apex --set=apex.strategy=overlap",
    ),
    "a model with sliding windows": Row(sglang=("", "sliding-window", SGLANG_S_OWN), model="all-sliding"),
    "a model with some sliding windows": Row(sglang=("", "sliding-window", SGLANG_S_OWN), model="some-sliding"),
    "a model with layers that keep a state": Row(sglang=("", "layers of other kinds", SGLANG_S_OWN), model="lfm2"),
}

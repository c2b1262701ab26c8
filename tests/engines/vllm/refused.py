"""What vLLM with our backend refuses."""

from __future__ import annotations

import json

from hybrid_backend.engines.vllm import CPU_WORKER, OWN_BACKEND
from tests.engines.server import MODEL

_NGRAM = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'
OVERLAP = ["--set=method=apex", "--set=apex.strategy=overlap", "--set=apex.device_tokens=96"]

HELP = ("--help=max-model-len", "--max-model-len")  # engine flag, what must be shown
ENVIRONMENT = {
    "rows that wait, and the V2 model runner": {"VLLM_USE_V2_MODEL_RUNNER": "1"},
    "a memory size that the environment overrules": {"VLLM_CPU_KVCACHE_SPACE": "2"},
    "a host pool of vLLM's variable larger than the memory": {"VLLM_CPU_KVCACHE_SPACE": str(2**16)},
}


def _transfer(connector: str, role: str = "kv_consumer") -> str:
    extra = {"shared_storage_path": "/nowhere/kv"}
    return json.dumps({"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": extra})


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
        ["--kv-cache-memory-bytes", str(2**26), "--dtype", "bfloat16"],
        ["--kv-cache-memory-bytes: 64MiB", "--max-model-len 8192 (181 MiB)", "--max-model-len 2896 or less"],
    ),
    "a host pool smaller than one sequence": (
        MODEL,
        ["--set=host_pool.size=64MiB"],
        ["--dtype", "bfloat16"],
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
    "fewer frames than the budget of a method that keeps it resident": (
        MODEL,
        ["--set=method=infinigen", "--set=frames_per_request=20"],
        [],
        ["frames_per_request: 20", "128 pages", "write auto, or 129"],
    ),
    "a head that the model lacks": (
        MODEL,
        ["--set=method=headinfer", "--set=headinfer.resident_heads=['3:1', '30:0']"],
        [],
        ["headinfer.resident_heads", "30:0", "layers 0..29"],
    ),
    "byte digests that the native decoder cannot combine": (
        MODEL,
        ["--set=selection.digest=minmax_int8", "--set=selection.aggregate=max"],
        [],
        ["selection.digest", "not max with layer", "write auto or minmax"],
    ),
    "a page size unlike the engine's": (MODEL, [], ["--block-size", "64"], ["page_size: 16", "block size 64"]),
    "a memory size that the environment overrules": (
        MODEL,
        ["--set=host_pool.size=1GiB"],
        [],
        ["host_pool.size: 1GiB", "VLLM_CPU_KVCACHE_SPACE"],
    ),
    "another backend than ours": (MODEL, [], ["--attention-backend", "CPU_ATTN"], ["leave it out", "vllm serve"]),
    "speculative decoding": (MODEL, [], ["--speculative-config", _NGRAM], ["leave out --speculative-config"]),
    "pipeline parallelism": (MODEL, [], ["--pipeline-parallel-size", "2"], ["use --pipeline-parallel-size 1"]),
    "decode context parallelism": (
        "llama",
        [],
        ["--tensor-parallel-size=2", "--decode-context-parallel-size=2"],
        ["use --decode-context-parallel-size 1"],
    ),
    "a quantised KV cache": (MODEL, [], ["--kv-cache-dtype", "fp8"], ["fp8", "use --kv-cache-dtype auto"]),
    "a KV cache of another type than the model's": (
        MODEL,
        [],
        ["--dtype", "float32", "--kv-cache-dtype", "bfloat16"],
        ["another type than the model's", "bfloat16 instead of float32", "use --kv-cache-dtype auto"],
    ),
    "a dtype that the kernels of gated delta nets lack": (
        "delta-nets",
        [],
        ["--dtype", "float32"],
        ["--dtype float32", "gated delta nets", "use --dtype bfloat16"],
    ),
    "gRPC": (MODEL, [], ["--grpc"], ["--grpc", "leave it out"]),
    "several API servers": (MODEL, [], ["--api-server-count", "2"], ["--api-server-count", "leave it out"]),
    "prefixes that end within a block of a model that keeps a state": (
        "lfm2",
        [],
        ["--prefix-match-unit", "16"],
        ["leave out --prefix-match-unit"],
    ),
    "a KV connector that is not known": (
        MODEL,
        [],
        ["--kv-transfer-config", _transfer("DecodeBenchConnector")],
        ["DecodeBenchConnector", "choose ExampleConnector or NixlConnector in --kv-transfer-config"],
    ),
    "KV offloading by vLLM": (MODEL, [], ["--kv-offloading-size", "1"], ["leave out --kv-offloading-size"]),
    "handing its own KV over": (
        MODEL,
        ["--set=page_size=32"],
        ["--kv-transfer-config", _transfer("ExampleConnector", "kv_both")],
        ["kv_role: kv_both", "write kv_role: kv_consumer"],
    ),
    "pages that no prefill server has": (
        MODEL,
        [],
        ["--kv-transfer-config", _transfer("ExampleConnector")],
        ["page_size: 16", "set page_size: 32 here, --block-size 32 there"],
    ),
    "a folder for KV that is not there": (
        MODEL,
        ["--set=page_size=32"],
        ["--kv-transfer-config", _transfer("ExampleConnector")],
        ["shared_storage_path: '/nowhere/kv' is no folder", "the prefill server"],
    ),
    "ranks that would read the same file": (
        "llama",
        [],
        ["--kv-transfer-config", _transfer("ExampleConnector"), "--tensor-parallel-size", "2"],
        ["--tensor-parallel-size 2", "use --tensor-parallel-size 1"],
    ),
    "a KV connector and layers that slide": (
        "some-sliding",
        [],
        ["--kv-transfer-config", _transfer("ExampleConnector")],
        ["beside full attention", "leave out --kv-transfer-config"],
    ),
    "LoRA with the lookahead": (
        MODEL,
        ["--set=method=scout"],
        ["--enable-lora"],
        ["lookahead: {enabled: false}", "--enable-lora"],
    ),
    "rows that wait, and the V2 model runner": (
        MODEL,
        OVERLAP,
        [],
        ["apex.strategy: overlap", "V2 model runner", "set VLLM_USE_V2_MODEL_RUNNER=0"],
    ),
    "rows that wait, and tensor parallelism": (
        "llama",
        OVERLAP,
        ["--tensor-parallel-size", "2"],
        ["apex.strategy: overlap", "use --tensor-parallel-size 1, or write auto or lockstep"],
    ),
    "rows that wait, and LoRA": (
        MODEL,
        OVERLAP,
        ["--enable-lora"],
        ["apex.strategy: overlap", "leave out --enable-lora, or write auto or lockstep"],
    ),
    "rows that wait, and layers that slide": (
        "some-sliding",
        OVERLAP,
        [],
        ["apex.strategy: overlap", "sliding-window layers", "write auto or lockstep"],
    ),
    "rows that wait, and another scheduler": (
        MODEL,
        OVERLAP,
        ["--scheduler-cls", "vllm.v1.core.sched.scheduler.Scheduler"],
        ["leave out --scheduler-cls"],
    ),
    "native kernels for a shape that they lack": (
        "many-heads",
        ["--set=workers.kernel=native"],
        [],
        ["workers.kernel: native has no kernels for 32 query heads on 1 KV heads", "write auto or torch"],
    ),
    "an MLA model": ("mla", [], [], ["MLA", OWN_BACKEND]),
    "a model whose layers all slide": ("all-sliding", [], [], ["64 tokens", OWN_BACKEND]),
    "a model whose attention is in chunks": (
        "llama4",
        [],
        [],
        ["chunked local attention", OWN_BACKEND],
    ),
    "another worker": (
        MODEL,
        [],
        ["--worker-cls", "vllm.v1.worker.cpu_worker.CPUWorker"],
        [CPU_WORKER, "instead of vllm.v1.worker.cpu_worker.CPUWorker", "leave it out"],
    ),
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

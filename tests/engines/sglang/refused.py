"""What SGLang with our backend refuses."""

from __future__ import annotations

from tests.engines.server import MODEL

STOCK = "use SGLang's own attention backend for this model"
HELP = ("--help", "--chunked-prefill-size")  # engine flag, what must be shown
ENVIRONMENT: dict[str, dict[str, str]] = {}
# What the promise is -> model, options of `hybrid serve`, engine flags, words of the one line.
REFUSED: dict[str, tuple[str, list[str], list[str], list[str]]] = {
    "a host pool larger than the memory": (MODEL, ["--set=host_pool.size=64TiB"], [], ["host_pool.size: 64TiB", "GiB"]),
    "an exact layer beyond the model": (MODEL, ["--set=exact_layers=[0, 30]"], [], ["exact_layers", "got 30", "0..29"]),
    "fewer frames than the budget of a method that keeps it resident": (
        MODEL,
        ["--set=method=infinigen", "--set=frames_per_request=20"],
        [],
        ["frames_per_request: 20", "write auto, or 129"],
    ),
    "a page size unlike the engine's": (MODEL, [], ["--page-size", "64"], ["page_size: 16", "--page-size 16"]),
    "chunks of prompts that end within a page": (
        MODEL,
        [],
        ["--chunked-prefill-size", "1000"],
        ["--chunked-prefill-size: got 1000", "page_size 16", "write 1008"],
    ),
    "another backend for decode": (MODEL, [], ["--decode-attention-backend", "torch_native"], ["prefill and decode"]),
    "another backend than ours": (MODEL, [], ["--attention-backend", "torch_native"], ["leave it out", "sglang serve"]),
    "a model in Transformers' implementation": (
        MODEL,
        [],
        ["--model-impl", "transformers"],
        ["leave out --model-impl"],
    ),
    "FlexKV": (MODEL, [], ["--enable-flexkv"], ["FlexKV", "leave out --enable-flexkv"]),
    "the canary of the KV cache": (MODEL, [], ["--kv-canary", "log"], ["canary", "leave out --kv-canary"]),
    "what SGLang itself refuses only when it starts": (
        MODEL,
        [],
        ["--schedule-conservativeness", "-1"],
        ["SGLang cannot serve", "schedule_conservativeness must be non-negative"],
    ),
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
        ["--set=method=scout"],
        ["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj"],
        ["lookahead: {enabled: false}", "--enable-lora"],
    ),
    "rows that wait from one step to the next": (
        MODEL,
        ["--set=method=apex", "--set=apex.strategy=overlap"],
        [],
        ["apex.strategy: overlap", "write auto or lockstep"],
    ),
    "native kernels for a shape that they lack": (
        "many-heads",
        ["--set=workers.kernel=native"],
        [],
        ["workers.kernel: native has no kernels for 32 query heads on 1 KV heads", "write auto or torch"],
    ),
    "an MLA model": ("mla", [], [], ["MLA", STOCK]),
    "a model with sliding windows": ("all-sliding", [], [], ["sliding-window", STOCK]),
    "a model with some sliding windows": ("some-sliding", [], [], ["sliding-window", STOCK]),
    "a model with layers that keep a state": ("lfm2", [], [], ["layers of other kinds", STOCK]),
    "a model whose attention is in chunks": ("llama4", [], [], ["layers of other kinds", STOCK]),
    "an engine flag that does not exist": (MODEL, [], ["--no-such-flag"], ["unrecognized arguments: --no-such-flag"]),
    "an engine flag of the wrong type": (MODEL, [], ["--page-size", "many"], ["--page-size", "'many'"]),
    "a context longer than the model's": (MODEL, [], ["--context-length", "99999"], ["99999", "8192"]),
}

"""A rehearsal: every case of a session at the least size, on the simulated GPU of the tests.

The simulated GPU (tests/engines/vllm/simulated_gpu.py) runs vLLM's CUDA engine with Triton's interpreter. So servers
start, and requests are answered, by the code that a GPU runs; figures are no measurements.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from bench.gpu_session.plan import Sizes

ROOT = Path(__file__).parents[2]
SITE = ROOT / "tests" / "engines" / "vllm" / "simulated_site"
GRAPHS = {"mode": 0, "custom_ops": ["none"], "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [4]}
KV_BYTES = 16 << 20


def environment() -> dict[str, str]:
    """Return the variables by which every process that imports vLLM gets the simulated GPU."""
    paths = [str(SITE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_PLUGINS": "",  # The simulation registers the plugin.
        "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",  # Piecewise graphs without torch.compile.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }


def sizes(folder: Path) -> Sizes:
    """Return the sizes of a rehearsal, whose model is in ``folder``."""
    engine = {
        "dtype": "float32", "compilation_config": GRAPHS, "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": KV_BYTES,
    }  # fmt: skip
    return Sizes(
        model=str(make_model(folder)), host_bytes=KV_BYTES, cards_gb=(80,), shape="tiny", stock="TRITON_ATTN",
        dtypes=("float32",), equal_contexts=(20, 60), equal_answer=6,
        accuracy={"context": 512, "samples": 1, "answer": 4, "dtype": "float32", "budgets": "128"},
        prefill_contexts=(64, 300),
        traffic={"input": 40, "output": 4, "prompts": 3, "dtype": "float32", "most": 4},
        decode_context=320, steps=(1, 2), most=2, profiled=2, keys={"budget_tokens": 128, "frames_per_request": 8},
        kernels={
            "context": 256, "batches": [1], "budget": 64, "chunk": 64,
            "bench": {
                "heads": 4, "kv_heads": 2, "dim": 32, "page": 16, "staged": 64, "host_pages": 64,
                "copied_bytes": 1 << 16, "rounds": 1, "calls": 2,
            },
        },
        engine=engine,
        flags=("--compilation-config", json.dumps(GRAPHS), "--max-num-batched-tokens", "256"),
        stock_flags=("--kv-cache-memory-bytes", str(KV_BYTES)), pool=2 * KV_BYTES, slowness=2,
    )  # fmt: skip


def make_model(folder: Path) -> Path:
    """Write a small model whose random weights are large enough for attention to be peaked; return its folder."""
    target = folder / "tiny-shape"
    if (target / "model.safetensors").exists():
        return target
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from bench.model_configs import SHAPES
    from bench.shapes import write_shape

    folder.mkdir(parents=True, exist_ok=True)
    write_shape("tiny", folder)
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPES["tiny"])).float().save_pretrained(target)
    return target

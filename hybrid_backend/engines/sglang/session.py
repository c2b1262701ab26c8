"""Connection between SGLang and the runtime in one scheduler: which request each row is, and when it is gone."""

from __future__ import annotations

import logging
from typing import Any

import torch
from prometheus_client import REGISTRY
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_observability
from torch import Tensor, nn

from hybrid_backend.attention.lookahead import Layer, layer_at
from hybrid_backend.batch import Batch, ModelSpec, Step, captured_step
from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.sglang import OWN_BACKEND, patches
from hybrid_backend.engines.sglang.checks import check_layer
from hybrid_backend.engines.sglang.pool import HostTokenPool
from hybrid_backend.engines.start import start_lines
from hybrid_backend.errors import EngineError
from hybrid_backend.observe.metrics import Publisher
from hybrid_backend.runtime import HybridRuntime


def attention_layers(model: nn.Module) -> list[Layer]:
    """Return all attention layers of the decoder, in order."""
    modules = dict(model.named_modules())
    layers = []
    for path, module in modules.items():
        if isinstance(module, RadixAttention):
            check_layer(module)
            layers.append(layer_at(modules, path))
    layers.sort(key=lambda layer: int(layer.attention.layer_id))
    return layers


class Session:
    """Owner of the runtime. It knows which request each row belongs to.

    Attributes:
        runtime: the runtime of this scheduler.
        step: the step that runs; None between steps.
    """

    def __init__(self, runner: Any, config: HybridConfig, layers: list[Layer]) -> None:
        """Build the runtime over the token pool of ``runner``, SGLang's model runner."""
        pool = runner.token_to_kv_pool
        if not isinstance(pool, HostTokenPool):
            raise EngineError(
                f"SGLang built a KV pool of its own ({type(pool).__name__}), because this package's platform is not "
                "active; run on a machine without an accelerator, without SGLANG_PLATFORM and SGLANG_USE_CPU_ENGINE"
            )
        if not layers:
            raise EngineError(
                "SGLang's model has no attention layer of SGLang's own (it runs models that it does not know in "
                f"Transformers' implementation); {OWN_BACKEND}"
            )
        shapes = {
            (a.tp_q_head_num, a.tp_k_head_num, a.qk_head_dim, a.v_head_dim, a.scaling)
            for a in (layer.attention for layer in layers)
        }
        if len(shapes) != 1:
            raise EngineError(f"layers of different shape are not supported: {sorted(shapes)}")
        heads, kv_heads, head_dim, _, scale = shapes.pop()
        self._rows = runner.req_to_token_pool
        self._page_size = pool.page_size
        self._last_layer = len(layers) - 1
        longest = self._rows.req_to_token.shape[1]
        model = ModelSpec(
            len(layers), heads, kv_heads, head_dim, float(scale), pool.dtype, max_tokens=longest,
            layer_weight_bytes=sum(weight.nbytes for weight in layers[0].decoder.parameters()),
            kv_dtype=torch.int8 if pool.pages[0].dtype is torch.int8 else None,
        )  # fmt: skip
        self.runtime = HybridRuntime(config, model, pool.pages, self._rows.size, torch.device("cpu"))
        for level, line in start_lines(self.runtime):
            logging.getLogger(__name__).log(level, line)
        self.step: Step | None = None
        self._answering: set[str] = set()
        self._publisher: Publisher | None = None
        if get_observability().enable_metrics:
            runtime = self.runtime
            chunk = resolved_view(runner.server_args).chunked_prefill_size or 0
            settings = {"hybrid_step_tokens": chunk} if chunk > 0 else {}  # -1: prompts are not cut.
            self._publisher = Publisher(runtime.stats, runtime.gauges, 0, REGISTRY, settings)
            self._publisher.publish()
        setattr(self._rows, patches.LISTENER, self._freed)

    def begin_step(self, forward_batch: Any) -> None:
        """Begin the runtime's step for SGLang's batch. A replayed graph does not call `forward`."""
        rows = real_rows(forward_batch)
        ids = self._request_ids(rows)
        decode = decoding(forward_batch, ids, self._answering)
        batch = batch_of(forward_batch, ids, decode, self._rows.req_to_token, rows, self._page_size)
        self.step = self.runtime.begin_step(batch)
        self._publish()

    def capture_step(self, rows: int) -> None:
        """Begin a step whose layers are captured in a graph of ``rows`` decode rows."""
        self.step = captured_step(rows)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Attend in one layer of the running step; the last layer ends the step."""
        if self.step is None:
            raise EngineError("SGLang ran an attention layer outside of a step")
        self.runtime.forward(layer, self.step, q, k, v, out)
        if layer == self._last_layer and not self.step.is_captured:
            step, self.step = self.step, None
            self.runtime.end_step(step)
            self._publish()
            failure = self.runtime.failure(step)
            # SGLang has no way to run a failed step again, as vLLM has. So the error ends the engine.
            if failure is not None:
                raise failure.error

    def _publish(self, force: bool = False) -> None:
        if self._publisher is not None:
            self._publisher.publish(force=force)

    def _request_ids(self, rows: Tensor) -> list[str]:
        """Return an id for the request of each row, made of the row and its generation.

        SGLang counts the generation up whenever it hands the row out. So no id is used twice, whatever names clients
        give their requests.
        """
        generations = self._rows.req_generation[rows].tolist()
        return [f"{row}.{generation}" for row, generation in zip(rows.tolist(), generations, strict=True)]

    def _freed(self, rows: list[int]) -> None:
        """Release the requests of rows that SGLang takes back: finished, aborted or retracted."""
        ids = self._request_ids(torch.tensor(rows))
        self._answering.difference_update(ids)
        self.runtime.release(ids)
        self._publish(force=True)


def real_rows(fb: Any) -> Tensor:
    """Return a batch's rows of ``req_to_token``, ``[rows]`` int64, without the padding rows of a graph's replay."""
    return fb.req_pool_indices[: len(fb.req_pool_indices) - getattr(fb, "num_padding", 0)].long()


def decoding(fb: Any, request_ids: list[str], answering: set[str]) -> list[bool]:
    """Tell which rows of a batch are decode rows: one token each, after the whole prompt.

    With ``--enable-mixed-chunk`` running rows come at the end of a batch of prompts, with one token each, and SGLang
    calls all rows "extend". A decode row differs from the last token of a prompt in one way: its prompt has ended in an
    earlier batch.

    Args:
        fb: SGLang's ForwardBatch.
        request_ids: request of each row.
        answering: requests whose prompt has ended. Those whose prompt ends in this batch are added.
    """
    if fb.forward_mode.is_decode():
        return [True] * len(request_ids)
    decode = [
        length == 1 and request in answering
        for request, length in zip(request_ids, fb.extend_seq_lens_cpu, strict=True)
    ]
    # The length of the whole prompt. A retracted request computes its answer again as a part of its prompt.
    whole_lengths = fb.orig_seq_lens.tolist()
    answering.update(
        r for r, done, whole in zip(request_ids, _lengths(fb), whole_lengths, strict=True) if done >= whole
    )
    return decode


def _lengths(fb: Any) -> list[int]:
    """Return the length of each row's sequence with this step's tokens, padding rows included."""
    lengths: Tensor = fb.seq_lens if fb.seq_lens_cpu is None else fb.seq_lens_cpu
    return [int(length) for length in lengths.tolist()]


def batch_of(
    fb: Any, request_ids: list[str], decode: list[bool], req_to_token: Tensor, rows: Tensor, page_size: int
) -> Batch:
    """Return SGLang's ForwardBatch, or the view of one that a graph's replay makes, as the runtime's batch.

    ``decode`` is the result of `decoding`, ``rows`` of `real_rows`.
    """
    seq_lens = _lengths(fb)[: len(rows)]
    query_start = [0]
    for length in [1] * len(rows) if fb.forward_mode.is_decode() else fb.extend_seq_lens_cpu:
        query_start.append(query_start[-1] + length)
    # The slots of a page are consecutive, so every page_size-th slot names a page.
    slots = req_to_token[:, : max(seq_lens) : page_size].index_select(0, rows)
    return Batch(
        request_ids=request_ids,
        query_start=query_start,
        seq_lens=seq_lens,
        decode=decode,
        page_table=slots // page_size,
        slot_mapping=fb.out_cache_loc[: query_start[-1]],
    )

"""HybridRuntime: the step lifecycle that engines drive. Knows no engine; engines know nothing below it.

Data path:  engine -> `forward` -> host pool, digests, slots.
Query path: engine -> `lookahead`, `forward` -> method -> kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hybrid_backend.attention.local import LocalLayers, decode_windows
from hybrid_backend.attention.prefill import windowed
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError, WorkerError
from hybrid_backend.methods import resolve_method
from hybrid_backend.observe.stats import Stats
from hybrid_backend.step import Batch, DecodeRows, ModelSpec, Step, StepFailure, make_step, window_rows
from hybrid_backend.tiers import Tiers
from hybrid_backend.tiers.host_pool import HostPool
from hybrid_backend.tiers.pinned import node_of_gpu
from hybrid_backend.workers import ALONE, Rank, kernel_name, make_pool


class HybridRuntime:
    """One rank's hybrid attention: the tiers, the workers and the method, over the engine's KV memory.

    Per engine step: `release` for requests that are gone, `begin_step`, then for every layer `lookahead` (of the next
    layer) and `forward`; `end_step`, or `abandon` if the engine's forward raised. When the step's results are there,
    `failure` tells whether they may be used. Local (sliding-window) layers have no lookahead, and their own step if the
    engine gives them another page table.
    """

    def __init__(
        self,
        config: HybridConfig,
        model: ModelSpec,
        kv_layers: Sequence[Tensor],
        max_requests: int,
        device: torch.device,
        seen: Sequence[Tensor] = (),
        rank: Rank = ALONE,
    ) -> None:
        """``kv_layers``: per layer ``[pages, kv_heads, 2, page_size, head_dim]`` host memory of the engine; ``seen``:
        the same memory as the device sees it, where that is not the host; ``rank``: this process among the engine's
        on this machine, rank i on GPU i."""
        config.validate_for(model.num_layers)
        host = HostPool(kv_layers, seen)
        full = next((layer for layer in range(model.num_layers) if model.window(layer) is None), None)
        if full is None:
            raise ConfigError("every layer has a sliding window: nothing to offload; use the engine's own backend")
        page_size = host.layers[full].shape[3]
        if page_size != config.page_size:
            raise ConfigError(
                f"page_size: {config.page_size} is unlike the engine's block size {page_size}; "
                f"set page_size: {page_size} or start the engine with --block-size {config.page_size}"
            )
        method = resolve_method(config.method)
        method.check_device(config, device)
        method.check(config, device, model.num_layers, model.num_kv_heads)
        self.config = config
        self.model = model
        self._stats = Stats.of(model.num_layers)
        layout = method.layout(config, model, device)
        self.tiers = Tiers.build(layout, config, model, host, max_requests, device)
        self.workers = make_pool(config.workers, rank if device.type != "cuda" else _on_gpus(rank, device))
        self.method = method(config, model, self.tiers, self.workers, self._stats)
        native = device.type == "cpu" and kernel_name(config.workers.kernel) == "native"
        self._local = LocalLayers.of(model, host.layers) if native else None
        self._decodes_alone = method.runs_kernels(config, device)
        self._plans_on_host = device.type != "cpu" and not self._decodes_alone
        self._steps = 0
        self._open: Step | None = None

    # --- the step ---

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget requests that ended, were aborted or were preempted. Unknown ids are ignored."""
        for request_id in request_ids:
            self.method.release(request_id)

    def begin_step(self, batch: Batch) -> Step:
        """Start a step over the layers with full attention. A step that was left open is abandoned."""
        self._abandon_open()
        if self._plans_on_host:  # and reads there what the device wrote in earlier steps: this copy waits for them
            batch = replace(batch, page_table=batch.page_table.cpu())
        step = make_step(self._steps, batch, self.config.page_size)
        self._steps += 1
        self._open = step
        try:
            self.method.begin_step(step)
        except WorkerError as error:
            self._fail(step, error)
        return step

    def begin_local_step(self, batch: Batch, page_size: int) -> Step:
        """Start the same step for local layers, which have a page table (and perhaps a page size) of their own."""
        return make_step(self._steps, batch, page_size)

    def end_step(self, step: Step) -> None:
        """All layers of the step have run."""
        if self._open is step:
            self._open = None
            self.method.end_step(step)

    def abandon(self, step: Step) -> None:
        """The engine's forward raised: nothing stays under way for the step."""
        if self._open is step:
            self._abandon_open()

    def failure(self, step: Step) -> StepFailure | None:
        """What must not be used of a step whose results have come; None: all is right. A CPU that is late or fails does
        not stop the forward, which other ranks and a captured graph would not notice; its outputs say nothing."""
        if step.error is not None:
            return StepFailure(step.error, step.request_ids, step.write_pages.unique().tolist())
        return self.method.failure(step)

    # --- data path ---

    def forward(self, layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """One layer: store the step's new tokens, then attend.

        ``q``, ``out``: ``[tokens, heads, head_dim]``; ``k``, ``v``: ``[tokens, kv_heads, head_dim]``.
        """
        if step.error is None:
            try:
                self._forward(layer, step, q, k, v, out)
            except WorkerError as error:
                self._fail(step, error)
        if step.error is not None:
            out.zero_()

    def _forward(self, layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        in_place = self.method.in_place if self.model.window(layer) is None else self._local
        if step.prefill or in_place is None:
            self._append(layer, step, k, v)
        self._attend_prompts(layer, step, q, k, v, out)
        if step.decode is None:
            return
        if in_place is not None:
            in_place.decode(layer, step, q, k, v, out)
        else:
            self._attend_decoding(layer, step, step.decode, q, out)

    def _append(self, layer: int, step: Step, k: Tensor, v: Tensor) -> None:
        tokens = step.num_tokens
        kv = torch.stack([k[:tokens], v[:tokens]], 2)
        self.tiers.host.write(layer, step.write_pages, step.write_offsets, kv)
        if self.model.window(layer) is not None:
            return
        digests = self.tiers.digests
        has_digests = digests is not None and layer in digests.layers
        if digests is not None and has_digests:
            for row in step.prefill:
                digests.rebuild(layer, row.written, row.tokens_in)
        if self.method.in_place is not None:
            return  # it appends by itself
        if digests is not None and has_digests and step.decode is not None:
            pages, offsets = step.decode.gather(step.write_pages), step.decode.gather(step.write_offsets)
            digests.append(layer, pages, offsets, step.decode.gather(kv)[:, :, 0])
        self.method.append(layer, step, kv)

    def imported(self, pages: Tensor) -> None:
        """Whole pages (``[n]`` int64 host page ids, all layers) that somebody else wrote: a KV connector."""
        if self.tiers.digests is not None:
            for layer in self.tiers.digests.layers:
                self.tiers.digests.rebuild(layer, pages, torch.full((len(pages),), self.config.page_size))

    # --- query path ---

    def wants_lookahead(self, layer: int, step: Step) -> bool:
        """Whether `lookahead` should be called for ``layer`` in this step."""
        if self.model.window(layer) is not None or step.decode is None:
            return False
        return (
            (step.is_captured or self._open is step) and step.error is None and self.method.wants_lookahead(layer, step)
        )

    def lookahead(self, layer: int, step: Step, predicted_q: Tensor) -> None:
        """The predicted query of ``layer`` is known: ``[decode rows, heads, head_dim]``. Returns at once."""
        try:
            self.method.lookahead(layer, step, predicted_q)
        except WorkerError as error:
            self._fail(step, error)

    def _attend_prompts(self, layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """All prompt chunks, each exactly."""
        window = self.model.window(layer)
        heads, scale = self.model.num_kv_heads, self.model.scale
        for row in step.prefill:
            mine = slice(row.start, row.end)
            if window is None:
                out[mine] = self.method.prefill(layer, row, q[mine], k[mine], v[mine])
            else:
                out[mine] = windowed(
                    q[mine], self.tiers.host.blocks(layer), row.pages, row.seq_len, heads, scale, window
                )

    def _attend_decoding(self, layer: int, step: Step, rows: DecodeRows, q: Tensor, out: Tensor) -> None:
        window = self.model.window(layer)
        if window is None:
            result = self.method.attend(layer, step, rows.gather(q))
        else:
            blocks = self.tiers.host.blocks(layer)
            seen = window_rows(step, window, blocks.shape[1])
            result = decode_windows(rows.gather(q), blocks, seen, self.model.num_kv_heads, self.model.scale)
        if rows.whole_batch:
            out[: rows.count] = result
        else:
            out.index_copy_(0, rows.tokens.to(out.device), result.to(out.dtype))

    # --- the end ---

    @property
    def stats(self) -> Stats:
        """All counters, as far as the device has come: it may be a step behind."""
        self.method.count()
        return self._stats

    def gauges(self) -> dict[str, float]:
        """What is in use now, by metric name. Brings `stats` up to date. A GPU's own kernels do not say which of their
        recalls are under way."""
        self.method.count()
        found: dict[str, float] = {
            "hybrid_regions_in_use": self.tiers.slots.regions_in_use,
            "hybrid_slots_in_use": self.method.resident_pages,
            "hybrid_host_pool_pages": self.tiers.host.layers[0].shape[0],
            "hybrid_digest_bytes": self.tiers.digests.nbytes if self.tiers.digests else 0,
            "hybrid_slot_bytes": self.tiers.slots.nbytes,
            "hybrid_device_bytes": self.tiers.device_bytes + self.method.device_bytes,
            "hybrid_context_cache_bytes": self.method.host_bytes,
            "hybrid_copied_bytes": self.tiers.copied_bytes,
        }
        if not self._decodes_alone:
            found["hybrid_recalls_in_flight"] = self.tiers.transfers.in_flight
        return found

    def close(self) -> None:
        """Stop all threads."""
        self._abandon_open()
        self.method.close()
        if self._local is not None:
            self._local.close()
        self.workers.close()
        self.tiers.close()

    def _abandon_open(self) -> None:
        step, self._open = self._open, None
        if step is not None:
            self.method.abandon(step)

    def _fail(self, step: Step, error: WorkerError) -> None:
        """Nothing more is computed for the step, and nobody is waited for."""
        if step.is_captured or step is not self._open:
            raise error  # it stands for many steps, or for local layers, of which nobody asks `failure`
        step.error = error
        self.abandon(step)


def _on_gpus(rank: Rank, device: torch.device) -> Rank:
    """``rank`` with what is known of the ranks' GPUs; a process may see its own alone."""
    if torch.cuda.device_count() < rank.count:
        return replace(rank, on_gpu=True, node=node_of_gpu(device))
    return rank.with_gpus([node_of_gpu(torch.device("cuda", index)) for index in range(rank.count)])

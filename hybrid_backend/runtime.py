"""HybridRuntime: the step lifecycle that engines drive. Knows no engine; engines know nothing below it.

Data path:  engine -> `forward` -> host pool, digests, slots.
Query path: engine -> `lookahead`, `forward` -> method -> kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hybrid_backend.attention.prefill import windowed
from hybrid_backend.config import HybridConfig
from hybrid_backend.errors import ConfigError
from hybrid_backend.methods import resolve_method
from hybrid_backend.observe.stats import Stats
from hybrid_backend.step import Batch, DecodeRows, ModelSpec, Step, make_step
from hybrid_backend.tiers import Tiers
from hybrid_backend.tiers.host_pool import HostPool
from hybrid_backend.workers import make_pool


class HybridRuntime:
    """One rank's hybrid attention: the tiers, the workers and the method, over the engine's KV memory.

    Per engine step: `release` for requests that are gone, `begin_step`, then for every layer `lookahead` (of the next
    layer) and `forward`; `end_step`. Local (sliding-window) layers have no lookahead, and their own step if the engine
    gives them another page table.
    """

    def __init__(
        self,
        config: HybridConfig,
        model: ModelSpec,
        kv_layers: Sequence[Tensor],
        max_requests: int,
        device: torch.device,
        seen: Sequence[Tensor] = (),
    ) -> None:
        """``kv_layers``: per layer ``[pages, kv_heads, 2, page_size, head_dim]`` host memory of the engine; ``seen``:
        the same memory as the device sees it, where that is not the host."""
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
        self.workers = make_pool(config.workers)
        self.method = method(config, model, self.tiers, self.workers, self._stats)
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
        """Start a step over the layers with full attention. A step left open by a failed forward is dropped."""
        self._drop_open()
        if self._plans_on_host:  # and reads there what the device wrote in earlier steps: this copy waits for them
            batch = replace(batch, page_table=batch.page_table.cpu())
        step = make_step(self._steps, batch, self.config.page_size)
        self.method.begin_step(step)
        self._steps += 1
        self._open = step
        return step

    def begin_local_step(self, batch: Batch, page_size: int) -> Step:
        """Start the same step for local layers, which have a page table (and perhaps a page size) of their own."""
        return make_step(self._steps, batch, page_size)

    def end_step(self, step: Step) -> None:
        """All layers of the step have run."""
        if self._open is step:
            self._open = None
            self.method.end_step(step)

    # --- data path ---

    def forward(self, layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """One layer: store the step's new tokens, then attend.

        ``q``, ``out``: ``[tokens, heads, head_dim]``; ``k``, ``v``: ``[tokens, kv_heads, head_dim]``.
        """
        in_place = self.method.in_place if self.model.window(layer) is None else None
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
        return (step.is_captured or self._open is step) and self.method.wants_lookahead(layer, step)

    def lookahead(self, layer: int, step: Step, predicted_q: Tensor) -> None:
        """The predicted query of ``layer`` is known: ``[decode rows, heads, head_dim]``. Returns at once."""
        self.method.lookahead(layer, step, predicted_q)

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
            mine = rows.gather(q)
            blocks = self.tiers.host.blocks(layer)
            heads, scale = self.model.num_kv_heads, self.model.scale
            result = torch.cat(
                [
                    windowed(
                        mine[r : r + 1],
                        blocks,
                        rows.page_table[r],
                        int(rows.seq_lens[r]),
                        heads,
                        scale,
                        window,
                    )
                    for r in range(rows.count)
                ]
            )
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
        self._drop_open()
        self.method.close()
        self.workers.close()
        self.tiers.close()

    def _drop_open(self) -> None:
        if self._open is not None:
            self.method.abandon(self._open)
            self._open = None

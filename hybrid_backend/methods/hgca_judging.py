"""Prompts of method ``hgca`` that the CPU workers judge while the engine decodes (`Unjudged`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_backend.batch import DecodeRows
from hybrid_backend.kernels.operations import Judgement, LayerToJudge, PromptToJudge
from hybrid_backend.tiers import Tiers
from hybrid_backend.workers import Judging, WorkerPool


class LeftPage(NamedTuple):
    """A page that left the window before its request was judged."""

    page: int
    """Logical page."""
    host_page: Tensor
    """``[1]`` int64 host page."""
    average: Tensor
    """``[layers, kv_heads, page_size]`` averages of its tokens, on the host, without the prompt's weights."""
    steps: int
    """Steps that the averages followed."""


class Unjudged:
    """A request that decodes while its prompt is judged.

    The queries and the page table are copied to the host without waiting for a GPU. The first `poll` after the copies
    have arrived submits the prompt. All its K and V are in the host pool then.
    """

    def __init__(
        self, tiers: Tiers, workers: WorkerPool, rows: DecodeRows, r: int, request: int, first: int, sinks: int
    ) -> None:
        """Begin the copies of row ``r``.

        Args:
            tiers: the tiers.
            workers: pool that judges.
            rows: decode rows of the request's first step.
            r: its row.
            request: request index.
            first: page that the request's window begins with.
            sinks: first pages, which are not judged.
        """
        self.first, self.left = first, list[LeftPage]()
        self.started_tokens = int(rows.seq_lens[r])
        self._tiers, self._workers, self._request, self._sinks = tiers, workers, request, sinks
        self._name = f"the judging of request {rows.request_ids[r]}"
        self._pages = rows.page_table[r, : int(rows.num_pages[r])].int().to("cpu", non_blocking=True)
        self._queries: list[Tensor] = []
        self._threshold = self._scale = 0.0
        self._event: torch.cuda.Event | None = None
        self._judging: Judging | None = None

    def prepare(self, queries: list[Tensor], threshold: float, scale: float) -> None:
        """Begin to copy the queries. Nothing is submitted yet, so that no error of the workers comes from here.

        Args:
            queries: ``[n, heads, head_dim]`` of each layer with a context cache: queries of the prompt's last n tokens.
            threshold: weight that a kept token exceeds.
            scale: factor of the logits.
        """
        self._queries = [q.contiguous().to("cpu", non_blocking=True) for q in queries]
        self._threshold, self._scale = threshold, scale
        if self._tiers.device.type == "cuda":
            self._event = torch.cuda.current_stream(self._tiers.device).record_event()

    def poll(self, deadline: float) -> Judgement | None:
        """Return the judgement; None while the workers have work left. Never waits.

        Raises:
            WorkerError: the workers failed, or made no progress for ``deadline`` seconds.
        """
        self._submit_arrived()
        return None if self._judging is None else self._judging.poll(deadline)

    def abandon(self) -> None:
        """Give up the prompt, so that no worker writes to the request's pages of the context caches any more."""
        if self._judging is not None:
            self._judging.abandon()

    def _submit_arrived(self) -> None:
        if self._judging is not None or (self._event is not None and not self._event.query()):
            return
        cache, host = self._tiers.cache, self._tiers.host
        size = next(iter(cache.stores.values())).shape[3]
        layers = [
            LayerToJudge(q, host.layers[layer], cache.own_pages(layer, self._request))
            for layer, q in zip(cache.row, self._queries, strict=True)
        ]
        stored = self.started_tokens - 1  # The first step's own token is not in the host pool yet.
        prompt = PromptToJudge(
            layers, self._pages, stored, self._sinks * size, self.first * size, self._threshold, self._scale
        )
        self._judging = self._workers.judge(prompt, self._name)

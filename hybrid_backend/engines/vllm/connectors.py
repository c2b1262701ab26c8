"""vLLM's own KV connectors on a server that decodes: they tell the runtime which pages they wrote.

`adopt` has vLLM load a connector of a name in `CONNECTORS` from this module. Each class has the name of vLLM's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector as _Example
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector as _Nixl
from vllm.logger import init_logger

from hybrid_backend.engines.vllm import CONNECTOR_MODULE, CONNECTORS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

_logger = init_logger("vllm.hybrid_backend")
STOCK_BACKEND = "CPU_ATTN"
"""Name of vLLM's own backend, in whose layout pages arrive."""


class Importing:
    """Mixin for a connector of vLLM, which tells the runtime the pages that it wrote in vLLM's own layout."""

    updates_digests = True  # `checks.Start.has_silent_connector` reads it.
    brings_stock_pages = True
    imported: Callable[[Tensor, Tensor | None], None] | None = None
    """`Session.imported`, set by the worker."""

    def tell(self, pages: Tensor, tokens: Tensor | None = None) -> None:
        """Tell the runtime about pages (`Session.imported`)."""
        assert self.imported is not None, "KV was loaded before the KV memory was there"
        if len(pages):
            self.imported(pages, tokens)


class ExampleConnector(Importing, _Example):
    """Connector through files in a folder.

    It writes whole pages before the step's forward, also those that a request already had from the prefix cache. All
    pages of a request are brought into our layout before anything reads them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unread: set[int] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return 0 where vLLM's own answer is wrong.

        That is negative where the prefix cache has a page more than the files. Where a prompt ends one token after a
        page, vLLM checks other files than it opens.
        """
        count, is_later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if count is None or (count > 0 and request.num_prompt_tokens % self._block_size != 1):
            return count, is_later
        return 0, False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = [request.slot_mapping for request in self._get_connector_metadata().requests if not request.is_store]
        if not loads or forward_context.attn_metadata is None:
            return
        pages = (torch.cat(loads) // self._block_size).unique()
        try:
            super().start_load_kv(forward_context, **kwargs)
        except (OSError, RuntimeError, IndexError, SafetensorError) as error:
            # The prefill server may still be writing the files, or its blocks may differ. An exception would end vLLM.
            _logger.error("KV of %d pages could not be read from %s: %s", len(pages), self._storage_path, error)
            self._unread.update(pages.tolist())
            return
        self.tell(pages)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be read. vLLM's ``kv_load_failure_policy`` handles their requests."""
        unread, self._unread = self._unread, set()
        return unread

    def save_kv_layer(self, *_: Any, **__: Any) -> None:
        """Write nothing, because other servers would read our pages in vLLM's layout."""


class NixlConnector(Importing, _Nixl):
    """Connector through RDMA or shared memory, from the prefill server's memory into ours, beside the steps.

    A request waits until its pages have arrived.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _same_cpus():
            super().__init__(*args, **kwargs)
        self._prompt_lengths: dict[str, int] = {}  # In the scheduler: prompts that are to be loaded.
        self._loads: dict[str, tuple[Tensor, Tensor]] = {}  # In the worker: pages of a request, and tokens in them.
        if self.connector_worker is not None:
            # The prefill server compares this name. Arriving pages are brought from that backend's layout into ours.
            self.connector_worker.backend_name = STOCK_BACKEND

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the length of a prompt that is to be loaded."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens > 0:
            self._prompt_lengths[request.request_id] = request.num_prompt_tokens

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """Send the lengths of prompts to the worker."""
        metadata = super().build_connector_meta(scheduler_output)
        metadata.lengths, self._prompt_lengths = self._prompt_lengths, {}
        return metadata

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        for name, length in metadata.lengths.items():
            if name in metadata.reqs_to_recv:
                (ids,) = metadata.reqs_to_recv[name].local_physical_block_ids
                self._loads[name] = self._last_pages(ids, length)
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Tell the runtime about requests whose pages have arrived.

        Failed transfers are included, because vLLM uses the pages before the first one that failed.
        """
        results = super().get_transfer_results(finished_req_ids)
        for name in results.finished_recving:
            if name in self._loads:
                self.tell(*self._loads.pop(name))
        return results

    def _last_pages(self, ids: list[int], length: int) -> tuple[Tensor, Tensor]:
        """Return pages ``ids``, the last ones of a prompt of ``length`` tokens, and the tokens in each page."""
        page_size = self._vllm_config.cache_config.block_size
        tokens = torch.full((len(ids),), page_size)
        tokens[-1:] = (length - 1) % page_size + 1
        return torch.tensor(ids, dtype=torch.int64), tokens


NixlPullConnector = NixlConnector


def adopt(vllm_config: VllmConfig) -> None:
    """Have vLLM load the user's connector from this module."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector not in CONNECTORS or transfer.kv_connector_module_path:
        return
    transfer.kv_connector_module_path = CONNECTOR_MODULE
    cache = vllm_config.cache_config
    _logger.info_once(
        "KV comes through %s: the prefill server is vLLM's own, on a CPU of the same kind, with --block-size %d, "
        "--dtype %s and the kv_role kv_producer",
        transfer.kv_connector,
        cache.block_size,
        str(vllm_config.model_config.dtype).removeprefix("torch."),
    )


@contextmanager
def _same_cpus() -> Iterator[None]:
    """Keep this thread's CPUs: vLLM's NIXL worker binds its thread to one core, where we would compute afterwards."""
    cpus = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cpus)

"""vLLM's own KV connectors on a server that decodes: the runtime learns which pages they wrote, in our layout.

`adopt` has vLLM load a connector of a name in `CONNECTORS` from here. Each is vLLM's class of that name.
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
STOCK_BACKEND = "CPU_ATTN"  # whose layout arrives


class Importing:
    """Mixed into a connector of vLLM's: it says which pages it wrote."""

    updates_digests = True  # see `checks.Start.has_silent_connector`
    brings_stock_pages = True  # which lie as vLLM's own backend writes them
    imported: Callable[[Tensor, Tensor | None], None] | None = None
    """`Session.imported`, set by the worker."""

    def tell(self, pages: Tensor, tokens: Tensor | None = None) -> None:
        assert self.imported is not None, "KV was loaded before the KV memory was there"
        if len(pages):
            self.imported(pages, tokens)


class ExampleConnector(Importing, _Example):
    """Through files in a folder. It writes before the step's forward, whole pages, also those of a request that were
    there already (from the prefix cache): all of a request's are brought into our layout, before anybody reads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unread: set[int] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """vLLM's own says less than nothing where the prefix cache has a page more than the files, and looks for
        other files than it opens where a prompt ends one token after a page."""
        count, is_later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if count is None or (count > 0 and request.num_prompt_tokens % self._block_size != 1):
            return count, is_later
        return 0, False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = [each.slot_mapping for each in self._get_connector_metadata().requests if not each.is_store]
        if not loads or forward_context.attn_metadata is None:
            return
        pages = (torch.cat(loads) // self._block_size).unique()
        try:
            super().start_load_kv(forward_context, **kwargs)
        except (OSError, RuntimeError, IndexError, SafetensorError) as error:
            # The prefill server is still writing, or has other blocks. vLLM's own ends with the whole engine.
            _logger.error("KV of %d pages could not be read from %s: %s", len(pages), self._storage_path, error)
            self._unread.update(pages.tolist())
            return
        self.tell(pages)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """vLLM's ``kv_load_failure_policy`` says what becomes of their requests."""
        found, self._unread = self._unread, set()
        return found

    def save_kv_layer(self, *_: Any, **__: Any) -> None:
        """A server that decodes writes nothing: others would take it for vLLM's layout."""


class NixlConnector(Importing, _Nixl):
    """Through RDMA or shared memory, from the prefill server's memory into ours, beside the steps. A request waits
    until its pages are there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _same_cpus():
            super().__init__(*args, **kwargs)
        self._lengths: dict[str, int] = {}  # scheduler: of prompts that are to be loaded
        self._loads: dict[str, tuple[Tensor, Tensor]] = {}  # worker: pages of each request, and tokens in them
        if self.connector_worker is not None:
            # The other side compares: what arrives is brought from that backend's layout into ours.
            self.connector_worker.backend_name = STOCK_BACKEND

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens > 0:
            self._lengths[request.request_id] = request.num_prompt_tokens

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        metadata.lengths, self._lengths = self._lengths, {}
        return metadata

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        for name, length in metadata.lengths.items():
            if name in metadata.reqs_to_recv:
                (ids,) = metadata.reqs_to_recv[name].local_physical_block_ids
                self._loads[name] = self._last_pages(ids, length)
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for name in results.finished_recving:  # also where it failed: pages before the first that did are used
            if name in self._loads:
                self.tell(*self._loads.pop(name))
        return results

    def _last_pages(self, ids: list[int], length: int) -> tuple[Tensor, Tensor]:
        """Of a prompt of ``length`` tokens, and the tokens that each holds: the last may not be whole."""
        page_size = self._vllm_config.cache_config.block_size
        tokens = torch.full((len(ids),), page_size)
        tokens[-1:] = (length - 1) % page_size + 1
        return torch.tensor(ids, dtype=torch.int64), tokens


NixlPullConnector = NixlConnector


def adopt(vllm_config: VllmConfig) -> None:
    """Have vLLM load the connector that the user named from this file."""
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
    """vLLM's NIXL worker binds the thread that makes it to one core, where it would compute from then on, and so would
    all that it starts."""
    cpus = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cpus)

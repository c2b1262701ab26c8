"""Mixin for vLLM's workers of all devices, which runs the runtime beside vLLM's model runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from prometheus_client import REGISTRY
from torch import Tensor
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.logger import init_logger

from hybrid_backend.config import HybridConfig
from hybrid_backend.engines.start import start_lines
from hybrid_backend.engines.vllm.checks import check_engine_config
from hybrid_backend.engines.vllm.model_hooks import attach_inputs, attach_lookahead, block_size_of
from hybrid_backend.engines.vllm.parking import parks_rows
from hybrid_backend.engines.vllm.session import Session, global_rank
from hybrid_backend.engines.vllm.settings import attached_config
from hybrid_backend.observe.metrics import Publisher

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.worker_base import CompilationTimes
    from vllm.v1.worker.worker_base import WorkerBase as _Worker

    from hybrid_backend.runtime import HybridRuntime
else:
    _Worker = object


class HybridWorker(_Worker):
    """Mixin for the worker of each device. ``session`` is set once the KV memory is allocated."""

    worker_cls: ClassVar[str]
    hybrid_config: HybridConfig
    session: Session | None = None
    publisher: Publisher | None = None
    is_warming_up = False

    def init_device(self) -> None:
        """Check the final configuration: vLLM derives settings after it has asked the platform."""
        check_engine_config(self.vllm_config, attached_config(self.vllm_config), self.worker_cls)
        super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        self.hybrid_config = attached_config(self.vllm_config)
        attach_lookahead(self.model_runner.get_model(), self.vllm_config, self.hybrid_config, self.device)
        if parks_rows(self.vllm_config):
            attach_inputs(self.model_runner.get_model(), self.vllm_config, self.hybrid_config)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        block_size = block_size_of(self.model_runner.get_model(), kv_cache_config)
        super().initialize_from_config(kv_cache_config)
        self.session = Session(
            self.model_runner, self.vllm_config, self.hybrid_config, self.device, self.on_host, block_size
        )
        runtime, rank = self.session.runtime, global_rank(self.vllm_config.parallel_config)
        if has_kv_transfer_group():
            connector = get_kv_transfer_group()
            is_stock = getattr(connector, "brings_stock_pages", False)
            connector.imported = self.session.imported if is_stock else runtime.imported
        if rank == 0:
            # On a GPU each KV cache group has a pool of its own (`device_groups`); on a CPU all groups share one.
            groups = 1 if self.device.type == "cuda" else len(kv_cache_config.kv_cache_groups)
            for level, line in start_lines(runtime, groups):
                init_logger("vllm.hybrid_backend").log(level, line)
        settings = {"hybrid_step_tokens": self.vllm_config.scheduler_config.max_num_batched_tokens}
        self.publisher = Publisher(runtime.stats, runtime.gauges, rank, REGISTRY, settings)
        self.publisher.publish()

    def on_host(self, view: Tensor) -> Tensor:
        """Return the host's tensor over the memory of a layer's KV cache."""
        return view

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Warm up without a trace in the counters: vLLM serves requests of its own for it, and on a GPU we do."""
        if self.session is None:
            return super().compile_or_warm_up_model()
        self.is_warming_up = True
        try:
            self.warm_up_kernels(self.session.runtime)
            times = super().compile_or_warm_up_model()
            self.session.runtime.forget_counts()
            return times
        finally:
            self.is_warming_up = False

    def warm_up_kernels(self, runtime: HybridRuntime) -> None:
        """Launch our own kernels before vLLM's warm-up. A CPU's kernels need none."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        session, publisher = self.session, self.publisher
        if session is None or publisher is None:
            return super().execute_model(scheduler_output)
        preempted = scheduler_output.preempted_req_ids or set()
        session.runtime.preempt(preempted)  # vLLM delivers the tokens that a step under way computes for them.
        session.runtime.release(scheduler_output.finished_req_ids)
        session.note_budgets(scheduler_output)
        try:
            with session.scheduled():
                return super().execute_model(scheduler_output)
        finally:
            if not self.is_warming_up:
                publisher.publish(force=bool(preempted or scheduler_output.finished_req_ids))

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        if self.session is None:
            return super().sample_tokens(grammar_output)
        with self.session.sampled():
            output = super().sample_tokens(grammar_output)
        return self.session.checked(output)

    def shutdown(self) -> None:
        if self.session is not None:
            self.session.runtime.close()
        super().shutdown()

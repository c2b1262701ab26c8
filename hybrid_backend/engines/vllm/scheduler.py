"""vLLM's schedulers, which do not use a token that was computed without the CPU's part.

A step that failed (`outputs.HybridOutput`) is taken back: its requests are preempted, their output of this step and of
those already under way is dropped, and they are computed again from what the prefix cache holds of their right tokens.
vLLM does the same when the prefix cache is reset under running requests (``Scheduler.reset_prefix_cache``). A request
whose step fails again at the same token ends with an error. Nobody else's request is touched.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from hybrid_backend.engines.vllm.compat import end_with_error
from hybrid_backend.engines.vllm.outputs import HybridOutput

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput

_logger = init_logger("vllm.hybrid_backend")


class Recomputing(Scheduler):
    """Mixed into both of vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._failed_at: dict[str, int] = {}  # of requests whose step failed, how many tokens they had then

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if isinstance(model_runner_output, HybridOutput) and model_runner_output.failed:
            self._take_back(model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _take_back(self, output: HybridOutput) -> None:
        """Before the output is used."""
        mine = [self.requests[name] for name in output.failed if name in self.requests]
        # Output that was given up already, when an earlier step failed, does not fail once more.
        mine = [each for each in mine if not (each.is_finished() or (_is_stale(each) and each.drop_stale_output))]
        bad = set(output.blocks)
        # Others may have found such a block in the prefix cache since.
        victims = {each.request_id: each for each in mine}
        victims |= {each.request_id: each for each in self.running if bad.intersection(self._blocks(each))}
        self.kv_cache_manager.evict_blocks(bad)
        for request in victims.values():
            if not bad.intersection(self._blocks(request)):
                continue
            # The step wrote to every group, and names the pages of the one with full attention.
            for group in self.kv_cache_manager.coordinator.single_type_managers:
                blocks = [block.block_id for block in group.req_to_blocks.get(request.request_id, ())]
                shared = group.block_pool is self.kv_cache_manager.block_pool
                first = next((at for at, block in enumerate(blocks) if shared and block in bad), 0)
                group.block_pool.evict_blocks(set(blocks[first:]))
        given_up = [each.request_id for each in mine if self._failed_at.get(each.request_id) == each.num_tokens]
        self._failed_at = {name: tokens for name, tokens in self._failed_at.items() if name in self.requests}
        self._failed_at |= {each.request_id: each.num_tokens for each in mine}
        now = time.monotonic()
        for request in reversed(list(victims.values())):  # each goes to the front of the queue
            if request.status == RequestStatus.RUNNING:
                self.running.remove(request)
                self._preempt_request(request, now, drop_stale_output=True)
            else:  # preempted since; what is on its way would still be delivered
                request.drop_stale_output = True
        self.prev_step_scheduled_req_ids.difference_update(victims)
        end_with_error(self, given_up)
        again = [name for name in victims if name not in given_up]
        _logger.error("%s; computed again: %s; ended with an error: %s", output.why, again, given_up)

    def _blocks(self, request: Request) -> list[int]:
        """Of the groups in the host pool, which is the one whose pages a step names."""
        manager, name = self.kv_cache_manager, request.request_id
        groups = [each for each in manager.coordinator.single_type_managers if each.block_pool is manager.block_pool]
        return [block.block_id for group in groups for block in group.req_to_blocks.get(name, ())]


def _is_stale(request: Request) -> bool:
    return request.num_stale_output_tokens > 0


class RecomputingScheduler(Recomputing):
    pass


class RecomputingAsyncScheduler(Recomputing, AsyncScheduler):
    pass


class ParkingScheduler(RecomputingScheduler):
    """Scheduler of rows that yield their token some steps after they got it to compute (`methods.apex.parking`).

    vLLM takes a scheduled token for computed. Here a row that is unfinished gets the same one again. And a block is
    given to the prefix cache only when its last token is done, not when it is scheduled: until then some layers of it
    are empty. There is no seam for that: ``KVCacheManager.allocate_slots`` (v1/core/kv_cache_manager.py) is called in
    the middle of ``Scheduler.schedule``, and told to delay.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._allocate = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate_slots

    def _allocate_slots(self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        if num_new_tokens == 1:  # more are a prompt's, or computed again as one, and never wait
            kwargs["delay_cache_blocks"] = True
        return self._allocate(request, num_new_tokens, *args, **kwargs)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        output = model_runner_output
        failed, unfinished = (output.failed, output.unfinished) if isinstance(output, HybridOutput) else ([], [])
        for name, count in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(name)
            if request is None or request.is_finished() or _is_stale(request) or name in failed:
                continue
            if name in unfinished:
                request.num_computed_tokens -= count
            else:
                self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        return super().update_from_output(scheduler_output, model_runner_output)

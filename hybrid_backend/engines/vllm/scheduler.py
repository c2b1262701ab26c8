"""vLLM's schedulers, which do not use a token that was computed without the CPU's partials.

A step that failed (`outputs.HybridOutput`) is taken back: its requests are preempted, their output of this step and of
later steps under way is dropped, and they are computed again from the prefix cache's blocks of their correct tokens.
vLLM does the same when the prefix cache is reset under running requests (``Scheduler.reset_prefix_cache``). A request
whose step fails again at the same token ends with an error. Other requests are not touched.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from hybrid_backend.engines.vllm.compat import end_with_error
from hybrid_backend.engines.vllm.outputs import HybridOutput
from hybrid_backend.step.request_room import RequestRoom

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput

_logger = init_logger("vllm.hybrid_backend")


class Recomputing(Scheduler):
    """Mixin for both of vLLM's schedulers, which takes failed steps back.

    A method may limit the requests that run (`step.method.request_room`). The limit of the last step whose output has
    arrived holds for the next step that is scheduled.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tokens_at_failure: dict[str, int] = {}  # The lengths of requests when their last step failed.
        self._room: RequestRoom | None = None
        self._most_active: int = self.max_num_active_reqs

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        active = self._most_active
        if self._room is not None:
            running, waiting = ([request.num_tokens for request in queue] for queue in (self.running, self.waiting))
            started = len(running) + self.num_waiting_for_streaming_input
            active = min(active, started + self._room.startable(running, waiting))
        self.max_num_active_reqs: int = active
        return super().schedule(*args, **kwargs)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        output = model_runner_output if isinstance(model_runner_output, HybridOutput) else None
        self._room = None if output is None else output.room
        if output is not None and output.failed:
            self._take_back(output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _take_back(self, output: HybridOutput) -> None:
        failed = [self.requests[name] for name in output.failed if name in self.requests]
        # Output that was given up when an earlier step failed does not fail again.
        failed = [
            request
            for request in failed
            if not (request.is_finished() or (_is_stale(request) and request.drop_stale_output))
        ]
        bad_blocks = set(output.blocks)
        # Other requests may have received a bad block from the prefix cache in the meantime.
        sharing = [request for request in self.running if bad_blocks.intersection(self._host_blocks(request))]
        victims = {request.request_id: request for request in (*failed, *sharing)}
        self.kv_cache_manager.evict_blocks(bad_blocks)
        for request in victims.values():
            if bad_blocks.intersection(self._host_blocks(request)):
                self._evict_blocks_after(request, bad_blocks)
        lengths = {request.request_id: request.num_tokens for request in failed}
        ended = [name for name, tokens in lengths.items() if self._tokens_at_failure.get(name) == tokens]
        earlier = {name: tokens for name, tokens in self._tokens_at_failure.items() if name in self.requests}
        self._tokens_at_failure = earlier | lengths
        self._preempt(victims.values())
        self.prev_step_scheduled_req_ids.difference_update(victims)
        end_with_error(self, ended)
        again = [name for name in victims if name not in ended]
        _logger.error("%s; computed again: %s; ended with an error: %s", output.why, again, ended)

    def _evict_blocks_after(self, request: Request, bad_blocks: set[int]) -> None:
        """Evict a request's blocks of every group from the first bad block on.

        The step wrote to every group, but names only blocks of the full-attention group. A group with a pool of its own
        loses all blocks.
        """
        for group in self.kv_cache_manager.coordinator.single_type_managers:
            blocks = [block.block_id for block in group.req_to_blocks.get(request.request_id, ())]
            is_shared = group.block_pool is self.kv_cache_manager.block_pool
            bad_indices = [index for index, block in enumerate(blocks) if is_shared and block in bad_blocks]
            group.block_pool.evict_blocks(set(blocks[bad_indices[0] if bad_indices else 0 :]))

    def _preempt(self, requests: Iterable[Request]) -> None:
        timestamp = time.monotonic()
        for request in reversed(list(requests)):  # Each preempted request goes to the front of the queue.
            if request.status == RequestStatus.RUNNING:
                self.running.remove(request)
                self._preempt_request(request, timestamp, drop_stale_output=True)
            else:
                # The request was preempted since. Its output on the way would still be delivered.
                request.drop_stale_output = True

    def _host_blocks(self, request: Request) -> list[int]:
        """Return a request's blocks in the host pool, which are the blocks that a failed step names."""
        manager, name = self.kv_cache_manager, request.request_id
        groups = [group for group in manager.coordinator.single_type_managers if group.block_pool is manager.block_pool]
        return [block.block_id for group in groups for block in group.req_to_blocks.get(name, ())]


def _is_stale(request: Request) -> bool:
    """Tell whether output is on its way that was computed before the request was preempted."""
    return request.num_stale_output_tokens > 0


class RecomputingScheduler(Recomputing):
    """vLLM's synchronous scheduler, which takes failed steps back."""


class RecomputingAsyncScheduler(Recomputing, AsyncScheduler):
    """vLLM's asynchronous scheduler, which takes failed steps back."""


class ParkingScheduler(RecomputingScheduler):
    """Scheduler for rows that yield their token some steps after it was scheduled (`execution.parking`).

    vLLM takes a scheduled token for computed. Here an unfinished row gets the same token again. A block is given to the
    prefix cache when its last token is done, not when it is scheduled: until then some layers of the block are empty.
    vLLM has no seam for that: ``KVCacheManager.allocate_slots`` (v1/core/kv_cache_manager.py) is called in the middle
    of ``Scheduler.schedule``, and told to delay.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._allocate = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate_slots

    def _allocate_slots(self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        # Only decode rows wait for the CPU. A row with several new tokens is a prefill chunk, which never waits.
        if num_new_tokens == 1:
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

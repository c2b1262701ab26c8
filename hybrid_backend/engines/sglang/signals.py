"""End of an SGLang server at a signal. SGLang by itself waits for requests without limit, and polls every 5 s."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from hybrid_backend.engines.lifecycle import ServerProcess

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_POLL_SECONDS = 0.1


def register(server: ServerProcess) -> None:
    """Have SGLang's process for HTTP end as ``server`` does, by SGLang's own `HookRegistry`.

    Must be called before SGLang's plugins are loaded.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_MANAGER}.auto_create_handle_loop", partial(_handle_signals, server), HookType.AROUND)
    HookRegistry.register(f"{_MANAGER}.sigterm_watchdog", partial(_end_when_idle, server), HookType.AROUND)


def _handle_signals(server: ServerProcess, original: Callable[[Any], None], manager: Any) -> None:
    """Replace SGLang's handler of SIGTERM and uvicorn's of SIGINT, once SGLang has set its own."""
    is_first = manager.event_loop is None
    original(manager)
    if is_first and threading.current_thread() is threading.main_thread():
        server.watch_engine()
        for number in (signal.SIGINT, signal.SIGTERM):
            manager.event_loop.add_signal_handler(number, server.on_signal, number, partial(_stop, manager))


def _stop(manager: Any) -> None:
    manager.gracefully_exit = True


async def _end_when_idle(server: ServerProcess, original: Callable[[Any], Awaitable[None]], manager: Any) -> None:
    """Wait for the signal and for the requests in short steps; SGLang's own coroutine then ends the server at once.

    SGLang does not wait for requests after a failed health check, nor where ``SGL_FORCE_SHUTDOWN`` is set.
    """
    while not manager.gracefully_exit:
        await asyncio.sleep(_POLL_SECONDS)
    is_forced = bool(os.environ.get("SGL_FORCE_SHUTDOWN"))
    while manager.rid_to_state and not is_forced and manager.server_status.value != "UnHealthy":
        await asyncio.sleep(_POLL_SECONDS)
    server.expect_ends()  # SGLang kills the detokenizer even in a graceful shutdown.
    await original(manager)

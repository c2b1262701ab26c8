"""All hooks inside SGLang, by its own `HookRegistry`.

* Around ``KVCacheConfigurator._profile_available_bytes``: the pool is sized from the host budget, not from free device
  memory.
* After ``ReqToTokenPool.free_rows``: finished, aborted and retracted requests all give their row back by this function.
* After ``ReqToTokenPool.clear``: flushing the cache takes all rows back, also those of idle streaming sessions.
* Around ``uvicorn.Server.serve``, in the process of `hybrid serve` alone: SGLang's HTTP server accepts connections on
  the socket that listens since the start, where it would bind one of its own after the engine has started, and refuses
  new requests once it was told to end.

SGLang logs a hook that it cannot apply and goes on. So `verify` examines the functions themselves.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from hybrid_backend.engines.address import ServerAddress
from hybrid_backend.engines.ending import RefuseWhileEnding
from hybrid_backend.engines.sglang.compat import SGLANG
from hybrid_backend.engines.sglang.settings import chosen, pool_budget
from hybrid_backend.errors import EngineError

if TYPE_CHECKING:
    import socket

LISTENER = "hybrid_rows_freed"
"""Attribute of a ReqToTokenPool: a function that is called with the rows that were given back."""
_SERVE = "uvicorn.Server.serve"


def _host_budget(original: Callable[..., int], configurator: Any, *args: Any, **kwargs: Any) -> int:
    from sglang.srt.arg_groups.overrides import resolved_view

    view = resolved_view(configurator.server_args)
    if not chosen(view):
        return original(configurator, *args, **kwargs)
    return pool_budget(view)


def _rows_freed(_: None, pool: Any, indices: list[int]) -> None:
    listener = getattr(pool, LISTENER, None)
    if listener is not None:
        listener(indices)


def _all_freed(_: None, pool: Any) -> None:
    _rows_freed(None, pool, list(range(len(pool.req_generation))))


_CACHE = "sglang.srt.mem_cache"
_HOOKS: Mapping[str, tuple[Callable[..., Any], str]] = {
    f"{_CACHE}.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes": (_host_budget, "AROUND"),
    f"{_CACHE}.memory_pool.ReqToTokenPool.free_rows": (_rows_freed, "AFTER"),
    f"{_CACHE}.memory_pool.ReqToTokenPool.clear": (_all_freed, "AFTER"),
}
"""Functions of SGLang that are hooked in every process, with the kind of each hook."""


async def _serve_on(
    address: ServerAddress,
    original: Callable[..., Awaitable[None]],
    server: Any,
    sockets: list[socket.socket] | None = None,
) -> None:
    # For TLS, SGLang loads the ASGI application before it calls this function. Otherwise uvicorn loads `app` later.
    application = "loaded_app" if server.config.loaded else "app"
    setattr(server.config, application, RefuseWhileEnding(getattr(server.config, application)))
    listener = address.hand_over()
    await original(server, sockets=sockets if listener is None else [listener])


def register() -> None:
    """Hand the hooks to SGLang, which applies them once all plugins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, (hook, kind) in _HOOKS.items():
        HookRegistry.register(target, hook, HookType[kind])


def verify() -> None:
    """Raise EngineError unless the hooks of `register` are in place in this process."""
    for target, (hook, _) in _HOOKS.items():
        _verify(target, hook)


def register_address(address: ServerAddress) -> None:
    """Have SGLang's HTTP server listen on ``address``; must be called before SGLang's plugins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_SERVE, partial(_serve_on, address), HookType.AROUND)


def verify_address() -> None:
    """Raise EngineError unless the hook of `register_address` is in place."""
    _verify(_SERVE, _serve_on)


def _verify(target: str, hook: Callable[..., Any]) -> None:
    if not _wraps(pkgutil.resolve_name(target), hook):
        raise EngineError(f"SGLang did not apply the hook on {target}; {SGLANG.fix}")


def _wraps(function: Any, hook: Callable[..., Any]) -> bool:
    """Tell whether ``hook``, or a `partial` of it, is in a chain of HookRegistry wrappers.

    Each wrapper keeps its hook in a closure cell.
    """
    while function is not None:
        contents = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        if any(getattr(content, "func", content) is hook for content in contents):
            return True
        function = getattr(function, "__wrapped__", None)
    return False

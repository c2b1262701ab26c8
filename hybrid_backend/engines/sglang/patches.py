"""Everything that we hook inside SGLang, by its own `HookRegistry`.

* around ``KVCacheConfigurator._profile_available_bytes``: the pool is sized from the host budget, not from free device
  memory;
* after ``ReqToTokenPool.free_rows``: the one door through which finished, aborted and retracted requests give their row
  back;
* after ``ReqToTokenPool.clear``: flushing the cache takes all rows back, of idle streaming sessions too.

SGLang logs a hook that it cannot apply and goes on; `verify` looks at the functions themselves.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from hybrid_backend.engines.sglang.compat import SGLANG
from hybrid_backend.engines.sglang.settings import chosen, config_of, host_pool_bytes
from hybrid_backend.errors import EngineError

LISTENER = "hybrid_rows_freed"  # attribute of a ReqToTokenPool: called with the rows that were given back
_BUDGET = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes"
_FREE_ROWS = "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free_rows"
_CLEAR = "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.clear"


def _host_budget(original: Callable[..., int], configurator: Any, *args: Any, **kwargs: Any) -> int:
    from sglang.srt.arg_groups.overrides import resolved_view

    view = resolved_view(configurator.server_args)
    if not chosen(view):
        return original(configurator, *args, **kwargs)
    return host_pool_bytes(config_of(view))


def _rows_freed(_: None, pool: Any, indices: list[int]) -> None:
    listener = getattr(pool, LISTENER, None)
    if listener is not None:
        listener(indices)


def _all_freed(_: None, pool: Any) -> None:
    _rows_freed(None, pool, list(range(len(pool.req_generation))))


def register() -> None:
    """Hand the hooks to SGLang, which applies them once all plugins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_BUDGET, _host_budget, HookType.AROUND)
    HookRegistry.register(_FREE_ROWS, _rows_freed, HookType.AFTER)
    HookRegistry.register(_CLEAR, _all_freed, HookType.AFTER)


def verify() -> None:
    """Raise EngineError unless all hooks are in place in this process."""
    for target, hook in ((_BUDGET, _host_budget), (_FREE_ROWS, _rows_freed), (_CLEAR, _all_freed)):
        if not _wraps(pkgutil.resolve_name(target), hook):
            raise EngineError(f"SGLang did not apply the hook on {target}; {SGLANG.fix}")


def _wraps(function: Any, hook: Callable[..., Any]) -> bool:
    """Whether ``hook`` is in a chain of HookRegistry wrappers, each of which keeps its hook in a closure cell."""
    while function is not None:
        if any(cell.cell_contents is hook for cell in getattr(function, "__closure__", None) or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False

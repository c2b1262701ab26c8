"""``hybrid top URL``: the status page beside a server, wherever that runs."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

from hybrid_backend.errors import EngineError
from hybrid_backend.hardware import find_hardware
from hybrid_backend.tools.status.app import PAGE, application
from hybrid_backend.tools.status.sampler import INTERVAL, Sampler
from hybrid_backend.tools.status.source import from_server, metrics_url


def serve(
    server: str,
    host: str,
    port: int,
    interval: float = INTERVAL,
    machine: str | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Serve the page of a server until stopped.

    Args:
        server: the server's address.
        host: address that the page listens on.
        port: port of the page; 0 takes a free one.
        interval: seconds between two readings.
        machine: name or file of the server's hardware profile, which attention's speed is compared with.
        tell: gets the page's address.

    Raises:
        EngineError: an address cannot be used.
        ConfigError: there is no such hardware profile.
    """
    import uvicorn
    from fastapi.responses import RedirectResponse

    url = metrics_url(server)
    if not 0.2 <= interval <= 3600:
        raise EngineError(f"--interval {interval} is not between 0.2 and 3600 seconds")
    hardware = None if machine is None else find_hardware(machine)
    listener = _listen(host, port)
    app = application(Sampler(from_server(url), url, interval, machine=hardware), watching=True)
    app.add_api_route("/", lambda: RedirectResponse(PAGE.lstrip("/"), status_code=307), methods=["GET"])
    shown = "localhost" if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    tell(f"status of {url} on http://{shown}:{listener.getsockname()[1]}{PAGE}")
    with listener, suppress(KeyboardInterrupt):  # uvicorn raises it again when it has shut down
        uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2)).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise EngineError(
            f"cannot listen on {host}:{port}: {reason}; give another address with --host, --port"
        ) from error
    return listener

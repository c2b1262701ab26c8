"""The address that a server will listen on, checked before its engine is even imported."""

from __future__ import annotations

import errno
import socket
from collections.abc import MutableMapping, Sequence

from hybrid_backend.errors import EngineError

_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


def reach_this_machine_directly(environment: MutableMapping[str, str]) -> None:
    """Whoever asks a server on this machine from here on does not ask the proxy that ``environment`` may name."""
    given = [name for key in ("no_proxy", "NO_PROXY") for name in environment.get(key, "").split(",") if name]
    environment["no_proxy"] = environment["NO_PROXY"] = ",".join(dict.fromkeys([*given, *_THIS_MACHINE]))


def check_address(extra: Sequence[str], host: str, port: int, elsewhere: Sequence[str]) -> None:
    """Raise EngineError if the address in the engine flags ``extra`` cannot be used.

    Args:
        extra: engine flags.
        host, port: the engine's defaults; an empty host is any address.
        elsewhere: flags with which only the engine can tell where it listens.
    """
    flags = list(extra)
    for i, flag in enumerate(flags):
        name, _, value = flag.partition("=")
        value = value or (flags[i + 1] if i + 1 < len(flags) else "")
        if name in elsewhere:
            return
        if name == "--host":
            host = value
        if name == "--port":
            if not (value.isascii() and value.isdigit() and len(value) <= 5 and 0 < int(value) < 65536):
                raise EngineError(f"--port: got {value!r}, expected a number from 1 to 65535")
            port = int(value)
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, UnicodeError) as error:
        raise EngineError(_why_not(host, port, error)) from error


def _why_not(host: str, port: int, error: Exception) -> str:
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EADDRINUSE:
        return f"--port: {port} is already in use; choose another one with --port"
    if code == errno.EACCES:
        return f"--port: {port} needs privileges that this user lacks; choose another one with --port"
    reason = (getattr(error, "strerror", None) or str(error)).lower()
    return f"--host: got {host!r} ({reason}), expected an address of this machine"

"""The address that a server will listen on, taken before its engine is even imported."""

from __future__ import annotations

import errno
import socket
from collections.abc import MutableMapping, Sequence

from hybrid_backend.errors import EngineError

LOOPBACK = "127.0.0.1"
"""Default address that a server listens on."""
_THIS_MACHINE = (LOOPBACK, "localhost", "::1")
_taken: list[socket.socket] = []


def reach_this_machine_directly(environment: MutableMapping[str, str]) -> None:
    """Whoever asks a server on this machine from here on does not ask the proxy that ``environment`` may name."""
    given = [name for key in ("no_proxy", "NO_PROXY") for name in environment.get(key, "").split(",") if name]
    environment["no_proxy"] = environment["NO_PROXY"] = ",".join(dict.fromkeys([*given, *_THIS_MACHINE]))


def take_address(extra: Sequence[str], port: int, elsewhere: Sequence[str]) -> None:
    """Listen on the address that the engine flags name, so that no second server starts on it; `hand_over` gives it on.

    Args:
        extra: engine flags.
        port: the engine's default.
        elsewhere: flags with which only the engine can tell where it listens; nothing is taken then.

    Raises:
        EngineError: the address cannot be used.
    """
    if (earlier := hand_over()) is not None:
        earlier.close()
    host, flags = LOOPBACK, list(extra)
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
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()  # two servers may bind the same port, but only one of them may listen on it
    except (OSError, UnicodeError) as error:
        listener.close()
        raise EngineError(why_not(host, port, error)) from error
    _taken.append(listener)


def hand_over() -> socket.socket | None:
    """The listening socket of `take_address`, which from here on is the caller's; None if it took none."""
    return _taken.pop() if _taken else None


def who_can_reach(host: str, port: int) -> str:
    """A line for the log: where the server listens, for whom, and how to change that."""
    if host in _THIS_MACHINE:
        return f"listening on {host}, port {port}, for this machine only; --host 0.0.0.0 opens it to the network"
    return f"listening on {host}, port {port}, for everybody who can reach it; --api-key asks clients for a key"


def why_not(host: str, port: int, error: Exception) -> str:
    """The message of an `EngineError`: which flag names an address that cannot be used, and why."""
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EADDRINUSE:
        return f"--port: {port} is already in use; choose another one with --port"
    if code == errno.EACCES:
        return f"--port: {port} needs privileges that this user lacks; choose another one with --port"
    reason = (getattr(error, "strerror", None) or str(error)).lower()
    return f"--host: got {host!r} ({reason}), expected an address of this machine"

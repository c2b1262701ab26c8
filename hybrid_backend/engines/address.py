"""Address of a server, which is taken before its engine is imported."""

from __future__ import annotations

import errno
import itertools
import socket
from collections.abc import MutableMapping, Sequence
from typing import Self

from hybrid_backend.errors import EngineError

LOOPBACK = "127.0.0.1"
"""Default address that a server listens on."""
_THIS_MACHINE = (LOOPBACK, "localhost", "::1")


def reach_this_machine_directly(environment: MutableMapping[str, str]) -> None:
    """Have HTTP clients reach servers on this machine without the proxy that ``environment`` may name."""
    names = [name for key in ("no_proxy", "NO_PROXY") for name in environment.get(key, "").split(",") if name]
    environment["no_proxy"] = environment["NO_PROXY"] = ",".join(dict.fromkeys([*names, *_THIS_MACHINE]))


class ServerAddress:
    """Address of one server: a socket that listens on it until the engine gets the socket or binds its own.

    As a context manager it frees the address at the end.
    """

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def take(self, extra: Sequence[str], port: int, elsewhere: Sequence[str]) -> Self:
        """Listen on the address that the engine flags name, so that no second server starts on it.

        Args:
            extra: engine flags.
            port: the engine's default.
            elsewhere: flags with which only the engine knows where it listens; no address is taken then.

        Raises:
            EngineError: the address cannot be used.
        """
        self.release()
        if (address := _address_of(extra, port, elsewhere)) is None:
            return self
        host, port = address
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen()  # Two servers may bind the same port, but only one of them may listen on it.
        except (OSError, UnicodeError) as error:
            listener.close()
            raise EngineError(why_not(host, port, error)) from error
        self._listener = listener
        return self

    def hand_over(self) -> socket.socket | None:
        """Return the listening socket, which from then on is the caller's; None if no address is taken."""
        listener, self._listener = self._listener, None
        return listener

    def release(self) -> None:
        """Close the listening socket, if there is one, so that the engine can bind the address itself."""
        if (listener := self.hand_over()) is not None:
            listener.close()


def _address_of(extra: Sequence[str], port: int, elsewhere: Sequence[str]) -> tuple[str, int] | None:
    """Return host and port that the engine flags ``extra`` name; None if one of ``elsewhere`` is among them."""
    host, words = LOOPBACK, [*extra, ""]
    for word, following in itertools.pairwise(words):
        name, _, value = word.partition("=")
        value = value or following
        if name in elsewhere:
            return None
        if name == "--host":
            host = value
        if name == "--port":
            if not (value.isascii() and value.isdigit() and len(value) <= 5 and 0 < int(value) < 65536):
                raise EngineError(f"--port: got {value!r}, expected a number from 1 to 65535")
            port = int(value)
    return host, port


def who_can_reach(host: str, port: int) -> str:
    """Return a line for the log: the address that the server listens on, for whom, and how to change that."""
    if host in _THIS_MACHINE:
        return f"port {port} is reserved on {host}, for this machine only; --host 0.0.0.0 opens it to the network"
    return f"port {port} is reserved on {host}, for everybody who can reach it; --api-key asks clients for a key"


def why_not(host: str, port: int, error: Exception) -> str:
    """Return the message of an `EngineError`: which flag names an address that cannot be used, and why."""
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EADDRINUSE:
        return f"--port: {port} is already in use; choose another one with --port"
    if code == errno.EACCES:
        return f"--port: {port} needs privileges that this user lacks; choose another one with --port"
    reason = (getattr(error, "strerror", None) or str(error)).lower()
    return f"--host: got {host!r} ({reason}), expected an address of this machine"

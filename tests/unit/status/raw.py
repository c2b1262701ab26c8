"""Servers that answer with bytes of a test's choice."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def raw_server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that speaks no HTTP of its own: ``answer`` is given each connection, in a thread."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=talk, args=(connection,), daemon=True).start()

        def talk(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                connection.recv(65536)
                answer(connection)

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def drip(start: bytes) -> Callable[[socket.socket], None]:
    """Send ``start``, then a byte now and then for ten seconds."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(start)
        for _ in range(100):
            time.sleep(0.1)
            connection.sendall(b"#")

    return answer

"""The sources of readings: servers' addresses, and answers that are late, endless or no answers."""

from __future__ import annotations

import asyncio
import re
import socket
import time

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from hybrid_backend.errors import EngineError
from hybrid_backend.tools.status.source import from_server, metrics_url
from tests.unit.status.raw import drip, raw_server
from tests.unit.status.server_stand import serving


def test_an_address_where_nobody_listens_is_one_line() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/metrics"
        with pytest.raises(EngineError, match=r"cannot be read: All connection attempts failed"):
            asyncio.run(from_server(url)())


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"])
def test_an_answer_that_comes_in_drops_is_given_up_at_the_deadline(start: bytes) -> None:
    """However often a byte comes: in the status line, in the headers, in the body."""
    began = time.monotonic()
    with raw_server(drip(start)) as url, pytest.raises(EngineError, match=r"no whole answer within 0\.5 seconds"):
        asyncio.run(from_server(url, deadline=0.5)())
    assert time.monotonic() - began < 3


def test_a_page_that_is_missing_is_one_line() -> None:
    with serving(FastAPI()) as url, pytest.raises(EngineError, match=r"cannot be read: HTTP 404"):
        asyncio.run(from_server(f"{url}/metrics")())


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("localhost:8000", "http://localhost:8000/metrics"),
        ("http://host:1/", "http://host:1/metrics"),
        ("https://host/prefix/v1", "https://host/prefix/metrics"),
        ("http://host:8000/metrics", "http://host:8000/metrics"),
        ("[::1]:8000", "http://[::1]:8000/metrics"),
        ("metrics", "http://metrics/metrics"),
    ],
)
def test_addresses_are_taken_as_users_write_them(written: str, url: str) -> None:
    assert metrics_url(written) == url


@given(st.text(max_size=30))
def test_any_address_is_a_url_or_refused(text: str) -> None:
    try:
        assert re.match(r"https?://\S+/metrics$", metrics_url(text))
    except EngineError as error:
        assert "is not a server's address" in str(error)


@pytest.mark.parametrize("written", ["", "ftp://host", "http://", "host:99999999", "a b", "file:///etc/passwd"])
def test_what_is_no_address_is_refused(written: str) -> None:
    with pytest.raises(EngineError, match="is not a server's address"):
        metrics_url(written)


@pytest.mark.parametrize(
    "answer",
    [
        b"\x15\x03\x03\x00\x02\x02\x46",  # a server that expects TLS
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nhybrid_steps 1",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4096\r\n\r\n# TYPE hybrid_steps counter\n",
    ],
    ids=["no HTTP", "a chunk cut short", "a body cut short"],
)
def test_an_answer_that_is_none_is_told_in_one_line(answer: bytes) -> None:
    with raw_server(lambda connection: connection.sendall(answer)) as url, pytest.raises(EngineError) as raised:
        asyncio.run(from_server(url)())
    assert str(raised.value).startswith(f"{url} cannot be read: ") and "\n" not in str(raised.value)

"""The page's server over HTTP: a real uvicorn, reading a real /metrics."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from hypothesis import given
from hypothesis import strategies as st

from hybrid_backend.errors import EngineError
from hybrid_backend.tools.status import MIDDLEWARE
from hybrid_backend.tools.status.app import PAGE, PATHS, StatusMiddleware, application
from hybrid_backend.tools.status.model import Status
from hybrid_backend.tools.status.sampler import Sampler
from hybrid_backend.tools.status.source import Source, from_server, metrics_url
from tests.unit.status.server_stand import LAYERS, Clock, MetricsStand, metrics_app, serving


def status_of(url: str, after: float = 0.0) -> Status:
    answer = httpx.get(f"{url}{PAGE}.json", params={"after": after}, timeout=20)
    assert answer.status_code == 200, answer.text
    return Status.model_validate_json(answer.text)


def answers(text: str) -> Source:
    async def source() -> str:
        return text

    return source


def test_the_json_follows_the_server_and_sends_only_what_is_new() -> None:
    stand, clock = MetricsStand(), Clock()
    stand.running.set(3)
    stand.fill.set(0.5)
    with serving(metrics_app(stand.text)) as upstream:
        sampler = Sampler(from_server(f"{upstream}/metrics"), upstream, interval=2.0, kept=4, clock=clock)
        with serving(application(sampler, watching=False)) as url:
            first = status_of(url)
            assert first.columns == () and first.layers == () and first.problem is None and first.engine == "vllm"
            stand.decode(cpu=lambda layer: layer / LAYERS, resident=lambda layer: 1 - layer / LAYERS)
            clock.now += 2.0
            status = status_of(url)
            (column,) = status.columns
            assert column.running == 3 and column.pool_fill == 0.5 and column.rates.generated_per_second == 50
            assert column.cpu_ratio == tuple(round(layer / LAYERS, 3) for layer in range(LAYERS))
            assert status.layers[6].residency == 0.8 and status.layers[6].attended_tokens_per_second == 500
            assert column.rates.wait_share == pytest.approx(LAYERS * 0.001 / 2, abs=1e-4)
            assert status_of(url, after=column.time).columns == ()
            for _ in range(9):
                stand.decode()
                clock.now += 2.0
                status_of(url)
            last = status_of(url)
            assert len(last.columns) == 4 == last.kept
            assert [c.time for c in status_of(url, after=last.columns[2].time).columns] == [last.columns[3].time]


def test_many_viewers_cost_one_reading_per_interval() -> None:
    stand, clock, asked = MetricsStand(), Clock(), []

    async def source() -> str:
        asked.append(clock.now)
        return stand.text()

    with (
        serving(application(Sampler(source, "here", clock=clock), watching=False)) as url,
        ThreadPoolExecutor(8) as pool,
    ):
        for _ in range(3):
            list(pool.map(lambda _: status_of(url), range(16)))
            clock.now += 2.0
    assert len(asked) == 3 and len(set(asked)) == 3


def test_a_server_that_goes_away_is_told_and_comes_back() -> None:
    stand, clock = MetricsStand(), Clock()
    alive = [True]

    async def source() -> str:
        if not alive[0]:
            raise EngineError("http://x/metrics cannot be read: refused")
        return stand.text()

    with serving(application(Sampler(source, "x", clock=clock), watching=False)) as url:
        for _ in range(3):
            stand.decode()
            status_of(url)
            clock.now += 2.0
        alive[0] = False
        gone = status_of(url)
        assert gone.problem == "http://x/metrics cannot be read: refused" and len(gone.columns) == 2
        alive[0] = True
        clock.now += 2.0
        stand.decode()
        assert status_of(url).problem is None


def test_a_server_without_the_plugin_is_told_apart_from_no_server() -> None:
    for text, told in (
        ("vllm:num_requests_running 1\n", "publishes no hybrid_* metrics"),
        ("python_info 1\n", "nothing of vLLM, SGLang or this plugin"),
        ('hybrid_cpu_tokens_total{layer="x"} 1\n', "not of this version"),
    ):
        sampler = Sampler(answers(text), "x")
        asyncio.run(sampler.refresh())
        assert told in str(sampler.status().problem)


def test_an_address_where_nobody_listens_is_one_line() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/metrics"
        with pytest.raises(EngineError, match=r"cannot be read: .*refused"):
            asyncio.run(from_server(url)())


def test_a_page_that_is_missing_is_one_line() -> None:
    with serving(FastAPI()) as url, pytest.raises(EngineError, match=r"cannot be read: .*Not Found|404"):
        asyncio.run(from_server(f"{url}/metrics")())


@pytest.mark.parametrize("bad", ["-1", "nan", "inf", "x"])
def test_a_bad_question_is_refused(bad: str) -> None:
    with serving(application(Sampler(MetricsStand().source, "x"), watching=False)) as url:
        assert httpx.get(f"{url}{PAGE}.json", params={"after": bad}).status_code == 422


def test_the_page_loads_nothing_from_elsewhere() -> None:
    with serving(application(Sampler(MetricsStand().source, "x"), watching=False)) as url:
        for path, kind in (
            (PAGE, "text/html"),
            (f"{PAGE}.css", "text/css"),
            (f"{PAGE}.js", "text/javascript"),
            (f"{PAGE}-plots.js", "text/javascript"),
        ):
            answer = httpx.get(url + path)
            assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert not re.findall(r"https?://|@import|url\(|(?:src|href)=\"//", answer.text)
        named = set(re.findall(r'(?:src|href)="([^"#:]+)"', httpx.get(url + PAGE).text))
        assert named == {"status.css", "status.js", "status.json"}
        for path in PATHS:
            assert httpx.get(url + path, follow_redirects=True).status_code == 200, path


def test_the_page_is_package_data() -> None:
    names = {entry.name for entry in (files("hybrid_backend.tools.status") / "page").iterdir()}
    assert {"status.html", "status.css", "status.js", "status-plots.js"} <= names


def test_inside_a_server_only_the_pages_own_paths_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    engine = FastAPI()
    engine.add_api_route("/v1/models", lambda: PlainTextResponse("engine"), methods=["GET"])
    engine.add_api_route("/hybrid/other", lambda: PlainTextResponse("engine"), methods=["GET"])
    engine.add_middleware(StatusMiddleware)
    with serving(engine) as url:
        assert httpx.get(f"{url}/v1/models").text == httpx.get(f"{url}/hybrid/other").text == "engine"
        assert httpx.get(f"{url}/hybrid/nothing").status_code == 404
        assert "hybrid status" in httpx.get(url + PAGE).text
        assert "nothing of vLLM" in str(status_of(url).problem), "this process has no engine"
    module, _, name = MIDDLEWARE.rpartition(".")
    assert getattr(__import__(module, fromlist=[name]), name) is StatusMiddleware


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


SIDECAR = """import sys
from hybrid_backend.tools.status.sidecar import serve
serve(sys.argv[1], "127.0.0.1", 0, 0.2)
"""


@pytest.mark.slow
def test_the_sidecar_watches_while_nobody_looks_and_ends_quietly() -> None:
    stand = MetricsStand()
    with serving(metrics_app(stand.text)) as upstream:
        command = [sys.executable, "-uc", SIDECAR, upstream]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stderr is not None
            try:
                found = re.search(r"on (http://\S+):(\d+)(/\S+)", process.stdout.readline())
                assert found and found[3] == PAGE
                url = f"{found[1]}:{found[2]}"
                stand.decode()
                time.sleep(3)  # fifteen intervals
                assert len(status_of(url).columns) >= 3
                assert httpx.get(f"{url}/", follow_redirects=True).url.path == PAGE
            finally:
                process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0 and process.stderr.read() == ""


def test_a_taken_port_is_one_line() -> None:
    from hybrid_backend.tools.status.sidecar import serve

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(EngineError, match=r"cannot listen on 127.0.0.1:\d+: Address already in use"):
            serve("localhost:1", "127.0.0.1", taken.getsockname()[1])
        with pytest.raises(EngineError, match="--interval"):
            serve("localhost:1", "127.0.0.1", 0, interval=0.0)


@pytest.mark.parametrize(
    "answer",
    [
        b"\x15\x03\x03\x00\x02\x02\x46",  # a server that expects TLS
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nhybrid_steps 1",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4096\r\n\r\n# TYPE hybrid_steps counter\n",
    ],
    ids=["no HTTP", "a chunk cut short", "a body cut short"],
)
def test_an_answer_that_is_none_is_told_and_asked_for_again(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        served = thread.submit(serve)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        sampler = Sampler(from_server(f"{url}/metrics"), url)
        asyncio.run(sampler.refresh())
        served.result(10)
    assert "cannot be read" in str(sampler.status().problem)

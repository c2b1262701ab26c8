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

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

from hybrid_backend.errors import EngineError
from hybrid_backend.tools.status import MIDDLEWARE
from hybrid_backend.tools.status.app import PAGE, PATHS, StatusMiddleware, application
from hybrid_backend.tools.status.model import Status
from hybrid_backend.tools.status.sampler import Sampler
from hybrid_backend.tools.status.source import Source, from_server
from tests.unit.status.raw import drip, raw_server
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
        sampler = Sampler(from_server(f"{upstream}/metrics"), upstream, interval=2.0, max_columns=4, clock=clock)
        with serving(application(sampler, watching=False)) as url:
            first = next(status for _ in range(20) if (status := status_of(url)).read is not None)
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
            assert len(last.columns) == 4 == last.max_columns
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
        assert gone.headline.state == "silent" and gone.stale_seconds == 2 and gone.glance == ()
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


@pytest.mark.slow
def test_a_server_that_drips_keeps_no_viewer_waiting_and_its_silence_is_told() -> None:
    with raw_server(drip(b"HTTP/1.1 200 OK\r\n")) as upstream:
        sampler = Sampler(from_server(upstream, deadline=2.5), upstream, interval=0.2)
        with serving(application(sampler, watching=True)) as url, ThreadPoolExecutor(4) as pool:
            began = time.monotonic()
            waited = list(pool.map(lambda _: status_of(url), range(4)))
            assert time.monotonic() - began < 2.4, "viewers wait for the deadline of the reading"
            assert waited[-1].headline.state in ("starting", "silent")
            time.sleep(3)
            status = status_of(url)
    assert status.headline.state == "silent" and "no whole answer within" in str(status.problem)


def test_a_fresh_reading_is_not_old_and_a_missing_one_tells_its_age() -> None:
    stand, clock = MetricsStand(), Clock()
    sampler = Sampler(stand.source, "x", clock=clock)
    for _ in range(3):
        asyncio.run(sampler.refresh())
        clock.now += 2.0
    assert sampler.status().stale_seconds is None
    clock.now += 60
    status = sampler.status()
    assert status.stale_seconds == 62 and status.headline.title == "No answer for 62 s" and status.glance == ()
    asyncio.run(sampler.refresh())
    assert sampler.status().stale_seconds is None


def test_an_answer_and_the_end_of_its_line_are_one_number() -> None:
    """However unevenly tokens come: both are the mean of the same seconds."""
    stand, clock = MetricsStand(), Clock()
    stand.running.set(3)
    sampler = Sampler(stand.source, "x", clock=clock)
    for number in range(20):
        stand.tokens.inc(400 if number % 7 == 3 else 3)
        clock.now += 2.0
        asyncio.run(sampler.refresh())
    rates = (status := sampler.status()).columns[-1].rates
    assert rates.seconds == 14 and rates.generated_per_second == pytest.approx(418 / 14, abs=0.01)
    shown = f"{rates.generated_per_second:.1f} tokens/s"
    assert shown in status.glance[1].text and shown in status.headline.detail


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
        ):
            answer = httpx.get(url + path)
            assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(|(?:src|href)=\"//", answer.text)
        named = set(re.findall(r'(?:src|href)="([^"#:]+)"', httpx.get(url + PAGE).text))
        assert named == {"status.css", "status.js", "status.json"}
        for path in PATHS:
            assert httpx.get(url + path, follow_redirects=True).status_code == 200, path
            head, get = httpx.head(url + path), httpx.get(url + path)
            assert (head.status_code, head.content) == (get.status_code, b""), path
            assert head.headers["content-type"] == get.headers["content-type"]
            assert httpx.post(url + path).status_code == 405


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


ENDED = (0, 128 + signal.SIGTERM, -signal.SIGTERM)
"""Exit statuses of a page that SIGTERM ended; SIGINT would be ignored in a background job."""
SIDECAR = """import sys
from hybrid_backend.tools.status.app import serve
serve(sys.argv[1], "127.0.0.1", 0, 0.2)
"""


@pytest.mark.slow
def test_the_sidecar_watches_while_nobody_looks_and_ends_quietly() -> None:
    stand, readings = MetricsStand(), []

    def text() -> str:
        stand.decode()
        readings.append(stand.text())
        return readings[-1]

    with serving(metrics_app(text)) as upstream:
        command = [sys.executable, "-uc", SIDECAR, upstream]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stderr is not None
            try:
                found = re.search(r"on (http://\S+):(\d+)(/\S+)", process.stdout.readline())
                assert found and found[3] == PAGE
                url = f"{found[1]}:{found[2]}"
                deadline = time.monotonic() + 60
                while len(readings) < 5 and time.monotonic() < deadline:
                    time.sleep(0.1)
                assert len(status_of(url).columns) >= 3
                assert httpx.get(f"{url}/", follow_redirects=True).url.path == PAGE
            finally:
                process.terminate()
            assert process.wait(20) in ENDED and process.stderr.read() == ""


@pytest.mark.slow
def test_the_command_asks_the_engines_own_address_if_none_is_given() -> None:
    command = [sys.executable, "-um", "hybrid_backend.cli", "top", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        process.terminate()
        _, told = process.communicate(timeout=20)
        assert line.startswith("status of http://localhost:8000/metrics on http://127.0.0.1:"), told
        assert process.returncode in ENDED


@pytest.mark.slow
def test_a_server_that_cannot_be_read_is_told_once_in_the_terminal_and_so_is_its_return() -> None:
    stand, is_up = MetricsStand(), [False]

    def text() -> str:
        if not is_up[0]:
            raise EngineError("not yet")
        return stand.text()

    with serving(metrics_app(text)) as upstream:
        command = [sys.executable, "-uc", SIDECAR, upstream]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                assert process.stdout.readline().startswith("status of ")
                assert "500" in process.stdout.readline()
                time.sleep(1)  # five readings
                is_up[0] = True
                assert process.stdout.readline() == "the server answers\n"
            finally:
                process.terminate()


def test_a_taken_port_is_one_line() -> None:
    from hybrid_backend.tools.status.app import serve

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(EngineError, match=r"cannot listen on 127.0.0.1:\d+: Address already in use"):
            serve("localhost:1", "127.0.0.1", taken.getsockname()[1])
        with pytest.raises(EngineError, match="--interval"):
            serve("localhost:1", "127.0.0.1", 0, interval=0.0)

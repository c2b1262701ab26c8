"""The page in a real browser: it shows the numbers of its JSON, draws them, and can be read."""

from __future__ import annotations

import asyncio
import html
import math
import re
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from fastapi import Request, Response
from PIL import Image

from hybrid_backend.errors import EngineError
from hybrid_backend.tools.status.app import PAGE, application
from hybrid_backend.tools.status.sampler import Sampler
from tests.unit.status.chromium import browse
from tests.unit.status.server_stand import LAYERS, Clock, MetricsStand, serving
from tests.unit.status.states import STATES

pytestmark = pytest.mark.slow

CSS = (files("hybrid_backend.tools.status") / "page" / "status.css").read_text()


def theme(dark: bool, stale: bool = False) -> dict[str, str]:
    """The colours by name; ``stale``: those of a page whose numbers are old."""
    light, dark_rules = [], []
    for selector in (":root", ".stale") if stale else (":root",):
        blocks = re.findall(rf"^ *{re.escape(selector)} {{([^}}]*--one:[^}}]*)}}", CSS, re.M)
        assert len(blocks) == 2, f"{selector}: one block for each theme"
        light.append(blocks[0])
        dark_rules.append(blocks[1])
    return dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6});", "".join(light + dark_rules if dark else light)))


@pytest.fixture
def page() -> Iterator[str]:
    """A page with two minutes of history: even layers all resident, odd ones not at all, on the CPU the other way."""
    stand, clock = MetricsStand(), Clock()
    stand.running.set(12)
    stand.waiting.set(4)
    stand.fill.set(0.625)
    sampler = Sampler(stand.source, "a stand", interval=2.0, clock=clock)
    for _ in range(60):
        stand.decode(cpu=lambda layer: layer % 2, resident=lambda layer: 1 - layer % 2)
        clock.now += 2.0
        asyncio.run(sampler.refresh())
    with serving(application(sampler, watching=False)) as url:
        yield url + PAGE


def text_of(markup: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", markup)).split())


def part(dom: str, name: str, tag: str = "section") -> str:
    """The text of the element of that id, up to the end of the first ``tag``."""
    start = dom.index(f'id="{name}"')
    return text_of(dom[dom.index(">", start) + 1 : dom.index(f"</{tag}>", start)])


def opened(sampler: Sampler, folder: Path) -> str:
    """The page's markup when it has drawn; fails if its console said anything."""
    with serving(application(sampler, watching=False)) as url:
        dom, console = browse(url + PAGE, folder, "--dump-dom")
    assert not console, console
    return dom


@cache
def dom_of(state: str) -> str:
    """Open a server's state in the browser, once for all tests that look at its markup."""
    with TemporaryDirectory() as folder:
        return opened(STATES[state](), Path(folder))


def test_the_page_shows_the_numbers_of_its_json(page: str, tmp_path: Path) -> None:
    dom, console = browse(page, tmp_path, "--dump-dom")
    assert not console, console
    tiles = part(dom, "tiles")
    for shown in (
        "at the last reading Running 12 of 12 requests Waiting 4 requests Host pool 62.5 % of 1,000 pages",
        "mean of the last 14 s Decode 50.0 tokens/s Each request 4.2 tokens/s First token – TTFT",
        "since the server's start Generated 6,000 tokens",
    ):
        assert shown in tiles, tiles
    assert part(dom, "headline").startswith(
        "Decoding: slow, held back by the batch 50.0 tokens/s generated; 12 requests"
    )
    glance = part(dom, "glance")
    for shown in (
        "Is it faithful? Not measured",
        "Is it fast? Slow 50.0 tokens/s, 4.2 for each of 12 requests; a person reads about 5.",
        "What holds it back? The batch 4 requests wait, the host pool is 62% full.",
    ):
        assert shown in glance, glance
    assert "Recommended change The batch: --max-num-seqs 24 (now 12); hybrid plan reckons" in part(dom, "change")
    assert "<code>--max-num-seqs 24</code>" in dom and "means of the 14 s before each point" in text_of(dom)
    body = re.findall(r"<tr>(.*?)</tr>", dom[dom.index("<tbody>") :], re.S)
    assert len(body) == LAYERS
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in body]
    for layer, row in enumerate(cells):
        expected = ["0.0 %", "100.0 %"] if layer % 2 else ["100.0 %", "0.0 %"]
        assert row[:6] == [str(layer), "25.0 %", *expected, "500", "1.0"], row
    assert 'data-columns="59"' in dom and re.search(r'id="problem"[^>]* role="alert" hidden', dom)
    shown = re.findall(r'role="img" aria-label="([^"]*)"', dom)
    assert all(shown) and len(shown) == 14, "all plots but the one of a server in place"
    assert "30 layers over" in dom and dom.count("<canvas") == 3
    keys = dict(re.findall(r"<b>([^<]*)</b><span class=\"key one\">([^<]*)</span>", dom))
    assert keys["Decoded tokens/s"] == "50" and keys["Requests"] == "running 12", "a line ends in its tile's number"
    assert keys["Waits, share of time"] == "1.5 %" and "Waits 1.5 % of the time" in tiles


@pytest.mark.parametrize(
    ("name", "level", "title", "answers"),
    [
        ("idle", "unknown", "Idle", ["good", "unknown", "unknown"]),
        ("prompts", "unknown", "Reading prompts", ["unknown", "unknown", "unknown"]),
        ("well", "good", "Decoding well", ["good", "good", "good"]),
        ("slowed", "bad", "Decoding: very slow, held back by prompts", ["good", "bad", "fair"]),
        ("memory", "bad", "Decoding: not faithful, slow, held back by host memory", ["bad", "fair", "fair"]),
        ("separate", "good", "Decoding well", ["good", "good", "good"]),
    ],
)
def test_each_state_is_told_in_words_and_in_a_colour(name: str, level: str, title: str, answers: list[str]) -> None:
    dom = dom_of(name)
    assert f'id="headline" class="wide {level}"' in dom and part(dom, "title", "h2") == title
    assert re.findall(r'<article class="answer (\w+)"', dom) == answers
    changes = {"slowed": "Prompts:", "memory": "Not faithful:"}
    assert re.search(r'id="change"[^>]* hidden', dom) if name not in changes else changes[name] in part(dom, "change")
    assert not re.search(r'<span class="age">[^<]', dom) and 'class="stale' not in dom
    assert ('id="residency"' in dom) == (name in ("memory", "separate"))


def test_a_server_in_place_shows_what_happens_there() -> None:
    """No maps and tiles of frames, copies and workers that it does not have; how long attention takes instead."""
    dom = dom_of("well")
    tiles = part(dom, "tiles")
    assert "Attention 17.5 % of the time" in tiles and "On CPU" not in tiles and "TPOT" in tiles
    assert "Attention takes 18% of the time" in part(dom, "glance")
    assert dom.count('role="img"') == 9, "one map, eight courses"


def test_what_a_silent_server_said_last_is_marked_with_its_age() -> None:
    dom = dom_of("gone")
    assert '<div id="page" class="stale"' in dom and 'id="headline" class="wide bad"' in dom
    assert part(dom, "title", "h2") == "No answer for 28 s"
    assert part(dom, "detail", "p").startswith(
        "http://localhost:8000/metrics cannot be read: Connection refused. Every"
    )
    ages = re.findall(r'<span class="age">([^<]*)</span>', dom)
    assert len(ages) == 4 and all(age.startswith("28 s old, of ") for age in ages)
    assert "<article" not in dom and re.search(r'id="change"[^>]* hidden', dom), "nothing is judged or recommended"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_heat_maps_are_drawn_in_the_colours_of_the_theme(page: str, tmp_path: Path, dark: bool) -> None:
    shot = tmp_path / "shot.png"
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    browse(page, tmp_path, f"--screenshot={shot}", "--window-size=1280,2800", scheme)
    pixels = np.asarray(Image.open(shot).convert("RGB")).reshape(-1, 3)
    colours = theme(dark)
    for name in ("--low-0", "--high-0", "--low-1", "--high-1"):
        wanted = [int(colours[name][at : at + 2], 16) for at in (1, 3, 5)]
        drawn = int((np.abs(pixels.astype(int) - wanted).max(1) <= 1).sum())
        assert drawn > 20_000, f"{name}: half of a map of 30 layers is this colour, found {drawn} pixels"


def test_old_numbers_are_drawn_without_colour(tmp_path: Path) -> None:
    shot = tmp_path / "shot.png"
    with serving(application(STATES["gone"](), watching=False)) as url:
        browse(
            url + PAGE,
            tmp_path,
            f"--screenshot={shot}",
            "--window-size=1280,1700",
            "--blink-settings=preferredColorScheme=1",
        )
    pixels = np.asarray(Image.open(shot).convert("RGB")).reshape(-1, 3).astype(int)
    for name in ("--one", "--high-0"):
        wanted = [int(theme(dark=False)[name][at : at + 2], 16) for at in (1, 3, 5)]
        assert not (np.abs(pixels - wanted).max(1) <= 1).any(), name


def test_a_server_that_cannot_be_read_is_told_on_the_page(tmp_path: Path) -> None:
    async def gone() -> str:
        raise EngineError("http://host/metrics cannot be read: <refused>")

    dom = opened(Sampler(gone, "x"), tmp_path)
    assert part(dom, "title", "h2") == "No server answers"
    assert "http://host/metrics cannot be read: <refused>" in part(dom, "detail", "p")


def test_a_page_whose_own_server_ends_says_so(tmp_path: Path) -> None:
    """It marks what it shows as old by itself."""
    sampler, is_alive = STATES["well"](), [True]
    app = application(sampler, watching=False)

    @app.middleware("http")
    async def end(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        if not is_alive[0]:
            return Response(status_code=503)
        is_alive[0] = not request.url.path.endswith(".json")
        return await answer(request)

    with serving(app) as url:
        dom, _ = browse(url + PAGE, tmp_path, "--dump-dom")
    assert '<div id="page" class="stale"' in dom and "<article" not in dom
    assert "This page's own server does not answer (status.json: HTTP 503)" in part(dom, "detail", "p")


KEYS_AND_POINTER = b"""
setTimeout(() => {
  const [map, other] = ["residency", "cpu_ratio"].map((name) => document.querySelector(`#${name} canvas`));
  map.focus();
  for (const key of ["ArrowUp", "ArrowDown", "ArrowDown", "ArrowLeft"]) {
    map.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  }
  document.body.dataset.told = document.querySelector("#residency output").textContent;
  document.body.dataset.focus = document.activeElement === map;
  const { right, bottom } = other.getBoundingClientRect();
  other.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: right - 3, clientY: bottom - 3 }));
}, 3000);
"""


def test_the_maps_are_read_by_the_keyboard_and_by_pointing(tmp_path: Path) -> None:
    app = application(STATES["separate"](), watching=False)

    @app.middleware("http")
    async def act(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        if not request.url.path.endswith(".js"):
            return await answer(request)
        script = (files("hybrid_backend.tools.status") / "page" / "status.js").read_bytes()
        return Response(script + KEYS_AND_POINTER, media_type="text/javascript")

    with serving(app) as url:
        dom, console = browse(url + PAGE, tmp_path, "--dump-dom")
    assert not console, console
    told = re.search(r"<body[^>]*>", dom)
    assert told and re.search(r'data-told="Layer 2, [\d:]+ 96 % resident".* data-focus="true"', told[0]), told
    assert re.search(r"<output>Layer 29, [\d:]+: 48.3 % on the CPU workers</output>", dom)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_and_lines_have_the_contrast_that_wcag_asks_for(dark: bool) -> None:
    """WCAG 2.2: 4.5 for text (1.4.3), 3 for graphics (1.4.11)."""

    def luminance(name: str) -> float:
        parts = [int(colours[name][at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(one: str, two: str) -> float:
        low, high = sorted((luminance(one), luminance(two)))
        return (high + 0.05) / (low + 0.05)

    colours = theme(dark)
    texts = [("--text", "--card"), ("--text", "--page"), ("--soft", "--card"), ("--soft", "--page")]
    for level in ("--good", "--fair", "--bad", "--unknown"):
        texts += [(level, f"{level}-page"), (level, "--card"), ("--text", f"{level}-page")]
    texts += [("--bad", "--page"), ("--focus", "--card")]
    assert {pair: contrast(*pair) for pair in texts if contrast(*pair) < 4.5} == {}
    graphics = [("--one", "--card"), ("--two", "--card"), ("--focus", "--card"), ("--focus", "--page")]
    graphics += [("--low-0", "--high-0"), ("--low-1", "--high-1")]
    assert {pair: contrast(*pair) for pair in graphics if contrast(*pair) < 3} == {}
    colours = theme(dark, stale=True)
    graphics = [("--one", "--page"), ("--two", "--page"), ("--low-0", "--high-0"), ("--low-1", "--high-1")]
    assert {pair: contrast(*pair) for pair in graphics if contrast(*pair) < 3} == {}


@pytest.fixture
def wordy_page() -> Iterator[str]:
    """Every answer as long as it gets: a dense spell of a promise, requests that wait for memory."""
    stand, clock = MetricsStand(), Clock()
    stand.running.set(12)
    stand.waiting.set(4)
    stand.fill.set(0.97)
    stand.gauges |= {
        "hybrid_quality_min_mass": 0.9402, "hybrid_quality_mass": 0.9371, "hybrid_quality_budget_tokens": math.inf,
        "hybrid_quality_max_kl": 0.01, "hybrid_host_pool_bytes": 3 * 2**30,
    }  # fmt: skip
    sampler = Sampler(stand.source, "a stand", interval=2.0, clock=clock)
    for _ in range(3):
        stand.decode(cpu=lambda layer: 0.5)
        clock.now += 2.0
        asyncio.run(sampler.refresh())
    with serving(application(sampler, watching=False)) as url:
        yield url + PAGE


def test_a_dense_spell_is_told_on_the_page(wordy_page: str, tmp_path: Path) -> None:
    dom, console = browse(wordy_page, tmp_path, "--dump-dom")
    assert not console, console
    glance = part(dom, "glance")
    assert "Is it faithful? Everything attended The largest budget kept 93.71% of the attention mass" in glance, glance
    assert "less than the promised 94.02%" in glance
    change = part(dom, "change")
    assert "Everything attended: frames_per_request=70 (now 35); or quality.max_kl=0.02 (now 0.01)" in change
    assert "After that, Host memory: a larger host_pool.size, or a smaller --max-model-len" in change


@pytest.mark.parametrize("shown", ["page", "wordy_page"])
def test_a_phone_sees_all_of_it_without_scrolling_sideways(
    shown: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Beside the cards is nothing but the page's own colour, down to the table, which scrolls by itself."""
    shot, url = tmp_path / "shot.png", request.getfixturevalue(shown)
    browse(url, tmp_path, f"--screenshot={shot}", "--window-size=390,5600", "--blink-settings=preferredColorScheme=1")
    pixels = np.asarray(Image.open(shot).convert("RGB")).astype(int)
    colour = theme(dark=False)["--page"]
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    assert pixels.shape[1] == 390 and (pixels[:, -8:] == wanted).all() and (pixels[:, :8] == wanted).all()
    assert not (pixels[4000:] == wanted).all(), "the page ends sooner: this shows less"

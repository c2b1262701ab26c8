"""The page in a real browser: it shows the numbers of its JSON, draws them, and can be read."""

from __future__ import annotations

import asyncio
import html
import math
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hybrid_backend.errors import EngineError
from hybrid_backend.tools.status.app import PAGE, application
from hybrid_backend.tools.status.sampler import Sampler
from tests.unit.status.chromium import browse
from tests.unit.status.server_stand import LAYERS, Clock, MetricsStand, serving

pytestmark = pytest.mark.slow

CSS = (files("hybrid_backend.tools.status") / "page" / "status.css").read_text()


def theme(dark: bool) -> dict[str, str]:
    """The colours by name."""
    light, _, rest = CSS.partition("@media (prefers-color-scheme: dark)")
    colours = dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6});", light))
    return colours | dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6});", rest)) if dark else colours


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


def test_the_page_shows_the_numbers_of_its_json(page: str, tmp_path: Path) -> None:
    dom, console = browse(page, tmp_path, "--dump-dom")
    assert not console, console
    tiles = text_of(dom[dom.index('id="tiles"') : dom.index("</dl>", dom.index('id="tiles"'))])
    for shown in ("Running 12 requests", "Waiting 4 requests", "Decode 50 tokens/s", "62.5 % 625 of 1,000 pages"):
        assert shown in tiles, tiles
    glance = text_of(dom[dom.index('id="glance"') : dom.index("</dl>")])
    for shown in (
        "Is it faithful? Not measured",
        "Is it fast? Good. 50.0 tokens/s, 4.2 of each of 12 requests (240 ms per token)",
    ):
        assert shown in glance, glance
    assert "Fair. The batch: 4 requests wait, the host pool is 62% full." in glance
    assert "What to change Batch: --max-num-seqs 16 (now 12)." in glance
    body = re.findall(r"<tr>(.*?)</tr>", dom[dom.index("<tbody>") :], re.S)
    assert len(body) == LAYERS
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in body]
    for layer, row in enumerate(cells):
        expected = ["0.0 %", "100.0 %"] if layer % 2 else ["100.0 %", "0.0 %"]
        assert row[:7] == [str(layer), "25.0 %", *expected, "500", "–", "1.0"], row
    assert re.search(r'data-columns="\d+"', dom) and 'id="problem" role="alert" hidden' in dom
    for label in re.findall(r'<canvas[^>]*aria-label="([^"]*)"', dom):
        assert label
    assert "30 layers over" in dom and dom.count("<canvas") == 12
    assert dom.count("aria-label=") == 11, "all but what is for serving in place"


def test_a_server_that_serves_in_place_shows_what_happens_there(tmp_path: Path) -> None:
    """No maps and tiles of frames, copies and workers that it does not have; how long attention takes instead."""
    stand, clock = MetricsStand(), Clock()
    stand.gauges = {"hybrid_host_pool_pages": 1000, "hybrid_frame_bytes": 0, "hybrid_page_tokens": 32}
    stand.gauges["hybrid_budget_tokens"] = 1024
    for layer in stand.stats.layers:
        layer.attention_seconds = 1e-6
    sampler = Sampler(stand.source, "a stand", interval=2.0, clock=clock)
    for _ in range(20):
        stand.decode(moved=False)
        for layer in stand.stats.layers:
            layer.attention_seconds += 0.04
        clock.now += 2.0
        asyncio.run(sampler.refresh())
    with serving(application(sampler, watching=False)) as url:
        dom, console = browse(url + PAGE, tmp_path, "--dump-dom")
    assert not console, console
    tiles = text_of(dom[dom.index('id="tiles"') : dom.index("</dl>", dom.index('id="tiles"'))])
    assert "Attended 25.0 % of the contexts" in tiles and "Attention 600 ms per s" in tiles and "On CPU" not in tiles
    glance = text_of(dom[dom.index('id="glance"') : dom.index("</dl>")])
    assert "The CPU's attention: it takes 60% of the time for 25% of the contexts' tokens." in glance, glance
    assert "Is it fast? 50.0 tokens/s; attention takes 60% of the time. In place nothing is waited for" in glance, (
        glance
    )
    assert "Attention: budget_tokens=512 (now 1024), as far as it is faithful enough" in glance, glance
    assert '<body class="in-place"' in dom and dom.count("aria-label=") == 6, "one map, five courses"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_heat_maps_are_drawn_in_the_colours_of_the_theme(page: str, tmp_path: Path, dark: bool) -> None:
    shot = tmp_path / "shot.png"
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    browse(page, tmp_path, f"--screenshot={shot}", "--window-size=1280,1400", scheme)
    pixels = np.asarray(Image.open(shot).convert("RGB")).reshape(-1, 3)
    colours = theme(dark)
    for name in ("--low-0", "--high-0", "--low-1", "--high-1"):
        wanted = [int(colours[name][at : at + 2], 16) for at in (1, 3, 5)]
        drawn = int((np.abs(pixels.astype(int) - wanted).max(1) <= 1).sum())
        assert drawn > 20_000, f"{name}: half of a map of 30 layers is this colour, found {drawn} pixels"


def test_a_server_that_cannot_be_read_is_told_on_the_page(tmp_path: Path) -> None:
    async def gone() -> str:
        raise EngineError("http://host/metrics cannot be read: <refused>")

    with serving(application(Sampler(gone, "x"), watching=False)) as url:
        dom, _ = browse(url + PAGE, tmp_path, "--dump-dom")
    found = re.search(r'<p id="problem" role="alert">(.*?)</p>', dom)
    assert found and html.unescape(found[1]) == "http://host/metrics cannot be read: <refused>"


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
    texts += [("--alert", "--alert-page")]
    assert {pair: contrast(*pair) for pair in texts if contrast(*pair) < 4.5} == {}
    graphics = [("--one", "--card"), ("--two", "--card"), ("--focus", "--card"), ("--focus", "--page")]
    graphics += [("--low-0", "--high-0"), ("--low-1", "--high-1")]
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
    glance = text_of(dom[dom.index('id="glance"') : dom.index("</dl>")])
    assert "Is it faithful? Good. Everything is attended just now: the largest budget kept 93.71% of the" in glance, (
        glance
    )
    assert "less than the promised 94.02%" in glance and "Bad." not in glance
    assert "Promise: frames_per_request=70 (now 35" in glance and "Memory: host_pool.size=4GiB (now 3.0 GiB;" in glance


@pytest.mark.parametrize("shown", ["page", "wordy_page"])
def test_a_phone_sees_all_of_it_without_scrolling_sideways(
    shown: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Beside the cards is nothing but the page's own colour, down to the table, which scrolls by itself."""
    shot, url = tmp_path / "shot.png", request.getfixturevalue(shown)
    browse(url, tmp_path, f"--screenshot={shot}", "--window-size=390,4200", "--blink-settings=preferredColorScheme=1")
    pixels = np.asarray(Image.open(shot).convert("RGB")).astype(int)
    colour = theme(dark=False)["--page"]
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    assert pixels.shape[1] == 390 and (pixels[:, -8:] == wanted).all() and (pixels[:, :8] == wanted).all()
    assert not (pixels[3000:] == wanted).all(), "the page ends sooner: this shows less"

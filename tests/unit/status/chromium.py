"""A headless Chromium, driven by its command line: no driver, no further package."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def executable() -> str:
    """Its path; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no Chromium here (looked for {', '.join(NAMES)}); on Debian: apt-get install chromium")
    return found


def browse(url: str, folder: Path, *flags: str, milliseconds: int = 6000) -> tuple[str, str]:
    """``(what it wrote, what its console said)`` after ``milliseconds`` of the page's own time."""
    command = [
        executable(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--mute-audio",
        "--no-first-run", "--hide-scrollbars", "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}",
        f"--virtual-time-budget={milliseconds}", *flags, url,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if re.search(r"\bCONSOLE\b", line)]
    return done.stdout, "\n".join(console)

"""The page in a real browser: a headless Chromium draws it, on a light and on a dark screen, wide and narrow."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from glm_runtime.ab.report import page
from tests.ab.test_report import made

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "headless_shell")


def browser() -> str | None:
    """A Chromium: GLM_RUNTIME_BROWSER, one on the path, or one that playwright has fetched."""
    named = os.environ.get("GLM_RUNTIME_BROWSER")
    fetched = sorted(Path.home().glob(".cache/ms-playwright/chromium*/chrome-linux*/*"))
    found = [str(path) for path in fetched if path.name in ("chrome", "headless_shell")]
    return next((one for one in [named, *map(shutil.which, NAMES), *found] if one), None)


@pytest.mark.parametrize(("dark", "width"), [(False, 1200), (True, 1200), (False, 420)])
def test_the_page_is_drawn(tmp_path: Path, dark: bool, width: int) -> None:
    program = browser()
    if program is None:
        pytest.skip("no Chromium here (set GLM_RUNTIME_BROWSER)")
    from PIL import Image

    source, shot = tmp_path / "report.html", tmp_path / "shot.png"
    source.write_text(page.page(made()))
    command = [
        program,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        "--hide-scrollbars",
        "--blink-settings=preferredColorScheme=0" if dark else "--blink-settings=preferredColorScheme=1",
        f"--window-size={width},2400",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--screenshot={shot}",
        source.as_uri(),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    pixels = np.asarray(Image.open(shot).convert("RGB")).astype(int)
    corner = pixels[2, 2]
    assert (corner < 60).all() if dark else (corner > 240).all()

    def drawn(red: int, green: int, blue: int) -> int:
        return int((np.abs(pixels - [red, green, blue]).max(axis=2) < 12).sum())

    colours = [(0xF0, 0x98, 0x3F), (0x6A, 0xA2, 0xDE), (0xFF, 0x61, 0x78)]  # prompt rows, decode rows, waiting
    if not dark:
        colours = [(0xE0, 0x7B, 0x16), (0x3F, 0x74, 0xAD), (0xC4, 0x27, 0x3F)]
    assert all(drawn(*colour) > 100 for colour in colours)
    if width < 600:  # nothing but tables may be wider than a narrow screen, and those scroll by themselves
        assert (np.abs(pixels[:, -3:] - corner).max(axis=2) > 24).mean() < 0.2

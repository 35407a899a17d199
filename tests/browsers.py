"""Open pages in headless Chromium; the tests are skipped if it is not installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def browser(*arguments: str) -> Iterator[Any]:
    """Start headless Chromium, controlled by Playwright, with more command-line arguments."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no browser: chromium is not on the path")
    quiet = ("background-networking", "component-update", "sync", "gpu")
    options = ["--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in quiet)]
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=[*options, *arguments])
        try:
            yield chromium
        finally:
            chromium.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The browser of the tests of a module."""
    with browser() as opened:
        yield opened

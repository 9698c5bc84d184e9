"""A headless Chromium for tests, driven by selenium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,900",
)


def chromium(profile: Path) -> Iterator[Any]:
    """A browser with a new profile, closed after the test; skips the test without Chromium."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium drives the browser")
    programs = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    program, driver = next(filter(None, programs), None), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed")
    options = selenium.ChromeOptions()
    options.binary_location = program
    for argument in (*_ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = selenium.Chrome(options, selenium.ChromeService(driver))
    try:
        yield browser
    finally:
        browser.quit()

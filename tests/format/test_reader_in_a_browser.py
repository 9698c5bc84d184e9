"""The JavaScript reader in a browser, over HTTP range requests and over a chosen file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from web_server import WebServer

pytestmark = pytest.mark.tool

SUITE = Path(__file__).resolve().parents[2] / "conformance"
PAGE = "readers/javascript/browser.html"


@pytest.fixture
def url(web: WebServer) -> str:
    web.folder = SUITE
    return web.url("")


def verdict(browser: Any) -> str:
    from selenium.webdriver.support.ui import WebDriverWait

    def told(driver: Any) -> str | None:
        text: str = driver.find_element("id", "verdict").text
        return None if text in ("", "Reading") else text

    return str(WebDriverWait(browser, 60).until(told))


def show(browser: Any, *, address: str = "", file: Path | None = None, full: bool = False) -> str:
    browser.find_element("id", "url").clear()
    browser.find_element("id", "url").send_keys(address)
    if file is not None:
        browser.find_element("id", "file").send_keys(str(file))
    if full:
        browser.find_element("id", "full").click()
    browser.find_element("css selector", "button").click()
    return verdict(browser)


def test_an_archive_at_a_url_is_opened_by_requests_for_its_end_and_its_model(
    browser: Any, url: str, web: WebServer
) -> None:
    browser.get(f"{url}/{PAGE}")
    assert show(browser, address=f"{url}/vectors/alignment-mixed.onnxa") == "Accepted"
    shown = browser.find_element("id", "result").text
    assert "Entries: 4" in shown
    assert re.search(r"^default w w 1 \[2, 3\]$", shown, re.MULTILINE)

    browser.get(f"{url}/{PAGE}")
    web.nbytes = 0
    assert show(browser, address=f"{url}/vectors/far-end-record.onnxa") == "Accepted"
    size = (SUITE / "vectors" / "far-end-record.onnxa").stat().st_size
    assert 65_633 < web.nbytes < 65_633 + 1_000 < size


def test_an_archive_at_a_url_is_refused_with_the_broken_rule(browser: Any, url: str) -> None:
    browser.get(f"{url}/{PAGE}")
    assert show(browser, address=f"{url}/vectors/crc.onnxa") == "Accepted"
    browser.get(f"{url}/{PAGE}")
    assert show(browser, address=f"{url}/vectors/crc.onnxa", full=True).startswith("ZIP-15: ")
    browser.get(f"{url}/{PAGE}")
    assert show(browser, address=f"{url}/vectors/comment.onnxa").startswith("ZIP-2: ")


def test_a_chosen_file_is_opened(browser: Any, url: str) -> None:
    browser.get(f"{url}/{PAGE}")
    assert show(browser, file=SUITE / "vectors" / "data-types.onnxa", full=True) == "Accepted"
    assert "External tensors: 27" in browser.find_element("id", "result").text

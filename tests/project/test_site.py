"""The site has every public name, command, rule and recipe, and asks no other server."""

from __future__ import annotations

import fcntl
import functools
import html
import http.server
import importlib
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from documented_names import DOCUMENTED

from tools import dev
from tools.docs import build_site, reference
from tools.docs.commands import commands

ROOT = Path(__file__).resolve().parents[2]


def build(target: Path, **variables: str) -> None:
    command = [sys.executable, dev.__file__, "docs", str(target)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env={**os.environ, **variables})


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once for all processes of the run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with (folder / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "site").exists():
            build(folder / "new-site")
            (folder / "new-site").rename(folder / "site")
    return folder / "site"


class Page(HTMLParser):
    """Links of a page, what the page loads, and the ids of its elements."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attributes if value is not None}
        if "id" in found:
            self.ids.add(found["id"])
        if "href" in found:
            is_loaded = tag == "link" and found["rel"] != "canonical"
            (self.loaded if is_loaded else self.links).append(found["href"])
        if "src" in found:
            self.loaded.append(found["src"])


def pages_of(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def text_of(page: Path) -> str:
    """The text of a page without its tags."""
    return html.unescape(re.sub("<[^>]+>", "", page.read_text(encoding="utf-8")))


def test_the_pages_of_the_reference_have_exactly_the_public_names() -> None:
    named = [
        f"{module}.{name}"
        for group in reference.GROUPS.values()
        for module, names in group.names.items()
        for name in names.split()
    ]
    modules = map(importlib.import_module, reference.MODULES)
    assert sorted(named) == sorted(f"{it.__name__}.{name}" for it in modules for name in it.__all__)


@pytest.mark.tool
def test_every_public_name_is_on_a_page_of_the_reference(site: Path) -> None:
    pages = [Page(site / "reference" / f"{name}.html") for name in reference.GROUPS]
    for name in DOCUMENTED:
        assert sum(name in page.ids for page in pages) == 1, name


@pytest.mark.tool
def test_signatures_are_as_in_the_source_and_link_to_types(site: Path) -> None:
    page = site / "reference" / "open.html"
    assert "Unpack[Access]" in text_of(page)
    assert "timeout: float | None = 30" in text_of(page)
    assert "#onnxarchive.Archive" in Page(page).links
    assert "errors.html#onnxarchive.ArchiveFormatError" in Page(page).links


@pytest.mark.tool
def test_every_command_is_on_the_page_of_commands(site: Path) -> None:
    text = text_of(site / "commands.html")
    names = [name for name, _ in commands()]
    assert {"convert", "assets add"} <= set(names)
    for name in names:
        assert f"usage: onnxarchive {name} " in text


@pytest.mark.tool
def test_every_rule_of_the_specification_has_an_anchor(site: Path) -> None:
    text = (site / "specification.html").read_text(encoding="utf-8")
    rules = tomllib.loads((ROOT / "spec" / "rules.toml").read_text(encoding="utf-8"))
    for rule in rules:
        assert f'<p id="{rule.lower()}"><strong>{rule}</strong>' in text
    assert text.count('href="#zip-16"') > 2


@pytest.mark.tool
def test_every_recipe_is_shown_with_its_programs(site: Path) -> None:
    text = "".join(text_of(page) for page in sorted((site / "recipes").glob("*.html")))
    programs = [
        path
        for path in sorted((ROOT / "tools" / "recipes").rglob("*.*"))
        if path.suffix in (".py", ".mjs", ".cpp") and "node_modules" not in path.parts
    ]
    assert len(programs) > 12
    for program in programs:
        assert program.read_text(encoding="utf-8").strip() in text, program


@pytest.mark.tool
def test_every_link_of_the_site_leads_to_a_page_and_an_anchor_or_a_file(site: Path) -> None:
    pages = pages_of(site)
    for path, page in pages.items():
        for link in page.links + page.loaded:
            if link.startswith(build_site.FILES):
                assert (ROOT / urlsplit(link).path.partition("/blob/main/")[2]).exists(), link
            elif not urlsplit(link).scheme:
                parts = urlsplit(link)
                target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
                assert target.is_file(), f"{path.name}: {link}"
                if parts.fragment and target in pages:
                    assert unquote(parts.fragment) in pages[target].ids, f"{path.name}: {link}"


@pytest.mark.tool
def test_two_builds_of_the_site_are_equal(site: Path, tmp_path: Path) -> None:
    build(tmp_path / "again", PYTHONHASHSEED="1")
    one = {it.relative_to(site): it.read_bytes() for it in site.rglob("*") if it.is_file()}
    again = tmp_path / "again"
    two = {it.relative_to(again): it.read_bytes() for it in again.rglob("*") if it.is_file()}
    assert one == two


# In a browser

SIZES = {"a phone": (390, 844), "a desk": (1440, 900)}
PAGES = (
    "index.html",
    "overview.html",
    "damaged.html",
    "commands.html",
    "recipes/cpp.html",
    "reference/open.html",
    "reference/convert.html",
    "specification.html",
    "search.html?q=recover",
)


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """The address of a server of the site."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.tool
def test_pages_fit_a_phone_and_a_desk_and_ask_no_other_server(address: str, browser: Any) -> None:
    for width, height in SIZES.values():
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        for page in PAGES:
            browser.get(address + page)
            shown, loaded = browser.execute_script(
                "return [document.documentElement.scrollWidth,"
                " performance.getEntriesByType('resource').map(it => it.name)]"
            )
            assert shown <= width, page
            assert all(it.startswith(address) for it in loaded)
            assert any("furo.css" in it for it in loaded)


@pytest.mark.tool
def test_pages_have_a_light_and_a_dark_scheme(address: str, browser: Any) -> None:
    lightness = {}
    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        browser.get(address)
        ground = "return getComputedStyle(document.body).backgroundColor"
        lightness[scheme] = max(map(int, re.findall(r"\d+", browser.execute_script(ground))[:3]))
    assert lightness["light"] > 200
    assert lightness["dark"] < 60


@pytest.mark.tool
def test_a_search_finds_the_function_of_this_name(address: str, browser: Any) -> None:
    browser.get(f"{address}search.html?q=recover")
    browser.implicitly_wait(30)
    found = browser.find_element("css selector", "#search-results li a").get_attribute("href")
    assert found.startswith(f"{address}reference/edit.html")
    assert found.endswith("#onnxarchive.recover")

"""The recipe of a page that runs a model of an archive in the browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium import chromium
from models import entry_of, flip_byte, further_model, runnable_model
from range_server import ranges, serving

import onnxarchive

pytestmark = pytest.mark.tool

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "tools" / "recipes" / "browser"
MIB = 1 << 20
X = np.ones((2, MIB // 64), np.float32)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    yield from chromium(tmp_path / "profile")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[str]:
    """The address of the page; an archive of two models and an asset lies beside it."""
    if not (RECIPE / "node_modules").exists():
        pytest.skip(f"npm install --prefix {RECIPE.relative_to(ROOT)} brings the runtime")
    site = tmp_path / "site"
    site.joinpath("tools", "recipes").mkdir(parents=True)
    site.joinpath("conformance").symlink_to(ROOT / "conformance")
    folder = site / "tools" / "recipes" / "browser"
    folder.mkdir()
    for file in RECIPE.iterdir():
        folder.joinpath(file.name).symlink_to(file)
    onnxarchive.save(
        runnable_model(MIB),
        folder / "model.onnxa",
        models={"further": further_model(MIB)},
        assets={"unread": bytes(4 * MIB)},
    )
    with serving(site) as url:
        yield f"{url}/tools/recipes/browser/index.html"


def archive_of(tmp_path: Path) -> Path:
    return tmp_path / "site" / "tools" / "recipes" / "browser" / "model.onnxa"


def run_in(browser: Any, model: str = "") -> tuple[str, str]:
    """Runs a model on ones; gives the status and the outputs that the page shows."""
    from selenium.webdriver.support.ui import WebDriverWait

    def shown(driver: Any) -> str | None:
        text: str = driver.find_element("id", "status").text
        return None if text in ("", "Running") else text

    browser.find_element("id", "model").clear()
    browser.find_element("id", "model").send_keys(model)
    browser.find_element("css selector", "button").click()
    status = str(WebDriverWait(browser, 120).until(shown))
    return status, browser.find_element("id", "outputs").text


@pytest.mark.parametrize("model", ["", "further"])
def test_a_page_computes_what_python_does_and_reads_what_that_needs(
    browser: Any, page: str, tmp_path: Path, model: str
) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    archive = archive_of(tmp_path)
    session = onnxarchive.session(archive, providers=["CPUExecutionProvider"], model=model)
    (expected,) = session.run(None, {"x": X})
    browser.get(page)
    status, outputs = run_in(browser, model)
    assert status == "Done", browser.get_log("browser")
    name, dims, *numbers = outputs.split()
    assert (name, dims) == (
        session.get_outputs()[0].name,
        f"[{','.join(map(str, expected.shape))}]:",
    )
    np.testing.assert_allclose(
        np.array(numbers, np.float32), expected.ravel(), rtol=1e-4, atol=1e-3
    )

    assert MIB < sum(stop - start for _, start, stop in ranges) < MIB + 100_000
    own = entry_of(archive, "own").header_offset
    assert (own in [start for _, start, _ in ranges]) == (model == "further")


def test_a_page_tells_a_weight_that_has_changed(browser: Any, page: str, tmp_path: Path) -> None:
    with onnxarchive.open(archive_of(tmp_path)) as opened:
        offset = opened.entries["layer_0_weight"].data_offset
    flip_byte(archive_of(tmp_path), offset)
    browser.get(page)
    status, outputs = run_in(browser)
    assert status.startswith("expected data with the CRC-32")
    assert outputs == ""

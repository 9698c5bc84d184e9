from __future__ import annotations

import importlib.util
import os
import re
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import (
    MEASURE_MEMORY,
    break_local_header,
    entry_of,
    flip_byte,
    full_model,
    keys_of,
    open_below,
    run_python,
    runnable_model,
)
from pages import needs_smaps
from processes import wait_until

import onnxarchive
from onnxarchive.interop import netron

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("netron") is None,
    reason="netron, which pip installs, is the page that is served",
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / 'a "model" <b> für Größen.onnxa'
    onnxarchive.save(runnable_model(), path, assets={"secret.txt": b"secret"})
    return path


@pytest.fixture
def server(path: Path) -> Iterator[netron.Server]:
    with netron.Server(path) as server:
        yield server


def get(url: str) -> HTTPResponse:
    response: HTTPResponse = urllib.request.urlopen(url, timeout=30)
    return response


def read(url: str) -> bytes:
    with get(url) as response:
        return response.read()


def status_of(url: str) -> int:
    try:
        with get(url) as response:
            return response.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


# Answers of the server


def test_the_model_and_its_external_data_are_served_as_the_archive_has_them(path: Path) -> None:
    onnxarchive.save(full_model(), path, size_threshold=0, convert_attribute=True, assets={})
    with onnxarchive.open(path) as archive, netron.Server(path) as server:
        assert read(server.url + "data/model.onnx") == archive.read("__MODEL_PROTO")
        assert len(keys_of(archive)) > 10
        for key in keys_of(archive):
            with get(f"{server.url}data/{key}?cb=17") as response:
                assert response.read() == archive.read(key)
                assert response.headers["Content-Length"] == str(archive.entries[key].nbytes)
                assert response.headers["Content-Type"] == "application/octet-stream"


def test_the_page_names_the_archive_and_asks_for_its_model(server: netron.Server) -> None:
    page = read(server.url).decode()
    assert '<meta name="file" content="/data/model.onnx">' in page
    name = "a &quot;model&quot; &lt;b&gt; für Größen.onnxa"
    assert f'<meta name="name" content="{name}">' in page
    assert read(server.url + "index.html") == page.encode()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((f"{name}.js", "/javascript") for name in ("index", "view", "onnx")),  # of some kind
        ("grapher.css", "text/css"),
        ("favicon.ico", "icon"),  # "image/x-icon" or "image/vnd.microsoft.icon"
        ("onnx-metadata.json", "application/json"),
    ],
)
def test_every_file_of_the_page_is_served(server: netron.Server, name: str, kind: str) -> None:
    with get(server.url + name) as response:
        assert str(response.headers["Content-Type"]).endswith(kind)
        assert len(response.read()) > 100


def test_the_page_can_reach_nothing_but_the_server_and_reports_nothing(
    server: netron.Server,
) -> None:
    with get(server.url) as response:
        policy = response.headers["Content-Security-Policy"]
        assert "default-src 'self';" in policy
        assert "connect-src 'self';" in policy
        assert response.headers["Referrer-Policy"] == "no-referrer"
        assert response.headers["Cache-Control"] == "no-store"
        page = response.read().decode()
        assert '<meta name="version" content="0.0.0">' in page
        assert '<meta name="date"' not in page
        # Consent to nothing, for this page and not for another Netron on this machine.
        secret = server.url.rstrip("/").rpartition("/")[2]
        assert response.headers["Set-Cookie"].startswith(f"consent=0; Path=/{secret}/;")


def test_nothing_but_the_page_the_model_and_its_tensors_is_served(server: netron.Server) -> None:
    names = [
        *("data/", "data/missing", "data/__MODEL_PROTO", "data/assets/secret.txt"),
        *("data/../index.html", "data/%2e%2e/index.html", "../../../../../../etc/passwd"),
        *("%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd", "server.py", "__pycache__", "."),
        "/index.html",
    ]
    assert {name: status_of(server.url + name) for name in names} == dict.fromkeys(names, 404)


def test_nothing_is_served_without_the_secret_in_the_address(server: netron.Server) -> None:
    root, secret, _ = server.url.rsplit("/", 2)
    assert len(secret) >= 20
    for address in ("", "index.html", "data/model.onnx", f"{secret[:-1]}/", f"{secret[:-1]}x/"):
        assert status_of(f"{root}/{address}") == 404
    assert status_of(server.url) == 200


def test_two_servers_of_this_machine_have_different_secrets_and_ports(path: Path) -> None:
    with netron.Server(path) as one, netron.Server(path) as other:
        assert one.socket.getsockname()[0] == "127.0.0.1"
        assert one.url.startswith("http://127.0.0.1:")
        for part in (2, 3):
            assert one.url.split("/")[part] != other.url.split("/")[part]


def flip_weight(path: Path) -> None:
    flip_byte(path, entry_of(path, "layer_0_weight").data_offset + 5)


def break_header(path: Path) -> None:
    break_local_header(path, entry_of(path, "layer_0_weight"))


@pytest.mark.parametrize("damage", [flip_weight, break_header])
def test_a_damaged_weight_is_not_served(path: Path, damage: Callable[[Path], None]) -> None:
    damage(path)
    rule = r".*\[ZIP-15\]" if damage is flip_weight else ""
    message = f"^a weight is not shown: {re.escape(str(path))}: entry 'layer_0_weight': {rule}"
    with netron.Server(path) as server:
        with pytest.warns(UserWarning, match=message):
            assert status_of(server.url + "data/layer_0_weight") == 500
        assert status_of(server.url + "data/model.onnx") == 200


def test_a_weight_that_is_too_large_for_a_browser_is_not_served(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = entry_of(path, "layer_0_weight").nbytes
    with netron.Server(path) as server:
        monkeypatch.setattr(netron, "TOO_LARGE", nbytes + 1)
        assert status_of(server.url + "data/layer_0_weight") == 200
        monkeypatch.setattr(netron, "TOO_LARGE", nbytes)
        assert status_of(server.url + "data/layer_0_weight") == 404


@pytest.mark.large
@needs_smaps
def test_a_large_weight_is_served_without_holding_it_in_memory(tmp_path: Path) -> None:
    onnxarchive.save(runnable_model(256 << 20), tmp_path / "m.onnxa")
    code = f"""
{MEASURE_MEMORY}
import urllib.request
from onnxarchive.interop import netron
total = 0
def ask():
    global total
    with urllib.request.urlopen(server.url + "data/layer_0_weight") as response:
        while piece := response.read(1 << 20):
            total += len(piece)
            sample()
with netron.Server(sys.argv[1]) as server:
    print(growth(ask) >> 20, total >> 20)
"""
    grown, total = map(int, run_python(code, tmp_path / "m.onnxa").split())
    assert total == 256
    assert grown < 64


def test_many_weights_are_served_at_once(server: netron.Server) -> None:
    with ThreadPoolExecutor(16) as executor:
        answers = executor.map(read, [server.url + "data/layer_0_weight"] * 16)
    assert list(answers) == [runnable_model().graph.initializer[0].raw_data] * 16


def test_a_browser_that_goes_away_ends_nothing(server: netron.Server) -> None:
    with get(server.url + "data/layer_0_weight") as response:
        response.read(1)
    assert status_of(server.url) == 200


# How a server begins and ends


def test_a_closed_server_leaves_no_thread_file_or_port(path: Path) -> None:
    before = sorted(path.parent.iterdir())
    threads = threading.active_count()
    with netron.Server(path) as server:
        read(server.url + "data/layer_0_weight")
        address = server.url.split("/")[2]
    wait_until(lambda: threading.active_count() <= threads)
    assert threading.active_count() == threads
    assert sorted(path.parent.iterdir()) == before
    if os.path.exists("/proc/self/fd"):
        assert open_below(path.parent) == []
    with netron.Server(path, port=int(address.split(":")[1])) as server:
        assert server.url.split("/")[2] == address


def test_a_port_that_is_taken_is_reported(path: Path, server: netron.Server) -> None:
    port = int(server.url.split("/")[2].split(":")[1])
    with pytest.raises(OSError, match="in use") as caught:
        netron.Server(path, port=port)
    assert caught.value.filename == f"127.0.0.1:{port}"
    if os.path.exists("/proc/self/fd"):
        assert len(open_below(path.parent)) == len([server])


def test_wrong_addresses_and_files_are_reported(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a port from 0 to 65535, found 65536"):
        netron.Server(path, port=65536)
    with pytest.raises(FileNotFoundError):
        netron.Server(tmp_path / "missing.onnxa")
    (tmp_path / "text").write_text("not an archive")
    with pytest.raises(onnxarchive.ArchiveFormatError, match="text: "):
        netron.Server(tmp_path / "text")


def test_a_netron_whose_page_is_another_is_not_supported(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "netron"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "index.html").write_text("<html></html>")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "netron", raising=False)  # imported by another test
    with pytest.raises(
        onnxarchive.UnsupportedFeatureError, match=r"Netron's page .* is missing or lacks the tag"
    ):
        netron.Server(path)


# In a browser


def select(browser: Any, css: str) -> list[Any]:
    return list(browser.find_elements("css selector", css))


def show_node(browser: Any, op_type: str) -> None:
    """Clicks a node of the graph."""
    texts = wait_until(lambda: [it for it in select(browser, ".node text") if it.text == op_type])
    texts[0].click()
    wait_until(lambda: "INPUTS" in sidebar(browser))


def sidebar(browser: Any) -> str:
    return "\n".join(it.text for it in select(browser, ".sidebar"))


def shown_values(browser: Any, weight: str) -> str:
    """Expands a weight in the sidebar and then its tensor, and gives what is written there."""
    value = wait_until(
        lambda: [
            it
            for it in select(browser, ".sidebar .sidebar-item-value")
            if re.search(rf"^name: {re.escape(weight)}$", it.text, re.MULTILINE)
        ]
    )[0]
    expanders = value.find_elements("css selector", ".sidebar-item-value-expander")
    expanders[0].click()
    for index in (0, 1):  # the weight's properties may come with the tensor closed or open
        buttons = value.find_elements("css selector", ".sidebar-item-value-button")
        if not value.find_elements("css selector", "pre") and buttons:
            buttons[min(index, len(buttons) - 1)].click()
    texts = wait_until(
        lambda: [it.text for it in value.find_elements("css selector", "pre") if len(it.text) > 3]
    )
    return str(texts[0])


@pytest.mark.tool
def test_a_browser_draws_the_graph_and_shows_the_values_of_a_weight(
    browser: Any, path: Path
) -> None:
    weight = onnx.numpy_helper.to_array(runnable_model().graph.initializer[0])
    with netron.Server(path) as server:
        browser.get(server.url)
        show_node(browser, "MatMul")
        labels = {it.text for it in select(browser, "#canvas text, svg text")}
        assert {"MatMul", "Add", "x", "y"} <= labels
        assert browser.title == path.name
        text = shown_values(browser, "layer.0/weight")
        numbers = np.array(re.findall(r"-?\d+\.?\d*(?:e[+-]?\d+)?", text), np.float32)
        np.testing.assert_array_equal(numbers[:16], weight[0])
        np.testing.assert_array_equal(numbers[: weight.size], weight.reshape(-1)[: numbers.size])
        addresses = browser.execute_script(
            "return performance.getEntriesByType('resource').map(it => it.name)"
        )
        assert f"{server.url}data/layer_0_weight" in {it.split("?")[0] for it in addresses}
        assert all(it.startswith(server.url) for it in addresses)
        assert [it["message"] for it in browser.get_log("browser")] == []


@pytest.mark.tool
def test_a_browser_shows_no_values_of_a_weight_that_has_changed(
    browser: Any, path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    flip_weight(path)
    with netron.Server(path) as server:
        browser.get(server.url)
        show_node(browser, "MatMul")
        assert shown_values(browser, "layer.0/weight") == "Tensor data is empty."
    assert "[ZIP-15]" in str(recwarn.pop(UserWarning).message)

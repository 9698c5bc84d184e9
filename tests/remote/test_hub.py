"""Archives in repositories of the Hugging Face Hub, read from a server of the hub's API."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import onnx
import pytest
from commands import run
from models import further_model, run_model, run_python, runnable_model
from web_server import Answer, Request, WebServer, serving

import onnxarchive
from onnxarchive.errors import ObjectChangedError, UnsupportedFeatureError
from onnxarchive.remote.origins import FileSystemOrigin

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

MIB = 1 << 20
REPOSITORY = "hf://ada/tiny"
ARCHIVE = f"{REPOSITORY}/onnx/model.onnxa"


class Hub:
    """A hub with one repository: what a commit holds is asked for, and ranges are redirected."""

    def __init__(self, server: WebServer, files: dict[str, bytes]) -> None:
        self.server = server
        self.files = files
        self.options = {"endpoint": server.url("")}
        server.files.update({f"/storage/{name}": data for name, data in files.items()})
        server.change = self.answer

    def answer(self, request: Request, answer: Answer) -> Answer:
        path = unquote(urlsplit(request.path).path)
        if path.startswith("/storage/"):
            return answer
        if path in ("/api/models/ada/tiny", "/api/models/ada/tiny/revision/main"):
            return _json({"id": "ada/tiny", "sha": "0" * 40})
        if path.startswith("/api/models/ada/tiny/tree/main"):
            folder = path.removeprefix("/api/models/ada/tiny/tree/main").strip("/")
            return _json([self.describe(name) for name in self.files if _folder(name) == folder])
        name = path.removeprefix("/ada/tiny/resolve/main/")
        if name in self.files:
            return Answer(302, {"Location": f"/storage/{name}", "X-Repo-Commit": "0" * 40}, [])
        return Answer(404, {"X-Error-Code": "RepoNotFound"}, [])

    def describe(self, name: str) -> dict[str, object]:
        data = self.files[name]
        blob = hashlib.sha1(data).hexdigest()
        return {"type": "file", "path": name, "size": len(data), "oid": blob}


def _json(value: object) -> Answer:
    return Answer(200, {"Content-Type": "application/json"}, [json.dumps(value).encode()])


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "repository"
    folder.mkdir()
    model = runnable_model(MIB)
    onnxarchive.save(
        model,
        folder / "model.onnxa",
        models={"further": further_model(MIB)},
        assets={"unread": bytes(6 * MIB)},
    )
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx_data")
    files = {f"onnx/{path.name}": path.read_bytes() for path in folder.iterdir()}
    with serving({}) as server:
        yield Hub(server, files)


def test_tensors_are_read_by_ranges_without_reading_ahead(hub: Hub) -> None:
    with onnxarchive.open(ARCHIVE, storage_options=hub.options) as archive:
        assert list(archive.models) == ["", "further"]
        assert hub.server.nbytes < MIB
        expected = runnable_model(MIB).graph.initializer[0]
        array = archive.fetch([expected.name])[expected.name]
    np.testing.assert_array_equal(array, onnx.numpy_helper.to_array(expected))
    assert hub.server.nbytes < 2 * MIB


def test_a_revision_is_part_of_the_url(hub: Hub) -> None:
    model = onnxarchive.load(f"{REPOSITORY}@main/onnx/model.onnxa", storage_options=hub.options)
    assert model == runnable_model(MIB)


def test_the_commands_read_from_the_hub_that_a_variable_names(hub: Hub, tmp_path: Path) -> None:
    code = "import sys; from onnxarchive.cli import main; sys.exit(main(sys.argv[1:]))"
    url = hub.server.url("")
    assert "layer.0/weight" in run_python(code, "ls", ARCHIVE, HF_ENDPOINT=url)
    source = f"{REPOSITORY}/onnx/model.onnx"
    run_python(code, "convert", source, tmp_path / "new.onnxa", HF_ENDPOINT=url)
    assert onnxarchive.check(tmp_path / "new.onnxa", full=True) == []
    assert onnxarchive.load(tmp_path / "new.onnxa") == runnable_model(MIB)


def test_an_archive_becomes_a_onnx_and_a_session(hub: Hub, tmp_path: Path) -> None:
    options = ["--storage-option", f"endpoint={hub.server.url('')}"]
    assert run("export", ARCHIVE, tmp_path / "model.onnx", *options) == 0
    assert onnx.load(tmp_path / "model.onnx") == runnable_model(MIB)
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    access: dict[str, Any] = {"storage_options": hub.options, "cache": tmp_path / "cache"}
    session = onnxarchive.session(ARCHIVE, providers=["CPUExecutionProvider"], **access)
    (x,) = session.get_inputs()
    ones = np.ones(x.shape, np.float32)
    (expected,) = run_model(tmp_path / "model.onnx", x=ones)
    np.testing.assert_array_equal(session.run(None, {"x": ones})[0], expected)
    nbytes = hub.server.nbytes
    onnxarchive.session(ARCHIVE, **access)
    assert hub.server.nbytes - nbytes < MIB


def test_a_new_commit_of_the_archive_is_noticed(hub: Hub) -> None:
    with onnxarchive.open(ARCHIVE, storage_options=hub.options) as archive:
        hub.files["onnx/model.onnxa"] = bytes(len(hub.files["onnx/model.onnxa"]))
        with pytest.raises(ObjectChangedError, match=r"hf://ada/tiny/onnx/model\.onnxa"):
            archive.fetch(["layer.0/weight"])


class SlowSystem:
    """A file system that takes some time to tell the id of a file's content."""

    def __init__(self) -> None:
        self.id = "first"
        self.questions = 0
        self.began = Event()

    def cat_file(self, path: str, *, start: int, end: int) -> bytes:
        return bytes(end - start)

    def invalidate_cache(self) -> None:
        pass

    def info(self, path: str) -> dict[str, object]:
        self.questions += 1
        answer = {"size": 1, "blob_id": self.id}
        self.began.set()
        sleep(0.3)
        return answer


async def ids_of(origin: FileSystemOrigin, count: int) -> list[str | None]:
    return [it.etag for it in await asyncio.gather(*(origin.version() for _ in range(count)))]


def test_ranges_that_are_read_at_once_share_checks_of_the_version() -> None:
    system = SlowSystem()
    origin = FileSystemOrigin("model.onnxa", "", True, system, "model.onnxa")
    assert asyncio.run(ids_of(origin, 4)) == ["first"] * 4
    assert system.questions < 4


def test_a_version_check_that_began_before_a_read_ended_does_not_confirm_the_read() -> None:
    system = SlowSystem()
    origin = FileSystemOrigin("model.onnxa", "", True, system, "model.onnxa")
    with ThreadPoolExecutor() as pool:
        before = pool.submit(asyncio.run, ids_of(origin, 1))
        assert system.began.wait(30)
        system.id = "second"
        after = pool.submit(asyncio.run, ids_of(origin, 2))
        assert before.result() == ["first"]
        assert after.result() == ["second"] * 2


@pytest.mark.parametrize("url", [f"{REPOSITORY}/onnx/none.onnxa", "hf://ada/none/model.onnxa"])
def test_a_missing_repository_revision_or_file_is_named(hub: Hub, url: str) -> None:
    with pytest.raises(FileNotFoundError, match=url):
        onnxarchive.open(url, storage_options=hub.options)


def test_writing_says_to_upload_a_local_file(hub: Hub) -> None:
    url = f"{REPOSITORY}/new.onnxa"
    with pytest.raises(UnsupportedFeatureError, match=r"write a local .*\('hf upload'\)"):
        onnxarchive.save(runnable_model(), url, storage_options=hub.options)

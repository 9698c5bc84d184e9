"""A save over an archive loses no assets and no further models, unless the call says so."""

from __future__ import annotations

import errno
import functools
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import edits
import onnx
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from interruptions import PHASES, interrupt
from models import full_model, further_model, runnable_model
from several_models import A, B, of, require_loads
from versions import object_store
from written import saved

import onnxarchive

ASSETS = {"labels.txt": b"cat\ndog\n", "folder/vocabulary": b"a b c"}
DECODER = {"decoder": of(z=B)}
# What an archive has beside its default model, and the arguments that drop it.
CONTENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "assets": ({"assets": ASSETS}, {"assets": {}}),
    "further models": ({"models": DECODER}, {"models": {}}),
    "both": ({"assets": ASSETS, "models": DECODER}, {"assets": {}, "models": {}}),
}


@pytest.fixture(params=CONTENTS)
def contents(request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    return CONTENTS[request.param]


def onnx_ir() -> Any:
    return pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")


def of_onnx_ir(path: Path) -> Any:
    return onnx_ir().from_proto(onnxarchive.load(path))


def loaded_by_onnx_ir(path: Path) -> Any:
    onnx_ir()
    import onnxarchive.ir

    return onnxarchive.ir.load(path)


# Saves over an archive that has assets or further models: those that lose them

LOSING: dict[str, Callable[[Path], object]] = {
    "a model of the archive": lambda path: onnxarchive.save(onnxarchive.load(path), path),
    "another model": lambda path: onnxarchive.save(full_model(), str(path)),
    "a model of onnx_ir": lambda path: onnxarchive.save(of_onnx_ir(path), path),
    "onnx_ir's model of the archive": lambda path: onnxarchive.save(loaded_by_onnx_ir(path), path),
    "onnx.save": lambda path: onnx.save(onnx.load(path), path),
    "onnx.save to a string": lambda path: onnx.save(onnx.load(path), os.path.relpath(path)),
    "onnx.save_model of bytes": lambda path: onnx.save_model(
        full_model().SerializeToString(), f=path, format="onnxa"
    ),
    "onnx_ir.save": lambda path: onnx_ir().save(onnx_ir().load(path), path),
}


@pytest.mark.parametrize("save", LOSING.values(), ids=LOSING)
def test_a_save_that_would_lose_assets_or_models_is_refused_and_writes_nothing(
    path: Path,
    contents: tuple[dict[str, Any], dict[str, Any]],
    save: Callable[[Path], object],
) -> None:
    onnxarchive.save(of(a=A), path, **contents[0])
    with edits.untouched(path), edits.refused(path, ValueError) as caught:
        save(path)
    message = str(caught.value)
    for name in contents[0]:
        assert f"{name}={{}}" in message
    for name in [*contents[0].get("assets", ()), *contents[0].get("models", ())]:
        assert repr(name) in message
    assert message.startswith(str(path))
    assert "with onnxarchive.edit(path) as edit: edit.model = model" in message
    assert "remove the file before onnx.save" in message


def test_an_archive_without_assets_and_further_models_is_replaced(path: Path) -> None:
    onnxarchive.save(of(a=A), path)
    onnxarchive.save(runnable_model(), path)
    require_loads(path, {"": runnable_model()})
    onnx.save(of(a=A), path)
    require_loads(path, {"": of(a=A)})


def test_empty_arguments_drop_what_the_archive_has(
    path: Path, contents: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    onnxarchive.save(of(a=A), path, **contents[0])
    onnxarchive.save(runnable_model(), path, **contents[1])
    assert path.read_bytes() == saved(runnable_model())


def test_assets_and_models_that_would_be_lost_need_an_argument_each(path: Path) -> None:
    def of_both() -> None:
        onnxarchive.save(of(a=A), path, assets=ASSETS, models=DECODER)

    given: list[dict[str, Any]] = [
        {"assets": {}},
        {"assets": {"new": b""}},
        {"models": {}},
        {"models": {"encoder": further_model()}},
    ]
    of_both()
    for options in given:
        (missing,) = {"assets", "models"} - options.keys()
        with edits.refused(path, ValueError, rf"pass {missing}={{}} to"):
            onnxarchive.save(runnable_model(), path, **options)
    for options in given[1::2]:
        onnxarchive.save(runnable_model(), path, **{"assets": {}, "models": {}, **options})
        assert path.read_bytes() == saved(runnable_model(), **options)
        path.unlink()
        of_both()


def test_the_remedy_in_the_message_keeps_what_a_save_would_lose(path: Path) -> None:
    onnxarchive.save(of(a=A), path, assets=ASSETS, models=DECODER)
    with edits.refused(path, ValueError, re.escape("edit.models[id] = model")):
        onnxarchive.save(loaded_by_onnx_ir(path), path)
    model = loaded_by_onnx_ir(path)
    with onnxarchive.edit(path) as edit:
        edit.model = model
        edit.models["decoder"] = of(c=B)
    require_loads(path, {"": onnx_ir().to_proto(model), "decoder": of(c=B)})
    with onnxarchive.open(path) as archive:
        assert {name: bytes(data) for name, data in archive.assets.items()} == ASSETS


def test_packed_weights_count_as_assets_and_are_named_by_their_folder(path: Path) -> None:
    packed = {f"onnxruntime/prepacked/{name}": b"{}" for name in ("index.json", "a.0", "b.0")}
    onnxarchive.save(of(a=A), path, assets={**packed, **ASSETS})
    named = re.escape("('folder/vocabulary', 'labels.txt', 'onnxruntime/prepacked/')")
    with edits.refused(path, ValueError, f"has assets {named}, which"):
        onnxarchive.save(of(a=A), path)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\3\4", bytes(70_000)])
def test_a_file_that_is_no_archive_is_replaced(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    onnxarchive.save(runnable_model(), path)
    require_loads(path, {"": runnable_model()})


def test_a_damaged_directory_is_replaced_but_not_a_damaged_model(path: Path) -> None:
    onnxarchive.save(of(a=A), path, assets=ASSETS)
    data = path.read_bytes()
    at = data.index(b"__MODEL_PROTO")
    path.write_bytes(data[:at] + bytes(20) + data[at + 20 :])  # its name and first bytes
    with edits.refused(path, ValueError, "assets"):
        onnxarchive.save(of(a=A), path)
    path.write_bytes(data[:-1])
    onnxarchive.save(of(a=A), path)
    require_loads(path, {"": of(a=A)})


@pytest.mark.parametrize("phase", PHASES)
def test_assets_of_the_archive_before_an_interrupted_edit_are_not_lost(
    path: Path, phase: str
) -> None:
    onnxarchive.save(of(a=A), path, assets={"old": b"1"})
    edit = interrupt(path, lambda path: edits.document(path))
    path.write_bytes(edit.states[phase])
    with edits.refused(path, ValueError, r"assets \('old'\)"):
        onnxarchive.save(of(b=B), path)
    onnxarchive.recover(path)
    assert path.read_bytes() == edit.old


def test_a_wrapper_around_onnx_save_does_not_hide_the_loss(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = onnx.save_model

    @functools.wraps(save)
    def logged(*arguments: Any) -> None:
        save(*arguments)

    onnxarchive.save(of(a=A), path, assets=ASSETS)
    for changed in (logged, functools.partial(save)):
        monkeypatch.setattr(onnx, "save_model", changed)
        with edits.untouched(path), edits.refused(path, ValueError):
            onnx.save_model(runnable_model(), path)


def test_targets_that_are_written_in_order_are_not_read(path: Path) -> None:
    onnxarchive.save(of(a=A), path, assets=ASSETS)
    with open(path, "r+b") as file:
        onnxarchive.save(runnable_model(), file)
        file.truncate()
    assert path.read_bytes() == saved(runnable_model())
    buffer = io.BytesIO(saved(of(a=A), assets=ASSETS))
    onnx.save(runnable_model(), buffer, format="onnxa")
    assert buffer.getvalue().startswith(saved(runnable_model()))


def test_onnx_saves_its_other_formats_over_archives(path: Path) -> None:
    onnxarchive.save(of(a=A), path, assets=ASSETS)
    onnx.save(of(b=B), path, format="protobuf")
    assert onnx.load(path, format="protobuf") == of(b=B)


# Stores


def test_a_save_to_a_store_that_would_lose_assets_or_models_is_refused(
    contents: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    store = object_store("MemoryStore")
    onnxarchive.save(of(a=A), "m.onnxa", store=store, **contents[0])
    before = bytes(store.get("m.onnxa").bytes())
    with pytest.raises(ValueError, match=r"m\.onnxa: the archive has .* would lose"):
        onnxarchive.save(of(b=B), "m.onnxa", store=store)
    assert bytes(store.get("m.onnxa").bytes()) == before
    onnxarchive.save(of(b=B), "m.onnxa", store=store, **contents[1])
    assert bytes(store.get("m.onnxa").bytes()) == saved(of(b=B))
    onnxarchive.save(of(a=A), "m.onnxa", store=store)
    assert bytes(store.get("m.onnxa").bytes()) == saved(of(a=A))
    store.put("m.onnxa", b"no archive")
    onnxarchive.save(of(a=A), "m.onnxa", store=store)


def test_for_a_store_the_error_says_to_pass_assets_and_models_that_would_be_lost() -> None:
    onnx_ir()
    url = "memory://test_overwriting/own.onnxa"
    onnxarchive.save(of(a=A), url, assets=ASSETS)
    model = loaded_by_onnx_ir(url)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"pass them to onnxarchive\.save") as caught:
        onnxarchive.save(model, url)
    assert "onnxarchive.edit" not in str(caught.value)
    with onnxarchive.open(url) as archive:
        onnxarchive.save(model, url, assets=archive.assets)
    with onnxarchive.open(url) as archive:
        assert {name: bytes(data) for name, data in archive.assets.items()} == ASSETS


def test_an_object_that_cannot_be_read_is_replaced_only_if_reading_is_forbidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = "memory://test_overwriting/m.onnxa"
    onnxarchive.save(of(a=A), url, assets=ASSETS)

    def failing(error: OSError) -> Callable[..., Any]:
        def info(*_: object, **__: object) -> Any:
            raise error

        return info

    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "info", failing(OSError(errno.EIO, None)))
        with pytest.raises(OSError, match="Input/output error"):
            onnxarchive.save(of(b=B), url)
    with onnxarchive.open(url) as archive:
        assert sorted(archive.assets) == sorted(ASSETS)
    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "info", failing(PermissionError(errno.EACCES, None)))
        onnxarchive.save(of(b=B), url)
    assert onnxarchive.load(url) == of(b=B)

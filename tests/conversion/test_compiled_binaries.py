"""Compiled binaries that EPContext nodes name are never left out without a warning."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import onnx
import pytest
from models import attribute, model_of, node, raw_tensor
from onnx import helper
from web_server import WebServer
from written import contents, saved, write_model, zipped

import onnxarchive
from onnxarchive.conversion.convert import Conversion
from onnxarchive.errors import ArchiveFormatError

BINARY = b"compiled" * 100


def context(path: str | None, **attributes: Any) -> onnx.NodeProto:
    """A node whose compiled binary is in a file, unless the attributes say otherwise."""
    attributes = {"embed_mode": 0, "main_context": 1, "source": "QNN", **attributes}
    if path is not None:
        attributes["ep_cache_context"] = path
    return helper.make_node("EPContext", ["x"], ["y"], domain="com.microsoft", **attributes)


def model(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    result = model_of(raw_tensor("w", dims=(300,)))
    result.graph.node.extend(nodes)
    return result


def write_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(BINARY)


def convert(source: str | Path, path: Path, **options: Any) -> Conversion:
    """The outcome of a conversion whose warnings are those of the outcome, each with the source."""
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        outcome = onnxarchive.convert(source, path, **options)
    expected = [f"{outcome.source}: {warning}" for warning in outcome.warnings]
    assert [str(warning.message) for warning in issued] == expected
    return outcome


def assets_of(path: Path) -> dict[str, bytes]:
    assert onnxarchive.check(path, full=True) == []
    with onnxarchive.open(path) as archive:
        return dict(archive.assets)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new.onnxa"


@pytest.fixture(params=["file", "directory", "zip", "zip of a folder"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def source_of(kind: str, folder: Path) -> Path:
    if kind == "file":
        return folder / "m_ctx.onnx"
    if kind == "directory":
        return folder
    prefix = "m/" if kind == "zip of a folder" else ""
    files = {f"{prefix}{name}": data for name, data in contents(folder).items()}
    return zipped(folder.parent / "m.zip", files)


# Binaries beside the model


def test_a_binary_is_named_in_the_outcome_and_a_warning_says_how_to_store_it(
    folder: Path, path: Path, kind: str
) -> None:
    nodes = [context("ctx.bin"), context("./sub/other.bin"), context("sub/other.bin")]
    write_model(folder / "m_ctx.onnx", model(*nodes))
    write_files(folder, "ctx.bin", "sub/other.bin")
    for options in ({}, {"dry_run": True}):
        outcome = convert(source_of(kind, folder), path, **options)
        assert outcome.left_out == ("ctx.bin", "sub/other.bin")
        assert outcome.warnings == (
            "the compiled binaries of EPContext nodes, without which a session of the model fails, "
            "are left out; other_files=True (--assets) adds them as assets: 'ctx.bin', "
            "'sub/other.bin'",
        )
    assert path.read_bytes() == saved(model(*nodes))


def test_with_other_files_a_binary_of_any_name_becomes_an_asset(
    folder: Path, path: Path, kind: str
) -> None:
    names = ["m.onnx_ctx_QNN.bin", "pytorch_model_ctx.bin", ".cache/trt.engine", "a/x.onnx"]
    write_model(folder / "m_ctx.onnx", model(*map(context, names)))
    write_files(folder, *names, "pytorch_model.bin", ".cache/other.engine")
    outcome = convert(source_of(kind, folder), path, other_files=True)
    assert assets_of(path) == dict.fromkeys(names, BINARY)
    assert outcome.added_files == tuple(sorted(names))
    assert outcome.warnings == ()
    assert "pytorch_model.bin" in outcome.left_out
    assert not {*outcome.left_out} & {*names}


def test_a_binary_is_stored_even_if_it_is_the_data_file_of_a_tensor(
    folder: Path, path: Path
) -> None:
    folder.mkdir()
    source = folder / "m_ctx.onnx"
    onnx.save(model(context("w.bin")), source, save_as_external_data=True, location="w.bin")
    assert convert(source, path).left_out == ("w.bin",)
    convert(source, path, other_files=True)
    assert [*assets_of(path)] == ["w.bin"]


def test_binaries_in_branches_and_functions_are_found(folder: Path, path: Path) -> None:
    body = onnx.GraphProto(name="body", node=[context("branch.bin")])
    whole = model(node(attribute("g", g=body)))
    function = onnx.FunctionProto(name="f", domain="test", node=[context("function.bin")])
    whole.functions.append(function)
    write_model(folder / "m_ctx.onnx", whole)
    write_files(folder, "branch.bin", "function.bin")
    assert convert(folder / "m_ctx.onnx", path).left_out == ("branch.bin", "function.bin")


def test_an_embedded_context_and_a_file_of_another_operator_are_no_binaries(
    folder: Path, path: Path
) -> None:
    embedded = context("ctx.bin")
    del embedded.attribute[[it.name for it in embedded.attribute].index("embed_mode")]
    other = context("ctx.bin")
    other.domain = "test"
    nodes = [context("ctx.bin", embed_mode=1), embedded, context(None, main_context=0), other]
    write_model(folder / "m_ctx.onnx", model(*nodes))
    write_files(folder, "ctx.bin")
    outcome = convert(folder / "m_ctx.onnx", path)
    assert (outcome.left_out, outcome.warnings) == ((), ())


@pytest.mark.parametrize("other_files", [False, True])
def test_a_missing_binary_is_a_warning_and_the_model_is_converted(
    folder: Path, path: Path, kind: str, other_files: bool
) -> None:
    write_model(folder / "m_ctx.onnx", model(context("ctx.bin")))
    outcome = convert(source_of(kind, folder), path, other_files=other_files)
    assert outcome.left_out == ()
    (warning,) = outcome.warnings
    assert "without which a session of the model fails, are missing; copy them" in warning
    assert warning.endswith("with other_files=True (--assets): 'ctx.bin'")
    assert path.read_bytes() == saved(model(context("ctx.bin")))


def test_a_binary_that_is_given_as_an_asset_is_not_left_out(folder: Path, path: Path) -> None:
    write_model(folder / "m_ctx.onnx", model(context("ctx.bin"), context("gone.bin")))
    write_files(folder, "ctx.bin")
    given = {"ctx.bin": BINARY, "gone.bin": BINARY}
    outcome = convert(folder / "m_ctx.onnx", path, assets=given)
    assert (outcome.left_out, outcome.warnings) == ((), ())
    onnxarchive.extract(path, folder / "unpacked")
    again = folder / "again.onnxa"
    for options in ({}, {"other_files": True}):
        outcome = convert(folder / "unpacked", again, **options)
        assert (outcome.left_out, outcome.warnings) == ((), ())
        assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("other_files", [False, True])
def test_a_binary_below_assets_is_stored_once(folder: Path, path: Path, other_files: bool) -> None:
    write_model(folder / "m_ctx.onnx", model(context("assets/ctx.bin")))
    write_files(folder, "assets/ctx.bin")
    outcome = convert(folder, path, other_files=other_files)
    assert (outcome.left_out, outcome.warnings) == ((), ())
    assert assets_of(path) == {"ctx.bin": BINARY}


# Files outside the directory


@pytest.mark.parametrize("other_files", [False, True])
@pytest.mark.parametrize(
    "form", ["../secret", "{}/secret", "sub\\ctx.bin", "C:/ctx.bin", "/" * 5000]
)
def test_a_binary_whose_path_may_lead_out_is_not_looked_for(
    folder: Path, path: Path, form: str, other_files: bool
) -> None:
    write_files(folder.parent, "secret")
    write_model(folder / "m_ctx.onnx", model(context(form.format(folder.parent))))
    outcome = convert(folder / "m_ctx.onnx", path, other_files=other_files)
    assert outcome.left_out == ()
    (warning,) = outcome.warnings
    assert "are not looked for; ep_cache_context must be a relative path" in warning
    assert len(warning) < 1000
    assert assets_of(path) == {}


@pytest.mark.skipif(os.name == "nt", reason="links need a right on Windows")
def test_a_binary_that_is_a_link_out_is_left_out_and_refused_as_an_asset(
    folder: Path, path: Path
) -> None:
    write_model(folder / "m_ctx.onnx", model(context("pytorch_model.bin")))
    write_files(folder.parent, "secret")
    (folder / "pytorch_model.bin").symlink_to(folder.parent / "secret")
    for source in (folder, folder / "m_ctx.onnx"):
        outcome = convert(source, path)
        assert outcome.left_out == ("pytorch_model.bin",)
        assert len(outcome.warnings) == 1
        path.unlink()
        with pytest.raises(ArchiveFormatError, match=r"found 'pytorch_model\.bin', a link to"):
            onnxarchive.convert(source, path, other_files=True)
        assert not path.exists()
        convert(source, path, other_files=True, follow_links=folder.parent)
        assert assets_of(path) == {"pytorch_model.bin": BINARY}


@pytest.mark.skipif(os.name == "nt", reason="no such file on Windows")
def test_a_binary_that_is_a_pipe_is_left_out_and_refused_as_an_asset_without_waiting(
    folder: Path, path: Path
) -> None:
    write_model(folder / "m_ctx.onnx", model(context("model.onnx.bin")))
    os.mkfifo(folder / "model.onnx.bin")
    assert convert(folder / "m_ctx.onnx", path).left_out == ("model.onnx.bin",)
    with pytest.raises(ArchiveFormatError, match=r"model\.onnx\.bin"):
        onnxarchive.convert(folder / "m_ctx.onnx", path, other_files=True)


def test_a_binary_is_not_overwritten_by_the_archive(folder: Path) -> None:
    write_model(folder / "m_ctx.onnx", model(context("ctx.bin")))
    write_files(folder, "ctx.bin")
    with pytest.raises(ValueError, match="input"):
        onnxarchive.convert(folder / "m_ctx.onnx", folder / "ctx.bin")
    assert (folder / "ctx.bin").read_bytes() == BINARY


# Several models


def test_binaries_of_all_models_of_a_directory_are_named_by_their_paths_in_it(
    folder: Path, path: Path
) -> None:
    write_model(folder / "model.onnx", model(context("shared.bin")))
    write_model(folder / "decoder.onnx", model(context("shared.bin")))
    write_model(folder / "deep" / "past.onnx", model(context("shared.bin"), context("gone.bin")))
    names = ("deep/shared.bin", "shared.bin")
    write_files(folder, *names)
    outcome = convert(folder, path, models="all")
    assert outcome.left_out == names
    left_out, missing = outcome.warnings
    remedy = "other_files=True (--assets) adds them as assets"
    assert left_out.endswith(f"are left out; {remedy}: 'shared.bin', 'deep/shared.bin'")
    assert missing.endswith(": 'deep/gone.bin'")
    outcome = convert(folder, path, models="all", other_files=True)
    assert assets_of(path) == dict.fromkeys(names, BINARY)
    assert (outcome.left_out, outcome.warnings) == ((), (missing,))


def test_binaries_of_a_further_model_elsewhere_are_left_out_even_with_other_files(
    folder: Path, path: Path
) -> None:
    write_model(folder / "m.onnx", model())
    elsewhere = folder.parent / "elsewhere"
    further = write_model(elsewhere / "decoder.onnx", model(context("sub/ctx.bin")))
    write_files(elsewhere, "sub/ctx.bin")
    packed = zipped(folder.parent / "d.zip", contents(elsewhere))
    path_elsewhere = os.path.join(elsewhere, "sub", "ctx.bin")
    for source, named in ((further, path_elsewhere), (packed, "sub/ctx.bin")):
        models = {"decoder": source}
        outcome = convert(folder / "m.onnx", path, models=models, other_files=True)
        assert outcome.left_out == (named,)
        (warning,) = outcome.warnings
        assert "name them as assets={...} (--asset): " in warning
        outcome = convert(folder / "m.onnx", path, models=models, assets={"sub/ctx.bin": BINARY})
        assert (outcome.left_out, outcome.warnings) == ((), ())


def test_binaries_of_a_further_model_beside_the_default_model_are_other_files(
    folder: Path, path: Path
) -> None:
    write_model(folder / "m.onnx", model())
    further = write_model(folder / "sub" / "decoder.onnx", model(context("x.onnx.bin")))
    write_files(folder, "sub/x.onnx.bin")
    outcome = convert(folder / "m.onnx", path, models={"decoder": further}, other_files=True)
    assert assets_of(path) == {"sub/x.onnx.bin": BINARY}
    assert (outcome.left_out, outcome.warnings) == ((), ())


@pytest.mark.parametrize("is_zip", [False, True])
def test_binaries_of_further_models_of_an_unpacked_archive_are_named(
    folder: Path, path: Path, is_zip: bool
) -> None:
    onnxarchive.save(model(), path, models={"decoder": model(context("ctx.bin"))})
    onnxarchive.extract(path, folder)
    write_files(folder, "ctx.bin")
    source = zipped(folder.parent / "m.zip", contents(folder)) if is_zip else folder
    outcome = convert(source, folder.parent / "again.onnxa")
    assert outcome.left_out == ("ctx.bin",)
    assert len(outcome.warnings) == 1
    convert(source, folder.parent / "again.onnxa", other_files=True)
    assert assets_of(folder.parent / "again.onnxa") == {"ctx.bin": BINARY}


def test_convert_many_names_the_binaries_of_each_model(folder: Path, tmp_path: Path) -> None:
    write_model(folder / "a" / "m.onnx", model(context("ctx.bin")))
    write_files(folder, "a/ctx.bin")
    (outcome,) = onnxarchive.convert_many([folder], tmp_path / "out")
    assert outcome.left_out == ("ctx.bin",)
    assert len(outcome.warnings) == 1


# Models in a store


@pytest.mark.parametrize("other_files", [False, True])
def test_binaries_beside_a_remote_model_are_not_looked_for_and_a_warning_says_so(
    path: Path, web: WebServer, other_files: bool
) -> None:
    source = model(context("ctx.bin")).SerializeToString()
    web.files |= {"/m.onnx": source, "/ctx.bin": BINARY}
    outcome = convert(web.url("/m.onnx"), path, other_files=other_files)
    assert outcome.left_out == ()
    assert outcome.warnings[-1] == (
        "the compiled binaries of EPContext nodes, without which a session of the model fails, are "
        "not looked for beside a remote .onnx; name them as assets={...} (--asset), or convert a "
        "copy of its directory: 'ctx.bin'"
    )
    assert {request.path for request in web.requests} == {"/m.onnx"}
    outcome = convert(web.url("/m.onnx"), path, assets={"ctx.bin": BINARY})
    assert outcome.warnings == ()


def test_binaries_in_a_remote_zip_are_treated_as_those_in_a_local_zip(
    path: Path, tmp_path: Path, web: WebServer
) -> None:
    files = {"m.onnx": model(context("ctx.bin")).SerializeToString(), "ctx.bin": BINARY}
    web.files["/m.zip"] = zipped(tmp_path / "m.zip", files).read_bytes()
    assert convert(web.url("/m.zip"), path).left_out == ("ctx.bin",)
    convert(web.url("/m.zip"), path, other_files=True)
    assert assets_of(path)["ctx.bin"] == BINARY

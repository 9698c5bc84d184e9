"""Commands on archives with several models."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path

import onnx
import pytest
from commands import error_of, output_of, result_of, run
from models import entry_of, flip_byte, further_model, runnable_model
from written import write_model

import onnxarchive

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive of two models that share a tensor of 64 KiB."""
    onnxarchive.save(runnable_model(), "both.onnxa", models={"further": further_model()})
    return Path("both.onnxa")


def ids(archive: Path) -> list[str]:
    with onnxarchive.open(archive) as opened:
        return list(opened.models)


def test_convert_packs_several_models_and_says_what_they_share(
    archive: Path, capsys: Captured
) -> None:
    write_model(Path("m.onnx"), runnable_model())
    write_model(Path("f.onnx"), further_model())
    printed = output_of(capsys, "convert", "m.onnx", "new.onnxa", "--model", "further=f.onnx")
    assert Path("new.onnxa").read_bytes() == archive.read_bytes()
    assert printed.endswith("; 65,536 bytes (64.0 KiB) shared by several models\n")
    models = ("--model", "a=f.onnx", "--model", "b=m.onnx", "--force")
    assert result_of(capsys, "convert", "m.onnx", "new.onnxa", *models)["shared_nbytes"] == 2 << 16
    assert ids(Path("new.onnxa")) == ["", "a", "b"]


# models, ls, info


def test_models_lists_inputs_outputs_parameters_and_bytes(archive: Path, capsys: Captured) -> None:
    rows = [line.split("  ") for line in output_of(capsys, "models", "list", archive).splitlines()]
    assert [[it.strip() for it in row if it.strip()] for row in rows] == [
        ["model", "inputs", "outputs", "parameters", "shared bytes", "own bytes"],
        ["(default)", "x", "y", "16,400", "65,536", "0"],
        ["further", "x", "z", "16,896", "65,536", "2,048"],
    ]
    result = result_of(capsys, "models", "list", archive)
    assert result["path"] == str(archive)
    default, further = result["models"]
    assert (default["id"], default["entry"]) == ("", "__MODEL_PROTO")
    assert further == {
        "id": "further",
        "entry": "__MODEL_PROTO_further",
        "nbytes": entry_of(archive, "__MODEL_PROTO_further").nbytes,
        "inputs": {"x": {"kind": "tensor", "data_type": "FLOAT", "dims": [2, 1024]}},
        "outputs": {"z": {"kind": "tensor", "data_type": "FLOAT", "dims": [2, 32]}},
        "parameters": 1024 * 16 + 16 * 32,
        "shared_nbytes": 65_536,
        "own_nbytes": 2_048,
    }


def test_models_names_a_few_of_many_inputs(capsys: Captured) -> None:
    model = runnable_model()
    for number in range(60):
        past = onnx.helper.make_tensor_value_info(f"past.{number}", 1, [1])
        model.graph.input.append(past)
    onnxarchive.save(model, "past.onnxa")
    assert "x, past.0, past.1, past.2, 57 more  y " in output_of(
        capsys, "models", "list", "past.onnxa"
    )


def test_ls_shows_which_models_use_a_tensor(archive: Path, capsys: Captured) -> None:
    header, *lines, _, summary = output_of(capsys, "ls", archive).splitlines()
    assert header.split()[-1] == "models"
    crcs = [f"{entry_of(archive, name).crc32:08x}" for name in ("layer_0_weight", "own")]
    shared = (
        f"layer.0/weight layer_0_weight FLOAT [1024, 16] 65,536 64 {crcs[0]} (default), further"
    )
    own = f"own FLOAT [16, 32] 2,048 65,664 {crcs[1]} further"
    assert [line.split() for line in lines[:2]] == [shared.split(), own.split()]
    assert [line.split()[0] for line in lines[2:]] == ["__MODEL_PROTO_further", "__MODEL_PROTO"]
    assert summary.startswith("2 tensors, 67,584 bytes (66.0 KiB) in all; 1 more in the models; ")
    onnxarchive.save(runnable_model(), "one.onnxa")
    assert "models" not in output_of(capsys, "ls", "one.onnxa")


def test_ls_of_one_model_lists_its_tensors_under_its_names(archive: Path, capsys: Captured) -> None:
    tensors = result_of(capsys, "ls", archive, "--model", "further")["tensors"]
    assert [(it["name"], it["key"], it["models"]) for it in tensors] == [
        ("embedding", "layer_0_weight", ["", "further"]),
        ("own", "own", ["further"]),
    ]
    assert [it["name"] for it in result_of(capsys, "ls", archive, "--model", "")["tensors"]] == [
        "layer.0/weight"
    ]


def test_info_describes_the_model_that_is_asked_for(archive: Path, capsys: Captured) -> None:
    assert "other models  further\n" in output_of(capsys, "info", archive)
    text = output_of(capsys, "info", archive, "--model", "further")
    for line in ("model         further", "other models  (default)", "graph         further"):
        assert f"{line}\n" in text
    result = result_of(capsys, "info", archive, "--model", "further")
    assert (result["model"], result["models"]) == ("further", ["", "further"])
    parts = result["bytes"]
    assert parts.pop("archive") == archive.stat().st_size == sum(parts.values())
    assert parts["weights"] == 67_584


def test_check_names_the_model_at_fault(archive: Path, capsys: Captured) -> None:
    assert run("check", archive, "--full") == 0
    entry = entry_of(archive, "__MODEL_PROTO_further")
    flip_byte(archive, entry.data_offset + entry.nbytes // 2)
    assert "__MODEL_PROTO_further" in output_of(capsys, "check", archive, status=1)


# Commands that read one of the models


def test_export_and_link_write_the_model_that_is_asked_for(archive: Path, capsys: Captured) -> None:
    model = ("--model", "further")
    assert run("export", archive, "out.onnx", *model) == 0
    assert onnx.load("out.onnx") == further_model()
    assert run("export", archive, "large.onnx", *model, "--external-data", "large.data") == 0
    assert Path("large.data").stat().st_size < 4096 + 65_536 + 4096
    assert run("link", archive, "link.onnx", *model) == 0
    assert run("check", "--link", "link.onnx") == 0
    expected = [it.raw_data for it in further_model().graph.initializer]
    for path in ("large.onnx", "link.onnx"):
        graph = onnx.load(path).graph
        assert graph.name == "further"
        assert [it.raw_data for it in graph.initializer] == expected


def test_extract_writes_and_names_all_models(archive: Path, capsys: Captured) -> None:
    paths = [str(Path("out", name)) for name in ("__MODEL_PROTO", "__MODEL_PROTO_further")]
    assert output_of(capsys, "extract", archive, "out").splitlines() == [
        f"{paths[0]}: the model, with its tensors beside it",
        f"{paths[1]}: the model further, with its tensors beside it",
    ]
    assert onnx.load(paths[1]).graph.name == "further"
    Path("out").rename("first")
    models = {"": paths[0], "further": paths[1]}
    assert result_of(capsys, "extract", archive, "out") == {"model": paths[0], "models": models}


def test_run_runs_the_model_that_is_asked_for(archive: Path, capsys: Captured) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    assert [
        it["name"] for it in result_of(capsys, "run", archive, "--model", "further")["outputs"]
    ] == ["z"]


def test_view_shows_the_model_that_is_asked_for(
    archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    pytest.importorskip("netron", reason="Netron is not installed")
    served: list[bytes] = []

    def end(*_: object) -> None:
        url = json.loads(capsys.readouterr().out)["url"]
        with urllib.request.urlopen(f"{url}data/model.onnx", timeout=30) as response:
            served.append(response.read())
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", end)
    assert run("view", archive, "--no-browser", "--json", "--model", "further") == 0
    assert onnx.load_from_string(served[0]).graph.name == "further"


def test_diff_compares_all_models_or_one(archive: Path, capsys: Captured) -> None:
    other = further_model()
    other.graph.node[1].op_type = "Abs"
    onnxarchive.save(runnable_model(), "other.onnxa", models={"further": other})
    for options, status in (([], 1), (["--model", ""], 0), (["--model", "further"], 1)):
        printed = output_of(capsys, "diff", archive, "other.onnxa", *options, status=status)
        assert ("~ rectified: " in printed) is (status == 1)
    assert output_of(capsys, "diff", archive, archive, "--model", "further") == (
        f"{archive} and {archive}: the same model further (weights compared by CRC-32)\n"
    )
    onnxarchive.save(runnable_model(), "one.onnxa")
    (change,) = result_of(capsys, "diff", archive, "one.onnxa", status=1)["models"]
    assert (change["name"], change["kind"]) == ("further", "removed")


# Commands that edit


def test_set_metadata_changes_the_model_that_is_asked_for(archive: Path, capsys: Captured) -> None:
    assert run("metadata", "set", archive, "author=Ada", "--model", "further") == 0
    assert onnxarchive.check(archive, full=True) == []
    assert onnxarchive.load(archive) == runnable_model()
    with onnxarchive.open(archive, model="further") as opened:
        assert opened.metadata == {"author": "Ada"}


def test_models_are_replaced_and_added(archive: Path, capsys: Captured) -> None:
    weights = archive.read_bytes()[: 65_664 + 2_048]
    assert run("link", archive, "link.onnx", "--model", "further") == 0
    changed = onnx.load("link.onnx", load_external_data=False)
    changed.doc_string = "changed"
    onnx.save(changed, "link.onnx")
    assert run("models", "replace", archive, "link.onnx", "--model", "further") == 0
    assert run("models", "add", archive, "past=link.onnx", "other=link.onnx") == 0
    for id in ("further", "past", "other"):
        assert onnxarchive.load(archive, model=id).doc_string == "changed"
    assert ids(archive) == ["", "further", "other", "past"]
    assert archive.read_bytes().startswith(weights)
    assert onnxarchive.check(archive, full=True) == []


def test_a_model_is_only_added_with_a_new_id_and_only_replaced_with_an_old_one(
    archive: Path, capsys: Captured
) -> None:
    before = archive.read_bytes()
    assert "'onnxarchive models replace' replaces it" in error_of(
        capsys, "models", "add", archive, "new=m.onnx", "further=m.onnx"
    )
    assert "the id 'furthest', only '', 'further'; did you mean 'further'?" in error_of(
        capsys, "models", "replace", archive, "m.onnx", "--model", "furthest"
    )
    assert archive.read_bytes() == before


def test_models_are_renamed_and_removed(archive: Path, capsys: Captured) -> None:
    printed = output_of(capsys, "models", "rename", archive, "further", "past")
    assert printed.startswith(f"{archive}: ")
    assert ids(archive) == ["", "past"]
    onnxarchive.save(runnable_model(), "one.onnxa")
    nbytes = Path("one.onnxa").stat().st_size
    shown = f"{nbytes:,} bytes ({nbytes / 1024:.1f} KiB)"
    assert output_of(capsys, "models", "remove", archive, "past") == (
        f"{archive}: {shown}; {shown} written\n"
    )
    assert archive.read_bytes() == Path("one.onnxa").read_bytes()  # its own tensor went with it


def test_a_removed_model_leaves_the_weights_of_others_in_place(
    archive: Path, capsys: Captured
) -> None:
    write_model(Path("m.onnx"), runnable_model())
    assert run("models", "add", archive, "past=m.onnx") == 0
    before = archive.read_bytes()
    result = result_of(capsys, "models", "remove", archive, "past")
    assert result["nbytes"] == archive.stat().st_size
    assert result["nbytes_written"] < 5_000
    assert archive.read_bytes().startswith(before[:65_664])

"""Commands on archives with several models."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import run
from models import entry_of, flip_byte, runnable_model
from onnx import numpy_helper

import onnxarchive

Captured = pytest.CaptureFixture[str]
SHARED = "layer.0/weight"  # of both models: 64 KiB
OWN = "layer.1/weight"  # of the decoder


def decoder_model() -> onnx.ModelProto:
    """As the encoder, with another graph name and one more weight."""
    model = runnable_model()
    model.graph.name = "decoder"
    own = numpy_helper.from_array(np.arange(16 * 32, dtype=np.float32).reshape(16, 32), OWN)
    model.graph.initializer.append(own)
    node = onnx.helper.make_node("MatMul", ["y", OWN], ["z"])
    model.graph.node.append(node)
    output = onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, [2, 32])
    model.graph.output.append(output)
    return model


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(runnable_model(), "encoder.onnx")
    onnx.save(decoder_model(), "decoder.onnx")


@pytest.fixture
def archive() -> Path:
    path = Path("both.onnxa")
    onnxarchive.save(runnable_model(), path, models={"decoder": decoder_model()})
    return path


def printed(capsys: Captured) -> str:
    """What a command has printed; nothing on standard error."""
    out, err = capsys.readouterr()
    assert err == ""
    return out


def ids(archive: Path) -> list[str]:
    with onnxarchive.open(archive) as opened:
        return list(opened.models)


# convert


def test_convert_packs_several_models_and_says_what_they_share(
    archive: Path, capsys: Captured
) -> None:
    assert run("convert", "encoder.onnx", "new.onnxa", "--model", "decoder=decoder.onnx") == 0
    assert Path("new.onnxa").read_bytes() == archive.read_bytes()
    assert printed(capsys).endswith("; 65,536 bytes (64.0 KiB) shared by several models\n")


def test_convert_takes_any_number_of_models_and_gives_the_saving_in_json(capsys: Captured) -> None:
    models = ("--model", "a=decoder.onnx", "--model", "b=encoder.onnx")
    assert run("convert", "encoder.onnx", "new.onnxa", *models, "--json") == 0
    assert json.loads(printed(capsys))["shared_nbytes"] == 2 << 16
    assert ids(Path("new.onnxa")) == ["", "a", "b"]


# models, ls, info


def test_models_lists_inputs_outputs_parameters_and_bytes(archive: Path, capsys: Captured) -> None:
    assert run("models", archive) == 0
    header, default, decoder = (line.split("  ") for line in printed(capsys).splitlines())
    assert [*filter(None, header)] == [
        "model",
        "inputs",
        "outputs",
        "parameters",
        "shared bytes",
        "own bytes",
    ]
    cells = [[it.strip() for it in row if it.strip()] for row in (default, decoder)]
    assert cells == [
        ["(default)", "x", "y", "16,400", "65,536", "0"],
        ["decoder", "x", "y, z", "16,912", "65,536", "2,048"],
    ]


def test_models_gives_types_and_entries_in_json(archive: Path, capsys: Captured) -> None:
    assert run("models", archive, "--json") == 0
    result = json.loads(printed(capsys))
    assert result["path"] == str(archive)
    default, decoder = result["models"]
    assert (default["id"], default["entry"]) == ("", "__MODEL_PROTO")
    nbytes = entry_of(archive, "__MODEL_PROTO_decoder").nbytes
    assert decoder == {
        "id": "decoder",
        "entry": "__MODEL_PROTO_decoder",
        "nbytes": nbytes,
        "inputs": {"x": "FLOAT 2x1024"},
        "outputs": {"y": "FLOAT 2x16", "z": "FLOAT 2x32"},
        "parameters": 1024 * 16 + 16 + 16 * 32,
        "shared_nbytes": 65_536,
        "own_nbytes": 2_048,
    }


def test_models_names_a_few_of_many_inputs(capsys: Captured) -> None:
    model = runnable_model()
    for number in range(60):
        past = onnx.helper.make_tensor_value_info(f"past.{number}", 1, [1])
        model.graph.input.append(past)
    onnxarchive.save(model, "past.onnxa")
    assert run("models", "past.onnxa") == 0
    assert "x, past.0, past.1, past.2, 57 more  y " in printed(capsys)


def test_ls_shows_which_models_use_a_tensor(archive: Path, capsys: Captured) -> None:
    assert run("ls", archive) == 0
    header, *lines, _, summary = printed(capsys).splitlines()
    assert header.split()[-1] == "models"
    assert [line.split() for line in lines[:2]] == [
        [SHARED, "layer_0_weight", "FLOAT", "1024x16", "65,536", "64", "(default),", "decoder"],
        [OWN, "layer_1_weight", "FLOAT", "16x32", "2,048", "65,664", "decoder"],
    ]
    assert [line.split()[0] for line in lines[2:]] == ["__MODEL_PROTO_decoder", "__MODEL_PROTO"]
    assert summary.startswith("2 tensors, 67,584 bytes (66.0 KiB) in all; 2 more in the models; ")


def test_ls_of_one_model_lists_its_tensors_under_its_names(capsys: Captured) -> None:
    other = decoder_model()
    other.graph.initializer[0].name = "shared"
    onnxarchive.save(runnable_model(), "both.onnxa", models={"decoder": other})
    assert run("ls", "both.onnxa", "--model", "decoder", "--json") == 0
    tensors = json.loads(printed(capsys))["tensors"]
    assert [(it["name"], it["key"], it["models"]) for it in tensors] == [
        ("shared", "layer_0_weight", ["", "decoder"]),
        (OWN, "layer_1_weight", ["decoder"]),
    ]
    assert run("ls", "both.onnxa", "--model", "", "--json") == 0
    assert [it["name"] for it in json.loads(printed(capsys))["tensors"]] == [SHARED]


def test_ls_of_an_archive_with_one_model_has_no_column_of_models(capsys: Captured) -> None:
    onnxarchive.save(runnable_model(), "one.onnxa")
    assert run("ls", "one.onnxa") == 0
    assert "models" not in printed(capsys)


def test_info_describes_the_model_that_is_asked_for(archive: Path, capsys: Captured) -> None:
    assert run("info", archive) == 0
    assert "other models  decoder\n" in printed(capsys)
    assert run("info", archive, "--model", "decoder") == 0
    text = printed(capsys)
    assert "model         decoder\n" in text
    assert "other models  (default)\n" in text
    assert "graph         decoder\n" in text
    assert run("info", archive, "--model", "decoder", "--json") == 0
    result = json.loads(printed(capsys))
    assert (result["model"], result["models"]) == ("decoder", ["", "decoder"])
    parts = result["bytes"]
    assert parts.pop("archive") == archive.stat().st_size == sum(parts.values())
    assert parts["weights"] == 67_584


def test_check_names_the_model_at_fault(archive: Path, capsys: Captured) -> None:
    assert run("check", archive, "--full") == 0
    capsys.readouterr()
    entry = entry_of(archive, "__MODEL_PROTO_decoder")
    flip_byte(archive, entry.data_offset + entry.nbytes // 2)
    assert run("check", archive) == 1
    assert "__MODEL_PROTO_decoder" in printed(capsys)


# Commands that read one of the models


def test_export_and_link_write_the_model_that_is_asked_for(archive: Path, capsys: Captured) -> None:
    assert run("export", archive, "out.onnx", "--model", "decoder") == 0
    assert onnx.load("out.onnx") == decoder_model()
    external = ("--model", "decoder", "--external-data", "large.data")
    assert run("export", archive, "large.onnx", *external) == 0
    assert Path("large.data").stat().st_size < 4096 + 65_536 + 4096
    assert run("link", archive, "link.onnx", "--model", "decoder") == 0
    assert run("check", "--link", "link.onnx") == 0
    for path in ("large.onnx", "link.onnx"):
        model = onnx.load(path)
        assert model.graph.name == "decoder"
        for one, other in zip(
            model.graph.initializer, decoder_model().graph.initializer, strict=True
        ):
            assert np.array_equal(numpy_helper.to_array(one), numpy_helper.to_array(other))


def test_extract_writes_and_names_all_models(archive: Path, capsys: Captured) -> None:
    assert run("extract", archive, "out") == 0
    assert printed(capsys).splitlines() == [
        f"{Path('out', '__MODEL_PROTO')}: the model, with its tensors beside it",
        f"{Path('out', '__MODEL_PROTO_decoder')}: the model decoder, with its tensors beside it",
    ]
    assert onnx.load(Path("out", "__MODEL_PROTO_decoder")).graph.name == "decoder"
    assert run("extract", archive, "again", "--json") == 0
    assert json.loads(printed(capsys)) == {
        "model": str(Path("again", "__MODEL_PROTO")),
        "models": {
            "": str(Path("again", "__MODEL_PROTO")),
            "decoder": str(Path("again", "__MODEL_PROTO_decoder")),
        },
    }


def test_run_runs_the_model_that_is_asked_for(archive: Path, capsys: Captured) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    assert run("run", archive, "--model", "decoder", "--json") == 0
    result = json.loads(printed(capsys))
    assert [it["name"] for it in result["outputs"]] == ["y", "z"]


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
    assert run("view", archive, "--no-browser", "--json", "--model", "decoder") == 0
    assert onnx.load_from_string(served[0]).graph.name == "decoder"


def test_diff_compares_all_models_or_one(archive: Path, capsys: Captured) -> None:
    other = decoder_model()
    other.graph.node[1].op_type = "Sub"
    onnxarchive.save(runnable_model(), "other.onnxa", models={"decoder": other})
    assert run("diff", archive, "other.onnxa") == 1
    assert "~ y: " in printed(capsys)
    assert run("diff", archive, "other.onnxa", "--model", "") == 0
    capsys.readouterr()
    assert run("diff", archive, "other.onnxa", "--model", "decoder") == 1
    assert "~ y: " in printed(capsys)
    assert run("diff", archive, archive, "--model", "decoder") == 0
    assert printed(capsys) == (
        f"{archive} and {archive}: the same model decoder (weights compared by CRC-32)\n"
    )


def test_diff_tells_of_a_model_that_one_archive_lacks(archive: Path, capsys: Captured) -> None:
    onnxarchive.save(runnable_model(), "one.onnxa")
    assert run("diff", archive, "one.onnxa", "--json") == 1
    (change,) = json.loads(printed(capsys))["models"]
    assert (change["name"], change["kind"]) == ("decoder", "removed")


# Commands that edit


def test_set_metadata_changes_the_model_that_is_asked_for(archive: Path, capsys: Captured) -> None:
    options = ("--model", "decoder")
    assert run("set-metadata", archive, "author=Ada", *options) == 0
    assert onnxarchive.check(archive, full=True) == []
    assert onnxarchive.load(archive) == runnable_model()
    model = onnxarchive.load(archive, model="decoder")
    assert [(it.key, it.value) for it in model.metadata_props] == [("author", "Ada")]


def test_replace_model_replaces_or_adds_the_model_of_a_name(
    archive: Path, capsys: Captured
) -> None:
    weights = archive.read_bytes()[: 65_664 + 2_048]
    assert run("link", archive, "link.onnx", "--model", "decoder") == 0
    changed = onnx.load("link.onnx", load_external_data=False)
    changed.doc_string = "changed"
    onnx.save(changed, "link.onnx")
    for name in ("decoder", "past"):
        assert run("replace-model", archive, "link.onnx", "--name", name) == 0
        assert onnxarchive.load(archive, model=name).doc_string == "changed"
    assert ids(archive) == ["", "decoder", "past"]
    assert archive.read_bytes().startswith(weights)
    assert onnxarchive.check(archive, full=True) == []


def test_models_are_renamed_and_removed(archive: Path, capsys: Captured) -> None:
    assert run("rename-model", archive, "decoder", "past") == 0
    assert ids(archive) == ["", "past"]
    assert printed(capsys).startswith(f"{archive}: ")
    before = archive.read_bytes()
    assert run("remove-model", archive, "past") == 2  # its own tensor stays behind
    assert "layer_1_weight" in capsys.readouterr().err
    assert archive.read_bytes() == before
    assert run("remove-model", archive, "past", "--compact", "--json") == 0
    assert json.loads(printed(capsys)) == {"path": str(archive), "nbytes": archive.stat().st_size}
    onnxarchive.save(runnable_model(), "one.onnxa")
    assert archive.read_bytes() == Path("one.onnxa").read_bytes()

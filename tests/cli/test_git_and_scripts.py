"""What `ls` and `info` print for Git, which compares texts, and for scripts, which read JSON."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from zlib import crc32

import onnx
import pytest
from commands import error_of, output_of, result_of, run
from models import entry_of, flip_byte, mixed_model, model_of, raw_tensor, runnable_model

import onnxarchive
from onnxarchive.cli import output

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "an archive.onnxa"
    onnxarchive.save(runnable_model(), path, assets={"labels.txt": b"cat\n"})
    return path


def test_ls_shows_a_key_only_if_it_differs_from_the_name(path: Path, capsys: Captured) -> None:
    onnxarchive.save(model_of(raw_tensor("w", dims=(300,)), raw_tensor("v", dims=(300,))), path)
    header, *lines, _, _ = output_of(capsys, "ls", path).splitlines()
    assert "key" not in header
    assert [line.split()[0] for line in lines] == ["w", "v", "__MODEL_PROTO"]
    assert [it["key"] for it in result_of(capsys, "ls", path)["tensors"]] == ["w", "v"]
    onnxarchive.save(model_of(raw_tensor("w", dims=(300,)), raw_tensor("a/v", dims=(300,))), path)
    header, first, second, *_ = output_of(capsys, "ls", path).splitlines()
    column = header.index("key")
    assert [line[column:].split("  ")[0] for line in (first, second)] == ["", "a_v"]


def test_ls_hides_packed_weights_unless_all_is_asked_for(path: Path, capsys: Captured) -> None:
    folder = "onnxruntime/prepacked"
    assets = {f"{folder}/index.json": b"{}", f"{folder}/w": b"w", "labels.txt": b"a"}
    onnxarchive.save(model_of(raw_tensor("w", dims=(300,))), path, assets=assets)
    printed = output_of(capsys, "ls", path)
    assert folder not in printed
    assert "; 1 asset; archive of " in printed
    assert printed.endswith("; --all lists 2 files of packed weights, too\n")
    result = result_of(capsys, "ls", path)
    assert (result["totals"]["assets"], result["totals"]["packed"]) == (1, 2)
    assert [it["name"] for it in result["others"]] == ["assets/labels.txt", "__MODEL_PROTO"]
    printed = output_of(capsys, "ls", path, "--all")
    assert f"assets/{folder}/w " in printed
    assert "--all" not in printed
    assert len(result_of(capsys, "ls", path, "--all")["others"]) == 4


@pytest.mark.parametrize("command", ["ls", "info"])
def test_the_output_of_ls_and_info_does_not_depend_on_the_path_of_the_archive(
    archive: Path, capsys: Captured, command: str
) -> None:
    texts = [output_of(capsys, command, archive), output_of(capsys, command, archive, "--json")]
    moved = archive.rename(archive.with_name("moved.onnxa"))
    again = [output_of(capsys, command, moved), output_of(capsys, command, moved, "--json")]
    assert texts == again
    assert str(moved.parent) not in "".join(again)


def digest_of(capsys: Captured, path: Path, *options: str) -> str:
    """The SHA-256 over the tensors of an archive, which `info` prints."""
    digest: str = result_of(capsys, "info", path, *options)["sha256"]
    assert f"tensors       SHA-256 {digest}\n" in output_of(capsys, "info", path, *options)
    return digest


@pytest.mark.parametrize("name", ["layer.0/weight", "layer.0/bias"], ids=["outside", "inside"])
def test_the_digest_of_info_changes_with_a_weight_outside_and_inside_the_model(
    archive: Path, capsys: Captured, name: str
) -> None:
    before = digest_of(capsys, archive)
    with onnxarchive.edit(archive) as edit:
        edit.tensors[name] = -edit.tensors[name]
    changed = digest_of(capsys, archive)
    with onnxarchive.edit(archive) as edit:
        edit.tensors[name] = -edit.tensors[name]
    assert digest_of(capsys, archive) == before != changed


def test_the_digest_of_info_does_not_depend_on_where_tensors_are_stored(
    path: Path, capsys: Captured
) -> None:
    model = mixed_model()
    digests = set()
    for threshold in (0, 100, 1 << 20):
        onnxarchive.save(model, path, size_threshold=threshold, alignment=4096)
        digests.add(digest_of(capsys, path))
        with onnxarchive.edit(path) as edit:
            edit.metadata["author"] = "Ada"
        digests.add(digest_of(capsys, path))
    assert len(digests) == 1


def test_the_digest_of_info_is_computed_as_documented(path: Path, capsys: Captured) -> None:
    onnxarchive.save(model_of(raw_tensor("w", dims=(3, 100)), raw_tensor("b", dims=())), path)
    lines = []
    for tensor in onnxarchive.load(path).graph.initializer:
        data = tensor.raw_data
        fields = [tensor.name, "FLOAT", [*tensor.dims], len(data), crc32(data)]
        lines.append(json.dumps(fields) + "\n")
    expected = hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
    assert digest_of(capsys, path) == expected


def test_the_digest_of_info_covers_the_chosen_model_alone(path: Path, capsys: Captured) -> None:
    decoder = model_of(raw_tensor("own", dims=(300,)))
    onnxarchive.save(model_of(raw_tensor("w", dims=(300,))), path, models={"decoder": decoder})
    digests = [digest_of(capsys, path, *options) for options in ([], ["--model", "decoder"])]
    with onnxarchive.edit(path, model="decoder") as edit:
        edit.tensors["own"] = -edit.tensors["own"]
    changed = [digest_of(capsys, path, *options) for options in ([], ["--model", "decoder"])]
    assert digests[0] != changed[0]
    assert digests[1] != changed[1]
    default = digest_of(capsys, path, "--model", "")
    assert default not in (*digests, *changed)


def test_types_of_inputs_are_objects_in_json(path: Path, capsys: Captured) -> None:
    model = model_of()
    del model.graph.input[:], model.graph.output[:]
    shaped = onnx.helper.make_tensor_type_proto(1, ["maxxlen", None, 64])
    types = {
        "shaped": shaped,
        "unshaped": onnx.helper.make_tensor_type_proto(7, None),
        "scalar": onnx.helper.make_tensor_type_proto(10, []),
        "sparse": onnx.helper.make_sparse_tensor_type_proto(1, [3]),
        "sequence": onnx.helper.make_sequence_type_proto(shaped),
        "optional": onnx.helper.make_optional_type_proto(shaped),
        "map": onnx.helper.make_map_type_proto(7, shaped),
        "untyped": onnx.TypeProto(),
    }
    for name, type in types.items():
        model.graph.input.append(onnx.ValueInfoProto(name=name, type=type))
    onnxarchive.save(model, path)
    tensor = {"kind": "tensor", "data_type": "FLOAT", "dims": ["maxxlen", None, 64]}
    expected = {
        "shaped": tensor,
        "unshaped": {"kind": "tensor", "data_type": "INT64", "dims": None},
        "scalar": {"kind": "tensor", "data_type": "FLOAT16", "dims": []},
        "sparse": {"kind": "sparse_tensor", "data_type": "FLOAT", "dims": [3]},
        "sequence": {"kind": "sequence", "element": tensor},
        "optional": {"kind": "optional", "element": tensor},
        "map": {"kind": "map", "key": "INT64", "value": tensor},
        "untyped": {"kind": None},
    }
    assert result_of(capsys, "info", path)["inputs"] == expected
    assert result_of(capsys, "models", "list", path)["models"][0]["inputs"] == expected
    assert "inputs        shaped: FLOAT [maxxlen, ?, 64]\n" in output_of(capsys, "info", path)


# Errors under --json


def test_an_error_is_a_line_of_json_under_json(archive: Path, capsys: Captured) -> None:
    flip_byte(archive, entry_of(archive, "__MODEL_PROTO").data_offset)
    described = json.loads(error_of(capsys, "info", archive, "--json", status=3))["error"]
    assert described.pop("message").startswith(f"{archive}: entry '__MODEL_PROTO': ")
    assert described == {
        "type": "ChecksumError",
        "path": str(archive),
        "rule": "ZIP-15",
        "entry": "__MODEL_PROTO",
        "status": 3,
    }
    assert error_of(capsys, "info", archive, status=3).startswith("onnxarchive: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["info", "--json"], "the following arguments are required: ARCHIVE"),
        (["infos", "--json"], "there is no command 'infos'; did you mean 'info'?"),
        (["models", "lst", "--json"], "there is no command 'lst'; did you mean 'list'?"),
    ],
)
def test_wrong_use_is_a_line_of_json_under_json(
    capsys: Captured, words: list[str], message: str
) -> None:
    described = json.loads(error_of(capsys, *words))["error"]
    no_file = dict.fromkeys(("type", "path", "rule", "entry"))
    assert described == {**no_file, "message": message, "status": 2}
    without = [word for word in words if word != "--json"]
    assert error_of(capsys, *without).startswith("usage: ")


def test_each_error_of_several_files_and_each_warning_is_a_line_of_json(
    tmp_path: Path, capsys: Captured
) -> None:
    assert run("check", "--json", tmp_path / "a", tmp_path / "b") == 2
    lines = capsys.readouterr().err.splitlines()
    paths = [json.loads(line)["error"]["path"] for line in lines]
    assert paths == [str(tmp_path / "a"), str(tmp_path / "b")]
    onnx.save(runnable_model(), tmp_path / "m.onnx")
    assert run("convert", tmp_path / "m.onnx", tmp_path / "n.onnx", "--json") == 0
    warning = json.loads(capsys.readouterr().err)["warning"]
    assert warning.startswith(f"{tmp_path / 'n.onnx'} is an archive; ")


def test_a_secret_in_an_error_is_hidden_in_json(capsys: Captured) -> None:
    url = "ftp://user:password@localhost/m.onnxa"
    assert run("info", url, "--json") != 0
    assert "password" not in capsys.readouterr().err


def test_convert_prints_paths_as_they_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    onnx.save(runnable_model(), "models/a.onnx")
    onnx.save(runnable_model(), "b.onnx")
    Path("models/bad.onnx").write_text("no model")
    assert run("convert", "models", "b.onnx", "--output-dir", "./out") == 3
    printed = capsys.readouterr().out
    assert str(tmp_path) not in printed
    rows = [line.split() for line in printed.splitlines()[1:4]]
    assert [row[:2] for row in rows] == [
        ["models/a.onnx", "./out/a.onnxa"],
        ["models/bad.onnx", "./out/bad.onnxa"],
        ["b.onnx", "./out/b.onnxa"],
    ]
    assert "failed: models/bad.onnx: " in printed
    assert run("convert", "models/a.onnx", "a.onnx", "b.onnx", "--output-dir", "out", "--json") == 2
    printed = capsys.readouterr().out
    assert str(tmp_path) not in printed
    listed = json.loads(printed)
    assert [item["path"] for item in listed] == ["out/a.onnxa", "out/a.onnxa", "out/b.onnxa"]


def test_a_command_without_json_prints_text_after_one_with_json(capsys: Captured) -> None:
    assert run("info", "missing", "--json") == 2
    capsys.readouterr()
    output.fail("text", 2)
    assert capsys.readouterr().err == "onnxarchive: text\n"

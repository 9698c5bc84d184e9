"""What notebooks show of an archive: tables, completions, and short texts."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import edits
import onnx
import pytest
from models import flip_byte, model_of, raw_tensor
from onnx import TensorProto
from versions import NO_OBSTORE
from web_server import WebServer

import onnxarchive
from onnxarchive.reading.html import MAX_ROWS, table

ASSETS = {"labels.txt": b"cat", "deep/er.json": b"x" * 2000}


class Tables(HTMLParser):
    """The texts of the cells of all rows of a page; tags must be closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.text = ""
        self.tags: set[str] = set()
        self.widths: list[int] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        self.tags.add(tag)
        style = dict(attrs).get("style") or ""
        if "background" in style:
            self.widths.append(int(style.rpartition(":")[2].removesuffix("px")))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open and self._open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnxa"
    model = model_of(
        raw_tensor("layer.0/weight", dims=(40, 30)),
        raw_tensor("four bits", TensorProto.INT4, (4001,)),
        raw_tensor("small", dims=()),
    )
    words = TensorProto(name="words", data_type=8, dims=[2], string_data=[b"a", b"b"])
    model.graph.initializer.append(words)
    onnxarchive.save(model, path, assets=ASSETS, models={"decoder": model_of()})
    return path


def test_tensors_are_a_table_with_type_shape_and_size(path: Path) -> None:
    with onnxarchive.open(path) as archive:
        found = Tables(archive.tensors._repr_html_())
    assert found.rows == [
        ["name", "type", "shape", "bytes", ""],
        ["'layer.0/weight'", "FLOAT", "[40, 30]", "4,800", ""],
        ["'four bits'", "INT4", "[4001]", "2,001", ""],
        ["'small'", "FLOAT", "[]", "4", ""],
        ["'words'", "STRING", "[2]", "", ""],
    ]
    assert found.widths == [120, 50, 0, 0]
    assert f"<4 tensors of {str(path)!r}>" in found.text


def test_entries_and_assets_are_tables(path: Path) -> None:
    with onnxarchive.open(path) as archive:
        entries = Tables(archive.entries._repr_html_()).rows
        assets = Tables(archive.assets._repr_html_()).rows
        expected = [
            [repr(entry.name), f"{entry.data_offset:,}", f"{entry.nbytes:,}", ""]
            for entry in archive.entries.values()
        ]
    assert entries == [["name", "data offset", "bytes", ""], *expected]
    assert assets == [
        ["name", "bytes", ""],
        ["'deep/er.json'", "2,000", ""],
        ["'labels.txt'", "3", ""],
    ]


def test_an_archive_shows_its_tensors_and_assets(path: Path) -> None:
    with onnxarchive.open(path) as archive:
        page = archive._repr_html_()
        assert archive.tensors._repr_html_() in page
        assert archive.assets._repr_html_() in page
        assert repr(archive) in Tables(page).text
        edits.change_assets(path, {}, ASSETS.keys())
    with onnxarchive.open(path) as archive:
        assert "assets" not in Tables(archive._repr_html_()).text


def test_tables_in_notebooks_read_no_weight_and_no_asset(path: Path) -> None:
    with onnxarchive.open(path) as archive:
        before = archive._repr_html_()
        for name, entry in archive.entries.items():
            if not name.startswith("__") and entry.nbytes:
                flip_byte(path, entry.data_offset)
                flip_byte(path, entry.header_offset)
    with onnxarchive.open(path) as archive:
        assert archive._repr_html_() == before


def test_the_tables_of_a_remote_archive_read_no_tensor(path: Path, web: WebServer) -> None:
    pytest.importorskip("obstore", reason=NO_OBSTORE)
    onnxarchive.save(model_of(raw_tensor("w", dims=(100_000,))), path, models={}, assets={})
    web.files["/m.onnxa"] = path.read_bytes()
    with onnxarchive.open(web.url("/m.onnxa")) as archive:
        requests = len(web.requests)
        assert ["'w'", "FLOAT", "[100000]", "400,000", ""] in Tables(archive._repr_html_()).rows
        assert len(web.requests) == requests


def test_a_closed_archive_is_still_shown(path: Path) -> None:
    archive = onnxarchive.open(path)
    before = archive._repr_html_()
    archive.close()
    assert archive._repr_html_() == before


def test_names_in_tables_are_escaped_and_cut(tmp_path: Path) -> None:
    names = ["<script>alert(1)</script>", "a\u202eb\n", '"&', "x" * 5000]
    path = tmp_path / "<img src=x>.onnxa"
    onnxarchive.save(model_of(*(raw_tensor(name, dims=(300,)) for name in names)), path)
    with onnxarchive.open(path) as archive:
        page = archive._repr_html_()
        found = Tables(page)
    assert found.tags <= {"p", "table", "caption", "thead", "tbody", "tr", "th", "td", "div"}
    assert [row[0] for row in found.rows[1:]] == [
        "'<script>alert(1)</script>'",
        r"'a\u202eb\n'",
        "'\"&'",
        repr("x" * 100) + "... (5000 characters)",
    ]
    assert "\u202e" not in page


def test_rows_of_tables_are_bounded_and_further_ones_counted(tmp_path: Path) -> None:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(model_of(*(raw_tensor(f"w{i}") for i in range(MAX_ROWS + 1))), path)
    with onnxarchive.open(path) as archive:
        found = Tables(archive.tensors._repr_html_())
    assert len(found.rows) == 1 + MAX_ROWS
    assert found.text.endswith("and 1 more")


def test_only_the_rows_that_are_shown_are_made() -> None:
    made = []

    def rows() -> Any:
        for number in range(10**9):
            made.append(number)
            yield [str(number)], number

    assert "and 999,999,900 more" in table("many", ["n"], rows(), 10**9)
    assert len(made) == MAX_ROWS


# Completions and texts


@pytest.mark.parametrize("view", ["tensors", "assets", "entries", "models"])
def test_names_are_completed_and_texts_are_short(path: Path, view: str) -> None:
    with onnxarchive.open(path) as archive:
        mapping = getattr(archive, view)
        names = mapping._ipython_key_completions_()
        assert names == list(mapping) != []
        assert isinstance(names, list)
        assert len(repr(mapping)) < 50 + len(repr(str(path)))


@pytest.mark.tool
@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('archive.tensors["', {"layer.0/weight", "four bits", "small", "words"}),
        ('archive.assets["deep', {"deep/er.json"}),
        ("archive.entries['__MODEL", {"__MODEL_PROTO", "__MODEL_PROTO_decoder"}),
        ('archive.models["d', {"decoder"}),
    ],
)
def test_ipython_completes_names(path: Path, text: str, names: set[str]) -> None:
    completer = pytest.importorskip("IPython.core.completer", reason="IPython is not installed")
    with onnxarchive.open(path) as archive:
        found = completer.IPCompleter(namespace={"archive": archive})
        found.use_jedi = False
        with completer.provisionalcompleter():
            assert {it.text for it in found.completions(text, len(text))} == names


def test_models_are_named_not_printed(path: Path) -> None:
    with onnxarchive.open(path) as archive:
        assert repr(archive.models) == f"<models '', 'decoder' of {str(path)!r}>"
        assert isinstance(archive.models["decoder"], onnx.ModelProto)
        with pytest.raises(KeyError):
            archive.models["encoder"]

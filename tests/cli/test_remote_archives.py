from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import error_of, output_of, run
from models import runnable_model
from remote_archives import ASSETS, PATH, a_model, an_archive, arrays_of, require_equal
from web_server import Answer, WebServer, serving
from written import files_below, saved

import onnxarchive
from onnxarchive.reading.archive import contents_of

ARCHIVE = an_archive()
ONCE = ("--storage-option", "max_retries=0")
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def url(web: WebServer) -> str:
    """A URL with secrets; the server requires the header that they give."""
    web.files[PATH] = ARCHIVE
    return web.url(PATH + "?X-Amz-Signature=SECRET").replace("//", "//me:SECRET@")


def test_ls_is_one_request_and_one_more_for_a_signed_url(
    web: WebServer, url: str, capsys: Captured
) -> None:
    for command in ("ls", "info", "models list", "assets list", "metadata get"):
        web.requests.clear()
        assert run(*command.split(), web.url(PATH)) == 0
        assert len(web.requests) == 1
        capsys.readouterr()
        assert run(*command.split(), url) == 0
        assert len(web.requests) == 3
        remote = capsys.readouterr().out
        assert "SECRET" not in remote
        assert "large1" in remote or command != "ls"


def test_cat_gives_a_tensor_or_an_asset(
    web: WebServer, url: str, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    def cat(*arguments: Any) -> bytes:
        assert run("cat", *arguments) == 0
        output, errors = capsysbinary.readouterr()
        assert errors == b""
        return output

    expected = arrays_of(a_model())
    found = np.load(io.BytesIO(cat(url, "large1")))
    require_equal({"large1": found}, {"large1": expected["large1"]})
    assert cat(url, "folder/big.bin", "--cache-dir", tmp_path) == ASSETS["folder/big.bin"]
    assert cat(url, "labels.txt", "--cache-dir", tmp_path) == b"cat\n"
    assert np.load(io.BytesIO(cat(url, "own", "--model", "further"))).size == 5000
    assert np.load(io.BytesIO(cat(url, "nothing"))).shape == (0, 3)
    assert np.load(io.BytesIO(cat(url, "scalar"))).shape == ()
    assert np.load(io.BytesIO(cat(url, "labels"))).tolist() == ["a", "ü", ""]
    local = tmp_path / "m.onnxa"
    local.write_bytes(ARCHIVE)
    for name in ("b", "c"):  # of types that numpy itself lacks
        assert cat(url, name) == cat(local, name)
        size = expected[name].size * expected[name].itemsize
        assert cat(local, name)[-size:] == np.ascontiguousarray(expected[name]).tobytes()


def test_cat_reads_the_rows_of_a_range_alone(
    web: WebServer, url: str, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run("cat", url, "large1", "--rows", "10:12") == 0
    assert web.ranges()[-1].startswith("bytes=")
    first, last = map(int, web.ranges()[-1].removeprefix("bytes=").split("-"))
    assert last + 1 - first == 8
    found = np.load(io.BytesIO(capsysbinary.readouterr().out))
    require_equal({"large1": found}, {"large1": arrays_of(a_model())["large1"][10:12]})
    assert run("cat", url, "scalar", "--rows", "0:1") == 2
    captured = capsysbinary.readouterr()
    assert captured.out == b""
    assert b"tensor 'scalar': a scalar has no rows; leave out --rows" in captured.err


def test_an_asset_that_was_damaged_in_transfer_is_fetched_again(
    web: WebServer, url: str, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    content = ASSETS["folder/big.bin"]
    correct = web.change
    web.change = lambda _, answer: dataclasses.replace(
        answer, body=[part.replace(content[:64], bytes(64)) for part in answer.body]
    )
    arguments = "cat", url, "folder/big.bin", "--cache-dir", tmp_path
    assert run(*arguments) == 3
    output, errors = capsysbinary.readouterr()
    assert output == b""
    assert b"m.onnxa: entry 'assets/folder/big.bin': expected" in errors
    web.change = correct
    assert run(*arguments) == 0
    assert capsysbinary.readouterr().out == content


def test_check_says_what_is_at_a_url(web: WebServer, capsys: Captured) -> None:
    web.files["/page"] = b"<!doctype html>" * 1000
    assert "/page: expected an ONNX archive, found an HTML page; " in output_of(
        capsys, "check", web.url("/page"), status=1
    )


def test_commands_take_urls(web: WebServer, url: str, tmp_path: Path, capsys: Captured) -> None:
    web.files["/r"] = saved(runnable_model())
    model = web.url("/r?sig=SECRET")
    local = tmp_path / "local.onnxa"
    local.write_bytes(ARCHIVE)
    commands: list[tuple[Any, ...]] = [
        ("check", url, "--full"),
        ("check", url, model),
        ("diff", url, local, "--full"),
        ("export", url, tmp_path / "m.onnx"),
        ("export", url, tmp_path / "e.onnx", "--external-data", "e.data", "--cache"),
        ("extract", url, tmp_path / "extracted"),
        ("assets", "extract", url, tmp_path / "assets"),
        ("convert", url, tmp_path / "m.onnxa"),
        ("convert", url, tmp_path / "c.onnxa", "--cache"),
        ("link", model, tmp_path / "home" / "onnxarchive" / "l.onnx", "--cache"),
        ("run", model),
        ("run", model, "--cache"),
        ("ls", url, "--cache-dir", tmp_path / "other"),
        ("download", url, tmp_path / "d.onnxa"),
        ("cache", "list"),
        ("cache", "list", "--cache-dir", tmp_path / "other"),
        ("cache", "clear"),
    ]
    for form in ([], ["--json"]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
            for command, *arguments in commands:
                force = ["--force"] if form and command in ("export", "link", "download") else []
                force += ["--force"] if form and command == "convert" else []
                if form and "extract" in (command, arguments[0]):
                    arguments[-1] = tmp_path / f"{command} again"
                assert run(command, *arguments, *force, *form) == 0, command
                captured = capsys.readouterr()
                assert "SECRET" not in captured.out + captured.err
                if form:
                    json.loads(captured.out)
    assert (tmp_path / "d.onnxa").read_bytes() == ARCHIVE
    assert not [it for it in files_below(tmp_path) if "SECRET" in it]
    written = [it for it in tmp_path.rglob("*") if it.is_file()]
    assert not [it for it in written if b"SECRET" in it.read_bytes()]


@pytest.mark.parametrize("status", [401, 403, 404, 500])
def test_errors_show_no_secret(
    web: WebServer, url: str, tmp_path: Path, capsys: Captured, status: int
) -> None:
    web.change = lambda *_: Answer(status, {}, [b"SECRET"])
    for command, *arguments in (
        ("ls", url),
        ("check", url),
        ("diff", url, url),
        ("convert", url, tmp_path / "m.onnxa"),
        ("convert", url, tmp_path / "m.onnxa", "--json"),
        ("extract", url, tmp_path / "x"),
        ("run", url),
        ("download", url, tmp_path / "m.onnxa"),
        ("cat", url, "large1"),
        ("ls", url, "--debug"),
    ):
        options = ["--storage-option", "max_retries=0"]
        assert run(command, *arguments, *options, "--storage-option", "user_agent=SECRET") == 2
        captured = capsys.readouterr()
        assert "SECRET" not in captured.out + captured.err
        if command != "cat":  # whose output is a terminal or text here
            assert web.url(PATH) in captured.err
        assert ("Traceback" in captured.err) is ("--debug" in arguments)
    assert not [it for it in files_below(tmp_path) if not it.startswith(".m.onnxa.download")]


@pytest.mark.parametrize(
    "arguments",
    [
        ("metadata", "set", "{url}", "a=b"),
        ("assets", "add", "{url}", "{file}"),
        ("assets", "remove", "{url}", "labels.txt"),
        ("models", "remove", "{url}", "further"),
        ("recover", "{url}"),
        ("convert", "{file}", "{url}"),
        ("export", "{url}", "{file}"),
        ("check", "--link", "{url}"),
        ("convert", "{file}", "{file}a", "--asset", "{url}"),
        ("ls", "{url}", "--storage-option", "SECRET"),
        ("ls", "{url}", "--storage-option", "a=SECRET", "--storage-option", "a=SECRET"),
        ("download", "{url}", "--storage-option", "SECRET"),
        ("ls", "{url}", "--storage-option", "proxy_url=SECRET", *ONCE),
    ],
)
def test_the_error_of_a_refused_argument_shows_no_secret(
    url: str, tmp_path: Path, capsys: Captured, arguments: tuple[str, ...]
) -> None:
    file = tmp_path / "m.onnx"
    file.write_bytes(runnable_model().SerializeToString())
    given = [it.format(url=url, file=file) for it in arguments]
    assert run(*given) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("onnxarchive: ")
    assert "SECRET" not in captured.out + captured.err


def test_no_output_of_the_library_shows_a_secret(web: WebServer, url: str, tmp_path: Path) -> None:
    options = {"default_headers": {"X-Token": "SECRET"}}
    with onnxarchive.open(url, storage_options=options, cache=tmp_path) as archive:
        shown = [repr(archive), archive._repr_html_(), archive.path, repr(archive.tensors)]
        shown += [
            repr(vars(archive)),
            repr(contents_of(archive).file),
            repr(vars(contents_of(archive).file)),
        ]
    shown.append(repr(onnxarchive.convert(url, tmp_path / "c.onnxa", storage_options=options)))
    shown.append(repr(onnxarchive.diff(url, url, storage_options=options)))
    assert not [it for it in shown if "SECRET" in it]


@pytest.mark.parametrize(
    "url",
    [
        "simplecache::ftp://me:1/SECRET?SECRET#SECRET@127.0.0.1:1/m.onnxa",
        "nonsense::simplecache::ftp://me:1/SECRET@127.0.0.1:1/m.onnxa",
        "https://me:1/SECRET?SECRET#SECRET@127.0.0.1:1/m.onnxa",
        "https://me:SECRET@SECRET/SECRET@127.0.0.1:1/m.onnxa",
        "s3://me:SECRET/SECRET@127.0.0.1:1/m.onnxa",
    ],
)
@pytest.mark.parametrize("command", ["ls", "check", "convert", "download", "run", "recover"])
def test_no_message_shows_a_password_with_slashes(
    url: str, command: str, tmp_path: Path, capsys: Captured
) -> None:
    targets = [tmp_path / "t.onnxa"] if command in ("convert", "download") else []
    options = [] if command == "recover" else ONCE
    assert run(command, url, *targets, *options) == 2
    captured = capsys.readouterr()
    assert "m.onnxa" in captured.err
    assert "SECRET" not in captured.out + captured.err
    assert "me:" not in captured.out + captured.err


def test_a_redirect_of_a_secret_is_refused_unless_an_option_allows_it(
    web: WebServer, url: str, capsys: Captured
) -> None:
    with serving({"/moved": ARCHIVE}) as other:
        web.change = lambda *_: Answer(302, {"Location": other.url("/moved")})
        text = error_of(capsys, "ls", url, *ONCE)
        assert f"the server redirects to '{other.url('')}'" in text
        assert "--storage-option allow_redirects=true allows redirects" in text
        assert "SECRET" not in text
        assert not other.requests
        assert run("ls", url, *ONCE, "--storage-option", "allow_redirects=true") == 0
        assert other.requests

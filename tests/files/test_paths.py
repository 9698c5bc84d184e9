"""Files of a directory in which somebody exchanges names for links while they are read."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import itertools
import os
import re
import stat
import sys
import timeit
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from limits import user
from models import external, model_of, open_below
from onnx import TensorProto
from processes import started

import onnxarchive
from onnxarchive import ArchiveError, ArchiveFormatError
from onnxarchive.conversion.convert import open_source
from onnxarchive.files import paths
from onnxarchive.files.paths import OutsideError, Root, open_own
from onnxarchive.remote.location import Location
from onnxarchive.sources.reader import SourceReader

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links and pipes are POSIX's")

INSIDE = b"inside! " * 500
OUTSIDE = b"outside!" * 500
LOCATIONS = ("data.bin", "sub/data.bin")
# Names of a source that may be exchanged, and the kind of source: its model, or all of it.
EXCHANGED = [
    ("file", "data.bin"),
    ("file", "sub"),
    ("file", "sub/data.bin"),
    ("file", ""),
    ("directory", "m.onnx"),
    ("directory", "data.bin"),
    ("directory", "sub"),
    ("directory", "assets"),
    ("directory", "assets/deep"),
    ("directory", "assets/deep/a"),
]


@pytest.fixture(params=["posix", "windows"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How directories are listed, and the paths of open files found."""
    if request.param == "posix":
        return
    if sys.platform != "linux":
        pytest.skip("/proc says where a file lies that is open")

    def get_final_path(handle: Any, path: Any, size: int, flags: int) -> int:
        path.value = "\\\\?\\" + os.readlink(f"/proc/self/fd/{handle.value}")
        return len(path.value)

    kernel32 = types.SimpleNamespace(GetFinalPathNameByHandleW=get_final_path)
    monkeypatch.setattr(ctypes, "windll", types.SimpleNamespace(kernel32=kernel32), raising=False)
    msvcrt = types.SimpleNamespace(get_osfhandle=lambda descriptor: descriptor)
    monkeypatch.setitem(sys.modules, "msvcrt", msvcrt)
    monkeypatch.setattr(paths, "HAS_DIR_FD", False)


ways = pytest.mark.usefixtures("way")


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """Holds a source, and a directory outside of it with other files of the same names."""
    for name, content, text in (("source", INSIDE, ""), ("outside", OUTSIDE, OUTSIDE.decode())):
        for file in ("data.bin", "sub/data.bin", "assets/deep/a"):
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        (tmp_path / name / "m.onnx").write_bytes(_reaching_model(text))
    return tmp_path


def _reaching_model(doc_string: str) -> bytes:
    tensor = TensorProto(data_type=TensorProto.UINT8, dims=[len(INSIDE)])
    model = model_of(*(external(tensor, location) for location in LOCATIONS))
    for initializer, location in zip(model.graph.initializer, LOCATIONS, strict=True):
        initializer.name = location
    model.doc_string = doc_string
    return model.SerializeToString()


@pytest.fixture
def root(top: Path) -> Root:
    return Root(str(top / "source"))


def _read(root: Root, path: str) -> bytes:
    with open(root.open(path), "rb") as file:
        return file.read()


# Files below a directory


@ways
@pytest.mark.parametrize("path", ["data.bin", "sub/data.bin", "assets/deep/a"])
def test_a_file_below_the_root_is_opened(root: Root, path: str) -> None:
    assert _read(root, path) == INSIDE


@ways
@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("link", "data.bin"),
        ("link", "./sub/../data.bin"),
        ("link", "../source/data.bin"),
        ("link", "{source}/sub/data.bin"),
        ("sub/link", "../data.bin"),
        ("link", "chain"),
    ],
)
def test_a_link_that_stays_below_the_root_is_followed_however_it_is_written(
    root: Root, top: Path, link: str, target: str
) -> None:
    (top / "source" / "chain").symlink_to("sub/data.bin")
    (top / "source" / link).symlink_to(target.format(source=top / "source"))
    assert _read(root, link) == INSIDE


@ways
def test_a_linked_folder_that_stays_below_the_root_is_passed_through_and_listed(
    root: Root, top: Path
) -> None:
    (top / "source" / "folder").symlink_to("sub", target_is_directory=True)
    assert _read(root, "folder/data.bin") == INSIDE
    assert [entry.name for entry in root.scan("folder")] == ["data.bin"]


@ways
@pytest.mark.parametrize("target", ["../outside", "{top}/outside", "../source2"])
def test_a_link_that_leads_out_is_refused_with_where_it_leads_and_the_remedy(
    root: Root, top: Path, target: str
) -> None:
    (top / "source2").symlink_to("outside", target_is_directory=True)
    (top / "source" / "link").symlink_to(target.format(top=top), target_is_directory=True)
    before = open_below(top)
    for call in (lambda: root.open("link/data.bin"), lambda: list(root.scan("link"))):
        with pytest.raises(OutsideError, match="a copy of its target") as caught:
            call()
        for part in (str(top / "source"), "'link", str(top / "outside")):
            assert part in str(caught.value)
    assert open_below(top) == before


@ways
@pytest.mark.parametrize("path", ["..", "../outside/data.bin", "sub/../data.bin", "/etc/hostname"])
def test_a_path_that_climbs_or_is_absolute_is_refused(root: Root, path: str) -> None:
    with pytest.raises(ValueError, match="relative path"):
        root.open(path)
    with pytest.raises(ValueError, match="relative path"):
        list(root.scan(path))


@ways
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        *(("none", FileNotFoundError), ("none/x", FileNotFoundError)),
        ("data.bin/x", NotADirectoryError),
    ],
)
def test_a_missing_file_is_named_with_its_full_path(
    root: Root, path: str, expected: type[OSError]
) -> None:
    with pytest.raises(expected) as caught:
        root.open(path)
    assert caught.value.filename == os.path.join(root.path, path)


@ways
def test_a_link_to_itself_is_refused(root: Root, top: Path) -> None:
    (top / "source" / "loop").symlink_to("loop")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        root.open("loop")


@ways
def test_a_path_is_not_cut_off_at_a_nul(root: Root) -> None:
    with pytest.raises(ValueError, match="embedded null"):
        root.open("data.bin\0.txt")


@ways
def test_opening_and_listing_below_a_root_leave_nothing_open(root: Root, top: Path) -> None:
    (top / "source" / "link").symlink_to("sub/data.bin")
    for path in ("link", "none/x", "data.bin/x", "sub/data.bin"):
        try:
            os.close(root.open(path))
        except OSError:
            continue
    assert list(root.scan("sub"))
    assert open_below(top) == []


@ways
@pytest.mark.parametrize("source", ["source", "source/m.onnx"])
def test_a_conversion_leaves_its_directory_closed(top: Path, source: str) -> None:
    assert _outcome(top / source)
    (top / "source" / "sub" / "data.bin").unlink()
    assert not _outcome(top / source)
    assert open_below(top) == []


def test_descriptors_are_not_inherited_by_child_processes(root: Root) -> None:
    descriptor = root.open("data.bin")
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says where a file lies that is open")
@pytest.mark.parametrize("platform", ["freebsd14", "darwin"])
def test_the_path_of_an_open_file_is_found_on_other_systems(
    root: Root, top: Path, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")
    readlink: Callable[..., str] = os.readlink

    def read_link(path: Any, **options: Any) -> str:
        if str(path).startswith("/proc/"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return readlink(path, **options)

    def get_path(descriptor: int, command: int, buffer: bytes) -> bytes:
        assert (command, len(buffer)) == (50, 1024)
        return os.fsencode(readlink(f"/proc/self/fd/{descriptor}")).ljust(1024, b"\0")

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(os, "readlink", read_link)
    if platform == "darwin":
        monkeypatch.setattr(fcntl, "F_GETPATH", 50, raising=False)
        monkeypatch.setattr(fcntl, "fcntl", get_path)
    (top / "source" / "link").symlink_to("sub/data.bin")
    (top / "source" / "out").symlink_to(top / "outside")
    assert _read(root, "link") == INSIDE
    with pytest.raises(OutsideError, match="outside"):
        root.open("out/data.bin")


@ways
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(root: Root, top: Path) -> None:
    os.mkfifo(top / "source" / "pipe")
    os.close(root.open("pipe"))


@pytest.mark.skipif(not hasattr(os, "O_PATH"), reason="macOS lists what it passes")
def test_a_directory_that_may_not_be_listed_can_be_passed_through(
    own_path: Path, nobody: None
) -> None:
    below = own_path.with_name("sub")
    below.mkdir()
    (below / "data.bin").write_bytes(INSIDE)
    for directory in (own_path.parent, below):
        directory.chmod(0o111)
    root = Root(str(own_path.parent))
    with pytest.raises(PermissionError):
        list(root.scan("sub"))
    assert _read(root, "sub/data.bin") == INSIDE
    for directory in (own_path.parent, below):
        directory.chmod(0o755)


# Changes while a source is read


class Moments:
    """Calls that look at names of a source; before two of them a name is exchanged for a link."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, link: Path) -> None:
        self._path, self._link = path, link
        self._source = str(link.parent / "source")
        self._at: tuple[int | None, ...] = ()
        self._exchanges = self.count = 0
        for name in ("open", "stat", "lstat", "readlink", "scandir"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Any, *arguments: Any, **options: Any) -> Any:
            if (
                isinstance(path, int)
                or options.get("dir_fd") is not None
                or str(path).startswith(self._source)
            ):
                if self.count in self._at:
                    self._exchange()
                self.count += 1
            return function(path, *arguments, **options)

        return called

    def _exchange(self) -> None:
        self._exchanges += 1
        spare = self._link.with_name("spare")
        os.rename(self._path, spare)
        os.rename(self._link, self._path)
        os.rename(spare, self._link)

    def begin(self, *at: int | None) -> None:
        """Counts from 0 again, with the names as they were, and exchanges them before these."""
        if self._exchanges % 2:
            self._exchange()
        self.count = self._exchanges = 0
        self._at = at


@pytest.mark.sweep
@ways
@pytest.mark.parametrize(("kind", "name"), EXCHANGED)
def test_at_no_two_moments_can_a_name_be_exchanged_to_bring_in_bytes_from_outside(
    top: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    source = top / "source" / ("m.onnx" if kind == "file" else "")
    if not name:  # what is of another directory is, too, if the model is not
        (top / "outside" / "m.onnx").unlink()
    _exchange_at_two_moments(top, monkeypatch, source, name)


@pytest.mark.sweep
@ways
@pytest.mark.parametrize("name", ["snapshots/0/m.onnx", "snapshots/0/data.bin", "blobs", "blobs/d"])
def test_at_no_two_moments_can_a_link_of_a_cache_be_exchanged_to_bring_in_outside_bytes(
    top: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for cache, directory in (("source/models--a", "source"), ("outside", "outside")):
        (top / cache / "snapshots" / "0" / "sub").mkdir(parents=True)
        (top / cache / "blobs").mkdir()
        for blob, file in (("m", "m.onnx"), ("d", "data.bin"), ("s", "sub/data.bin")):
            (top / directory / file).rename(top / cache / "blobs" / blob)
            up = "../" * (2 + file.count("/"))
            (top / cache / "snapshots" / "0" / file).symlink_to(f"{up}blobs/{blob}")
    source = top / "source" / "models--a" / "snapshots" / "0"
    name = f"models--a/{name}"
    (top / "outside" / "models--a").symlink_to(".")
    _exchange_at_two_moments(top, monkeypatch, source, name, follow_links=True)


def _exchange_at_two_moments(
    top: Path, monkeypatch: pytest.MonkeyPatch, source: Path, name: str, **options: Any
) -> None:
    (top / "link").symlink_to(top / "outside" / name)
    moments = Moments(monkeypatch, top / "source" / name, top / "link")
    allowed = {b"", _outcome(source, **options)}
    moments.begin(0)
    allowed.add(_outcome(source, **options))  # a folder of assets is left out where it is a link
    outcomes: Counter[str] = Counter()
    for first in itertools.count():
        for second in itertools.chain([None], itertools.count(first + 1)):
            moments.begin(first, second)
            outcome = _outcome(source, **options)
            assert OUTSIDE[:100] not in outcome
            assert outcome in allowed
            outcomes["right" if outcome else "refused"] += 1
            if second is not None and second >= moments.count:
                break
        if first >= moments.count:
            break
    moments.begin()
    assert set(outcomes) == {"right", "refused"}
    assert outcomes.total() > 10


@ways
@pytest.mark.parametrize("way", ["posix"], indirect=True)
def test_at_no_moment_can_a_directory_outside_be_listed(
    root: Root, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (top / "outside" / "sub" / "secret").touch()
    (top / "link").symlink_to(top / "outside" / "sub")
    moments = Moments(monkeypatch, top / "source" / "sub", top / "link")
    for moment in itertools.count():
        moments.begin(moment)
        try:
            assert [entry.name for entry in root.scan("sub")] == ["data.bin"]
        except OutsideError:
            assert moment < moments.count
        if moment >= moments.count:
            break
    assert moment > 0


def _outcome(source: Path, **options: Any) -> bytes:
    """The archive of a source, or nothing where it is refused."""
    target = io.BytesIO()
    try:
        onnxarchive.convert(source, target, jobs=1, **options)
    except (ArchiveError, OSError):
        return b""
    return target.getvalue()


# Exchanges two names for as long as it is let, now fast, now slowly, rests while each is where it
# was, and says when it has begun.
EXCHANGING = """
import ctypes, itertools, os, sys, time

first, second = map(os.fsencode, sys.argv[1:3])
exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2")
for count in itertools.count():
    if exchange(-100, first, -100, second, 2):  # AT_FDCWD, RENAME_EXCHANGE
        sys.exit(os.strerror(ctypes.get_errno()))
    if count == 0:
        print("exchanged", flush=True)
    if count % 4096 < 64:
        time.sleep(0.0002)
    if count % 4096 == 4095:
        time.sleep(float(sys.argv[3]))
"""


@pytest.fixture
def exchanging() -> Iterator[Callable[[Path, Path, float], None]]:
    """Has two names exchanged by another process, with rests, until the test ends."""
    with contextlib.ExitStack() as stack:

        def begin(first: Path, second: Path, rest: float) -> None:
            command = [sys.executable, "-c", EXCHANGING, first, second, str(rest)]
            process = stack.enter_context(started(command))
            assert process.stdout is not None
            assert process.stderr is not None
            if not process.stdout.readline():
                pytest.skip(f"names are not exchanged in {first.parent}: {process.stderr.read()}")

        yield begin


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform != "linux", reason="renameat2 is Linux's")
@ways
@pytest.mark.parametrize(("kind", "name"), [("file", "data.bin"), ("directory", "data.bin")])
def test_no_conversion_has_bytes_from_outside_while_another_process_exchanges_names(
    top: Path, exchanging: Callable[[Path, Path, float], None], kind: str, name: str
) -> None:
    source = top / "source" / ("m.onnx" if kind == "file" else "")
    expected = _outcome(source)
    duration = min(timeit.repeat(lambda: _outcome(source), number=1, repeat=5))
    (top / "link").symlink_to(top / "outside" / name)
    exchanging(top / "source" / name, top / "link", 5 * duration)
    outcomes = {"right": 0, "refused": 0}
    # Of a path that is judged before the file is opened, the first 160 have bytes from outside.
    for _ in range(2500):
        outcome = _outcome(source)
        assert OUTSIDE[:100] not in outcome
        assert outcome in (b"", expected)
        outcomes["right" if outcome else "refused"] += 1
    assert min(outcomes.values()) >= 25


@ways
@pytest.mark.parametrize("size", [0, len(INSIDE) - 1, 2 * len(INSIDE)], ids=str)
def test_a_file_that_changes_its_size_gives_its_old_bytes_or_an_error(top: Path, size: int) -> None:
    path = top / "source" / "data.bin"
    with contextlib.ExitStack() as resources:
        source = open_source(Location.of(top / "source"), resources, SourceReader())
        os.truncate(path, size)
        first, second = source.data
        if size < len(INSIDE):
            with pytest.raises(ArchiveFormatError, match=f"{re.escape(str(path))}.*truncated"):
                list(first.pieces())
        else:
            assert b"".join(first.pieces()) == INSIDE
        assert b"".join(second.pieces()) == INSIDE


@ways
@pytest.mark.parametrize("target", ["../moved", "new"])
def test_a_data_file_is_read_as_opened_after_its_path_leads_elsewhere(
    top: Path, target: str
) -> None:
    with contextlib.ExitStack() as resources:
        source = open_source(Location.of(top / "source"), resources, SourceReader())
        os.rename(top / "source" / "data.bin", top / "moved")
        (top / "source" / "new").write_bytes(OUTSIDE)
        (top / "source" / "data.bin").symlink_to(target)
        assert [b"".join(data.pieces()) for data in source.data] == [INSIDE, INSIDE]


# Own files


@pytest.fixture(params=[True, False], ids=["of a descriptor", "of a path"])
def own(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of an own file, which is not there; opened relative to a descriptor or not."""
    monkeypatch.setattr(paths, "HAS_DIR_FD", request.param)
    return tmp_path / "own"


def test_an_own_file_is_made_once_and_then_opened(own: Path) -> None:
    with open(open_own(str(own), 0o600), "wb") as file:
        file.write(b"abc")
    with open(open_own(str(own), 0o666), "r+b") as file:
        assert file.read() == b"abc"
    assert stat.S_IMODE(own.stat().st_mode) == 0o600


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_in_the_place_of_an_own_file_is_not_followed(
    own: Path, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = own.with_name("other")
    other.write_bytes(b"kept")
    if is_there:
        own.touch()
    look, exchanges = os.stat, iter([own])

    def look_and_exchange(path: Any, **options: Any) -> os.stat_result:
        try:
            return look(path, **options)
        finally:
            for name in exchanges:
                name.unlink(missing_ok=True)
                name.symlink_to(other)

    monkeypatch.setattr(os, "stat", look_and_exchange)
    with pytest.raises(OSError) as caught:  # noqa: PT011 of a link, in the words of each system
        open_own(str(own), 0o666)
    assert caught.value.filename == str(own)
    assert other.read_bytes() == b"kept"
    assert open_below(own.parent) == []


@pytest.mark.parametrize(
    ("mode", "number", "is_taken"),
    [(0o777, 65534, True), (0o1777, 65534, False), (0o1777, 0, True)],
    ids=["of all", "sticky", "sticky, to root"],
)
def test_the_file_of_the_directorys_owner_is_taken_if_it_can_be_replaced(
    own: Path, own_path: Path, mode: int, number: int, is_taken: bool
) -> None:
    if os.geteuid():
        pytest.skip("only root can be several users")
    own_path.touch()
    own_path.chmod(0o666)
    for owned in (own_path.parent, own_path):
        os.chown(owned, 12345, -1)
    own_path.parent.chmod(mode)
    with user(number):
        if is_taken:
            os.close(open_own(str(own_path), 0o600))
            return
        with pytest.raises(FileExistsError, match="found a file of user 12345") as caught:
            open_own(str(own_path), 0o600)
        assert caught.value.filename == str(own_path)


def test_an_own_file_in_a_directory_that_is_missing_is_an_error(own: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        open_own(str(own / "below"), 0o666)
    assert caught.value.filename == str(own / "below")

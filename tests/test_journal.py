"""The journal of a change: its bytes, whose it is, and what becomes of an archive that has one."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import pytest
from models import model_of, raw_tensor

import onnxarchive
from onnxarchive import journal
from onnxarchive.edit import replace_model
from onnxarchive.errors import ArchiveError, ArchiveFormatError, UnfinishedEditError
from onnxarchive.files import MappedFile
from onnxarchive.journal import Span
from onnxarchive.recovery import recover

posix = pytest.mark.skipif(os.name != "posix", reason="POSIX's kinds of files and links")
forking = pytest.mark.skipif(not hasattr(os, "fork"), reason="a fork is killed")
LOOKED_AT = 4096  # bytes on either side of what changes


def journal_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-journal")


def surroundings(content: bytes, spans: Sequence[tuple[int, int]]) -> bytes:
    """What of a file tells that a journal is of it: 4096 bytes on either side of what changes."""
    digest = hashlib.sha256()
    start = 0
    for offset, nbytes in spans:
        kept = content[start:offset]
        digest.update(kept if len(kept) <= 2 * LOOKED_AT else kept[:LOOKED_AT] + kept[-LOOKED_AT:])
        start = offset + nbytes
    return digest.digest()


def packed(
    content: bytes,
    inode: int,
    spans: Sequence[tuple[int, int]],
    *,
    magic: bytes = b"onnxa-journal 1\n",
    count: int | None = None,
    size: int | None = None,
) -> bytes:
    """A journal of a file of these bytes, as written by somebody else."""
    body = magic
    body += struct.pack("<I", len(spans) if count is None else count)
    body += struct.pack("<Q", inode & (1 << 64) - 1)
    body += struct.pack("<Q", len(content) if size is None else size)
    body += surroundings(content, spans)
    for span in spans:
        body += struct.pack("<QQ", *span)
    for offset, nbytes in spans:
        body += content[offset : offset + nbytes]
    return body + hashlib.sha256(body).digest()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[MappedFile, int]]:
    """A file for reading, and its descriptor for writing."""
    descriptor = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
    try:
        with MappedFile(path) as file:
            yield file, descriptor
    finally:
        os.close(descriptor)


def change(path: Path, spans: Sequence[Span], write: Callable[[int], int]) -> None:
    with opened(path) as (file, descriptor):
        journal.change(file, descriptor, spans, write)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    return path


# The bytes


def test_a_journal_is_these_bytes(path: Path) -> None:
    found = []

    def write(descriptor: int) -> int:
        assert path.read_bytes() == b"0123456789"
        found.append(journal_of(path).read_bytes())
        return 10

    change(path, [Span(2, 3), Span(8, 2)], write)
    expected = b"onnxa-journal 1\n"
    expected += bytes.fromhex("02000000")  # spans
    expected += path.stat().st_ino.to_bytes(8, "little")
    expected += bytes.fromhex("0a00000000000000")  # size
    expected += hashlib.sha256(b"01" + b"567").digest()  # what surrounds the spans
    expected += bytes.fromhex("0200000000000000 0300000000000000")  # the first
    expected += bytes.fromhex("0800000000000000 0200000000000000")  # and the second
    expected += b"234" + b"89"
    expected += hashlib.sha256(expected).digest()
    assert found == [expected]
    assert found == [packed(b"0123456789", path.stat().st_ino, [(2, 3), (8, 2)])]


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 4097, 8191, 8192, 8193, 12_000])
def test_what_surrounds_a_span_is_looked_at_for_4096_bytes(tmp_path: Path, offset: int) -> None:
    path = tmp_path / "file"
    content = os.urandom(16_000)
    path.write_bytes(content)
    spans = [(offset, 10), (14_000, 2000)]
    journal_of(path).write_bytes(packed(content, path.stat().st_ino, spans))
    found = journal.read(path)
    assert found is not None
    is_looked_at = bytearray(16_000)
    for start, stop in ((0, offset), (offset + 10, 14_000)):
        for begin, end in (
            (start, min(start + LOOKED_AT, stop)),
            (max(start, stop - LOOKED_AT), stop),
        ):
            is_looked_at[begin:end] = b"\1" * (end - begin)
    edges = {at for at in range(16_000) if at == 0 or is_looked_at[at] != is_looked_at[at - 1]}
    with opened(path) as (file, descriptor):
        assert found.is_of(file)
        for at in {at + step for at in edges for step in (-1, 0)} & set(range(16_000)):
            journal.write_at(descriptor, at, bytes([content[at] ^ 1]))
            assert found.is_of(file) == (not is_looked_at[at]), at
            journal.write_at(descriptor, at, content[at : at + 1])


# Where it is


@pytest.mark.parametrize("name", ["model.onnxa", "a model of mine", "-", "größer.onnxa", "a'b\n"])
def test_a_journal_is_beside_its_file(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = os.path.join(os.path.realpath(tmp_path), f"{name}-journal")
    assert journal.path_of(tmp_path / name) == expected
    assert journal.path_of(str(tmp_path / name)) == expected
    monkeypatch.chdir(tmp_path)
    assert journal.path_of(name) == expected
    assert journal.path_of(Path(name)) == expected
    (tmp_path / "below").mkdir()
    monkeypatch.chdir("below")
    assert journal.path_of(os.path.join("..", name)) == expected


@posix
def test_the_journal_of_a_symbolic_link_is_beside_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/file")
    (tmp_path / "directory").symlink_to("there")
    expected = str(tmp_path.resolve() / "there" / "file-journal")
    assert journal.path_of(tmp_path / "link") == expected
    assert journal.path_of(tmp_path / "directory" / "file") == expected


def test_the_journal_is_where_the_file_is_when_the_change_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(b"0123456789")
    found = []

    def write(descriptor: int) -> int:
        found.extend(sorted(os.listdir(tmp_path)))
        monkeypatch.chdir("other")
        journal.write_at(descriptor, 5, b"new")
        return 8

    change(Path("file"), [Span(5, 5)], write)
    assert found == ["file", "file-journal", "other"]
    assert sorted(os.listdir(tmp_path)) == ["file", "other"]
    assert (tmp_path / "file").read_bytes() == b"01234new"


# Changes


SPANS = {
    "the end": [Span(4, 6)],
    "all": [Span(0, 10)],
    "one amid": [Span(4, 3)],
    "several": [Span(0, 1), Span(3, 2), Span(5, 1), Span(9, 1)],
    "an empty one": [Span(4, 0), Span(8, 2)],
    "nothing": [],
}
# What changes of a file of 10 bytes, and the size that it gets: it loses nothing but of a span.
of_all_kinds = pytest.mark.parametrize(
    ("spans", "size"),
    [
        pytest.param(spans, size, id=f"{name}, {size} bytes")
        for name, spans in SPANS.items()
        for size in (0, 4, 9, 10, 5000)
        if size >= (spans[-1].offset if spans and sum(spans[-1]) == 10 else 10)
    ],
)


def write_new(descriptor: int, spans: Sequence[Span], size: int) -> int:
    for offset, nbytes in spans:
        journal.write_at(descriptor, offset, b"x" * nbytes)
    journal.write_at(descriptor, 10, b"x" * (size - 10))
    return size


def changed(spans: Sequence[Span], size: int) -> bytes:
    content = bytearray(b"0123456789")
    for offset, nbytes in spans:
        content[offset : offset + nbytes] = b"x" * nbytes
    return bytes(content.ljust(size, b"x"))[:size]


@of_all_kinds
def test_a_change_is_made_and_leaves_no_journal(
    path: Path, spans: Sequence[Span], size: int
) -> None:
    change(path, spans, lambda descriptor: write_new(descriptor, spans, size))
    assert path.read_bytes() == changed(spans, size)
    assert os.listdir(path.parent) == ["file"]


@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS.keys())
def test_a_change_that_fails_is_taken_back(
    path: Path, spans: Sequence[Span], error: type[BaseException]
) -> None:
    def write(descriptor: int) -> int:
        write_new(descriptor, spans, 5000)
        raise error("halfway")

    with pytest.raises(error, match="halfway"):
        change(path, spans, write)
    assert path.read_bytes() == b"0123456789"
    assert os.listdir(path.parent) == ["file"]


def kill_amid(path: Path, spans: Sequence[Span], size: int) -> None:
    """Changes a file in a process that is killed when all is written, and nothing removed."""

    def write(descriptor: int) -> int:
        os.ftruncate(descriptor, write_new(descriptor, spans, size))
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it was killed")

    process = os.fork()
    if not process:
        try:
            change(path, spans, write)
        finally:
            os._exit(1)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status)


@forking
@of_all_kinds
def test_a_change_that_is_killed_is_taken_back_by_its_journal(
    path: Path, spans: Sequence[Span], size: int
) -> None:
    kill_amid(path, spans, size)
    assert path.read_bytes() == changed(spans, size)
    assert sorted(os.listdir(path.parent)) == ["file", "file-journal"]
    found = journal.read(path)
    assert found is not None
    assert found.spans == tuple(spans)
    with opened(path) as (file, descriptor):
        assert found.is_of(file)
        assert found.is_intact(file) == (changed(spans, size) == b"0123456789")
        found.roll_back(descriptor)
        found.roll_back(descriptor)  # whoever was killed meanwhile begins anew
    assert path.read_bytes() == b"0123456789"
    with MappedFile(path) as file:
        assert found.is_of(file)
        assert found.is_intact(file)
    assert journal.remove(path)
    assert not journal.remove(path)
    assert os.listdir(path.parent) == ["file"]


@forking
@pytest.mark.parametrize("left", [b"", b"damaged", None])
def test_the_next_change_takes_the_place_of_a_journal_of_no_use(
    path: Path, left: bytes | None
) -> None:
    complete = packed(b"0123456789", path.stat().st_ino ^ 1, [(4, 6)])
    journal_of(path).write_bytes(complete if left is None else left)
    kill_amid(path, [Span(2, 8)], 20)
    assert journal_of(path).read_bytes() == packed(b"0123456789", path.stat().st_ino, [(2, 8)])


@posix
@pytest.mark.parametrize("mode", [0o600, 0o644, 0o700])
def test_nobody_may_read_a_journal_who_may_not_read_its_file(path: Path, mode: int) -> None:
    path.chmod(mode)
    modes = []

    def write(_: int) -> int:
        modes.append(journal_of(path).stat().st_mode & 0o777)
        return 10

    change(path, [Span(4, 6)], write)
    assert modes == [mode & modes[0]]
    assert modes[0] & 0o600 == 0o600


@posix
def test_a_link_in_the_place_of_a_journal_is_not_followed_when_one_is_written(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"of somebody")
    journal_of(path).symlink_to(other)
    change(path, [Span(4, 6)], lambda descriptor: write_new(descriptor, [Span(4, 6)], 10))
    assert path.read_bytes() == b"0123xxxxxx"
    assert other.read_bytes() == b"of somebody"
    assert sorted(os.listdir(path.parent)) == ["file", "other"]


# What is no journal


def require_none(path: Path, written: bytes) -> None:
    journal_of(path).write_bytes(written)
    assert journal.read(path) is None


def test_a_journal_of_another_kind_or_of_impossible_spans_is_none(path: Path) -> None:
    content, inode = path.read_bytes(), path.stat().st_ino
    spans = [(4, 6)]
    assert journal.read(path) is None
    journal_of(path).write_bytes(packed(content, inode, spans))
    assert journal.read(path) is not None
    require_none(path, packed(content, inode, spans, magic=b"onnxa-journal 2\n"))
    require_none(path, packed(content, inode, spans, count=0))
    require_none(path, packed(content, inode, spans, count=2))
    require_none(path, packed(content, inode, spans, count=(1 << 32) - 1))
    require_none(path, packed(content, inode, [(0, 0)] * 17))
    require_none(path, packed(content, inode, spans) + b"\0")
    for size in (9, 1 << 63, (1 << 64) - 1):
        require_none(path, packed(content, inode, spans, size=size))
    for other in (
        [(4, 0), (2, 0)],
        [(4, 4), (7, 1)],
        [(11, 0)],
        [(1 << 63, 0)],
        [((1 << 64) - 1, 0)],
    ):
        require_none(path, packed(content, inode, other))


# Archives


@dataclass(frozen=True)
class Cut:
    """An archive whose change was cut off.

    Attributes:
        path: The archive.
        old: Its bytes before.
        torn: Its bytes now.
        journal: Those of its journal.
    """

    path: Path
    old: bytes
    torn: bytes
    journal: bytes

    def set_up(self, content: bytes | None = None, journal: bytes | None = None) -> None:
        """Writes the archive, in its inode, and its journal; None for what it is."""
        with open(self.path, "r+b") as file:
            file.truncate()
            file.write(self.torn if content is None else content)
        journal_of(self.path).write_bytes(self.journal if journal is None else journal)


def model(doc_string: str = "", *, weights: int = 1) -> onnx.ModelProto:
    made = model_of(*(raw_tensor(f"w{index}", dims=(300,), seed=index) for index in range(weights)))
    made.doc_string = doc_string
    return made


def cut_off(path: Path, *, weights: int = 1) -> Cut:
    """An archive of which half of a new model is written."""
    onnxarchive.save(model("new" * 30, weights=weights), path)
    new = path.read_bytes()
    onnxarchive.save(model("old", weights=weights), path)
    old = path.read_bytes()
    with onnxarchive.open(path) as archive:
        offset = list(archive.entries.values())[-1].header_offset
    torn = new[: (offset + len(new)) // 2]
    span = (offset, len(old) - offset)
    cut = Cut(path, old, torn, packed(old, path.stat().st_ino, [span]))
    cut.set_up()
    return cut


@pytest.fixture
def cut(tmp_path: Path) -> Cut:
    (tmp_path / "there").mkdir()
    return cut_off(tmp_path / "there" / "a model.onnxa")


def left(path: Path) -> list[str]:
    """What is beside an archive."""
    return sorted(set(os.listdir(path.parent)) - {path.name})


def read_model(path: Path) -> str:
    with onnxarchive.open(path) as archive:
        return archive.model.doc_string


def rewrite(path: Path) -> None:
    replace_model(path, model("newest"))


def test_an_archive_that_was_cut_off_is_refused_and_recovered(cut: Cut) -> None:
    with pytest.raises(UnfinishedEditError, match="'onnxarchive recover' takes it back"):
        read_model(cut.path)
    assert cut.path.read_bytes() == cut.torn
    recovery = recover(cut.path)
    assert (recovery.is_rolled_back, recovery.removed) == (True, ())
    assert cut.path.read_bytes() == cut.old
    assert left(cut.path) == []


def test_a_writer_takes_a_change_back_that_was_cut_off_and_makes_its_own(cut: Cut) -> None:
    rewrite(cut.path)
    assert read_model(cut.path) == "newest"
    assert left(cut.path) == []
    onnxarchive.check(cut.path, full=True)


@posix
def test_a_journal_is_found_from_a_link_to_the_archive(
    cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = cut.path.parent.parent / "link"
    link.symlink_to(cut.path)
    monkeypatch.chdir(link.parent)
    with pytest.raises(UnfinishedEditError):
        read_model(Path("link"))
    assert recover("link").is_rolled_back
    assert cut.path.read_bytes() == cut.old
    assert link.is_symlink()


def test_a_reader_of_an_intact_archive_passes_its_journal_over(cut: Cut) -> None:
    cut.set_up(cut.old)
    assert read_model(cut.path) == "old"
    assert list(onnxarchive.check(cut.path, full=True)) == []
    assert journal_of(cut.path).read_bytes() == cut.journal  # which is not a reader's to remove


def test_a_journal_of_an_archive_with_nothing_before_its_model(tmp_path: Path) -> None:
    cut = cut_off(tmp_path / "model.onnxa", weights=0)
    assert cut.journal[36:68] == hashlib.sha256(b"").digest()
    with pytest.raises(UnfinishedEditError):
        read_model(cut.path)
    assert recover(cut.path).is_rolled_back
    assert cut.path.read_bytes() == cut.old


def damaged_journals(complete: bytes) -> Iterator[bytes]:
    """A journal cut at every length, and with every byte changed."""
    for size in range(len(complete)):
        yield complete[:size]
    for at in range(len(complete)):
        for bit in (1, 128):
            changed = bytearray(complete)
            changed[at] ^= bit
            yield bytes(changed)


def test_a_damaged_journal_is_none_and_changes_nothing(cut: Cut) -> None:
    """Cut short, it was never complete, and the archive is as it was; changed, it is not written
    back."""
    count = 0
    for damaged in damaged_journals(cut.journal):
        count += 1
        cut.set_up(cut.torn, damaged)
        assert journal.read(cut.path) is None
        with pytest.raises(ArchiveError, match="if the two belong together, force=True"):
            recover(cut.path)
        assert cut.path.read_bytes() == cut.torn
        assert journal_of(cut.path).read_bytes() == damaged
    assert count == 3 * len(cut.journal) > 1000


def test_a_damaged_journal_of_an_intact_archive_is_passed_over_and_removed(cut: Cut) -> None:
    name = os.path.realpath(journal_of(cut.path))
    for damaged in list(damaged_journals(cut.journal))[::23]:
        cut.set_up(cut.old, damaged)
        assert read_model(cut.path) == "old"
        recovery = recover(cut.path)
        assert (recovery.is_rolled_back, recovery.removed) == (False, (name,))
        assert cut.path.read_bytes() == cut.old
        assert left(cut.path) == []


@pytest.mark.parametrize("size", [0, 60, -1])
def test_a_writer_passes_an_incomplete_journal_over_and_writes_its_own(cut: Cut, size: int) -> None:
    cut.set_up(cut.old, cut.journal[:size])
    rewrite(cut.path)
    assert read_model(cut.path) == "newest"
    assert left(cut.path) == []


# Journals of other files


def other_inode(cut: Cut, content: bytes) -> None:
    """Archive and journal copied together: the journal has another inode."""
    kept = cut.path.with_suffix(".kept")
    os.rename(cut.path, kept)
    cut.path.write_bytes(content)
    assert cut.path.stat().st_ino != kept.stat().st_ino
    os.rename(kept, cut.path.parent.parent / "kept")
    journal_of(cut.path).write_bytes(cut.journal)


def other_surroundings(cut: Cut, content: bytes) -> None:
    """Another archive was written into the file: what is kept differs."""
    with open(cut.path.with_suffix(".other"), "wb") as file:
        onnxarchive.save(model_of(raw_tensor("w0", dims=(300,), seed=99)), file)
    other = cut.path.with_suffix(".other").read_bytes()
    cut.path.with_suffix(".other").unlink()
    cut.set_up(other if content == cut.old else other[: len(other) // 2])


others = pytest.mark.parametrize("change_file", [other_surroundings])


@others
def test_a_journal_of_another_file_is_nothing_to_a_reader(
    cut: Cut, change_file: Callable[[Cut, bytes], None]
) -> None:
    change_file(cut, cut.old)
    content = cut.path.read_bytes()
    read_model(cut.path)
    assert journal_of(cut.path).read_bytes() == cut.journal
    onnxarchive.open(cut.path, mode="r+").close()
    assert cut.path.read_bytes() == content
    assert left(cut.path) == []


@others
def test_a_journal_of_another_file_is_replaced_by_a_writer(
    cut: Cut, change_file: Callable[[Cut, bytes], None]
) -> None:
    change_file(cut, cut.old)
    with onnxarchive.open(cut.path, mode="r+") as archive:
        archive.doc_string = "newest"
    assert read_model(cut.path) == "newest"
    onnxarchive.check(cut.path, full=True)
    assert left(cut.path) == []


@others
def test_a_torn_archive_with_a_journal_of_another_file_is_none_to_readers_and_writers(
    cut: Cut, change_file: Callable[[Cut, bytes], None]
) -> None:
    change_file(cut, cut.torn)
    content = cut.path.read_bytes()
    for refused in (read_model, rewrite):
        with pytest.raises(ArchiveError) as caught:
            refused(cut.path)
        assert caught.value.path == str(cut.path)
    assert cut.path.read_bytes() == content
    assert journal_of(cut.path).read_bytes() == cut.journal


@others
def test_recovery_removes_a_journal_of_another_file_where_the_archive_is_whole(
    cut: Cut, change_file: Callable[[Cut, bytes], None]
) -> None:
    change_file(cut, cut.old)
    content = cut.path.read_bytes()
    recovery = recover(cut.path)
    name = os.path.realpath(journal_of(cut.path))
    assert (recovery.is_rolled_back, recovery.removed) == (False, (name,))
    assert cut.path.read_bytes() == content
    assert left(cut.path) == []


@others
def test_recovery_says_what_to_do_with_a_journal_that_may_be_of_another_file(
    cut: Cut, change_file: Callable[[Cut, bytes], None]
) -> None:
    change_file(cut, cut.torn)
    content = cut.path.read_bytes()
    with pytest.raises(ArchiveError) as caught:
        recover(cut.path)
    message = str(caught.value)
    assert message.startswith(f"{cut.path}: expected an archive, or the journal of its last change")
    assert "a journal that is damaged or of another file" in message
    assert os.path.realpath(journal_of(cut.path)) in message
    assert message.endswith(
        "if the two belong together, force=True (--force) writes it back; both are left as they are"
    )
    assert cut.path.read_bytes() == content
    assert journal_of(cut.path).read_bytes() == cut.journal


@pytest.mark.parametrize("change_file", [other_inode])
def test_a_change_is_taken_back_in_a_file_with_another_inode(
    cut: Cut, change_file: Callable[[Cut, bytes], None]
) -> None:
    # A copy, or the same file on a file system that numbers files anew.
    change_file(cut, cut.torn)
    with pytest.raises(UnfinishedEditError):
        read_model(cut.path)
    assert recover(cut.path).is_rolled_back
    assert cut.path.read_bytes() == cut.old
    assert left(cut.path) == []


def test_a_whole_archive_with_another_inode_stays_and_its_journal_goes(cut: Cut) -> None:
    # Such as another model with the same weights, which somebody has moved to here.
    recover(cut.path)
    rewrite(cut.path)
    content = cut.path.read_bytes()
    journal_of(cut.path).write_bytes(cut.journal)
    other_inode(cut, content)
    with pytest.raises(UnfinishedEditError):
        read_model(cut.path)
    recovery = recover(cut.path)
    assert not recovery.is_rolled_back
    assert cut.path.read_bytes() == content
    assert left(cut.path) == []


@others
def test_force_writes_back_what_a_journal_holds_whatever_file_it_says_it_is_of(
    cut: Cut, change_file: Callable[[Cut, bytes], None]
) -> None:
    change_file(cut, cut.torn)
    assert recover(cut.path, force=True).is_rolled_back
    found = cut.path.read_bytes()
    with MappedFile(cut.path) as file:
        assert file.size == len(cut.old)
    with onnxarchive.open(cut.path) as archive:
        offset = list(archive.entries.values())[-1].header_offset
    assert found[offset:] == cut.old[offset:]
    assert left(cut.path) == []


def test_force_writes_no_damaged_journal_back(cut: Cut) -> None:
    cut.set_up(cut.torn, cut.journal[:-1])
    with pytest.raises(ArchiveError, match="damaged"):
        recover(cut.path, force=True)
    assert cut.path.read_bytes() == cut.torn


# Journals that a save leaves behind


def test_a_new_archive_takes_the_journal_of_the_old_one_with_it(cut: Cut) -> None:
    onnxarchive.save(model("saved"), cut.path)
    assert left(cut.path) == []
    assert read_model(cut.path) == "saved"


@posix
def test_a_file_that_gets_the_inode_of_the_one_with_a_journal_keeps_its_bytes(cut: Cut) -> None:
    inode = cut.path.stat().st_ino
    for count in range(50):  # of which one may get the inode that became free
        onnxarchive.save(model(f"saved {count}"), cut.path)
        assert read_model(cut.path) == f"saved {count}"
        if cut.path.stat().st_ino == inode:
            break
    content = cut.path.read_bytes()
    onnxarchive.open(cut.path, mode="r+").close()
    assert cut.path.read_bytes() == content


# What cannot be a journal


def require_error_naming_the_journal(cut: Cut, act: Callable[[Path], object]) -> None:
    name = os.path.realpath(journal_of(cut.path))
    with pytest.raises((ArchiveError, OSError)) as caught:
        act(cut.path)
    error = caught.value
    assert name in (error.filename if isinstance(error, OSError) else str(error))
    assert cut.path.read_bytes() == cut.torn


def open_for_changes(path: Path) -> None:
    onnxarchive.open(path, mode="r+").close()


ACTS = (read_model, rewrite, recover, open_for_changes)


@posix
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("kind", ["a pipe", "a directory"])
def test_what_is_no_regular_file_in_the_place_of_a_journal_is_named_and_not_waited_for(
    cut: Cut, kind: str, act: Callable[[Path], object]
) -> None:
    journal_of(cut.path).unlink()
    if kind == "a pipe":
        os.mkfifo(journal_of(cut.path))
    else:
        journal_of(cut.path).mkdir()
    require_error_naming_the_journal(cut, act)
    with pytest.raises(ArchiveFormatError, match=f"expected a regular file, found {kind}"):
        act(cut.path)
    assert left(cut.path) == [journal_of(cut.path).name]


@posix
@pytest.mark.parametrize("act", ACTS)
def test_a_journal_that_leads_to_itself_is_named(cut: Cut, act: Callable[[Path], object]) -> None:
    journal_of(cut.path).unlink()
    journal_of(cut.path).symlink_to(journal_of(cut.path))
    require_error_naming_the_journal(cut, act)


@posix
def test_a_journal_that_may_not_be_read_is_named() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        cut = cut_off(Path(directory) / "model.onnxa")
        journal_of(cut.path).chmod(0)
        with as_nobody(), pytest.raises(PermissionError) as caught:
            read_model(cut.path)
        assert caught.value.filename == os.path.realpath(journal_of(cut.path))
        assert cut.path.read_bytes() == cut.torn


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Not as root, who may read everything."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@posix
def test_an_archive_whose_name_leaves_no_room_for_a_journal(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 249 + ".onnxa")
    onnxarchive.save(model("old"), path)
    old = path.read_bytes()
    assert journal.read(path) is None
    assert read_model(path) == "old"
    recovery = recover(path)
    assert (recovery.is_rolled_back, recovery.removed) == (False, ())
    try:
        rewrite(path)
    except OSError as error:  # unless the file system shares blocks
        assert error.errno == errno.ENAMETOOLONG
        assert error.filename is not None
        assert path.name in error.filename
        assert path.read_bytes() == old
    assert os.listdir(tmp_path) == [path.name]
    replace_model(path, model("newest"), copy=True)
    assert read_model(path) == "newest"
    assert os.listdir(tmp_path) == [path.name]

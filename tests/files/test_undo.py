"""Undo logs: their bytes, other bytes, and the recovery of a file that ends with one."""

from __future__ import annotations

import hashlib
import itertools
import os
import shlex
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest
from edits import replace_model
from hypothesis import HealthCheck, given, settings, strategies as st
from interruptions import TRAILER_SIZE, Interrupted, interrupt
from limits import user
from models import documented_model, model_of, raw_tensor
from outcomes import count_outcome, requires_outcomes
from written import saved

import onnxarchive
from onnxarchive.editing.recover import recover
from onnxarchive.errors import ArchiveError, UnfinishedEditError
from onnxarchive.files import undo
from onnxarchive.files.local_file import MappedFile, PositionalWriter
from onnxarchive.files.undo import UnfinishedEdit
from onnxarchive.zipformat.layout import EntryLayout
from tools.zip_readers.readers import Reader, ReaderError

OLD = b"0123456789"


MAGIC = b"onnxa undo log 1"

# The log of an edit of the last three of these bytes.
GOLDEN = (
    "c8c7c6 "  # 789, inverted
    "6f6e6e786120756e646f206c6f672031 "  # magic
    "0700000000000000 0a00000000000000 "  # where 789 belongs, and the old size
    "7b5d0e6c82601413c8da7a143d753d9b3eb81e02e851ad4ded29f5ffa8d2a2d6 "  # of c8c7c6
    "2d0bf605eebc25173ae9770cd5655a114b21d7bafa5b888a5681885cdf36058f"  # of all since the magic
)


def inverted(content: bytes) -> bytes:
    return bytes(255 - byte for byte in content)


def trailer(
    copy: bytes, offset: int, old_size: int, *, magic: bytes = MAGIC, checksum: bytes | None = None
) -> bytes:
    """The end of a log, as written by somebody else."""
    signed = magic + struct.pack("<QQ", offset, old_size)
    signed += hashlib.sha256(copy).digest() if checksum is None else checksum
    return signed + hashlib.sha256(signed).digest()


def logged(old: bytes, offset: int) -> bytes:
    """The log of an edit of the end of a file, as written by somebody else."""
    copy = inverted(old[offset:])
    return copy + trailer(copy, offset, len(old))


# The bytes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(OLD)
    return path


def change(path: Path, offset: int, new: bytes) -> None:
    """Gives a file another end."""
    with MappedFile(path, is_writable=True) as file:
        undo.change_end(file, offset, offset + len(new), lambda target: target.write(new))


of_all_sizes = pytest.mark.parametrize("size", [0, 1, 5, 6, 7, 5000])
of_all_offsets = pytest.mark.parametrize("offset", [0, 4, 9])


@of_all_sizes
@of_all_offsets
def test_while_a_new_end_is_written_the_file_ends_with_an_undo_log(
    path: Path, offset: int, size: int
) -> None:
    found = []

    def write(target: PositionalWriter) -> None:
        found.append(path.read_bytes())
        target.write(b"x" * size)

    with MappedFile(path, is_writable=True) as file:
        undo.change_end(file, offset, offset + size, write)
    # The file reaches to where the new end will; of what a log is, see below.
    assert found == [OLD.ljust(offset + size, b"\0") + logged(OLD, offset)]
    assert path.read_bytes() == OLD[:offset] + b"x" * size


def test_an_undo_log_has_exactly_the_expected_bytes(path: Path) -> None:
    found = interrupt(path, lambda path: change(path, 7, b"new end"))
    assert found.log == bytes.fromhex(GOLDEN)


# Edits


@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt, ArchiveError])
@of_all_sizes
def test_an_edit_that_fails_is_rolled_back(
    path: Path, size: int, error: type[BaseException]
) -> None:
    def write(target: PositionalWriter) -> None:
        target.write(b"x" * (size // 2))
        raise error("halfway")

    with MappedFile(path, is_writable=True) as file:
        with pytest.raises(error, match="halfway"):
            undo.change_end(file, 4, 4 + size, write)
        assert file.size == len(OLD)
    assert path.read_bytes() == OLD


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b"xxxx", "expected to write up to offset 9, found 8"),
        (b"xxxxxx", "the bytes to write go beyond offset 9"),
    ],
)
def test_an_end_of_another_size_than_announced_is_rolled_back(
    path: Path, written: bytes, message: str
) -> None:
    with MappedFile(path, is_writable=True) as file, pytest.raises(ArchiveError, match=message):
        undo.change_end(file, 4, 9, lambda target: target.write(written))
    assert path.read_bytes() == OLD


# Reading a log


def places(edit: UnfinishedEdit | None) -> tuple[int, int, int | None] | None:
    return None if edit is None else (edit.offset, edit.size, edit.copy_offset)


@of_all_offsets
@of_all_sizes
def test_an_interrupted_edit_is_found_and_rolled_back_twice(
    path: Path, offset: int, size: int
) -> None:
    interrupted = interrupt(path, lambda path: change(path, offset, b"x" * size))
    for phase in ("log complete", "new end complete"):
        path.write_bytes(interrupted.states[phase])
        with MappedFile(path, is_writable=True) as file:
            edit = undo.unfinished_edit(file)
            assert places(edit) == (offset, len(OLD), interrupted.copy_offset)
            assert edit is not None
            assert edit.end_nbytes == len(OLD) - offset
            undo.restore(edit)
            assert file.size == len(OLD)
            assert path.read_bytes() == OLD
            assert undo.unfinished_edit(file) is None
        path.write_bytes(interrupted.states[phase])
        with MappedFile(path, is_writable=True) as file:
            os.pwrite(file.fileno(), OLD[offset:], offset)  # as if it were killed here
            again = undo.unfinished_edit(file)
            assert again is not None
            assert places(again) == places(edit)
            undo.restore(again)
        assert path.read_bytes() == OLD


@of_all_sizes
def test_the_file_before_an_interrupted_edit_is_read_wherever_it_lies(
    path: Path, size: int
) -> None:
    interrupted = interrupt(path, lambda path: change(path, 4, b"x" * size))
    for phase, content in interrupted.states.items():
        path.write_bytes(content)
        with MappedFile(path) as file:
            is_logged = content.endswith(interrupted.log)
            edit = undo.unfinished_edit(file) if is_logged else undo.find_torn(file, 4, len(OLD))
            assert edit is not None, phase
            assert edit.size == len(OLD)
            for offset, nbytes in itertools.product(range(13), range(13)):
                assert edit.read(offset, nbytes) == OLD[offset : offset + nbytes]


def require_none(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with MappedFile(path) as file:
        assert undo.unfinished_edit(file) is None
        assert undo.find_torn(file, 4, len(OLD)) is None


def test_a_log_with_a_flipped_bit_is_not_taken_for_one(path: Path) -> None:
    complete = logged(OLD, 4)
    for at, bit in itertools.product(range(len(complete)), range(8)):
        changed = bytearray(complete)
        changed[at] ^= 1 << bit
        if changed[at]:  # a byte that did not reach the disk is 0
            require_none(path, OLD + changed)


def test_a_log_with_impossible_offsets_is_not_taken_for_one(path: Path) -> None:
    copy = inverted(OLD[4:])
    assert OLD + copy + trailer(copy, 4, 10) == OLD + logged(OLD, 4)
    for offset, old_size in (
        (11, 10),  # the old end begins behind itself
        (4, 11),  # the copy is in the old file
        (5, 11),
        (0, 10),  # it has other bytes
        (0, 0),
        (0, 17),  # it begins before the file does
        (1 << 63, 1 << 63),
        (1 << 63, (1 << 63) + 6),
        ((1 << 64) - 7, (1 << 64) - 1),
        (4, (1 << 64) - 1),
        ((1 << 64) - 1, 4),
    ):
        require_none(path, OLD + copy + trailer(copy, offset, old_size))


def test_a_log_of_another_version_or_kind_is_not_taken_for_one(path: Path) -> None:
    copy = inverted(OLD[4:])
    for content in (
        OLD + copy + trailer(copy, 4, 10, magic=b"onnxa undo log 2"),
        OLD + copy + trailer(copy, 4, 10, checksum=bytes(32)),
        OLD + OLD[4:] + trailer(OLD[4:], 4, 10)[:-32] + bytes(31) + b"1",
        OLD + logged(OLD, 4) + b"\n",
        *(OLD, b"", trailer(b"", 0, 0)[1:]),
    ):
        require_none(path, content)


def test_a_log_is_torn_if_some_of_its_bytes_are_zeros(path: Path) -> None:
    complete = logged(OLD, 4)
    for gap, start, stop in itertools.product(
        (0, 1, 5000), range(0, len(complete), 3), range(0, len(complete) + 1, 17)
    ):
        torn = complete[:start] + bytes(max(stop - start, 0)) + complete[max(start, stop) :]
        path.write_bytes(OLD + bytes(gap) + torn)
        with MappedFile(path) as file:
            assert places(undo.find_torn(file, 4, len(OLD))) == (4, len(OLD), None)


def test_a_log_that_is_cut_off_or_follows_anything_but_zeros_is_not_torn(path: Path) -> None:
    complete = logged(OLD, 4)
    for size in range(len(complete)):
        require_none(path, OLD + complete[:size])
    require_none(path, OLD + b"1" + complete[:-1] + b"\0")
    require_none(path, OLD + bytes(5000) + b"1" + bytes(len(complete)))


@pytest.mark.parametrize("has_log", [True, False])
def test_a_file_that_is_truncated_while_its_log_is_looked_for_has_none(
    path: Path, has_log: bool
) -> None:
    path.write_bytes(OLD + (logged(OLD, 4) if has_log else bytes(200)))
    with MappedFile(path, is_writable=True) as file:
        for size in range(file.size):
            os.ftruncate(file.fileno(), size)
            assert undo.unfinished_edit(file) is None
            assert undo.find_torn(file, 4, len(OLD)) is None
            path.write_bytes(OLD + (logged(OLD, 4) if has_log else bytes(200)))


def test_a_file_that_is_truncated_while_it_is_rolled_back_is_left_as_it_is_then(path: Path) -> None:
    path.write_bytes(OLD + logged(OLD, 4))
    with MappedFile(path, is_writable=True) as file:
        edit = undo.unfinished_edit(file)
        assert edit is not None
        path.write_bytes(b"another")
        with pytest.raises(ArchiveError, match="expected 6 bytes of an undo log, found 0"):
            undo.restore(edit)
    assert path.read_bytes() == b"another"


# Archives


@pytest.fixture(scope="module", params=[(), ("decoder", "encoder")], ids=["alone", "of three"])
def further(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The ids of the further models of the archive, which share its weights."""
    ids: tuple[str, ...] = request.param
    return ids


@pytest.fixture(scope="module")
def archive(further: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    """An archive whose default model gets a longer one."""
    path = tmp_path_factory.mktemp("archive") / "m.onnxa"
    models = {id: documented_model(id) for id in further}
    onnxarchive.save(documented_model("old"), path, models=models)
    return interrupt(path, lambda path: replace_model(path, documented_model("new" * 30)))


def open_to_edit(path: Path) -> None:
    with onnxarchive.edit(path):
        pass


def require_refused(path: Path, *, is_unfinished: bool) -> None:
    """Requires that readers refuse a file, and change nothing."""
    content = path.read_bytes()
    with pytest.raises(ArchiveError) as refused:
        onnxarchive.open(path)
    assert refused.value.path == str(path)
    assert isinstance(refused.value, UnfinishedEditError) == is_unfinished
    if is_unfinished:
        assert f"'onnxarchive recover {shlex.quote(str(path))}' rolls the edit back" in str(
            refused.value
        )
        with pytest.raises(UnfinishedEditError):
            onnxarchive.check(path)
    else:
        assert onnxarchive.check(path)
    assert path.read_bytes() == content


def require_left(path: Path) -> None:
    """Requires that readers and recovery refuse a file, and leave it as it is."""
    content = path.read_bytes()
    for act in (
        recover,
        open_to_edit,
        lambda path: replace_model(path, documented_model("another")),
    ):
        with pytest.raises(ArchiveError) as refused:
            act(path)
        assert refused.value.path == str(path)
        assert path.read_bytes() == content


def require_recovered(path: Path, expected: bytes) -> None:
    """Requires that a file is refused until it is recovered, and checks it then."""
    require_refused(path, is_unfinished=True)
    recovery = recover(path)
    assert (recovery.is_rolled_back, recovery.removed) == (True, ())
    assert path.read_bytes() == expected
    assert not recover(path).is_rolled_back
    assert path.read_bytes() == expected
    assert os.listdir(path.parent) == [path.name]


def partly_zeros(log: bytes) -> Iterator[bytes]:
    """A log without each of its beginnings, each of its ends, and each set of its sixths."""
    for size in range(len(log) + 1):
        yield bytes(size) + log[size:]
        yield log[:size] + bytes(len(log) - size)
    size = -(-len(log) // 6)
    sixths = [log[at : at + size] for at in range(0, len(log), size)]
    yield from map(b"".join, itertools.product(*((bytes(len(it)), it) for it in sixths)))


@pytest.mark.sweep
def test_a_log_of_which_any_bytes_did_not_reach_the_disk_is_rolled_back(
    path: Path, archive: Interrupted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", os.fstat)
    before = archive.states["log complete"][: archive.copy_offset]
    assert before.rstrip(b"\0") == archive.old.rstrip(b"\0")
    logs = [*partly_zeros(archive.log)]
    for torn in logs:
        path.write_bytes(before + torn)
        require_recovered(path, archive.old)
    assert len(logs) == 2 * (len(archive.log) + 1) + 64 > 700


@pytest.mark.sweep
def test_a_log_that_is_cut_off_at_any_byte_is_refused_and_the_file_left_as_it_is(
    path: Path, archive: Interrupted
) -> None:
    for phase in ("log complete", "new end begun"):
        content = archive.states[phase]
        for size in range(archive.copy_offset + 1, len(content)):
            path.write_bytes(content[:size])
            require_refused(path, is_unfinished=False)
            require_left(path)


def test_readers_refuse_an_interrupted_edit_and_say_what_to_do(
    path: Path, archive: Interrupted
) -> None:
    for content in archive.states.values():
        path.write_bytes(content)
        for read in (
            onnxarchive.open,
            onnxarchive.check,
            onnxarchive.load,
            lambda path: onnxarchive.convert(path, path.with_name("other")),
            lambda path: replace_model(path, documented_model(), copy=True),
        ):
            with pytest.raises(UnfinishedEditError) as refused:
                read(path)
            assert str(refused.value) == (
                f"{path}: the last edit of the archive was interrupted; 'onnxarchive recover "
                f"{shlex.quote(str(path))}' rolls the edit back, and so does the next edit"
            )
        assert path.read_bytes() == content
        assert os.listdir(path.parent) == [path.name]


def test_an_interrupted_edit_is_rolled_back_by_opening_for_edits_and_by_the_next_edit(
    path: Path, archive: Interrupted
) -> None:
    for content in archive.states.values():
        path.write_bytes(content)
        open_to_edit(path)
        assert path.read_bytes() == archive.old
        path.write_bytes(content)
        replace_model(path, documented_model("new" * 30))
        assert path.read_bytes() == archive.new


def test_a_file_that_was_moved_or_copied_while_it_was_edited_takes_its_log_along(
    path: Path, archive: Interrupted
) -> None:
    path.write_bytes(archive.states["new end begun"])
    moved = path.parent / "moved" / "another name"
    moved.parent.mkdir()
    path.rename(moved)
    require_recovered(moved, archive.old)


# What others put there, of an archive, the copy of its old end, and another archive.
HOSTILE: dict[str, Callable[[Interrupted, bytes, bytes], bytes]] = {
    # The rest of a longer file that a whole archive was written into.
    "log of another archive": lambda it, _, other: (
        it.old + logged(other, other.index(b"__MODEL_PROTO") - 30)
    ),
    "trailer of another archive": lambda it, copy, other: (
        it.old + copy + logged(other, it.offset)[-TRAILER_SIZE:]
    ),
    "copy that is no end": lambda it, copy, _: (
        it.old + bytes(len(copy)) + trailer(bytes(len(copy)), it.offset, len(it.old))
    ),
    "copy of an end that is damaged": lambda it, *_: (
        it.old + logged(it.old[:-30] + b"?" + it.old[-29:], it.offset)
    ),
    "wrong checksum of the copy": lambda it, copy, _: (
        it.states["new end begun"][:-TRAILER_SIZE]
        + trailer(copy, it.offset, len(it.old), checksum=b"\1" * 32)
    ),
    "wrong checksum of the trailer": lambda it, *_: it.states["new end begun"][:-1] + b"\1",
    "old end behind the file": lambda it, *_: it.old + trailer(b"", 1 << 40, 1 << 40),
    "old end over its own copy": lambda it, copy, _: (
        it.old + copy + trailer(copy, it.offset + 1, len(it.old) + 1)
    ),
    "old end amid the weights": lambda it, *_: (
        it.old + logged(it.old[: it.offset - 500], it.offset - 800)
    ),
    "nothing but a log": lambda it, *_: it.log,
    "empty log": lambda it, *_: it.states["new end begun"] + trailer(b"", 0, 0),
    "log of a file with a log": lambda it, *_: (
        it.states["new end begun"] + logged(it.states["new end begun"], it.offset)
    ),
    "log behind a log": lambda it, *_: it.states["new end begun"] + it.log,
    "log of a whole archive": lambda it, *_: it.new + logged(it.new, it.offset),
    "log of another model": lambda it, *_: it.new + it.log,
}
# The archives that some are recovered to; the others are left as they are.
RECOVERED: dict[str, Callable[[Interrupted], bytes]] = {
    "log behind a log": lambda it: it.old,
    "log of a whole archive": lambda it: it.new,
    "log of another model": lambda it: it.old,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_log_gives_an_archive_back_or_changes_nothing(
    path: Path, archive: Interrupted, kind: str
) -> None:
    other = saved(documented_model("other", seed=7))
    path.write_bytes(HOSTILE[kind](archive, inverted(archive.old[archive.offset :]), other))
    if kind in RECOVERED:
        require_recovered(path, RECOVERED[kind](archive))
        return
    with MappedFile(path) as file:
        is_complete = undo.unfinished_edit(file) is not None
    require_refused(path, is_unfinished=is_complete)
    require_left(path)
    with pytest.raises(ArchiveError) as refused:
        recover(path)
    assert ("not give a valid archive" in str(refused.value)) == is_complete


def test_a_log_of_an_archive_with_other_weights_is_not_rolled_back(
    path: Path, archive: Interrupted, further: tuple[str, ...]
) -> None:
    models = {id: documented_model(id, seed=7) for id in further}
    onnxarchive.save(documented_model("old", seed=7), path, models=models)
    other = path.read_bytes()
    assert len(other) == len(archive.old)
    assert other[: archive.offset] != archive.old[: archive.offset]
    path.write_bytes(other + bytes(500) + archive.log)
    with pytest.raises(
        ArchiveError,
        match=r"rolling it back would not give a valid archive \(.*'w'.*\); the file is",
    ):
        recover(path)
    require_left(path)


@pytest.mark.parametrize("nbytes", [300, 1 << 62, (1 << 64) - 100])
def test_a_file_that_ends_within_its_first_entry_is_no_interrupted_edit(
    path: Path, nbytes: int
) -> None:
    path.write_bytes(EntryLayout(b"w", nbytes, 0, 0).pack()[0] + bytes(100))
    require_refused(path, is_unfinished=False)
    require_left(path)
    with pytest.raises(ArchiveError):
        onnxarchive.convert(path, path.with_name("converted.onnxa"))


def test_a_whole_archive_is_never_changed_whatever_its_model_holds(
    path: Path, archive: Interrupted
) -> None:
    for held in (archive.log, archive.states["new end begun"], logged(OLD, 4)):
        made = model_of(raw_tensor("w", dims=(300,)))
        made.graph.initializer.add(
            name="log", data_type=onnx.TensorProto.UINT8, dims=[len(held)], raw_data=held
        )
        # What follows the graph keeps the archives in it away from the end (rule ZIP-16).
        made.metadata_props.add(key="padding", value="x" * 70_000)
        for size_threshold in (0, 1 << 20):
            assets = {"log": held, "z": archive.new}
            onnxarchive.save(made, path, size_threshold=size_threshold, assets=assets)
            content = path.read_bytes()
            assert not recover(path).is_rolled_back
            open_to_edit(path)
            assert onnxarchive.check(path, full=True) == []
            assert path.read_bytes() == content


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="files of others need root")
def test_a_log_that_another_user_has_written_is_rolled_back_by_those_who_may_write_the_file(
    own_path: Path, archive: Interrupted
) -> None:
    own_path.parent.chmod(0o755)
    own_path.write_bytes(archive.states["new end begun"])
    with user(65534):
        require_refused(own_path, is_unfinished=True)
        for act in (recover, open_to_edit):
            with pytest.raises(PermissionError) as refused:
                act(own_path)
            assert refused.value.filename == str(own_path)
        assert own_path.read_bytes() == archive.states["new end begun"]
    os.chown(own_path, 65534, 65534)
    require_recovered(own_path, archive.old)
    assert (own_path.stat().st_uid, own_path.stat().st_gid) == (65534, 65534)


def is_exact_log(tail: bytes, log: bytes) -> bool:
    """Whether these bytes after an archive are zeros and parts of its log."""
    gap = len(tail) - len(log)
    return (
        gap >= 0
        and not tail[:gap].strip(b"\0")
        and all(found in (0, byte) for found, byte in zip(tail[gap:], log, strict=True))
    )


@st.composite
def tails(draw: st.DrawFn, log: bytes) -> bytes:
    """Random bytes, zeros and parts of a log."""
    part = st.one_of(
        st.binary(max_size=100),
        st.integers(0, 600).map(bytes),
        st.tuples(st.integers(0, len(log)), st.integers(0, len(log))).map(
            lambda at: log[min(at) : max(at)]
        ),
        st.just(log),
        st.just(log[:-1] + b"\0"),
    )
    return b"".join(draw(st.lists(part, max_size=4)))


@pytest.mark.sweep
@requires_outcomes(torn=10, complete=10, refused=50, whole=5)
@settings(
    max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(data=st.data())
def test_recovery_changes_nothing_but_exact_logs(
    path: Path, archive: Interrupted, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    monkeypatch.setattr(os, "fsync", os.fstat)
    log = logged(archive.old, archive.offset)
    tail = data.draw(tails(log))
    content = archive.old + tail
    path.write_bytes(content)
    if is_exact_log(tail, log):
        count_outcome("torn" if tail else "whole")
        require_recovered(path, archive.old)
    elif tail.endswith(log):  # a complete one, after what may be a new end
        count_outcome("complete")
        recover(path)
        assert path.read_bytes() == archive.old
    elif tail:
        count_outcome("refused")
        require_refused(path, is_unfinished=False)
        require_left(path)
    else:
        count_outcome("whole")
        assert not recover(path).is_rolled_back
        assert path.read_bytes() == content


# Holes


TIB = 1 << 40

sparse = pytest.mark.skipif(not hasattr(os, "SEEK_DATA"), reason="no system call finds the holes")


@pytest.fixture
def little_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test read some MiB of files and no more."""
    pread = os.pread
    left = 16 << 20

    def counted(descriptor: int, size: int, offset: int) -> bytes:
        nonlocal left
        left -= size
        assert left >= 0, "holes are read"
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", counted)


@sparse
@pytest.mark.usefixtures("little_reading")
def test_a_hole_after_an_archive_is_an_interrupted_edit_and_is_not_read(
    path: Path, archive: Interrupted
) -> None:
    path.write_bytes(archive.old)
    os.truncate(path, TIB)
    for read in (onnxarchive.open, onnxarchive.check):
        with pytest.raises(UnfinishedEditError):
            read(path)
    assert recover(path).is_rolled_back
    assert path.read_bytes() == archive.old


@sparse
@pytest.mark.usefixtures("little_reading")
def test_a_torn_log_is_found_after_a_hole_and_not_after_other_bytes(
    path: Path, archive: Interrupted
) -> None:
    torn = archive.log[: len(archive.log) // 2]
    for other in (b"", b"1"):
        path.write_bytes(archive.old)
        with path.open("r+b") as file:
            file.seek(TIB // 2)
            file.write(other)
            file.seek(TIB)
            file.write(torn)
            file.truncate(TIB + len(archive.log))
        if other:
            require_refused_unread(path)
        else:
            assert recover(path).is_rolled_back
            assert path.read_bytes() == archive.old


def require_refused_unread(path: Path) -> None:
    for act in (onnxarchive.open, recover):
        with pytest.raises(ArchiveError) as refused:
            act(path)
        assert not isinstance(refused.value, UnfinishedEditError)


@sparse
@pytest.mark.usefixtures("little_reading")
def test_a_log_of_a_larger_end_than_archives_have_is_neither_used_nor_read(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(2 * TIB)
        file.seek(0, os.SEEK_END)
        file.write(trailer(b"", 4, TIB))
    with MappedFile(path) as found:
        assert undo.unfinished_edit(found) is None
        assert undo.find_torn(found, 4, TIB - 4096) is None
    require_refused_unread(path)


@sparse
@pytest.mark.usefixtures("little_reading")
def test_a_temporary_file_of_which_nothing_reached_the_disk_is_removed_unread(
    path: Path, archive: Interrupted
) -> None:
    path.write_bytes(archive.old)
    left = path.with_name(f".{path.name}.onnxarchive-1.tmp")
    left.touch()
    os.truncate(left, TIB)
    assert recover(path).removed == (str(left),)


# Other zip readers


@pytest.mark.tool
def test_no_zip_reader_finds_an_entry_in_a_log(path: Path, zip_reader: Reader) -> None:
    """Neither in a log alone, nor in that of a file whose old model is overwritten."""
    path = path.with_suffix(".zip")
    onnxarchive.save(model_of(raw_tensor("w", dims=(2,))), path, size_threshold=1 << 20)
    contents = [path.read_bytes(), logged(path.read_bytes(), 0)]
    onnxarchive.save(documented_model("old"), path)
    archive = interrupt(path, lambda path: replace_model(path, documented_model("new" * 50_000)))
    contents += [archive.old, archive.new]
    contents += [archive.states["new end begun"], archive.states["new end complete"]]
    paths = [path.with_name(f"{number}.zip") for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    (scratch := path.with_name("scratch")).mkdir()
    plain, log, old, new, begun, complete = (
        set() if isinstance(found, ReaderError) else {entry.sha256 for entry in found}
        for found in zip_reader.read_all(paths, scratch)
    )
    assert len(plain) == 1
    assert log == set()
    assert len(old - new) == 1  # the old model
    assert begun | complete <= new


def test_zipfile_would_find_a_copy_that_is_not_inverted(path: Path) -> None:
    content = saved(documented_model("old"))
    for log, is_found in (
        (content, True),
        (content + logged(content, 0)[-TRAILER_SIZE:], True),
        (logged(content, 0), False),
    ):
        path.write_bytes(log)
        assert zipfile.is_zipfile(path) == is_found

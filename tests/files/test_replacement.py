"""Files that are whole or untouched: beside the target, and then in its place."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from limits import limited
from lock_calls import is_free
from models import open_below
from processes import completed, started
from written import contents

from onnxarchive.editing.recover import recover
from onnxarchive.errors import ArchiveError, LockedError
from onnxarchive.files import clones_and_sync, locking
from onnxarchive.files.clones_and_sync import sync_directory
from onnxarchive.files.hidden_files import remove_abandoned
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.replacement import Replacement, Require

if sys.platform != "win32":
    import resource

posix = pytest.mark.skipif(os.name != "posix", reason="POSIX's kinds of files and permissions")
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what is open")
OLD, NEW = {"target": b"old"}, {"target": b"new"}


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a Python program in a process of its own."""
    return completed([sys.executable, "-c", textwrap.dedent(program), *arguments])


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A file with old content, alone in `tmp_path`."""
    path = tmp_path / "target"
    path.write_bytes(b"old")
    return path


@pytest.fixture
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MappedFile]:
    """Stands for a target that the caller has locked."""
    path = tmp_path_factory.mktemp("locked") / "file"
    path.touch()
    with MappedFile(path) as file:
        yield file


def replace(target: str | Path, require: Require | None = None) -> None:
    with Replacement(target) as replacement:
        replacement.writer.write(b"new")
        replacement.commit(require)


def prepared(target: str | Path, **options: Any) -> Replacement:
    """A replacement that is complete, but for its name."""
    replacement = Replacement(target, **options)
    replacement.writer.write(b"new")
    return replacement


# Replacing


@pytest.mark.parametrize("is_there", [False, True])
def test_a_target_is_what_it_was_until_the_new_file_is_complete(
    target: Path, is_there: bool
) -> None:
    if not is_there:
        target.unlink()
    with prepared(target) as replacement:
        assert (target.exists() and target.read_bytes()) == (is_there and b"old")
        replacement.commit()
    assert contents(target.parent) == NEW
    assert sys.platform != "linux" or open_below(target.parent) == []


@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("is_there", [False, True])
def test_an_error_leaves_the_target_and_nothing_else(
    target: Path, error: type[BaseException], is_there: bool
) -> None:
    if not is_there:
        target.unlink()
    with pytest.raises(error), prepared(target):
        raise error("halfway")
    assert contents(target.parent) == (OLD if is_there else {})
    assert sys.platform != "linux" or open_below(target.parent) == []


def test_a_replacement_without_references_leaves_nothing(tmp_path: Path) -> None:
    replacement = Replacement(tmp_path / "target")
    assert len(names(tmp_path)) == 1
    del replacement
    assert names(tmp_path) == []


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_replacement_that_cannot_be_committed_leaves_nothing_and_names_the_target(
    target: Path, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replacement = prepared(target)
    monkeypatch.setattr(os, function, Mock(side_effect=OSError(errno.EIO, "it fails")))
    with pytest.raises(OSError, match="it fails") as caught, replacement:
        replacement.commit()
    assert caught.value.filename == str(target)
    assert contents(target.parent) == OLD


@posix
def test_an_error_of_writing_names_the_target(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", Mock(side_effect=OSError(errno.EIO, "it fails")))
    with pytest.raises(OSError, match="it fails") as caught:
        replace(target)
    assert caught.value.filename == str(target)
    assert contents(target.parent) == OLD


def test_a_replacement_is_discarded_once_and_not_after_it_was_committed(target: Path) -> None:
    replacement = Replacement(target)
    for _ in range(2):
        replacement.close()
        assert contents(target.parent) == OLD
    replacement = prepared(target)
    replacement.commit()
    replacement.close()
    assert contents(target.parent) == NEW


def test_the_file_is_synced_before_it_gets_its_name_and_its_directory_after(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    rename = os.replace

    def traced_fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        calls.append("sync directory" if stat.S_ISDIR(status.st_mode) else "sync file")
        if calls[-1] == "sync file":
            assert status.st_size == 3, "what is buffered is not synced"

    def traced_replace(*paths: str) -> None:
        calls.append("rename")
        rename(*paths)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "replace", traced_replace)
    replace(target)
    assert calls == ["sync file", "rename"] + ["sync directory"] * (os.name == "posix")


@posix
def test_a_file_to_which_another_program_gave_the_new_name_stays(target: Path) -> None:
    with Replacement(target, resumes=True):
        (unfinished,) = {*target.parent.iterdir()} - {target}
        unfinished.unlink()
        unfinished.touch()
    unfinished.unlink()
    replacement = prepared(target)
    (temporary,) = {*target.parent.iterdir()} - {target}
    replacement.commit()
    temporary.write_bytes(b"bad")
    del replacement
    assert contents(target.parent) == NEW | {temporary.name: b"bad"}


# Links


@posix
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_a_link_and_its_target_is_replaced(tmp_path: Path, exists: bool) -> None:
    there, link = tmp_path / "there", tmp_path / "link"
    there.mkdir()
    if exists:
        (there / "file").write_bytes(b"old")
    link.symlink_to("there/file")
    with prepared(link) as replacement:
        # It is written beside the file, which may be on another disk than the link.
        assert len(names(there)) == 1 + exists
        assert names(tmp_path) == ["link", "there"]
        replacement.commit()
    assert link.is_symlink()
    assert contents(there) == {"file": b"new"}


@posix
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_that_is_not_followed_is_replaced_and_its_target_stays(
    tmp_path: Path, exists: bool, locked: MappedFile
) -> None:
    there, link = tmp_path / "there", tmp_path / "link"
    there.mkdir()
    if exists:
        (there / "file").write_bytes(b"old")
        (there / "file").chmod(0o640)
    link.symlink_to("there/file")
    replacement = prepared(link, locked=locked)
    assert len(names(tmp_path)) == 3
    assert link.is_symlink()
    replacement.commit()
    assert names(tmp_path) == ["link", "there"]
    assert not link.is_symlink()
    assert link.read_bytes() == b"new"
    assert contents(there) == ({"file": b"old"} if exists else {})
    assert not exists or stat.S_IMODE(link.stat().st_mode) == 0o640


@posix
def test_a_link_that_is_not_followed_may_be_reached_through_another_link(
    tmp_path: Path, locked: MappedFile
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "directory").symlink_to("there")
    (tmp_path / "there" / "link").symlink_to("nowhere")
    prepared(tmp_path / "directory" / "link", locked=locked).commit()
    assert names(tmp_path) == ["directory", "there"]
    assert contents(tmp_path / "there") == {"link": b"new"}


@posix
def test_a_link_to_a_directory_is_refused_even_if_it_is_not_followed(
    tmp_path: Path, locked: MappedFile
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    with pytest.raises(IsADirectoryError):
        Replacement(tmp_path / "link", locked=locked)
    assert names(tmp_path) == ["link", "there"]


@posix
def test_another_name_of_the_target_keeps_the_old_content(target: Path) -> None:
    os.link(target, target.with_name("other"))
    replace(target)
    assert contents(target.parent) == {"other": b"old"} | NEW


# Targets that are refused


@posix
@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("directory", IsADirectoryError, "irectory"),
        ("new/", IsADirectoryError, "irectory"),
        ("missing/target", FileNotFoundError, "create it first"),
        ("file/target", NotADirectoryError, "ot a directory"),
        ("pipe", FileExistsError, "is not a regular file"),
        ("/dev/null", FileExistsError, "is not a regular file"),
        ("loop", OSError, "symbolic links"),
        ("n" * 256, OSError, "too long"),
    ],
)
def test_a_path_that_cannot_be_a_file_is_refused_as_a_target(
    tmp_path: Path, name: str, error: type[OSError], message: str
) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_bytes(b"old")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    before = names(tmp_path)
    target = os.path.join(tmp_path, name)
    with pytest.raises(error, match=message) as caught:
        Replacement(target)
    if error is IsADirectoryError:
        assert caught.value.filename == target
    assert names(tmp_path) == before
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_an_empty_path_is_refused_as_a_target() -> None:
    with pytest.raises(FileNotFoundError, match="target is empty; give the path of a file: ''"):
        Replacement("")


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="only Linux has /proc")
def test_a_pipe_without_a_path_is_refused_as_a_pipe() -> None:
    reading, writing = os.pipe()
    with (
        open(reading),
        open(writing, "w"),
        pytest.raises(FileExistsError, match="is not a regular file"),
    ):
        Replacement(f"/proc/self/fd/{writing}")


@posix
@pytest.mark.parametrize("moment", range(1, 6))
def test_a_target_that_is_removed_at_any_moment_is_written(
    target: Path, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, looks = os.stat, iter(range(moment))

    def look_and_remove(path: Any, **options: Any) -> os.stat_result:
        status = look(path, **options)
        if path == str(target) and next(looks, None) == moment - 1:
            target.unlink()
        return status

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", look_and_remove)
        replacement = Replacement(str(target))
    replacement.writer.write(b"new")
    replacement.commit()
    assert target.read_bytes() == b"new"


@posix
@pytest.mark.parametrize("name", ["n" * 255, "é" * 127])
def test_the_longest_name_can_be_written(tmp_path: Path, name: str) -> None:
    replace(tmp_path / name)
    assert contents(tmp_path) == {name: b"new"}


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_relative_path_keeps_its_meaning_after_a_change_of_directory(
    tmp_path: Path, is_locked: bool, locked: MappedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    replacement = prepared("target", locked=locked if is_locked else None)
    monkeypatch.chdir("other")
    replacement.commit()
    assert contents(tmp_path) == NEW


def test_two_replacements_at_once_do_not_mix_and_the_last_one_stays(target: Path) -> None:
    first, second = Replacement(target), Replacement(target)
    first.writer.write(b"first")
    second.writer.write(b"second")
    second.commit()
    assert target.read_bytes() == b"second"
    first.commit()
    assert contents(target.parent) == {"target": b"first"}


# Locks


def test_a_file_is_locked_as_long_as_it_has_no_other_name(tmp_path: Path) -> None:
    replacement = prepared(tmp_path / "target")
    (temporary,) = names(tmp_path)
    assert not is_free(tmp_path / temporary)
    replacement.commit()
    assert is_free(tmp_path / "target")


@posix
def test_a_file_may_stay_open_and_locked_after_it_is_committed(target: Path) -> None:
    with prepared(target).commit_open() as file:
        assert (file.path, file.size, file.read(0, 9)) == (str(target), 3, b"new")
        assert file.is_at(target)
        assert not is_free(target)
    assert is_free(target)


def test_the_requirement_is_checked_before_the_rename_while_the_target_is_locked(
    target: Path,
) -> None:
    seen = []
    replace(target, require=lambda _: seen.append((target.read_bytes(), is_free(target))))
    assert seen == [(b"old", False)]
    assert is_free(target)


def test_a_target_that_does_not_meet_the_requirement_is_not_replaced(target: Path) -> None:
    with pytest.raises(ArchiveError, match="expected another one"):
        replace(target, require=Mock(side_effect=ArchiveError("expected another one")))
    assert contents(target.parent) == OLD
    assert is_free(target)


def test_a_target_that_this_thread_has_locked_is_not_waited_for(target: Path) -> None:
    with (
        MappedFile(target, is_writable=True) as file,
        file.locked(is_exclusive=True),
        pytest.raises(LockedError, match="finish the edit first") as caught,
    ):
        replace(target)
    assert caught.value.path == str(target)
    assert contents(target.parent) == OLD


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"of another")


REPLACED = "has replaced or removed .*, to which 3 bytes were written"


def put_another(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"bad")


@posix
@pytest.mark.parametrize("is_late", [False, True])  # while the target is waited for
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (append, "has changed .*: expected the 3 bytes that were written, found 13"),
        (put_another, REPLACED),
        (Path.unlink, REPLACED),
    ],
)
def test_a_temporary_file_that_was_changed_or_exchanged_is_not_renamed(
    target: Path, change: Callable[[Path], None], message: str, is_late: bool
) -> None:
    replacement = prepared(target)
    (temporary,) = {*target.parent.iterdir()} - {target}
    if not is_late:
        change(temporary)
    with pytest.raises(ArchiveError, match=f"another process {message}"), replacement:
        replacement.commit((lambda _: change(temporary)) if is_late else None)
    of_another = {temporary.name: b"bad"} if change is put_another else {}
    assert contents(target.parent) == OLD | of_another


@linux
def test_on_windows_neither_file_is_open_when_it_is_renamed(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    rename, path = os.replace, os.fspath(target)

    def traced(*paths: str) -> None:
        seen.append(open_below(target.parent))
        rename(*paths)

    monkeypatch.setattr(os, "replace", traced)
    with monkeypatch.context() as windows:
        windows.setattr(os, "name", "nt")
        prepared(path).commit()
    assert seen == [[]]
    assert target.read_bytes() == b"new"
    assert open_below(target.parent) == []


def test_a_temporary_name_that_is_taken_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What another machine may write in a shared directory, with locks that are not seen here.
    monkeypatch.setattr(clones_and_sync, "_LOCAL_TYPES", frozenset())
    others = {f".target.onnxarchive-{number}.tmp": b"of another" for number in (0, 2)}
    for other in others:
        (tmp_path / other).write_bytes(b"of another")
    replace(tmp_path / "target")
    Replacement(tmp_path / "target").close()
    assert contents(tmp_path) == others | NEW


@posix
def test_a_directory_that_may_be_written_and_not_listed_is_not_synced(
    own_path: Path, nobody: None
) -> None:
    own_path.parent.chmod(0o333)
    replace(own_path)
    sync_directory(str(own_path.parent))
    own_path.parent.chmod(0o700)
    assert own_path.read_bytes() == b"new"


# Processes that end


@posix
def test_a_disk_that_is_full_when_the_last_bytes_are_written_leaves_nothing(target: Path) -> None:
    # A limit on the size of files is what a full disk is, to a process of its own.
    with (  # noqa: PT012
        limited(resource.RLIMIT_FSIZE, 100_000),
        pytest.raises(OSError, match="File too large") as caught,
        Replacement(target) as replacement,
    ):
        replacement.writer.write(bytes(99_999))
        replacement.writer.write(b"22")
    assert caught.value.filename == str(target)
    assert contents(target.parent) == OLD


@posix
def test_a_process_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    program = """
    import signal, sys
    from onnxarchive.files.replacement import Replacement

    replacement = Replacement(sys.argv[1])
    replacement.writer.write(b"new")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which may be ignored by inheritance
    signal.raise_signal(signal.SIGINT)
    """
    done = run(program, tmp_path / "target")
    assert "KeyboardInterrupt" in done.stderr
    assert names(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@pytest.mark.parametrize("resumes", ["", "resumes"])
def test_a_child_that_ends_leaves_the_replacement_of_its_parent_and_its_lock(
    tmp_path: Path, resumes: str
) -> None:
    program = """
    import os, sys
    from onnxarchive.files.hidden_files import remove_unlocked
    from onnxarchive.files.replacement import Replacement

    replacement = Replacement(sys.argv[1], resumes=bool(sys.argv[2]))
    child = os.fork()
    if child == 0:
        replacement.close()
        sys.exit()
    os.waitpid(child, 0)
    (name,) = os.listdir(os.path.dirname(sys.argv[1]))
    print(remove_unlocked(os.path.join(os.path.dirname(sys.argv[1]), name)))
    replacement.writer.write(b"new")
    replacement.commit()
    """
    done = run(program, tmp_path / "target", resumes)
    assert (done.stdout, done.stderr) == ("False\n", "")
    assert contents(tmp_path) == NEW


# Files of killed processes

SAVER = """
    import sys
    import numpy as np, onnx, onnxarchive
    from onnx import numpy_helper

    def progress(done, total):
        if done < total:
            print("amid", flush=True)
            sys.stdin.readline()

    tensor = numpy_helper.from_array(np.ones(5 << 20, np.float32), "w")  # 20 MiB
    graph = onnx.GraphProto(name="graph", initializer=[tensor])
    model = onnx.ModelProto(
        ir_version=10, opset_import=[onnx.OperatorSetIdProto(version=21)], graph=graph
    )
    onnxarchive.save(model, sys.argv[1], progress=progress)
"""


@contextlib.contextmanager
def amid_a_save(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has written some MiB of an archive, and waits."""
    command = [sys.executable, "-c", textwrap.dedent(SAVER), path]
    with started(command, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "amid\n"
        yield process


@pytest.mark.parametrize("name", ["model.onnxa", "m" * 255, "a model [1]*.onnxa"])
def test_the_file_of_a_killed_save_is_removed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with amid_a_save(path) as process:
        process.kill()
        process.wait()
    (left,) = names(tmp_path)
    assert (tmp_path / left).stat().st_size > 8 << 20
    recovery = recover(path)  # which was never there
    assert not recovery.is_rolled_back
    assert recovery.removed == (os.path.join(os.path.realpath(tmp_path), left),)
    assert names(tmp_path) == []
    with pytest.raises(FileNotFoundError) as caught:
        recover(path)
    assert caught.value.filename == str(path)


def test_the_file_of_a_living_process_stays(tmp_path: Path) -> None:
    path = tmp_path / "model.onnxa"
    with amid_a_save(path) as process:
        (left,) = names(tmp_path)
        assert remove_abandoned(path) == []
        with pytest.raises(FileNotFoundError):
            recover(path)
        assert names(tmp_path) == [left]
        process.communicate("\n" * 9)
        assert process.returncode == 0
    assert names(tmp_path) == ["model.onnxa"]
    assert recover(path).removed == ()
    assert path.stat().st_size > 20 << 20


def test_the_file_that_this_process_writes_stays(tmp_path: Path) -> None:
    replacement = prepared(tmp_path / "target")
    assert remove_abandoned(tmp_path / "target") == []
    replacement.commit()
    assert contents(tmp_path) == NEW


@posix
def test_only_files_with_the_name_of_an_abandoned_one_are_removed(target: Path) -> None:
    folder = target.parent
    for name in (
        ".target.onnxarchive-1.tmp.bak",
        ".target.onnxarchive-1",
        ".target.onnxarchive--1.tmp",
        ".target.onnxarchive-1-.tmp",
        ".target.onnxarchive-a.tmp",
        ".target.onnxarchive-.tmp",
        ".target.1-1.tmp",
        ".target.onnxa.onnxarchive-1.tmp",
        ".targets.onnxarchive-1.tmp",
        "target.onnxarchive-1.tmp",
        ".Target.onnxarchive-1.tmp",
        "x.target.onnxarchive-1.tmp",
    ):
        (folder / name).write_bytes(b"of somebody")
    (folder / ".target.onnxarchive-21.tmp").symlink_to("target")
    (folder / ".target.onnxarchive-22.tmp").symlink_to("nowhere")
    (folder / ".target.onnxarchive-23.tmp").mkdir()
    os.mkfifo(folder / ".target.onnxarchive-24.tmp")
    before = names(folder)
    (folder / ".target.onnxarchive-1.tmp").write_bytes(b"abandoned")
    (folder / ".target.onnxarchive-456.tmp").write_bytes(b"")
    removed = [f"{os.path.realpath(folder)}/.target.onnxarchive-{it}.tmp" for it in (1, 456)]
    assert remove_abandoned(target) == removed
    assert names(folder) == before
    assert remove_abandoned(target) == []


@posix
def test_abandoned_files_are_looked_for_beside_the_target_of_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/file")
    left = tmp_path / "there" / ".file.onnxarchive-1.tmp"
    for folder, name in ((tmp_path, "link"), (left.parent, "file")):
        monkeypatch.chdir(folder)
        left.touch()
        assert remove_abandoned(name) == [os.path.realpath(left)]


def test_looking_for_abandoned_files_in_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        remove_abandoned(tmp_path / "missing" / "target")


def leftover(archive: Path, number: int = 1) -> Path:
    """A path as that of a file that a process left when it was killed amid a save."""
    return archive.with_name(f".{archive.name}.onnxarchive-{number}.tmp")


def recovered(archive: Path) -> list[str]:
    """The names of the files that `recover` removes."""
    return [os.path.basename(path) for path in recover(archive).removed]


def test_a_file_with_the_name_of_an_abandoned_one_is_removed_whatever_its_content(
    archive: Path,
) -> None:
    content = archive.read_bytes()
    without_its_beginning = bytes(4096) + content[4096:]
    left = [b"", content, content[:500], bytes(1000), without_its_beginning, b"of an export"]
    for number, begun in enumerate(left):
        leftover(archive, number).write_bytes(begun)
    assert recovered(archive) == [leftover(archive, number).name for number in range(6)]
    assert contents(archive.parent) == {archive.name: content}


@posix
def test_another_file_that_took_the_name_of_an_abandoned_one_stays(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leftover(archive).touch()
    lock = locking.keep_exclusive

    def late(descriptor: int, timeout: float) -> bool:
        leftover(archive).unlink()
        leftover(archive).write_bytes(b"What I wanted to keep.")
        return lock(descriptor, timeout)

    monkeypatch.setattr(locking, "keep_exclusive", late)
    assert recovered(archive) == []
    assert leftover(archive).read_bytes() == b"What I wanted to keep."

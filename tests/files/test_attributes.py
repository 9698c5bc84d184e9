"""Owner and permissions of archives that are replaced, and what is said of lost attributes.

What a file grants is asked of the system: it is opened as each of several users. Most of this is
root's, who alone can be others; where tests do not run as root they are skipped.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from struct import pack
from typing import Any

import edits
import numpy as np
import onnx
import pytest
from edits import on_a_clone
from limits import umask, user
from models import model_of, raw_tensor
from processes import completed
from public_calls import WRITES as WHOLE

import onnxarchive
from onnxarchive.cli import main
from onnxarchive.errors import AttributesWarning

linux = pytest.mark.skipif(sys.platform != "linux", reason="attributes as Linux has them")
posix = pytest.mark.skipif(os.name != "posix", reason="POSIX's owners and permissions")
root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be several users"
)

# Users and groups that the system need not know.
OWNER, MEMBER, NAMED, DENIED, OTHER = range(54321, 54326)
TEAM, OTHERS = 54331, 54332
USERS = (OWNER, MEMBER, NAMED, DENIED, OTHER)

Write = Callable[[Path], object]


def model(doc_string: str = "old", name: str = "w") -> onnx.ModelProto:
    made = model_of(raw_tensor(name, dims=(3000,)), raw_tensor("u", dims=(300,)))
    made.doc_string = doc_string
    return made


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory that every user can enter, unlike that of pytest, beside an archive."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        onnxarchive.save(model("new"), Path(directory, "source.onnxa"))
        folder = Path(os.path.realpath(directory), "folder")
        folder.mkdir()
        folder.chmod(0o777)
        yield folder


@pytest.fixture
def path(folder: Path) -> Path:
    path = folder / "model.onnxa"
    onnxarchive.save(model(), path)
    return path


# The ways in which a file is replaced


replace = partial(edits.replace_model, model=model("new"))
replace_tensor = partial(edits.replace_tensor, name="w", array=np.zeros(3000, np.float32))


def from_source(name: str) -> Write:
    """One of `public_calls.WRITES`, with the archive beside the directory as its source."""
    return lambda path: WHOLE[name](path.parent.with_name("source.onnxa"), path)


# Functions that replace a file even if they cannot read it.
BLIND = ("save", "Writer", "convert", "export")
WRITES: dict[str, Write] = {
    **{name: from_source(name) for name in BLIND},
    "replace_model in place": replace,
    "replace_model with copy": partial(replace, copy=True),
    "replace_model with compact": lambda path: edits.replace_model(
        path, model("new", "v"), compact=True
    ),
    "replace_model on a clone": on_a_clone(replace),
    "replace_tensor": replace_tensor,
    "replace_tensor on a clone": on_a_clone(replace_tensor),
    "an assignment": edits.document,
    "an assignment on a clone": on_a_clone(edits.document),
    "transform": lambda path: onnxarchive.transform(path, path, lambda it: it, weights="loaded"),
}
# Functions that edit the file in place if a new file would lose an attribute.
IN_PLACE = (
    "replace_model in place",
    "replace_model on a clone",
    "an assignment",
    "an assignment on a clone",
)
REPLACING = {"download": from_source("download")} | {
    name: write for name, write in WRITES.items() if name not in IN_PLACE
}

writes = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)


@pytest.fixture(autouse=True, scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Imports now what would be imported later, since another user may not read it."""
    if hasattr(os, "geteuid"):
        top = tmp_path_factory.mktemp("warmed")
        source, target = top / "source.onnxa", top / "folder" / "model"
        target.parent.mkdir()
        onnxarchive.save(model("new"), source)
        for name in ("export", "convert"):
            from_source(name)(target)
        edits.document(target)


# Kept attributes


def set_acl(path: Path, *entries: str) -> None:
    program = shutil.which("setfacl")
    if program is None:
        pytest.skip("setfacl is not installed")
    done = completed([program, "-m", ",".join(entries), path])
    if done.returncode:
        pytest.skip(f"{path} can have no access control list: {done.stderr.strip()}")


def acl_of(path: Path) -> str:
    return completed(["getfacl", "--omit-header", "--numeric", path], status=0).stdout


def attributes_of(path: Path) -> tuple[int, int, int, dict[str, bytes]]:
    """Owner, group, mode and all extended attributes, access control lists among them."""
    status = path.stat()
    extended = {}
    if hasattr(os, "listxattr"):
        extended = {name: os.getxattr(path, name) for name in os.listxattr(path)}
    return status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode), extended


MODES = [0o600, 0o640, 0o644, 0o666, 0o604, 0o444, 0o400, 0o000, 0o755, 0o2640, 0o4711, 0o1600]


@root
@linux
@pytest.mark.parametrize("mode", MODES, ids=oct)
@writes
def test_owner_group_and_mode_are_kept_whatever_the_umask_and_the_group_of_the_directory(
    path: Path, write: Write, mode: int
) -> None:
    os.chown(path, OWNER, TEAM)
    path.chmod(mode)
    os.chown(path.parent, 0, OTHERS)
    path.parent.chmod(0o2777)
    for mask in (0o000, 0o077):
        with umask(mask):
            write(path)
        assert attributes_of(path) == (OWNER, TEAM, mode, {})


@posix
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o755], ids=oct)
@pytest.mark.parametrize("name", BLIND)
def test_the_mode_of_a_file_of_ones_own_is_kept(path: Path, name: str, mode: int) -> None:
    path.chmod(mode)
    WRITES[name](path)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def set_xattr(path: Path, name: str, value: bytes) -> None:
    if not hasattr(os, "setxattr"):
        pytest.skip("this system has no extended attributes")
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        pytest.skip(f"{path} can have no extended attribute {name}: {error}")


@linux
@writes
def test_the_default_acl_of_a_directory_is_not_given_to_a_file_that_replaces_another(
    path: Path, write: Write
) -> None:
    path.chmod(0o664)
    before = attributes_of(path)
    set_acl(path.parent, f"d:u:{OTHER}:rw", "d:o:rwx")
    write(path)
    assert attributes_of(path) == before


@linux
def test_a_new_file_gets_the_default_acl_of_its_directory(folder: Path) -> None:
    set_acl(folder, f"d:u:{NAMED}:rw", "d:o:-")
    onnxarchive.save(model(), folder / "model.onnxa")
    (folder / "plain").touch()
    assert acl_of(folder / "model.onnxa") == acl_of(folder / "plain")
    assert f"user:{NAMED}:rw-" in acl_of(folder / "plain")


@posix
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o027, 0o077], ids=oct)
def test_a_new_file_has_the_mode_that_the_umask_leaves(folder: Path, mask: int) -> None:
    with umask(mask):
        onnxarchive.save(model(), folder / "model.onnxa")
    assert stat.S_IMODE((folder / "model.onnxa").stat().st_mode) == 0o666 & ~mask


@root
@linux
def test_a_link_that_is_replaced_gets_the_attributes_of_its_target(path: Path) -> None:
    os.chown(path, OWNER, TEAM)
    path.chmod(0o640)
    link = path.with_name("link.onnxa")
    link.symlink_to(path)
    edits.replace_model(link, model("new"), copy=True)
    assert not link.is_symlink()
    assert attributes_of(link) == attributes_of(path) == (OWNER, TEAM, 0o640, {})


# Directories


@root
@linux
def test_an_empty_directory_that_is_filled_keeps_its_attributes(path: Path) -> None:
    made = path.with_name("made")
    made.mkdir()
    os.chown(made, OWNER, TEAM)
    made.chmod(0o2750)
    set_xattr(made, "user.origin", b"here")
    set_acl(made, f"u:{NAMED}:rx", f"d:u:{NAMED}:r", "d:g::-", "d:o:-")
    set_acl(path.parent, f"d:u:{OTHER}:rwx")
    before = attributes_of(made)
    onnxarchive.extract(path, made)
    assert attributes_of(made) == before
    for name in os.listdir(made):
        assert (made / name).stat().st_gid == TEAM
        assert f"user:{NAMED}:r--" in acl_of(made / name)
        assert "other::---" in acl_of(made / name)


# Access granted at any moment

CALLS = (
    "open",
    "chmod",
    "fchmod",
    "chown",
    "fchown",
    "removexattr",
    "pwrite",
    "ftruncate",
    "fsync",
    "replace",
    "unlink",
    "mkdir",
)


class Watch:
    """Checks before and after each system call what each file of a directory grants.

    Attributes:
        moments: How often a temporary file was there.
        grants: What was granted at any moment beyond what the watched file grants.
    """

    def __init__(self, path: Path, writer: int = 0) -> None:
        self.moments = 0
        self.grants: list[tuple[str, int, str]] = []
        self._path = path
        self._writer = writer
        self._open, self._close = os.open, os.close
        self._is_looking = False
        self._groups = {MEMBER: TEAM}
        self._granted = {each: self._may(each, path) for each in USERS}

    def _may(self, number: int, path: Path) -> set[str]:
        """How a user may open a file."""
        ways = set()
        with user(number, self._groups.get(number, OTHERS)):
            for way in ("O_RDONLY", "O_WRONLY"):
                with contextlib.suppress(PermissionError, FileNotFoundError):
                    self._close(self._open(path, getattr(os, way)))
                    ways.add(way)
        return ways

    def look(self, moment: str) -> None:
        if self._is_looking:
            return
        self._is_looking = True
        for name in os.listdir(self._path.parent):
            self.moments += name.endswith(".tmp")
            if not (name == self._path.name or name.endswith(".tmp")):
                continue
            for each in USERS:
                more = self._may(each, self._path.with_name(name)) - self._granted[each]
                if each != self._writer:
                    self.grants += [(moment, each, way) for way in more]
        self._is_looking = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watch]:
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self._watched(name, getattr(os, name)))
            # What takes the place of `os.chmod` takes descriptors as well.
            patch.setattr(os, "supports_fd", os.supports_fd | {os.chmod})
            yield self

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            self.look(f"before {name}")
            try:
                return function(*arguments, **options)
            finally:
                self.look(f"after {name}")

        return watched


def no_acl(path: Path) -> None:
    """Leaves a file without an ACL."""


def acl_of_named(path: Path) -> None:
    set_acl(path, f"u:{NAMED}:rw", f"u:{DENIED}:-")


def acl_that_masks(path: Path) -> None:
    set_acl(path, f"u:{NAMED}:rw", "g::-", "m::rw")


RIGHTS: dict[str, tuple[int, Callable[[Path], None]]] = {
    **{oct(mode): (mode, no_acl) for mode in (0o600, 0o640, 0o604, 0o644, 0o000, 0o444)},
    "a list": (0o644, acl_of_named),
    "a list without the group": (0o604, acl_that_masks),
}
rights = pytest.mark.parametrize(("mode", "listed"), RIGHTS.values(), ids=RIGHTS)


@pytest.mark.sweep
@root
@linux
@rights
@pytest.mark.filterwarnings("ignore::onnxarchive.AttributesWarning")
@writes
def test_a_temporary_file_grants_nothing_that_the_file_does_not(
    path: Path, write: Write, mode: int, listed: Callable[[Path], None]
) -> None:
    os.chown(path, OWNER, TEAM)
    path.chmod(mode)
    listed(path)
    before, inode = attributes_of(path), path.stat().st_ino
    set_acl(path.parent, f"d:u:{OTHER}:rw", f"d:g:{OTHERS}:rw")
    watch = Watch(path)
    with umask(0o000), watch.watching():
        write(path)
    assert watch.grants == []
    assert watch.moments or write in (replace, edits.document)
    is_kept = listed is no_acl or path.stat().st_ino == inode
    assert attributes_of(path) == (before if is_kept else (OWNER, TEAM, 0o600, {}))


# Attributes that are not kept


@contextlib.contextmanager
def lost(path: Path) -> Iterator[list[str]]:
    """The attributes that a warning says were not kept."""
    said: list[str] = []
    with pytest.warns(AttributesWarning) as caught:
        yield said
    (message,) = {str(warning.message) for warning in caught}
    start = f"these attributes of {path} are not kept when it is replaced: "
    assert message.startswith(start)
    said += message.removeprefix(start).split(", ")


@linux
@pytest.mark.parametrize("write", REPLACING.values(), ids=REPLACING)
def test_a_replaced_file_loses_its_acl_and_extended_attributes_with_a_warning(
    path: Path, write: Write
) -> None:
    path.chmod(0o640)
    set_xattr(path, "user.origin", b"here")
    set_acl(path, f"u:{NAMED}:rw")
    with lost(path) as said:
        write(path)
    assert said == ["system.posix_acl_access", "user.origin", "mode 0o660 (becomes 0o600)"]
    assert attributes_of(path)[2:] == (0o600, {})


@linux
@pytest.mark.parametrize("name", IN_PLACE)
def test_an_edit_keeps_an_acl_and_extended_attributes_that_a_clone_would_lose(
    path: Path, name: str
) -> None:
    set_xattr(path, "user.origin", b"here")
    set_acl(path, f"u:{NAMED}:rw")
    before, inode = attributes_of(path), path.stat().st_ino
    WRITES[name](path)
    assert path.stat().st_ino == inode
    assert attributes_of(path) == before


@linux
@pytest.mark.parametrize(
    ("more", "mode"), [((), 0o640), (("ann@example.org",), 0o600), (("54321",), 0o600)]
)
def test_an_nfs_acl_that_names_users_leaves_the_new_file_to_its_owner(
    path: Path, more: tuple[str, ...], mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name.encode() for name in ("OWNER@", "GROUP@", *more, "EVERYONE@")]
    entries = [pack(f">4I{len(it) + 3 & ~3}s", 0, 0, 1, len(it), it) for it in names]
    monkeypatch.setattr(os, "listxattr", lambda _: ["system.nfs4_acl"])
    monkeypatch.setattr(os, "getxattr", lambda *_: pack(">I", len(names)) + b"".join(entries))
    path.chmod(0o640)
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(lost(path)) if more else []
        onnxarchive.save(model("new"), path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert said == (["system.nfs4_acl", "mode 0o640 (becomes 0o600)"] if more else [])


@pytest.mark.sweep
@root
@linux
@rights
@pytest.mark.parametrize("name", BLIND)
def test_a_file_of_another_user_is_replaced_by_one_that_grants_no_more_and_a_warning_says_so(
    path: Path, name: str, mode: int, listed: Callable[[Path], None]
) -> None:
    os.chown(path, OWNER, TEAM)
    path.chmod(mode)
    listed(path)
    watch = Watch(path, writer=OTHER)
    with umask(0o000), user(OTHER, OTHERS), lost(path) as said, watch.watching():
        WRITES[name](path)
    assert watch.grants == []
    assert watch.moments
    status = path.stat()
    assert (status.st_uid, status.st_gid) == (OTHER, OTHERS)
    expected = [f"owner {OWNER} (becomes {OTHER})", f"group {TEAM} (becomes {OTHERS})"]
    assert said[:2] == expected
    assert ("system.posix_acl_access" in said) == (listed is not no_acl)
    kept = stat.S_IMODE(status.st_mode)
    assert kept & ~0o700 == kept >> 3 & 0o7 | (kept & 0o7) << 3, "the group has what all have"


MEMBERS_OWN = f"owner {OWNER} (becomes {MEMBER})"
LIST = "system.posix_acl_access"
# Mode, ACL and owner before; writer and its groups; mode after, and what else is reported as lost.
LOST = [
    (0o664, no_acl, OWNER, MEMBER, (OTHERS, TEAM), 0o664, [MEMBERS_OWN]),
    # Bits that make a file a program of its owner are not given to another owner.
    *(
        (mode, no_acl, OWNER, MEMBER, (OTHERS, TEAM), after, [MEMBERS_OWN])
        for mode, after in ((0o4755, 0o644), (0o2755, 0o644), (0o6711, 0o600), (0o777, 0o666))
    ),
    # The bits of the group are the mask of the list: the group itself has nothing.
    (0o604, acl_that_masks, OWNER, MEMBER, (OTHERS, TEAM), 0o600, [MEMBERS_OWN, LIST]),
    # The system drops this bit in silence.
    (0o2640, no_acl, OTHER, OTHER, (OTHERS,), 0o600, [f"group {TEAM} (becomes {OTHERS})"]),
]


@root
@linux
@pytest.mark.parametrize(("before", "listed", "owner", "writer", "groups", "after", "lines"), LOST)
def test_permissions_that_another_owner_or_group_must_not_get_are_lost_and_reported(
    path: Path,
    before: int,
    listed: Callable[[Path], None],
    owner: int,
    writer: int,
    groups: tuple[int, ...],
    after: int,
    lines: list[str],
) -> None:
    os.chown(path, owner, TEAM)
    path.chmod(before)
    listed(path)
    shown = stat.S_IMODE(path.stat().st_mode)
    with user(writer, *groups), lost(path) as said:
        onnxarchive.save(model("new"), path)
    assert attributes_of(path)[:3] == (writer, groups[-1], after)
    assert said == lines + [f"mode {shown:#o} (becomes {after:#o})"] * (shown != after)


@root
@linux
@pytest.mark.filterwarnings("ignore::onnxarchive.AttributesWarning")
@writes
def test_in_a_sticky_directory_a_file_of_another_user_stays(path: Path, write: Write) -> None:
    os.chown(path, OWNER, TEAM)
    path.chmod(0o644)
    path.parent.chmod(0o1777)
    before, content = attributes_of(path), path.read_bytes()
    with user(OTHER, OTHERS), pytest.raises(PermissionError) as caught:
        write(path)
    assert caught.value.filename == str(path)
    assert attributes_of(path) == before
    assert path.read_bytes() == content
    assert os.listdir(path.parent) == [path.name]


@root
@linux
def test_in_a_directory_of_another_user_a_file_that_all_may_write_is_edited_in_its_place(
    path: Path,
) -> None:
    os.chown(path, OWNER, TEAM)
    path.chmod(0o666)
    path.parent.chmod(0o755)
    with user(OTHER, OTHERS):
        edits.document(path)
        with pytest.raises(PermissionError):
            onnxarchive.save(model("newer"), path)
    assert attributes_of(path) == (OWNER, TEAM, 0o666, {})
    with onnxarchive.open(path) as archive:
        assert archive.model.doc_string == "new"
    assert os.listdir(path.parent) == [path.name]


@root
@linux
@pytest.mark.parametrize("write", [replace, edits.document])
@pytest.mark.parametrize("mode", [0o1777, 0o777], ids=["sticky", "of all"])
@pytest.mark.parametrize("writer", [OWNER, MEMBER])
def test_an_edit_keeps_an_owner_and_a_group_that_a_clone_would_change(
    path: Path, write: Write, mode: int, writer: int
) -> None:
    os.chown(path, OWNER, TEAM)
    path.chmod(0o666)
    path.parent.chmod(mode)
    inode = path.stat().st_ino
    # The owner is no member of the group any more, and the member is not the owner.
    with user(writer, *((OTHERS, TEAM) if writer == MEMBER else (OTHERS,))):
        on_a_clone(write)(path)
    assert path.stat().st_ino == inode
    assert attributes_of(path) == (OWNER, TEAM, 0o666, {})
    with onnxarchive.open(path) as archive:
        assert archive.model.doc_string == "new"
    assert os.listdir(path.parent) == [path.name]


# How lost attributes are reported


@linux
def test_a_warning_that_is_an_error_leaves_the_file_as_it_was(path: Path) -> None:
    set_xattr(path, "user.origin", b"here")
    content = path.read_bytes()
    with pytest.raises(AttributesWarning, match=r"user\.origin"):
        onnxarchive.save(model("new"), path)
    assert path.read_bytes() == content
    assert os.listdir(path.parent) == [path.name]


@root
@linux
@pytest.mark.parametrize("is_many", [False, True])
def test_a_warning_about_attributes_is_a_line_on_the_command_line(
    path: Path, is_many: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    source = path.with_name("model.onnx")
    onnx.save(model("new"), source)
    os.chown(path, OWNER, TEAM)
    many = ["--output-dir", str(path.parent), "--force"]
    with user(OTHER, OTHERS):
        arguments = [str(source), *(many if is_many else [str(path), "--force"])]
        assert main(["convert", *arguments]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("onnxarchive: warning: ")
    assert f"these attributes of {path} are not kept when it is replaced" in line
    assert path.stat().st_uid == OTHER


@root
@linux
def test_attributes_that_a_worker_could_not_keep_are_in_the_outcome(path: Path) -> None:
    source = path.with_name("model.onnx")
    onnx.save(model("new"), source)
    path.chmod(0o640)
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=os.umask, initargs=(0,)) as pool:
        (kept,) = onnxarchive.convert_many([source], path.parent, pool)
        assert (kept.error, kept.warnings) == (None, ())
        os.chown(path, OWNER, TEAM)
        pool.submit(os.setegid, OTHERS).result()
        pool.submit(os.seteuid, OTHER).result()
        (lost,) = onnxarchive.convert_many([source], path.parent, pool)
    assert lost.error is None
    (warning,) = lost.warnings
    assert warning.startswith(f"these attributes of {path} are not kept when it is replaced")

"""Refuses a save that would lose the assets or further models of the archive that it replaces."""

from __future__ import annotations

from collections.abc import Sequence

from onnxarchive.errors import ArchiveFormatError, LockedError, quoted_names, with_path
from onnxarchive.files import local_file, locking
from onnxarchive.model.keys import ASSET_PREFIX, FURTHER_MODEL_PREFIX, MODEL_PROTO, PACKED_PREFIX
from onnxarchive.reading.archive_file import unfinished_edit
from onnxarchive.reading.contents import read_entries
from onnxarchive.remote.location import Location
from onnxarchive.zipformat.directory import Entry


def require_no_loss(
    target: Location,
    *,
    names_models: bool = False,
    names_assets: bool = False,
    timeout: float | None = locking.TIMEOUT,
) -> None:
    """Refuses to replace an archive if the caller leaves out its assets or further models.

    Only the directory of the archive is read: in a store, the last 128 KiB of the object, and the
    rest of a larger directory. After an interrupted edit, it is the directory before the edit.

    Args:
        target: The file or object to replace. It may be missing, or not an archive.
        names_models: Whether the caller says which further models the new archive has, or none.
        names_assets: Whether the caller says which assets the new archive has, or none.
        timeout: Seconds to wait for the lock of a local file; None waits without limit.

    Raises:
        ValueError: Assets or models would be lost.
        LockedError: The file stayed locked until `timeout`.
        OSError: The file cannot be read, or a request to the store failed. A file or object that
            this user may not read is replaced.
    """
    if names_models and names_assets:
        return
    entries = _entries_in(target, timeout)
    if not any(entry.name == MODEL_PROTO for entry in entries):
        return
    # A folder for the packed weights: they are many files with long names.
    names = dict.fromkeys(
        PACKED_PREFIX if entry.name.startswith(PACKED_PREFIX) else entry.name for entry in entries
    )
    losses, remedies = [], []
    for what, prefix, argument, is_named in (
        ("assets", ASSET_PREFIX, "assets={}", names_assets),
        ("further models", FURTHER_MODEL_PREFIX, "models={}", names_models),
    ):
        own = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        if own and not is_named:
            losses.append(f"{what} ({quoted_names(own)})")
            remedies.append(argument)
    if losses:
        raise ValueError(
            f"{target.name}: the archive has {' and '.join(losses)}, which this save would lose; "
            f"{_way_to_keep(target)}; to drop them, pass {', '.join(remedies)} to "
            "onnxarchive.save, or remove the file before onnx.save"
        )


def _way_to_keep(target: Location) -> str:
    if target.path is None:  # an object in a store, which cannot be edited
        return "to keep them, pass them to onnxarchive.save, too"
    return (
        "'with onnxarchive.edit(path) as edit: edit.model = model' keeps them (edit.models[id] = "
        "model, for another model than the default one)"
    )


def _entries_in(target: Location, timeout: float | None) -> Sequence[Entry]:
    """The entries of an archive; none if there is no archive, or it cannot be read."""
    try:
        if target.path is not None:
            with (
                with_path(target.path),
                local_file.locked_file(target.path, timeout=timeout) as file,
                file,
            ):
                if isinstance(file.lock_failure, LockedError):
                    raise file.lock_failure
                return read_entries(unfinished_edit(file) or file)
        if target.url is not None and not target.remote.is_web:  # web addresses are refused later
            with target.open() as remote:
                return read_entries(remote)
    except (ArchiveFormatError, FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    return ()

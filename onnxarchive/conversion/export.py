"""`export` and `extract`: models and all files from archives; weights are copied in pieces."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Unpack

from onnxarchive.conversion.linked_models import as_location, with_external_data
from onnxarchive.editing.pairs import PairReplacement
from onnxarchive.errors import UnsupportedFeatureError, quoted, with_path
from onnxarchive.files import locking
from onnxarchive.files.clones_and_sync import require_space
from onnxarchive.files.data import crc32, pieces
from onnxarchive.files.data_files import spool_all
from onnxarchive.files.local_file import PositionalWriter
from onnxarchive.files.locking import OfOneProcess
from onnxarchive.files.new_directory import new_directory
from onnxarchive.files.paths import directory_of, from_utf8, require_file_names, require_no_input
from onnxarchive.files.progress import Progress, ProgressCounter
from onnxarchive.files.replacement import Replacement
from onnxarchive.model import model_proto, weights
from onnxarchive.model.external import stays_outside
from onnxarchive.model.keys import model_entry
from onnxarchive.reading.archive import Archive, contents_of, fill_in_place, read_archive
from onnxarchive.reading.archive_file import locked_archive_file
from onnxarchive.reading.contents import EntryData, check_crc32
from onnxarchive.reading.damaged_entries import naming_all_damaged
from onnxarchive.remote.location import Access, Location, require_local_target
from onnxarchive.zipformat.directory import Entry
from onnxarchive.zipformat.layout import padding

# ONNX's document on external data: offsets should be multiples of the page size.
_PAGE_SIZE = 4096


def export(
    path: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    model: str | None = None,
    external_data: str | None = None,
    progress: Progress | None = None,
    timeout: float | None = locking.TIMEOUT,
    **access: Unpack[Access],
) -> None:
    """Writes a model of an archive as a `.onnx`; weights are streamed.

    A `.onnx` and its external data replace old files together. If the process is killed meanwhile,
    the model may exist without its data, until `recover` completes or undoes the export.

    Args:
        path: The archive, or its URL.
        destination: The `.onnx`.
        model: Id of the model, such as `"decoder"`; None for the default one.
        external_data: Name of a file beside `destination` for the large tensors; each begins at a
            multiple of 4096 bytes. The `.onnx` holds the tensors that `link` copies to a link, such
            as the shape of a Reshape. None stores all tensors in the `.onnx`, which must stay under
            2 GiB.
        progress: As in `save`. Tensors of a single `.onnx` count twice, since they are verified and
            then written.
        timeout: Seconds to wait if another process has locked a file to replace; None waits without
            limit.
        access: Options for a remote archive, as in `open`. Without a copy in a cache, tensors for a
            single `.onnx` are copied to a temporary file first.

    Raises:
        ArchiveFormatError: The archive breaks a rule.
        ModelNotFoundError: There is no model of this id.
        ChecksumError: The bytes of a model or tensor do not match their CRC-32. If several do not,
            the error of a local archive names all of them.
        UnsupportedFeatureError: The `.onnx` would take 2 GiB or more, or `destination` is a URL.
        LockedError: A file to replace stayed locked until `timeout`, another process was exporting
            to the folder with external data, or the archive was edited while it was opened.
        ArchiveError: Another process changed a new file; or after an error, the old `.onnx` and its
            external data could not be restored, which `recover` can do.
        ValueError: `external_data` is not a file name, or names `destination`; a written file would
            replace the archive; or `destination` begins with `~`.
        OSError: The archive cannot be read, or a file cannot be written.

    Example:
        onnxarchive.export("model.onnxa", "single.onnx")
        onnxarchive.export("model.onnxa", "large.onnx", external_data="large.data")
    """
    locking.require_timeout(timeout)
    destination = require_local_target(destination)
    source = Location.of(path, **access)
    require_no_input(destination, [source.path])
    if external_data is None:
        with _open_for_export(source, model) as (archive, models):
            content = models[model_entry(archive.model_id)]
            _export_single(archive, content, destination, progress, timeout)
        return
    beside = _beside(destination, external_data)
    require_no_input(beside, [source.path])
    with _open_for_export(source, model) as (archive, _):
        _export_external(archive, destination, beside, progress, timeout)


@contextlib.contextmanager
def _open_for_export(
    source: Location, model: str | None = None, *, reads_all: bool = False
) -> Iterator[tuple[Archive, dict[str, memoryview]]]:
    """Opens an archive, and reads the chosen model, or all models, before the block runs.

    While the block runs, an edit may overwrite the models in the file.

    Yields:
        The archive, and the models' bytes by entry name.
    """
    with locked_archive_file(source) as file:
        archive = read_archive(file, model)
        ids = archive.models if reads_all else (archive.model_id,)
        models = {name: archive.read(name) for name in map(model_entry, ids)}
    with naming_all_damaged(), archive, with_path(archive.path):
        yield archive, models


def _beside(destination: str | os.PathLike[str], external_data: str) -> str:
    directory, name = os.path.split(os.fspath(destination))
    beside = os.path.join(directory, external_data)
    is_plain = os.path.basename(external_data) == external_data and "\\" not in external_data
    is_same = os.path.realpath(beside) == os.path.realpath(destination)
    if not is_plain or is_same or external_data in ("", ".", ".."):
        same = ", which is the same file" if is_same else ""
        raise ValueError(
            f"expected external_data=NAME (--external-data) to be another file beside {name!r}, "
            f"found {external_data!r}{same}"
        )
    return beside


def _export_single(
    archive: Archive,
    serialized: memoryview,
    destination: str | os.PathLike[str],
    progress: Progress | None,
    timeout: float | None,
) -> None:
    names = (model_entry(archive.model_id), *archive.tensors.refs)
    total = sum(archive.entries[name].nbytes for name in names)
    if total >= model_proto.SIZE_LIMIT:
        raise UnsupportedFeatureError(
            f"expected less than {model_proto.SIZE_LIMIT} bytes, the limit of a single .onnx, "
            f"found {total}; export with external_data='NAME.data' (--external-data NAME.data)"
        )
    if contents_of(archive).file.is_mapped:
        views = {key: archive.read(key) for key in archive.tensors.refs}
    else:
        data = {key: EntryData(contents_of(archive), key) for key in archive.tensors.refs}
        views = spool_all(data, directory_of(destination))
    unused = dict(views)
    parts = weights.fill(serialized, lambda key: unused.pop(key, None))
    if unused:
        # If a singular field occurs twice, protobuf merges both messages, and `fill` skips the
        # tensors in them.
        parts = [model_proto.serialize(fill_in_place(archive))]
    # Tensors are read twice: for their CRC-32, and to be written.
    counter = ProgressCounter(progress, sum(map(len, [*views.values(), *parts])))
    for key, view in views.items():
        check_crc32(archive.entries[key], view.nbytes, crc32(view), contents_of(archive).strict)
        counter.add(view.nbytes)
    with Replacement(destination, timeout=timeout) as replacement:
        require_space(destination, sum(map(len, parts)))
        for part in parts:
            for piece in counter(pieces(part)):
                replacement.writer.write(piece)
        replacement.commit()


def _export_external(
    archive: Archive,
    destination: str | os.PathLike[str],
    beside: str,
    progress: Progress | None,
    timeout: float | None,
) -> None:
    offsets, nbytes = _offsets(archive)
    serialized = model_proto.serialize(
        with_external_data(
            archive, as_location(os.path.basename(beside)), offsets=offsets, in_place=True
        )
    )
    with PairReplacement(destination, beside, timeout=timeout) as replacement:
        require_space(beside, nbytes + len(serialized))
        replacement.model.writer.write(serialized)
        counter = ProgressCounter(progress, sum(archive.entries[key].nbytes for key in offsets))
        for key, offset in offsets.items():
            replacement.data.writer.offset = offset
            for piece in counter(contents_of(archive).pieces(key)):
                replacement.data.writer.write(piece)
        replacement.commit()


def _offsets(archive: Archive) -> tuple[dict[str, int], int]:
    """Offsets by key of the tensors in a file of external data, and the file's size in bytes."""
    offsets: dict[str, int] = {}
    end = 0
    is_outside = stays_outside(archive.model)
    for entry in archive.entries.values():
        ref = archive.tensors.refs.get(entry.name)
        if ref is not None and is_outside(ref, entry.nbytes):
            offsets[entry.name] = end + padding(end, _PAGE_SIZE)
            end = offsets[entry.name] + entry.nbytes
    return offsets, end


def extract(
    path: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    assets: Iterable[str] | None = None,
    progress: Progress | None = None,
    **access: Unpack[Access],
) -> None:
    """Unzips an archive to a directory of ONNX external data; or only its assets.

    Tools that read ONNX external data can open the directory's `__MODEL_PROTO`, and further models
    such as `__MODEL_PROTO_decoder`. ONNX Runtime cannot load a model if shape inference needs a
    tensor stored outside it, such as the sizes of a Split in 128 or more parts, or nearly any
    tensor of an archive with `size_threshold=0`. It loads what `export` and `link` write.

    A new directory appears when it is complete and synced. An empty directory that exists, such as
    the working directory, is filled at the end. After an error the directory is missing or empty,
    as before.

    Args:
        path: The archive, or its URL.
        directory: The directory to create or, if it exists and is empty, to fill.
        assets: Paths of assets: only these are written, without the folder `assets/`; `"all"` for
            all of them. None writes all entries.
        progress: As in `save`.
        access: Options for a remote archive, as in `open`.

    Raises:
        ArchiveFormatError: The archive breaks a rule.
        ChecksumError: The bytes of an entry do not match their CRC-32; see `export`.
        TensorNotFoundError: There is no such asset.
        UnsupportedFeatureError: `directory` is a URL; or on Windows, the name of an entry is not
            allowed for a file.
        ArchiveError: Another process has renamed or replaced the new directory.
        ValueError: `directory` begins with `~`.
        OSError: The archive cannot be read, the directory is not empty, or a file or directory
            cannot be written.

    Example:
        onnxarchive.extract("model.onnxa", "unzipped")
        model = onnx.load("unzipped/__MODEL_PROTO")
        onnxarchive.extract("model.onnxa", "labels", assets=["labels.txt"])
    """
    directory = require_local_target(directory)
    source = Location.of(path, **access)
    with _open_for_export(source, reads_all=True) as (archive, models):
        entries = archive.entries if assets is None else _entries_of(archive, assets)
        require_file_names(entries)
        _extract(archive, entries, models, directory, progress)


def _entries_of(archive: Archive, assets: Iterable[str]) -> dict[str, Entry]:
    """The entries of assets, by path."""
    if assets == "all":
        assets = archive.assets
    elif isinstance(assets, str):
        raise TypeError(f"expected paths of assets or 'all', got the string {quoted(assets)}")
    return {path: archive.assets.entry(path) for path in assets}


def _extract(
    archive: Archive,
    entries: Mapping[str, Entry],
    models: Mapping[str, memoryview],
    directory: str | os.PathLike[str],
    progress: Progress | None,
) -> None:
    with new_directory(directory) as made:
        total = sum(entry.nbytes for entry in entries.values())
        require_space(directory, total, made.path)
        counter = ProgressCounter(progress, total)
        work = OfOneProcess()
        for path, entry in entries.items():
            work.refuse_fork()  # a forked process would write into the same directory
            with made.make_file(from_utf8(path)) as file:
                target_writer = PositionalWriter(file)
                model = models.get(entry.name)
                content = (
                    contents_of(archive).pieces(entry.name) if model is None else pieces(model)
                )
                for piece in counter(content):
                    target_writer.write(piece)
                file.flush()

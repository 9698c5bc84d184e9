"""Finds the undo log that an interrupted edit leaves at the end of an archive (see `undo`)."""

from __future__ import annotations

from onnxarchive.errors import UnfinishedEditError
from onnxarchive.files import undo
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.undo import UnfinishedEdit
from onnxarchive.model.keys import MODEL_PROTO
from onnxarchive.zipformat import layout
from onnxarchive.zipformat.layout import Placement
from onnxarchive.zipformat.records import EndRecord, LocalHeader

_USUAL_HEADER_SIZE = 512  # bytes; the largest local header has about 128 KiB


def require_finished(file: MappedFile) -> None:
    """Refuses a file with an interrupted edit; the caller has locked the file.

    Raises:
        UnfinishedEditError: The file ends with an undo log.
    """
    if unfinished_edit(file) is not None:
        raise UnfinishedEditError(
            "expected a complete archive, found one whose last edit was interrupted; 'onnxarchive "
            "recover' rolls the edit back, and so does the next edit",
            path=file.path,
        )


def unfinished_edit(file: MappedFile) -> UnfinishedEdit | None:
    """The interrupted edit of an archive; None if the file does not end with an undo log."""
    edit = undo.find(file)
    if edit is not None or EndRecord.unpack(
        file.read(max(file.size - EndRecord.SIZE, 0), EndRecord.SIZE)
    ):
        return edit
    before = _first_archive(file)
    return None if before is None else undo.find_torn(file, *before)


def _first_archive(file: MappedFile) -> tuple[int, int] | None:
    """Finds the archive at the beginning of a file by local headers alone.

    Returns:
        The offset of the first model's entry and the size of the archive, in bytes; None if the
        file does not begin with an archive.
    """
    offset = directory_size = 0
    first_model = None
    for count in range(1, layout.MAX_ENTRIES + 1):
        placement = _placement(file, offset)
        if placement is None or placement.end > file.size:
            return None
        directory_size += len(placement.pack()[1])
        if placement.name.startswith(MODEL_PROTO.encode()):
            first_model = offset if first_model is None else first_model
            if placement.name == MODEL_PROTO.encode():
                end = layout.end_of_archive(count, directory_size, placement.end)
                return first_model, placement.end + directory_size + len(end)
        offset = placement.end
    return None


def _placement(file: MappedFile, offset: int) -> Placement | None:
    """The entry with a local header at `offset`, or None."""
    for size in (_USUAL_HEADER_SIZE, LocalHeader.MAX_SIZE):
        local = LocalHeader.unpack(file.read(offset, size))
        if local is not None:
            return layout.placement(local, offset)
    return None

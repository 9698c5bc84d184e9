"""Models whose external tensors refer to an archive by key: its entries are their data."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import onnx

from onnxarchive.archive.planning import Asset, Item, Plan, Resolve, open_assets, plan_archive
from onnxarchive.archive.reading import Archive, read_verified
from onnxarchive.archive.writing import write_archive
from onnxarchive.buffers.counting import Progress
from onnxarchive.buffers.data import Data, Stored
from onnxarchive.errors import ArchiveFormatError, Report
from onnxarchive.model import tensors
from onnxarchive.model.keys import ASSET_PREFIX
from onnxarchive.model.tensors import TensorRef
from onnxarchive.model.threshold import DEFAULT_SIZE_THRESHOLD
from onnxarchive.zipformat import layout


@dataclass(frozen=True, slots=True)
class EntryData(Stored):
    """The bytes of an entry of an archive, with the CRC-32 that its directory states.

    Attributes:
        name: The entry's name.
    """

    name: str = ""


def entry_data(archive: Archive, name: str) -> EntryData:
    """The bytes of an entry, mapped; its local header is compared with the directory."""
    return EntryData(archive.read(name), archive.entries[name].crc32, name)


def kept_assets(archive: Archive, replaced: Iterable[str] = ()) -> list[Item]:
    """The assets of an archive as entries to be written.

    Args:
        archive: The archive.
        replaced: Names of entries to leave out.
    """
    left_out = frozenset(replaced)
    return [
        Item(name, entry.nbytes, partial(entry_data, archive, name))
        for name, entry in archive.entries.items()
        if name.startswith(ASSET_PREFIX) and name not in left_out
    ]


def has_outside_attributes(archive: Archive) -> bool:
    """Whether tensors beside initializers are stored outside the model (`convert_attribute`)."""
    return any(not ref.is_initializer for ref in archive._refs.values())


def resolver(archive: Archive, size_threshold: int, convert_attribute: bool) -> Resolve:
    """What gives the bytes of tensors that refer to an archive, for `plan_archive`.

    Args:
        archive: The archive.
        size_threshold: As the plan is made with, and so is
        convert_attribute: this.
    """

    def resolve(ref: TensorRef) -> Data:
        key, nbytes = referred(ref, archive)
        if nbytes < size_threshold or not (ref.is_initializer or convert_attribute):
            read_verified(archive, key)  # it goes into the model, and no writer compares its CRC-32
        return entry_data(archive, key)

    return resolve


def referred(ref: TensorRef, archive: Archive) -> tuple[str, int]:
    """The key that an external tensor names, and its size.

    Raises:
        ArchiveFormatError: It names none of the archive, or its type and shape need another size.
    """
    reference = tensors.external_data(ref, Report())
    assert reference is not None  # the report would have raised
    key = reference.location
    if key not in archive._refs:
        raise ArchiveFormatError(
            f"{ref}: expected a key of the archive as the location of external data, found "
            f"{key!r}; give a new tensor its bytes as raw_data"
        )
    nbytes = tensors.external_type(ref).nbytes(ref.tensor.dims)
    stored = archive.entries[key].nbytes
    length = nbytes if reference.length is None else reference.length
    if (reference.offset or 0, length, nbytes) != (0, stored, stored):
        raise ArchiveFormatError(
            f"{ref}: expected the whole of entry {key!r}, which is {stored} bytes, found a shape "
            f"and type of {nbytes} bytes, offset {reference.offset} and length {reference.length}"
        )
    return key, nbytes


def plan_referring(
    model: onnx.ModelProto,
    archive: Archive,
    *,
    size_threshold: int = DEFAULT_SIZE_THRESHOLD,
    convert_attribute: bool | None = None,
    assets: Mapping[str, Asset] | None = None,
    temporary: str | None = None,
) -> Plan:
    """Plans an archive of a model whose external tensors have keys of another as their locations.

    Args:
        model: The model. It is not changed.
        archive: The archive. Its assets are kept.
        size_threshold: As in `save`.
        convert_attribute: As in `save`; None for True if the archive has any such tensor outside.
        assets: As in `save`; they take the place of the archive's assets of the same path.
        temporary: As in `plan_archive`.

    Raises:
        ArchiveFormatError: A tensor is external and names no key, or one of another size; or as
            `save` does.
        ChecksumError: Bytes of the archive that go into the model have changed.
    """
    if convert_attribute is None:
        convert_attribute = has_outside_attributes(archive)
    given = open_assets(assets)
    kept = kept_assets(archive, (item.name for item in given))
    plan = plan_archive(
        model,
        resolve=resolver(archive, size_threshold, convert_attribute),
        size_threshold=size_threshold,
        convert_attribute=convert_attribute,
        assets=sorted([*kept, *given], key=attrgetter("name")),
        temporary=temporary,
    )
    for item in plan.items:
        if item.ref is not None and item.ref.tensor.data_location == tensors.EXTERNAL:
            referred(item.ref, archive)  # before anything is written
    return plan


def save_referring(
    model: onnx.ModelProto,
    archive: Archive,
    path: str | os.PathLike[str],
    *,
    size_threshold: int = DEFAULT_SIZE_THRESHOLD,
    alignment: int = layout.MIN_ALIGNMENT,
    convert_attribute: bool | None = None,
    assets: Mapping[str, Asset] | None = None,
    progress: Progress | None = None,
) -> None:
    """Saves a model whose external tensors have keys of an archive as their locations.

    Their data is verified and copied, with a thread for each core, and the archive's assets are
    kept.

    Args:
        model: The model. It is not changed.
        archive: The archive.
        path: The archive to be written; it may be the path of the other one.
        size_threshold: As in `save`.
        alignment: As in `save`.
        convert_attribute: As in `plan_referring`.
        assets: As in `plan_referring`.
        progress: As in `save`.

    Raises:
        ArchiveFormatError: A tensor is external and names no key, or one of another size; or as
            `save` does.
        ChecksumError: Bytes of the archive have changed.
        ArchiveError: `path` is the archive, and others have changed it since it was opened.
        ValueError: As `save` does.
        OSError: As `save` does.
    """
    plan = plan_referring(
        model,
        archive,
        size_threshold=size_threshold,
        convert_attribute=convert_attribute,
        assets=assets,
        temporary=os.path.dirname(os.path.realpath(path)),
    )
    require = partial(archive._require_current, path)
    write_archive(plan, path, alignment=alignment, progress=progress, require=require)

"""Lists the objects below a URL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from onnxarchive.errors import UnsupportedFeatureError
from onnxarchive.remote.failures import attempt
from onnxarchive.remote.stores import (
    open_file_system,
    open_store,
    require_size,
)
from onnxarchive.remote.urls import Address, Store


class ListedObject(NamedTuple):
    """An object below a URL.

    Attributes:
        path: Path relative to the URL, as given by the store and unchecked.
        url: The object's URL, or its key if a store was given.
        size: Size of the object in bytes.
    """

    path: str
    url: str
    size: int


def list_objects(address: Address) -> Iterator[ListedObject]:
    """Lists all objects below a URL, or below a prefix in a store, in the order of the store."""
    name, base = address.name, address.url.removesuffix("/")
    folder = address.at(base)
    if address.is_of_store:
        if address.is_web:
            raise UnsupportedFeatureError(
                f"{name}: expected the URL of a store, such as s3://, gs:// or az://, found a web "
                "address, which has no listing"
            )
        opened, prefix = open_store(folder)
        if prefix:
            folder.require_key()
        listed = _listed(opened, prefix, name)
    else:
        system, prefix = open_file_system(folder)
        files = attempt(name, lambda: system.find(prefix, detail=True))
        listed = ((path, require_size(info.get("size"), name)) for path, info in files.items())
    prefix = prefix.strip("/")
    for key, size in listed:
        path = key.lstrip("/").removeprefix(prefix).lstrip("/")
        yield ListedObject(path, f"{base}/{path}".lstrip("/"), size)


def _listed(store: Store, prefix: str, name: str) -> Iterator[tuple[str, int]]:
    import obstore

    pages = attempt(name, lambda: iter(obstore.list(store, prefix or None)))
    while page := attempt(name, lambda: next(pages, None)):
        for meta in page:
            yield meta["path"], meta["size"]

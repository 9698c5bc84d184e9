"""Signs an archive entry by entry; verifies it, one tensor or some rows, also from a web server.

pip install 'onnxarchive[remote]' model-signing==1.1.1 pyOpenSSL aiohttp
openssl ecparam -genkey -name prime256v1 -noout -out private.pem
openssl ec -in private.pem -pubout -out public.pem
python sign.py sign model.onnxa private.pem model.sig --shards
python sign.py verify model.onnxa public.pem model.sig
onnxarchive assets add model.onnxa model.sig  # so that the signature travels with the archive
python sign.py verify https://example.com/model.onnxa public.pem --tensor w --rows 0:4

The manifest is the one that OpenSSF model signing makes of the unzipped directory, where entries
are files. So this accepts the directory (without --shards, which the command does not read):
`model_signing verify key DIRECTORY --signature model.sig --public_key public.pem`.
A reader of ranges compares what it reads: the model, and one tensor; or, with shards of 1 MiB, some
of its rows. An entry of no bytes has no shard, so shards refuse an archive with one. CRC-32s do not
show a forged weight: whoever forges it corrects them.

Public in model-signing 1.1 are keys and signing. Half public, and so pinned to one version, are the
types of a manifest, and the verifier, which gives the manifest. (model-signing imports pyOpenSSL,
but does not declare this requirement; fsspec needs aiohttp for web addresses.)
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any

import fsspec
import model_signing
import onnx
from cryptography.exceptions import InvalidSignature
from model_signing._hashing.hashing import Digest
from model_signing._signing.sign_ec_key import Verifier
from model_signing._signing.sign_sigstore_pb import Signature
from model_signing.manifest import Manifest, SerializationType
from onnx import numpy_helper

import onnxarchive

SIGNATURE = "assets/model.sig"  # may be in the archive, and is not signed
FILES = {"hash_type": "sha256", "allow_symlinks": False, "ignore_paths": [SIGNATURE]}
FILES |= {"method": "files"}
SHARDS = FILES | {"method": "shards", "shard_size": 1 << 20}


def parts_of(entry: onnxarchive.Entry, method: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Begin and end of each part of an entry, by the part's name in a manifest."""
    if method["method"] == "files":
        return {entry.name: (0, entry.nbytes)}
    begins = range(0, entry.nbytes, int(method["shard_size"]))  # a float in a signature
    parts = [(begin, min(begin + begins.step, entry.nbytes)) for begin in begins]
    return {f"{entry.name}:{begin}:{end}": (begin, end) for begin, end in parts}


class EntryHashing(model_signing.hashing.Config):  # type: ignore[misc]
    """Hashes the entries of an archive as model-signing hashes the files of a directory."""

    def __init__(self, method: dict[str, Any]) -> None:
        super().__init__()
        self.method = method

    def hash(self, model_path: Path, *, files_to_hash: Any = None) -> Manifest:
        """The manifest of an archive."""
        algorithm = "sha256"
        if self.method["method"] == "shards":
            algorithm += f"-sharded-{self.method['shard_size']}"
        serialization = SerializationType.from_args(self.method)
        items = []
        with onnxarchive.open(model_path) as archive:
            for entry in archive.entries.values():
                if entry.name == SIGNATURE:
                    continue
                parts = parts_of(entry, self.method)
                if not parts:
                    raise ValueError(f"{entry.name}: it has no bytes, so no shard; sign by files")
                data = archive.read(entry.name)
                for name, (begin, end) in parts.items():
                    digest = Digest(algorithm, hashlib.sha256(data[begin:end]).digest())
                    items.append(serialization.new_item(name, digest))
        return Manifest(model_path.stem, items, serialization)


def sign(archive: Path, key: Path, signature: Path, method: dict[str, Any] = FILES) -> None:
    """Signs an archive with a private key, and writes the signature."""
    config = model_signing.signing.Config().use_elliptic_key_signer(private_key=key)
    config.set_hashing_config(EntryHashing(method)).sign(archive, signature)


class SignedArchive:
    """An archive whose bytes are compared with a signature when they are read.

    Raises:
        ValueError: The signature is not one by this key, or what is read is not what was signed.
    """

    def __init__(self, location: str, key: Path, signature: Path | None = None) -> None:
        """Opens an archive, and verifies its signature with a public key."""
        self._location = location
        self._system, self._path = fsspec.url_to_fs(location)
        with onnxarchive.open(location) as archive, tempfile.TemporaryDirectory() as folder:
            self.entries = dict(archive.entries)
            if signature is None:
                if SIGNATURE not in self.entries:
                    raise ValueError(f"there is no signature {SIGNATURE}; give one as a file")
                signature = Path(folder, "model.sig")
                signature.write_bytes(archive.read(SIGNATURE))
            try:
                manifest = Verifier(key).verify(Signature.read(signature))
            except InvalidSignature:
                raise ValueError("the signature was changed") from None
            except (AttributeError, LookupError, RecursionError, TypeError):  # of a hostile file
                raise ValueError("expected a signature by a key, found another file") from None
        self._method = manifest.serialization_type
        self._signed: dict[str, dict[str, bytes]] = defaultdict(dict)  # digests by entry and part
        for part in manifest.resource_descriptors():
            name = part.identifier.partition(":")[0]
            self._signed[name][part.identifier] = part.digest.digest_value

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """The bytes of an entry or of a range of it, for which whole parts are read."""
        entry, signed = self.entries[name], self._signed.get(name, {})
        parts = parts_of(entry, self._method)
        if not signed or parts.keys() != signed.keys():
            raise ValueError(f"{name}: it was not signed, or with another size")
        end = entry.nbytes if end is None else end
        if entry.nbytes:
            parts = {part: it for part, it in parts.items() if it[0] < end and begin < it[1]}
        first = min((it[0] for it in parts.values()), default=0)
        last = max((it[1] for it in parts.values()), default=0)
        offset = entry.data_offset
        data = self._system.cat_file(self._path, offset + first, offset + last)
        for part, span in parts.items():
            digest = hashlib.sha256(data[span[0] - first : span[1] - first]).digest()
            if digest != signed[part]:
                raise ValueError(f"{part}: it was changed after it was signed")
        return bytes(data[begin - first : end - first])

    def tensor(self, name: str, rows: slice = slice(None)) -> Any:
        """A tensor outside the default model, or some of its rows, as an array."""
        model = onnx.load_model_from_string(self.read("__MODEL_PROTO"))
        found = {it.name: it for it in model.graph.initializer if it.external_data}
        if name not in found:
            raise ValueError(f"the default model has no tensor {name!r} outside of it")
        tensor = found[name]
        key = next(it.value for it in tensor.external_data if it.key == "location")
        part = onnx.TensorProto(data_type=tensor.data_type, dims=tensor.dims)
        if rows == slice(None):
            part.raw_data = self.read(key)
        else:
            itemsize = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
            row_nbytes = itemsize * prod(tensor.dims[1:])
            if not tensor.dims or self.entries[key].nbytes != row_nbytes * tensor.dims[0]:
                raise ValueError(f"{name}: it has no rows of whole bytes; read all of it")
            first, last, step = rows.indices(tensor.dims[0])
            if step != 1 or first > last:
                raise ValueError(f"expected rows FIRST:LAST, found {rows}")
            part.dims[0] = last - first
            part.raw_data = self.read(key, first * row_nbytes, last * row_nbytes)
        return numpy_helper.to_array(part)

    def verify(self) -> None:
        """Compares all entries and what zip readers may read differently; requires no others."""
        for name in self.entries.keys() - {SIGNATURE}:
            self.read(name)
        if missing := self._signed.keys() - self.entries.keys():
            raise ValueError(f"{min(missing)}: it was signed, and is missing")
        if findings := onnxarchive.check(self._location):
            raise ValueError(findings[0])


def main() -> None:
    """Signs or verifies; a wrong signature or archive ends with a message and exit status 1."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=["sign", "verify"])
    parser.add_argument("archive", help="a path; to verify, also a URL")
    parser.add_argument("key", type=Path)
    parser.add_argument("signature", type=Path, nargs="?", help="default: the asset model.sig")
    parser.add_argument("--shards", action="store_const", const=SHARDS, default=FILES)
    parser.add_argument("--tensor")
    parser.add_argument("--rows", default=":", metavar="FIRST:LAST")
    given = parser.parse_args()
    try:
        if given.action == "sign":
            sign(Path(given.archive), given.key, given.signature or Path("model.sig"), given.shards)
        else:
            archive = SignedArchive(given.archive, given.key, given.signature)
            if given.tensor is None:
                archive.verify()
            else:
                rows = slice(*(int(it) if it else None for it in given.rows.split(":")))
                print(archive.tensor(given.tensor, rows))
    except (onnxarchive.ArchiveError, OSError) as error:
        raise SystemExit(str(error)) from None
    except ValueError as error:
        raise SystemExit(f"{given.archive}: {error}") from None
    print(f"{given.archive}: {given.action}: done")


if __name__ == "__main__":
    main()

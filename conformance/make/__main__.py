"""Makes the vectors of the conformance suite from the recipes beside this file; needs only Python.

python3 -m conformance.make               writes conformance/vectors and conformance/manifest.json
python3 -m conformance.make --large DIR   writes the large vectors to DIR; files of some GiB are
                                          sparse

The same recipes give the same bytes on every machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.make import parts
from conformance.make.clauses import clauses
from conformance.make.clauses_of_models import clauses_of_models
from conformance.make.conditions import single_conditions
from conformance.make.conforming import conforming
from conformance.make.ends import false_ends
from conformance.make.framing import bad_framing
from conformance.make.large import large
from conformance.make.names_and_models import bad_names_and_models
from conformance.make.parts import Tensor, Vector
from conformance.make.records import bad_records
from conformance.make.several_models import several_models
from conformance.make.tensors import bad_tensors
from conformance.make.zips import Image, Zeros

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "conformance"
FORMAT_VERSION = 1
# conformance/run.py makes the files of these vectors; the repository does not contain the files.
SPECIAL: tuple[dict[str, Any], ...] = (
    {
        "name": "file-link",
        "about": "A symbolic link to an archive.",
        "kind": "symlink",
        "target": "plain",
        "accepted": True,
        "rules": ["FILE-1"],
    },
    *(
        {
            "name": f"file-{kind}",
            "about": f"A {kind} instead of a file.",
            "kind": kind,
            "accepted": False,
            "rules": ["FILE-1"],
            "stage": "open",
            "class": "not-regular",
        }
        for kind in ("directory", "fifo")
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the small vectors and the manifest, or the large vectors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--large", type=Path, metavar="DIR", help="write the large vectors to DIR")
    arguments = parser.parse_args(argv)
    if arguments.large is not None:
        write_large(arguments.large)
    else:
        write_small(SUITE)
    return 0


def vectors() -> list[Vector]:
    """All vectors; their names are unique."""
    listed = [
        *conforming(),
        *bad_framing(),
        *bad_records(),
        *bad_names_and_models(),
        *bad_tensors(),
        *false_ends(),
        *several_models(),
        *single_conditions(),
        *clauses(),
        *clauses_of_models(),
        *large(),
    ]
    assert len({vector.name for vector in listed}) == len(listed)
    return listed


def write_small(suite: Path) -> None:
    """Writes the vectors of up to 1 MiB, and the manifest of all vectors."""
    folder = suite / "vectors"
    folder.mkdir(parents=True, exist_ok=True)
    listed: list[dict[str, Any]] = []
    for vector in vectors():
        described = describe(vector)
        if not vector.large:
            source = vector.file()
            data = parts.to_bytes(source) if isinstance(source, Image) else source
            (folder / f"{vector.name}.onnxa").write_bytes(data)
            described |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            if vector.accepted:
                described |= expected(vector, source)
        listed.append(described)
    wanted = {f"{vector.name}.onnxa" for vector in vectors() if not vector.large}
    for path in sorted(folder.iterdir()):
        if path.name not in wanted:
            path.unlink()
    (suite / "manifest.json").write_text(manifest([*listed, *SPECIAL]), encoding="utf-8")


def manifest(listed: Iterable[Mapping[str, Any]]) -> str:
    """The text of the manifest, with one vector in a line."""
    lines = ",\n".join(json.dumps(it, ensure_ascii=False) for it in listed)
    return f'{{"version": {FORMAT_VERSION}, "vectors": [\n{lines}\n]}}\n'


def describe(vector: Vector) -> dict[str, Any]:
    """A vector's entry in the manifest, without the values that depend on the file's content."""
    described: dict[str, Any] = {
        "name": vector.name,
        "about": vector.about,
        "file": f"{'' if vector.large else 'vectors/'}{vector.name}.onnxa",
        "accepted": vector.accepted,
        "rules": list(vector.rules),
    }
    if not vector.accepted:
        described["stage"] = vector.stage or stages()[vector.rules[0]]
    if vector.attack is not None:
        described["class"] = vector.attack
    if vector.large:
        described["large"] = True
        if vector.accepted:
            described["expected"] = f"{vector.name}.json"
    return described


def stages() -> dict[str, str]:
    """The stage at which a reader can check each rule, from spec/rules.toml."""
    text = (ROOT / "spec" / "rules.toml").read_text(encoding="utf-8")
    return dict(re.findall(r'^\[([A-Z0-9-]+)\]$[^\[]*?^seen = "(\w+)"$', text, re.MULTILINE))


def expected(vector: Vector, source: Image | bytes) -> dict[str, Any]:
    """The entries and tensors of a conforming archive, as the manifest lists them."""
    assert isinstance(source, Image)
    return {
        "entries": [
            {
                "name": it.entry.name.decode(),
                "header_offset": it.header_offset,
                "data_offset": it.data_offset,
                "nbytes": len(it.entry.data),
                "crc32": it.crc32,
            }
            for it in source.place()
        ],
        "tensors": [
            {
                "model": model,
                "key": tensor.key,
                "name": tensor.key if tensor.name is None else tensor.name,
                "data_type": tensor.data_type,
                "dims": list(tensor.dims),
                "sha256": sha256(tensor),
            }
            for model, tensors in {"": vector.tensors, **vector.further}.items()
            for tensor in tensors
        ],
    }


def sha256(tensor: Tensor) -> str:
    """The SHA-256 of a tensor's data."""
    if tensor == parts.BIG:
        return parts.BIG_SHA256
    if isinstance(tensor.data, Zeros):
        return hashlib.sha256(bytes(len(tensor.data))).hexdigest()
    return hashlib.sha256(tensor.data).hexdigest()


def write_large(folder: Path) -> None:
    """Writes the large vectors, and the expected results of those that are accepted."""
    folder.mkdir(parents=True, exist_ok=True)
    for vector in vectors():
        if vector.large:
            source = vector.file()
            assert isinstance(source, Image)
            write_sparse(folder / f"{vector.name}.onnxa", source)
            if vector.accepted:
                unfinished = folder / f"{vector.name}.{os.getpid()}"
                text = json.dumps(expected(vector, source), ensure_ascii=False)
                unfinished.write_text(text, encoding="utf-8")
                os.replace(unfinished, folder / f"{vector.name}.json")


def write_sparse(path: Path, image: Image) -> None:
    """Writes a file with holes for zeros, and renames it to `path` when it is complete."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    with open(unfinished, "wb") as file:
        for offset, piece in image.pieces():
            file.seek(offset)
            file.write(piece)
    os.replace(unfinished, path)


if __name__ == "__main__":
    sys.exit(main())

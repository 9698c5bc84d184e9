"""Adds a variant of an archive's model with fixed shapes; both use the same weights.

pip install onnxarchive
python fixed_shapes.py model.onnxa batch1 batch=1 sequence=128

Compilers for NPUs, and some converters, want fixed shapes. The variant is a further model, of the
size of its graph: with 17 nodes, 834 bytes more in an archive of 33.6 MB. A session of ONNX Runtime
can do without one: its options have `add_free_dimension_override_by_name`.
"""

from __future__ import annotations

import os
import sys

import onnxarchive


def add_fixed(path: str, model_id: str, sizes: dict[str, int]) -> None:
    """Adds a copy of the default model whose named dimensions have these sizes.

    Raises:
        ValueError: The archive has a model of this id, or no value of the graph has one of the
            names; the archive does not change.
    """
    unknown = set(sizes)
    with onnxarchive.edit(path) as edit:
        if model_id in edit.models:
            raise ValueError(f"{path}: has a model {model_id!r}; choose another id")
        edit.models[model_id] = edit.models[""]  # a copy, whose tensors are the same entries
        graph = edit.models[model_id].graph
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param in sizes:
                    unknown.discard(dim.dim_param)
                    dim.dim_value = sizes[dim.dim_param]
        if unknown:
            raise ValueError(f"{path}: the model has no dimension {', '.join(sorted(unknown))}")


def size_of(pair: str) -> tuple[str, int]:
    """The name and the size in a text like `batch=1`."""
    name, _, size = pair.rpartition("=")
    if not size.isdecimal() or int(size) < 1:
        raise ValueError(f"expected NAME=SIZE with a size of at least 1, found {pair!r}")
    return name, int(size)


def main() -> None:
    """Adds the variant, and prints by how much the archive has grown."""
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    path, model_id, *pairs = sys.argv[1:]
    try:
        old = os.path.getsize(path)
        add_fixed(path, model_id, dict(map(size_of, pairs)))
    except (ValueError, OSError, onnxarchive.ArchiveError) as error:
        raise SystemExit(str(error)) from None
    print(f"{os.path.getsize(path) - old:,} bytes more")


if __name__ == "__main__":
    main()

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
        ValueError: No value of the graph has one of the names; the archive does not change.
    """
    unknown = set(sizes)
    with onnxarchive.edit(path) as edit:
        edit.models[model_id] = edit.models[""]  # a copy, whose tensors are the same entries
        graph = edit.models[model_id].graph
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param in sizes:
                    unknown.discard(dim.dim_param)
                    dim.dim_value = sizes[dim.dim_param]
        if unknown:
            raise ValueError(f"{path}: the model has no dimension {', '.join(sorted(unknown))}")


def main() -> None:
    """Adds the variant, and prints by how much the archive has grown."""
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    path, model_id, *pairs = sys.argv[1:]
    old = os.path.getsize(path)
    try:
        sizes = {name: int(size) for name, size in (pair.split("=") for pair in pairs)}
        add_fixed(path, model_id, sizes)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print(f"{os.path.getsize(path) - old:,} bytes more")


if __name__ == "__main__":
    main()

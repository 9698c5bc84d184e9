"""The commands `download`, for a remote archive, and `cat`, for one tensor or asset."""

from __future__ import annotations

import argparse
import io
import os

import numpy as np

from onnxarchive.cli.assets import write_asset
from onnxarchive.cli.frame import (
    DONE,
    StandardOutput,
    open_archive,
    require_free,
    require_no_terminal,
    say,
    storage_options,
)
from onnxarchive.cli.terminal import printable, progress_bar, size
from onnxarchive.conversion.downloading import download, path_of
from onnxarchive.errors import shown
from onnxarchive.files.replacement import partial_path
from onnxarchive.interop.inputs import npy_array


def download_command(arguments: argparse.Namespace) -> int:
    """Runs `download`."""
    options = storage_options(arguments)
    path = path_of(arguments.url, arguments.path)
    require_free(path, arguments.force)
    try:
        with progress_bar("download") as progress:
            path = download(arguments.url, path, progress=progress, storage_options=options)
    except KeyboardInterrupt:
        if not os.path.lexists(partial_path(os.path.realpath(path))):
            raise
        text = "interrupted; run the same command to resume the download"
        raise KeyboardInterrupt(text) from None
    nbytes = os.path.getsize(path)
    say(arguments, {"path": path, "nbytes": nbytes}, f"{printable(path)}: {size(nbytes)}, verified")
    return DONE


def cat_command(arguments: argparse.Namespace) -> int:
    """Runs `cat`."""
    require_no_terminal()
    with open_archive(arguments, arguments.model) as archive:
        if arguments.name in archive.assets:
            write_asset(archive, arguments.name)
        else:
            name = f"{archive.path}: tensor {shown(arguments.name)}"
            remedy = "use onnxarchive.open in Python"
            array = npy_array(archive.tensors[arguments.name], name, remedy)
            output = StandardOutput()
            header = io.BytesIO()
            np.lib.format.write_array_header_1_0(
                header, np.lib.format.header_data_from_array_1_0(array)
            )
            output.write(header.getvalue())
            output.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return DONE

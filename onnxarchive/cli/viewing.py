"""The command that shows an archive in a browser."""

from __future__ import annotations

import argparse
import sys
import webbrowser

from onnxarchive.cli.frame import DONE, say
from onnxarchive.cli.table import printable
from onnxarchive.errors import ArchiveError
from onnxarchive.runtime import netron


def view_command(arguments: argparse.Namespace) -> int:
    """Runs `view`."""
    with netron.serve(
        arguments.archive, host=arguments.host, port=arguments.port, on_fault=_tell_fault
    ) as server:
        result = {"path": server.path, "url": server.url, "netron": server.version}
        told = (
            f"Netron {server.version} shows {printable(server.path)} at {server.url}\n"
            "Ctrl-C ends it."
        )
        try:
            say(arguments, result, told)
            sys.stdout.flush()
            if not arguments.no_browser and not webbrowser.open(server.url):
                print(
                    "onnxarchive: no browser could be started; open the address in one",
                    file=sys.stderr,
                )
            server.wait()
        except KeyboardInterrupt:  # which is how this ends
            pass
    return DONE


def _tell_fault(error: ArchiveError) -> None:
    print(f"onnxarchive: not shown: {printable(str(error))}", file=sys.stderr, flush=True)

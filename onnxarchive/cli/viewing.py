"""The command that shows an archive in a browser."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from typing import Any

from onnxarchive.cli.frame import DONE, add_command, say
from onnxarchive.cli.table import printable
from onnxarchive.errors import ArchiveError
from onnxarchive.runtime import netron


def add_view(commands: Any) -> None:
    """Adds `view`."""
    command = add_command(
        commands, "view", _view, "Show an archive's graph and weights in a browser, with Netron."
    )
    command.add_argument("archive")
    command.add_argument(
        "--port", type=int, default=0, metavar="N", help="the port to serve at (default any free)"
    )
    command.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="the address to serve at (default %(default)s, for this machine alone)",
    )
    command.add_argument(
        "--no-browser", action="store_true", help="print the address, and start no browser"
    )


def _view(arguments: argparse.Namespace) -> int:
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

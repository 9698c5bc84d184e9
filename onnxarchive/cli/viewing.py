"""The command that shows an archive in a browser."""

from __future__ import annotations

import argparse
import contextlib
import html
import sys
import tempfile
import webbrowser
from pathlib import Path

from onnxarchive.cli.frame import DONE, say
from onnxarchive.cli.table import printable
from onnxarchive.errors import ArchiveError
from onnxarchive.interop import netron


def view_command(arguments: argparse.Namespace) -> int:
    """Runs `view`."""
    with netron.serve(
        arguments.archive, host=arguments.host, port=arguments.port, on_fault=_tell_fault
    ) as server:
        result = {"path": server.path, "url": server.url, "netron": server.version}
        told = (
            f"Netron {server.version} shows {printable(server.path)} at {server.url}\n"
            "If no browser shows it, open this address in one. Ctrl-C ends it."
        )
        with contextlib.suppress(KeyboardInterrupt):  # which is how this ends
            say(arguments, result, told)
            sys.stdout.flush()
            if not arguments.no_browser and not _open_browser(server):
                print(
                    "onnxarchive: no browser could be started; open the address in one",
                    file=sys.stderr,
                )
            server.wait()
    return DONE


def _open_browser(server: netron.Server) -> bool:
    """Opens a page that leads to the server's, and removes it when it has been used.

    All users of the machine can read a browser's command line, but only this one that page.

    Returns:
        Whether a browser could be started.
    """
    link = html.escape(server.url)
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix="onnxarchive-") as made:
        with tempfile.NamedTemporaryFile("wb", suffix=".html", dir=made, delete=False) as page:
            refresh = f'<meta http-equiv="refresh" content="0; url={link}">'
            page.write(f'{refresh}<a href="{link}">{link}</a>\n'.encode())
        if webbrowser.open(Path(page.name).as_uri()):
            while not server.shown.wait(0.2):  # an interrupt is seen on every system
                pass
            return True
    return False


def _tell_fault(error: ArchiveError) -> None:
    print(f"onnxarchive: not shown: {printable(str(error))}", file=sys.stderr, flush=True)

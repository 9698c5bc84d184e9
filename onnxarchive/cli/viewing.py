"""The command that shows an archive in a browser."""

from __future__ import annotations

import argparse
import tempfile
import time
import webbrowser
from contextlib import suppress
from pathlib import Path

from onnxarchive.cli.frame import DONE, access, say
from onnxarchive.cli.table import printable
from onnxarchive.interop.netron import Server
from onnxarchive.remote.urls import shown_url


def view_command(arguments: argparse.Namespace) -> int:
    """Runs `view` until it is interrupted."""
    archive, port, model = arguments.archive, arguments.port, arguments.model
    with (
        Server(archive, port=port, model=model, **access(arguments)) as server,
        tempfile.TemporaryDirectory(prefix="onnxarchive-") as folder,
        suppress(KeyboardInterrupt),
    ):
        # The address is secret. Other users can see the browser's arguments, but not the page.
        page = Path(folder, "view.html")
        page.touch(0o600)
        page.write_text(f'<meta http-equiv="refresh" content="0; url={server.url}">')
        text = f"Netron shows {printable(shown_url(archive))} at {server.url}\n"
        text += "If no browser shows it, open this address. Ctrl-C ends the server."
        say(arguments, {"path": shown_url(archive), "url": server.url}, text)
        if not arguments.no_browser:
            webbrowser.open(page.as_uri())
        while True:
            time.sleep(1)
    return DONE

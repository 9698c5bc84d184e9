"""A web server for the tests of objects."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from remote_files import CONTENT
from web_server import WebServer, serving


@pytest.fixture(scope="session")
def shared() -> Iterator[WebServer]:
    """A server with an object, a small and an empty one."""
    with serving({}) as server:
        _reset(server)
        yield server


@pytest.fixture
def server(shared: WebServer) -> Iterator[WebServer]:
    """The same server, whose answers a test may change."""
    _reset(shared)
    yield shared
    _reset(shared)


def _reset(server: WebServer) -> None:
    server.files = {"/m.onnxa": CONTENT, "/small": CONTENT[:1000], "/empty": b""}
    server.requests.clear()
    server.most = server.nbytes = 0
    server.change = lambda _, answer: answer

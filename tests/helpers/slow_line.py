"""A line of a given rate before a server, for all connections together."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator

_PIECE_SIZE = 4096
# Bytes that a client may send ahead: several of its largest segments. Its kernel counts a smaller
# window as no progress, and ends the connection after 30 seconds (TCP_USER_TIMEOUT of reqwest).
_WINDOW = 1 << 18
_LATE = 0.25  # seconds that the line makes up for, if the machine has let it wait


class SlowLine:
    """A proxy of TCP that passes bytes on at a rate in each direction.

    Attributes:
        port: The port to connect to.
        sent: Number of bytes passed on to the server.
        received: Number of bytes passed on from the server.
        is_open: False to pass nothing on.
        closes_after: After about this number of bytes to the server, nothing more is passed on.
    """

    port: int

    def __init__(self, server_port: int, rate: float) -> None:
        self.sent = self.received = 0
        self.is_open = True
        self.closes_after = sys.maxsize
        self._server_port = server_port
        self._rate = rate / 8
        self._free_at = [0.0, 0.0]  # when each direction has passed on all bytes so far

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await self._serve(reader, writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = socket.socket()
        upstream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 * _PIECE_SIZE)
        upstream.setblocking(False)
        await asyncio.get_running_loop().sock_connect(upstream, ("127.0.0.1", self._server_port))
        near, far = await asyncio.open_connection(sock=upstream, limit=_PIECE_SIZE)
        await asyncio.gather(
            self._pass_on(reader, far, 0), self._pass_on(near, writer, 1), return_exceptions=True
        )

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: int
    ) -> None:
        try:
            while piece := await reader.read(_PIECE_SIZE):
                now = time.monotonic()
                start = max(now - _LATE, self._free_at[direction])
                self._free_at[direction] = start + len(piece) / self._rate
                await asyncio.sleep(max(0, self._free_at[direction] - now))
                while not self.is_open:
                    await asyncio.sleep(0.01)
                writer.write(piece)
                await writer.drain()
                if direction:
                    self.received += len(piece)
                else:
                    self.sent += len(piece)
                    self.is_open &= self.sent < self.closes_after
        finally:
            writer.close()


@contextlib.contextmanager
def slow_line(server_port: int, rate: float) -> Iterator[SlowLine]:
    """A line of `rate` bits a second to a server on this machine, while the block runs."""
    line = SlowLine(server_port, rate)
    loop = asyncio.new_event_loop()
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WINDOW)
    line.port = listening.getsockname()[1]

    async def serve() -> None:
        await asyncio.start_server(line._connect, sock=listening, limit=_PIECE_SIZE)

    loop.run_until_complete(serve())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield line
    finally:
        asyncio.run_coroutine_threadsafe(_end(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        listening.close()


async def _end() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

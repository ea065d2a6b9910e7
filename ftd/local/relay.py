"""A relay from this machine's own network into a namespace: ``python -m ftd.local.relay FD HOST PORT``.

A socket belongs to the network in which it was created, whichever process holds it. The listening socket is
created outside and inherited; the connections to ``HOST:PORT`` are created inside.
"""

import asyncio
import contextlib
import socket
import sys

from ftd.tasks import cancel_all

_CHUNK_BYTES = 65536


async def relay(listening: socket.socket, host: str, port: int) -> None:
    """Serve until cancelled. A connection that ends on one side is closed on the other."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            target_reader, target_writer = await asyncio.open_connection(host, port)
            pumps = [
                asyncio.ensure_future(_pump(reader, target_writer)),
                asyncio.ensure_future(_pump(target_reader, writer)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            await cancel_all(pumps)
            target_writer.close()
        writer.close()

    server = await asyncio.start_server(serve, sock=listening)
    async with server:
        await server.serve_forever()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


if __name__ == "__main__":
    asyncio.run(relay(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], int(sys.argv[3])))

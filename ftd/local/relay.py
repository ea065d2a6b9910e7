"""A relay from this machine's own network into a namespace: ``python -m ftd.local.relay FD HOST PORT``.

A socket belongs to the network in which it was created, whichever process holds it. The listening socket is
created outside and inherited; the connections to ``HOST:PORT`` are created inside.
"""

import asyncio
import contextlib
import socket
import sys

_CHUNK_BYTES = 65536


async def relay(listening: socket.socket, host: str, port: int) -> None:
    """Serve until cancelled. A connection that ends on one side is closed on the other."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there_reader, there_writer = await asyncio.open_connection(host, port)
            ways = [
                asyncio.ensure_future(_pump(reader, there_writer)),
                asyncio.ensure_future(_pump(there_reader, writer)),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            there_writer.close()
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

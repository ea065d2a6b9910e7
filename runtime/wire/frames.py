"""Messages on a stream: a 4-byte big-endian length, then a msgpack map ``{"type": …, fields…}``. The module
does not import torch.
"""

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from statemachine.messages.common import Message

if TYPE_CHECKING:
    from asyncio import StreamReader

MAX_FRAME_BYTES = 64 * 1024 * 1024


class Frame(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of messages between processes of the same installation: unknown fields are an error."""


_ENCODER = msgspec.msgpack.Encoder()


def encode(frame: Message) -> bytes:
    """Return a frame as bytes, with its length first."""
    body = _ENCODER.encode(frame)
    return len(body).to_bytes(4, "big") + body


class ProtocolError(ValueError):
    """The other end sent something that is not a frame of this protocol."""


Decoded = TypeVar("Decoded")


class Decoder(Generic[Decoded]):
    """Decoder of a stream of frames: ``Decoder(Instruction)`` in a trainer, ``Decoder(Report)`` in a daemon."""

    def __init__(self, union: Any, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)
        self._max = max_frame_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray) -> list[Decoded]:
        """Add bytes from the stream, and return all frames that are complete now.

        :raises ProtocolError: a length is above the limit, or a body is not a frame of this union.
        """
        self._buffer += data
        frames: list[Decoded] = []
        while len(self._buffer) >= 4:
            length = int.from_bytes(self._buffer[:4], "big")
            if length > self._max:
                raise ProtocolError(f"frame of {length} bytes; at most {self._max} are allowed")
            if len(self._buffer) < 4 + length:
                break
            body = bytes(self._buffer[4 : 4 + length])
            del self._buffer[: 4 + length]
            try:
                frames.append(self._decoder.decode(body))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ProtocolError(f"malformed frame: {error}") from error
        return frames


async def read_frame(stream: "StreamReader", union: Any, max_frame_bytes: int) -> Any:
    """Read one frame, and not a byte of what follows it.

    :raises ProtocolError: see ``Decoder.feed``.
    :raises asyncio.IncompleteReadError: the stream ended before the frame was complete.
    """
    decoder: Decoder[Any] = Decoder(union, max_frame_bytes)
    head = await stream.readexactly(4)
    decoder.feed(head)
    return decoder.feed(await stream.readexactly(int.from_bytes(head, "big")))[0]

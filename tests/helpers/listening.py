"""Lists listening sockets as the kernel reports them, and probes how they answer clients without credentials."""

import contextlib
import re
import socket
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from runtime.wire import store_protocol
from runtime.wire.frames import Decoder
from tests.helpers.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
_LISTEN = "0A"
_ACCEPTS = 1 << 16
"""``__SO_ACCEPTCON`` in /proc/net/unix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """A socket that accepts connections."""

    kind: str
    """``tcp`` or ``unix``."""
    address: str
    port: int = 0

    @property
    def on_loopback(self) -> bool:
        return self.kind == "unix" or ip_address(self.address).is_loopback


def doors_of(pid: int) -> list[Door]:
    """Return all listening sockets of this process; none if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return _doors_of(pid)
    return []


def _doors_of(pid: int) -> list[Door]:
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if found := re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink())):
                inodes.add(found[1])
    doors = []
    for file, size in (("tcp", 4), ("tcp6", 16)):
        table = Path(f"/proc/{pid}/net/{file}")
        # A kernel without IPv6 has no table for it.
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in inodes:
                address, port = fields[1].split(":")
                doors.append(Door(kind="tcp", address=_address(address, size), port=int(port, 16)))
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) & _ACCEPTS and fields[6] in inodes:
            doors.append(Door(kind="unix", address=fields[7] if len(fields) > 7 else ""))
    return doors


def _address(text: str, size: int) -> str:
    """Return the address for its text in /proc: 32-bit words, each in the host's byte order."""
    words = bytes.fromhex(text)
    raw = b"".join(words[at : at + 4][::-1] for at in range(0, size, 4))
    found = ip_address(raw)
    return str(getattr(found, "ipv4_mapped", None) or found)


def answer(door: Door, said: bytes, *, host: str = "127.0.0.1", patience_s: float = PATIENCE_S) -> bytes:
    """Return the bytes that arrive until the peer closes the connection or is silent for ``patience_s``."""
    back = bytearray()
    with contextlib.suppress(OSError), socket.create_connection((host, door.port), patience_s) as stranger:
        stranger.settimeout(patience_s)
        stranger.sendall(said)
        while part := stranger.recv(65536):
            back += part
    return bytes(back)


def refusal(door: Door, *, host: str = "127.0.0.1") -> str:
    """Return how an HTTP client without credentials is rejected: ``401``, ``StoreRejected``, or whatever was
    answered.
    """
    back = answer(door, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", host=host)
    if found := re.match(rb"HTTP/1\.1 (\d+)", back):
        return found[1].decode()
    with contextlib.suppress(ValueError):
        decoder: Decoder[store_protocol.StoreReply] = Decoder(store_protocol.StoreReply)
        for reply in decoder.feed(back):
            return type(reply).__name__
    return repr(back[:80])


def documented(process: str) -> dict[str, str]:
    """Return the sockets of a process that SECURITY.md lists: name → how a client without credentials is
    rejected.
    """
    rows = re.findall(
        r"^\| `([\w .-]+)` \| ([^|]+?) \| [^|]* \| `([^`|]+)` \|", (ROOT / "SECURITY.md").read_text(), re.M
    )
    return {what: how for who, what, how in rows if who == process}


def undocumented(process: str, pid: int) -> list[str]:
    """Return the sockets that the table lacks, or that reject clients in another way than it says."""
    expected = list(documented(process).values())
    wrong = []
    for door in doors_of(pid):
        how = "mode 600" if door.kind == "unix" else refusal(door)
        if process == "trainer":
            how = "nothing"
        if door.kind == "unix" and Path(door.address).stat().st_mode & 0o077:
            how = "everybody"
        if door.on_loopback and how in ("200", "403", "404"):
            how = "401"  # This one asks for no credential, as the table says.
        if how in expected:
            expected.remove(how)
        else:
            wrong.append(f"{process} listens at {door}, and refuses a stranger with {how}")
    return wrong

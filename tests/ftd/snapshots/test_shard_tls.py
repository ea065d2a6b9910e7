"""TLS between snapshot servers: exact bytes with the right certificate, and clear errors with another one."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
import uvloop

from ftd.config.daemon import parse_daemon_config
from ftd.config.shard_tls import ShardTls
from ftd.errors import ConfigurationError, PeerError
from ftd.snapshots.shards.arenas import NodeArenas
from ftd.snapshots.shards.client import ShardClient
from ftd.snapshots.shards.copy_sender import CopySender
from ftd.snapshots.shards.protocol import AsyncRateLimiter
from ftd.snapshots.shards.sources import PartLocation, RangeRequest, SnapshotSource
from tests.helpers.kept_snapshots import JOB, TOKEN, Node, held_keys, raw_request, shared_directory, write

PART = "group-0/shard"
DATA = np.random.default_rng(3).integers(0, 256, 3_000_000, dtype=np.uint8)


@dataclass(slots=True)
class Authority:
    directory: Path
    made: trustme.CA

    @classmethod
    def make(cls, directory: Path) -> "Authority":
        directory.mkdir()
        made = trustme.CA()
        made.cert_pem.write_to_path(directory / "ca.pem")
        return cls(directory, made)

    def tls(self, *names: str, expires: datetime | None = None) -> ShardTls:
        """Return the TLS files of a node, with a certificate for these names."""
        issued = self.made.issue_cert(*names, not_after=expires)
        cert, key = self.directory / "cert.pem", self.directory / "key.pem"
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        key.touch(mode=0o600)
        key.write_bytes(issued.private_key_pem.bytes())
        return ShardTls(cert=cert, key=key, ca=self.directory / "ca.pem")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path / "authority")


def with_node(
    tls: ShardTls,
    body: Callable[[Node], Coroutine[Any, Any, None]],
    run: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run,
) -> None:
    async def main(root: Path) -> None:
        write(root, 5, {PART: DATA})
        async with asyncio.timeout(60), Node("n1", root, tls=tls.server_context(), greeting_s=2.0) as node:
            node.copies.begin(JOB)
            await body(node)

    with shared_directory() as root:
        run(main(root))


async def fetched(node: Node, tls: ShardTls | None) -> bytes:
    context = tls.client_context() if tls is not None else None
    async with ShardClient(TOKEN, tls=context, stall_s=30.0) as client:
        found = await client.manifest(node.source, JOB, 5)
        into = bytearray(len(DATA))
        place = PartLocation(source=node.source, job_id=JOB, step=5, part=found.manifests[0].part(PART))
        await client.fetch([RangeRequest(location=place, first=0, into=memoryview(into))])
        return bytes(into)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_reading_and_sending_copies_over_tls(authority: Authority, run: Callable[[Any], None]) -> None:
    tls = authority.tls("127.0.0.1")

    async def body(node: Node) -> None:
        assert await fetched(node, tls) == DATA.tobytes()
        with shared_directory() as other:
            write(other, 6, {PART: DATA})
            arenas = NodeArenas(other, devices=1)
            async with ShardClient(TOKEN, tls=tls.client_context()) as client:
                sender = CopySender(client, arenas, owner="n0", rate=AsyncRateLimiter(None))
                assert await sender.send(arenas.find(JOB, 6), node.source) == len(DATA)
            arenas.close()
        assert held_keys(node.copies.held()) == [(6, 1, "n0")]

    with_node(tls, body, run)


@pytest.mark.parametrize(
    ("names", "age_days", "says"),
    [
        (["127.0.0.1"], 1, r"certificate has expired \(renew that node's certificate"),
        (["10.9.9.9"], 0, r"mismatch.* \(use the name that the certificate is for in the host of \[node\]"),
        (["other.example"], 0, r"mismatch"),
    ],
)
def test_an_expired_certificate_or_one_of_another_host_is_rejected_at_once(
    authority: Authority, names: list[str], age_days: int, says: str
) -> None:
    expires = datetime.now(UTC) - timedelta(days=age_days) if age_days else None
    tls = authority.tls(*names, expires=expires)

    async def body(node: Node) -> None:
        with pytest.raises(PeerError, match=rf"n1 .*its certificate is rejected: .*{says}"):
            await fetched(node, tls)

    with_node(tls, body)


def test_a_running_server_uses_a_renewed_certificate(authority: Authority) -> None:
    tls = authority.tls("127.0.0.1", expires=datetime.now(UTC) - timedelta(days=1))

    async def body(node: Node) -> None:
        with pytest.raises(PeerError, match="certificate has expired"):
            await fetched(node, tls)
        authority.tls("127.0.0.1")
        assert await fetched(node, tls) == DATA.tobytes()
        tls.cert.write_bytes(b"half of a certi")
        assert await fetched(node, tls) == DATA.tobytes(), "the one before is shown until they go together"
        tls.cert.unlink()
        assert await fetched(node, tls) == DATA.tobytes()
        authority.tls("10.9.9.9")
        with pytest.raises(PeerError, match="mismatch"):
            await fetched(node, tls)

    with_node(tls, body)


def test_a_certificate_of_another_authority_is_rejected(authority: Authority, tmp_path: Path) -> None:
    stranger = Authority.make(tmp_path / "stranger")

    async def body(node: Node) -> None:
        with pytest.raises(PeerError, match=r"is rejected: .*authority in node.snapshot_tls_ca"):
            await fetched(node, authority.tls("127.0.0.1"))

    with_node(stranger.tls("127.0.0.1"), body)


@pytest.mark.long
def test_plain_http_and_tls_reject_each_other(authority: Authority) -> None:
    tls = authority.tls("127.0.0.1")

    async def body(node: Node) -> None:
        with pytest.raises(PeerError, match="n1"):
            await fetched(node, None)
        assert not (await raw_request(node.server.port, f"GET /v1/{JOB}/5 HTTP/1.1")).startswith(
            b"HTTP/1.1 2"
        )
        # A client that sends nothing at all is disconnected.
        reader, writer = await asyncio.open_connection("127.0.0.1", node.server.port)
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
        assert await fetched(node, tls) == DATA.tobytes()
        with shared_directory() as root:
            async with Node("plain", root) as plain:
                with pytest.raises(PeerError, match=r"plain .*no TLS connection: "):
                    await fetched(plain, tls)

    with_node(tls, body)


def test_the_url_of_a_source_has_its_host_and_port() -> None:
    assert str(SnapshotSource(node="a", address="[::1]:7").url("/x", secure=True)) == "https://[::1]:7/x"


# --- ftd.toml ----------------------------------------------------------------------------------------


def test_the_three_tls_files_are_checked_together_at_start(authority: Authority) -> None:
    authority.tls("127.0.0.1")
    here = authority.directory
    node = {"snapshot_tls_cert": "cert.pem", "snapshot_tls_key": "key.pem", "snapshot_tls_ca": "ca.pem"}

    def load(**changes: str | None) -> ShardTls | None:
        table = {name: path for name, path in {**node, **changes}.items() if path is not None}
        return parse_daemon_config({"node": table}, directory=here).snapshot_tls

    assert load() == ShardTls(cert=here / "cert.pem", key=here / "key.pem", ca=here / "ca.pem")
    assert load(snapshot_tls_cert=None, snapshot_tls_key=None, snapshot_tls_ca=None) is None
    with pytest.raises(ConfigurationError, match=r"node.snapshot_tls_ca: .*go together"):
        load(snapshot_tls_ca=None)
    with pytest.raises(ConfigurationError, match=r"node.snapshot_tls_cert: .*none.pem cannot be used"):
        load(snapshot_tls_cert="none.pem")
    with pytest.raises(ConfigurationError, match=r"node.snapshot_tls_ca: .*cannot be used"):
        load(snapshot_tls_ca="key.pem")
    with pytest.raises(ConfigurationError, match=r"node.snapshot_tls_cert: "):
        load(snapshot_tls_cert="ca.pem")
    (here / "key.pem").chmod(0o644)
    with pytest.raises(ConfigurationError, match=r"node.snapshot_tls_key: "):
        load()

"""A mosquitto with TLS, passwords and the ACL of ``ftd acl``, for tests."""

import shutil
import subprocess
from datetime import datetime
from pathlib import Path

import pytest
import trustme

from ftd.transport.address import BrokerAddress, Tls
from ftd.transport.mqtt.acl import Users, acl_text
from ftd.transport.mqtt.mosquitto import await_listening, find_mosquitto, free_port
from tests.helpers.waiting import PATIENCE_S

USERS = Users(nodes=["host-a", "host-b"], operators=["alice"], tools=["grafana"], chaos=["mallory"])
NAMES = (USERS.coordinator, *USERS.nodes, *USERS.operators, *USERS.tools, *USERS.chaos)

needs_mosquitto = pytest.mark.skipif(
    find_mosquitto() is None or shutil.which("mosquitto_passwd") is None, reason="mosquitto is not installed"
)


class SecureBroker:
    """A broker with TLS whose certificates come from the test's own authority; passwords are the names,
    reversed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = trustme.CA()
        self.authority.cert_pem.write_to_path(directory / "ca.pem")
        self.ports: list[int] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        (directory / "acl").write_text(acl_text("lab", USERS))
        for file in ("acl", "passwords"):
            (directory / file).touch(mode=0o600)
        for name in NAMES:
            command = ["mosquitto_passwd", "-b", str(directory / "passwords"), name, name[::-1]]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def start(self, *identities: str, expires: datetime | None = None) -> int:
        """Start a broker with a certificate for these names, and return its port."""
        port = free_port()
        here = self.directory / str(port)
        here.mkdir()
        certificate = self.authority.issue_cert(*identities, not_after=expires)
        certificate.private_key_pem.write_to_path(here / "key.pem")
        for blob in certificate.cert_chain_pems:
            blob.write_to_path(here / "cert.pem", append=True)
        (here / "mosquitto.conf").write_text(
            f"listener {port} 127.0.0.1\n"
            f"certfile {here}/cert.pem\nkeyfile {here}/key.pem\n"
            f"allow_anonymous false\npassword_file {self.directory}/passwords\n"
            f"acl_file {self.directory}/acl\n"
            "user root\nlog_dest none\n"  # Otherwise it changes to another user, who cannot read a test's directory.
        )
        binary = str(find_mosquitto())
        self.processes.append(subprocess.Popen([binary, "-c", str(here / "mosquitto.conf")]))
        await_listening("127.0.0.1", port, PATIENCE_S)
        return port

    def address(self, user: str, port: int) -> BrokerAddress:
        tls = Tls(ca_file=self.directory / "ca.pem")
        return BrokerAddress(host="localhost", port=port, username=user, password=user[::-1], tls=tls)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

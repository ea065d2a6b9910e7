"""Real brokers on loopback that a test may kill and start again."""

import subprocess
from pathlib import Path

from ftd.transport.address import BrokerAddress
from ftd.transport.mqtt.embedded import await_ready, embedded_command
from ftd.transport.mqtt.mosquitto import await_listening, free_port, mosquitto_command


class RunningBroker:
    """A broker process that a test may kill and start again on the same port."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.directory = directory
        self.options = ""
        """Further lines of mosquitto's configuration at the next start; they replace earlier ones."""
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> BrokerAddress:
        return BrokerAddress(host="127.0.0.1", port=self.port)

    def start(self) -> None:
        ready = self.directory / "ready"
        ready.unlink(missing_ok=True)
        command = (
            mosquitto_command(self.directory, self.port)
            if self.kind == "mosquitto"
            else embedded_command(ready, self.port)
        )
        if self.options:
            with (self.directory / "mosquitto.conf").open("a") as file:
                file.write(self.options)
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        if self.kind == "mosquitto":
            await_listening("127.0.0.1", self.port, 60)
        else:
            await_ready(ready, 60)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

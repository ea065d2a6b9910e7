"""Another client of the broker, for ``benchmarks.thousand_nodes``: what it reads, and when."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.packets import (
    PUBLISH,
    Splitter,
    connect_packet,
    puback_packet,
    publish_packet,
    published,
    subscribe_packet,
)
from ftd.wire.topics import Topics


class Observer:
    """Another client of the broker: events with the time at which each was read, and requests."""

    def __init__(self, port: int, cluster: str) -> None:
        self.topics = Topics(cluster=cluster)
        self.events: list[tuple[float, dict[str, Any]]] = []
        self.decided: Callable[[], None] = lambda: None
        """Called at once when a plan was chosen."""
        self.state_bytes = self.states = 0
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.sendall(
            connect_packet("observer", keep_alive_s=0)
            + subscribe_packet(
                1, [self.topics.events, self.topics.cluster_state, self.topics.reply("observer")]
            )
        )
        threading.Thread(target=self._read, daemon=True).start()

    def request(self, **request: Any) -> None:
        payload = {"request": f"r{time.monotonic_ns()}", "reply": "observer", **request}
        packet = publish_packet(self.topics.request.encode(), json.dumps(payload).encode(), 1)
        self._sock.sendall(packet)

    def read(self, name: str, since: float = 0.0) -> list[tuple[float, dict[str, Any]]]:
        return [(at, event) for at, event in list(self.events) if at >= since and event["event"] == name]

    def _read(self) -> None:
        # It stands for another host, and must not wait for what takes this one's cores.
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        splitter = Splitter()
        while data := self._sock.recv(1 << 20):
            for first, body in splitter.feed(data):
                if first & 0xF0 != PUBLISH:
                    continue
                at = time.monotonic()
                topic, payload, _, number = published(first, body)
                if number:
                    self._sock.sendall(puback_packet(number))
                if topic.endswith("/events"):
                    if b'"event":"PlanChosen"' in payload[:200]:
                        self.decided()
                    self.events.append((at, json.loads(payload)))
                elif topic.endswith("/state"):
                    self.states, self.state_bytes = self.states + 1, len(payload)
                elif not json.loads(payload)["accepted"]:
                    raise SystemExit(f"refused: {payload!r}")

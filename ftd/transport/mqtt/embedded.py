"""A broker that needs no installation: amqtt in a process of its own, for clusters on one machine.

``python -m ftd.transport.mqtt.embedded --port PORT --ready-file FILE`` listens on loopback, anonymously, and
then creates FILE. amqtt 0.12 has bugs that matter here (measured, see the tests); ``_Broker`` works
around those that can be fixed from outside:

* the keep-alive is never enforced, so the last will of a frozen client never comes;
* a new connection is sent retained messages that match *other* clients' subscriptions;
* a second connection under the same client id leaves the first one open;
* a subscription that arrives while a message is distributed makes the distribution fail: the message is lost.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ftd.errors import UnreachableError
from ftd.processes import module_command


def embedded_command(ready_file: Path, port: int) -> list[str]:
    """Return the command that runs the embedded broker."""
    return module_command("ftd.transport.mqtt.embedded", "--port", str(port), "--ready-file", str(ready_file))


def await_ready(ready_file: Path, timeout_s: float) -> None:
    """Wait for a broker that was started with ``ready_file``. It blocks: call it in a thread from a loop.

    :raises UnreachableError: it did not start within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if ready_file.exists():
            return
        time.sleep(0.005)
    raise UnreachableError(f"the embedded broker did not come up within {timeout_s:g} s")


async def serve(port: int, ready_file: Path) -> int:
    """Run the broker until SIGTERM or SIGINT, and return the exit code."""
    from amqtt.errors import BrokerError

    broker = _broker_class()(
        {
            "listeners": {"default": {"type": "tcp", "bind": f"127.0.0.1:{port}"}},
            "plugins": {
                "amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True},
            },
        }
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await broker.start()
    except BrokerError as error:
        print(f"ftd: the embedded broker cannot listen on 127.0.0.1:{port}: {error}", file=sys.stderr)
        return 2
    ready_file.touch()
    await stop.wait()
    with contextlib.suppress(Exception):
        await asyncio.wait_for(broker.shutdown(), 2.0)
    return 0


def _broker_class() -> Any:
    """Return the subclass. It is made here, so that an import of this module for its command costs nothing."""
    from amqtt.broker import Broker

    class _Broker(Broker):  # type: ignore[misc, unused-ignore]
        async def _initialize_client_session(self, *arguments: Any) -> Any:
            handler, session = await super()._initialize_client_session(*arguments)
            if session.keep_alive:
                # MQTT 3.1.1 §3.1.2.10: a connection ends after one and a half times the keep-alive without
                # a packet. A closed socket ends the reader in the same way, so the last will follows.
                session.keep_alive = session.keep_alive * 1.5

                def end_reader() -> None:
                    handler._reader_task.cancel()

                handler.handle_read_timeout = end_reader
            return handler, session

        async def _delete_session(self, client_id: str) -> None:
            if client_id in self._sessions:
                old, handler = self._sessions[client_id]
                if old.transitions.state == "connected":
                    await handler.handle_connection_closed()
            await super()._delete_session(client_id)

        async def _publish_retained_messages_for_subscription(self, subscription: Any, session: Any) -> None:
            subscribed = self._subscriptions.get(subscription[0], ())
            if any(subscriber is session for subscriber, _ in subscribed):
                await super()._publish_retained_messages_for_subscription(subscription, session)

        async def _run_broadcast(self, running_tasks: Any) -> None:
            broadcast = await self._broadcast_queue.get()
            for pattern, subscribers in list(self._subscriptions.items()):
                if self._matches(broadcast["topic"], pattern):
                    for session, subscribed_qos in list(subscribers):
                        self._hand_out(broadcast, session, subscribed_qos, running_tasks)

        def _hand_out(self, broadcast: Any, session: Any, subscribed_qos: int, running_tasks: Any) -> None:
            """Send a message to one subscriber. There are only clean sessions, so nothing is queued for absent
            clients.
            """
            handler = self._get_handler(session)
            if handler is None or session.transitions.state != "connected":
                return
            qos = broadcast.get("qos", subscribed_qos)
            publishing = handler.mqtt_publish(broadcast["topic"], broadcast["data"], qos, retain=False)
            running_tasks.append(asyncio.ensure_future(publishing))

    return _Broker


def main() -> None:
    """Run ``python -m ftd.transport.mqtt.embedded``."""
    parser = argparse.ArgumentParser(prog="python -m ftd.transport.mqtt.embedded", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ready-file", type=Path, required=True)
    options = parser.parse_args()
    # amqtt logs every connection and every slow client as a warning; only its failures matter here.
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    logging.getLogger("transitions").setLevel(logging.ERROR)
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()
    code = asyncio.run(serve(options.port, options.ready_file))
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

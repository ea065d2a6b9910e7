"""A client of a running cluster, for commands and scripts: requests, the public state and the event stream.

::

    async with ClusterClient(address) as cluster:
        answer = await cluster.request(StopRequest(**cluster.envelope(), job="gpt"))
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

from ftd.config.validation import NAME_PATTERN
from ftd.errors import RequestRejected, UnreachableError, WireError
from ftd.transport.address import ClusterAddress
from ftd.transport.mqtt.session import MqttSession
from ftd.transport.wire.checking import encode_event
from ftd.transport.wire.codec import MAX_COMMAND_BYTES, check_size
from ftd.transport.wire.duplicates import DuplicateFilter
from ftd.transport.wire.public import (
    Answer,
    ChaosRequest,
    DrainRequest,
    EventMessage,
    HistoryRequest,
    NodeStateMessage,
    Request,
    SnapshotRequest,
    SubmitRequest,
    TraceRequest,
    decode_json,
    encode_json,
)
from ftd.transport.wire.topics import Topics

_PAGE = 1000
"""Rows of the journal in one answer; the coordinator sends fewer if they are large."""
CONNECT_S = 3.0
ANSWER_S = 5.0
SOLVER_ANSWER_S = 60.0
"""Timeout for a job that needs a solver, which the coordinator imports and tries before it answers."""
DECISION_ANSWER_S = 30.0
"""Timeout for a drain, which the planner answers, and for a snapshot now, which is answered when it is complete;
both wait for a recovery that is under way. The coordinator answers earlier in any case (``ANSWER_LIMIT_S`` in
``statemachine.cluster.drains`` and ``statemachine.cluster.snapshots.requests``).
"""


class ClusterClient:
    """A connection to one cluster's broker; see the module."""

    def __init__(
        self,
        address: ClusterAddress,
        *,
        listen: bool = False,
        on_state: Callable[[dict[str, Any]], None] | None = None,
        on_node: Callable[[str, str], None] | None = None,
        on_broker: Callable[[bool], None] | None = None,
    ) -> None:
        """Prepare the connection; ``async with`` opens it.

        :param listen: subscribe to the event stream (``events``).
        :param on_state: receives every public state.
        :param on_node: receives every node's name and state, as the node publishes them.
        :param on_broker: receives whether the broker can be reached, when that changes.
        """
        self.topics = Topics(cluster=address.cluster)
        self.client_id = f"client-{secrets.token_hex(6)}"
        self._answers: dict[str, asyncio.Future[Answer]] = {}
        self._state: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._repeats = DuplicateFilter()
        self._on_state, self._on_node = on_state, on_node
        own = [self.topics.reply(self.client_id), self.topics.cluster_state]
        self._session = MqttSession(
            address.broker,
            client_id=self.client_id,
            subscriptions=[
                *own,
                *([self.topics.events] if listen else []),
                *([self.topics.node_state()] if on_node is not None else []),
            ],
            on_message=self._on_message,
            on_connected=lambda: on_broker(True) if on_broker is not None else None,
            on_lost=lambda: on_broker(False) if on_broker is not None else None,
        )
        self._address = address

    async def __aenter__(self) -> Self:
        """Connect.

        :raises UnreachableError: the broker does not answer.
        """
        self._task = asyncio.create_task(self._session.run())
        try:
            await self._session.wait_connected(CONNECT_S)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def envelope(self) -> dict[str, Any]:
        """Return the fields that every request begins with."""
        return {"request": secrets.token_hex(8), "reply": self.client_id}

    async def request(
        self,
        request: Request | ChaosRequest | TraceRequest,
        *,
        topic: str | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Send a request (to the coordinator, or to ``topic``) and wait for its answer.

        It is sent again every second; it is served once, whatever is lost or duplicated.

        :param timeout_s: limit for the answer; ``None`` for as long as the answer to such a request may take.

        :raises RequestRejected: the answer is no, or the request is too large to be read.
        :raises UnreachableError: no answer arrives in time.
        """
        limit_s = ANSWER_S if timeout_s is None else timeout_s
        if timeout_s is None:
            solver = isinstance(request, SubmitRequest) and request.job.policy.batch_solver != "exact"
            decided = isinstance(request, DrainRequest) or (
                isinstance(request, SnapshotRequest) and request.now
            )
            timeout_s = SOLVER_ANSWER_S if solver else DECISION_ANSWER_S if decided else ANSWER_S
        payload = encode_json(request)
        try:
            check_size(payload)
        except WireError as error:  # Nobody reads who sent it, so nobody answers.
            raise RequestRejected(f"the request is too large: {error}") from None
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[request.request] = answer
        began = asyncio.get_running_loop().time()
        try:
            while not answer.done():
                # Only a coordinator that leads takes longer than for an answer at once.
                left_s = began + (timeout_s if self._leader else limit_s) - asyncio.get_running_loop().time()
                if left_s <= 0:
                    raise UnreachableError(self._no_answer(topic))
                if self._session.refuses(len(payload)):
                    raise RequestRejected(
                        f"the request is too large for the broker at {self._address.broker.url}: {len(payload)} bytes "
                        "(raise its limit, mosquitto: max_packet_size, and restart it)"
                    )
                self._session.publish(topic or self.topics.request, payload)
                await asyncio.wait([answer], timeout=min(1.0, left_s))
        finally:
            del self._answers[request.request]
        found = answer.result()
        if not found.accepted:
            raise RequestRejected(found.detail)
        return found

    async def state(self, timeout_s: float = 1.0) -> dict[str, Any]:
        """Return the retained public state.

        :raises UnreachableError: no state is retained.
        """
        try:
            return await asyncio.wait_for(asyncio.shield(self._state), timeout_s)
        except TimeoutError:
            raise UnreachableError(self._no_answer(None)) from None

    async def require_present(self, node: str) -> None:
        """Check that a node is there before a request is sent to it, which nobody else would answer.

        Nothing is checked while no coordinator publishes which nodes there are: nodes answer without one.

        :raises RequestRejected: there is no such node, or it is offline.
        """
        if not NAME_PATTERN.fullmatch(node):
            raise RequestRejected(f"{node!r} is no name of a node: write letters, digits, '.', '_' and '-'")
        try:
            state = await self.state()
        except UnreachableError:
            return
        if state.get("phase") == "UNREACHABLE":
            return
        nodes: dict[str, Any] = state.get("nodes") or {}
        if node not in nodes:
            raise RequestRejected(f"there is no node {node!r}; nodes: {', '.join(sorted(nodes)) or 'none'}")
        if nodes[node].get("state") == "OFFLINE":
            present = sorted(name for name, one in nodes.items() if one.get("state") != "OFFLINE")
            raise RequestRejected(f"{node} is offline; nodes that are not: {', '.join(present) or 'none'}")

    async def history(self, *, what: str = "events", newest: int | None = None) -> list[dict[str, Any]]:
        """Return events or steps of the journal, oldest first: all of them, or at most so many of the ``newest`` ones.

        :raises UnreachableError: no coordinator answers.
        """
        found: list[dict[str, Any]] = []
        after = 0
        if newest is not None:
            found, last = await self._page(what, limit=min(newest, _PAGE), newest=True)
            if len(found) >= min(newest, last):
                return found[-newest:]
            # One answer has less if they are many or large, as plans of a thousand nodes are. Rows are numbered from 1.
            after, found = max(0, last - newest), []
        while True:
            rows, after = await self._page(what, after=after, limit=_PAGE)
            found += rows
            if not rows:
                return found if newest is None else found[-newest:]

    async def _page(
        self, what: str, *, limit: int, after: int = 0, newest: bool = False
    ) -> tuple[list[dict[str, Any]], int]:
        """Return a page of the journal and the number of its last row."""
        request = HistoryRequest(
            **self.envelope(),
            what="steps" if what == "steps" else "events",
            after=after,
            limit=limit,
            newest=newest,
        )
        data = (await self.request(request)).data or {}
        return data.get(what, []), int(data.get("last", 0))

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield events as they are published, each once, from the connection on; needs ``listen``."""
        while True:
            yield await self._events.get()

    async def publish_event(self, event: EventMessage, timeout_s: float = 1.0) -> None:
        """Publish an event and wait for the broker's acknowledgement, or for ``timeout_s``."""
        self.publish(self.topics.events, encode_event(event))
        await self._session.flush(timeout_s)

    def publish(self, topic: str, payload: bytes) -> None:
        """Publish a payload on a topic. Without a connection it waits for the next one."""
        self._session.publish(topic, payload, queue_offline=True)

    @property
    def _leader(self) -> str:
        """Name of the leading coordinator; empty if the newest state names none."""
        state = self._state.result() if self._state.done() else {}
        return "" if state.get("phase") == "UNREACHABLE" else str(state.get("leader") or "")

    def _no_answer(self, topic: str | None) -> str:
        broker, cluster = self._address.broker, self._address.cluster
        state = self._state.result() if self._state.done() else {}
        where = f"at {broker.url} for cluster {cluster!r}"
        rights = f", and may {broker.username} write there (ftd acl)" if broker.username else ""
        if topic:
            return f"no answer on {topic} {where} (is the node up{rights}?)"
        if state.get("phase") == "UNREACHABLE":
            return f"no coordinator answers {where}: {state.get('reason') or 'it is gone'}"
        if leader := self._leader:
            asked = self.topics.request
            return f"{leader} leads {where}, and does not answer on {asked} (is it busy{rights}?)"
        return f"no coordinator answers {where} (is it running, and is the cluster's name right?)"

    def _on_message(self, topic: str, payload: bytes, retained: bool) -> None:
        try:
            if topic == self.topics.cluster_state:
                state = decode_json(payload, dict[str, Any], MAX_COMMAND_BYTES)
                if self._state.done():
                    self._state = asyncio.get_running_loop().create_future()
                self._state.set_result(state)
                if self._on_state is not None:
                    self._on_state(state)
            elif self._on_node is not None and topic.endswith("/state"):
                node_state: NodeStateMessage = decode_json(payload, NodeStateMessage)
                self._on_node(node_state.node, node_state.state)
            elif topic == self.topics.events:
                event: EventMessage = decode_json(payload, EventMessage)  # Malformed messages are dropped.
                if self._repeats.is_new(event.id):
                    self._events.put_nowait(decode_json(payload, dict[str, Any]))
            else:
                answer = decode_json(payload, Answer, MAX_COMMAND_BYTES)
                waiting = self._answers.get(answer.request)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except WireError:
            return  # Anybody may publish garbage; it is no answer to a request of ours.

"""Handling of clients' requests: each is checked, passed to the machine or answered here, and answered once
per request id.
"""

import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, assert_never

import msgspec
import structlog

from ftd.config.job import job_from_data, profile_from_data
from ftd.config.snapshots import check_interval, check_protection
from ftd.config.tracking import check_installed
from ftd.config.validation import require_name
from ftd.coordinator.journal import Journal
from ftd.coordinator.leadership import Leadership
from ftd.coordinator.ports import CheckpointOperations
from ftd.driver import Driver
from ftd.errors import ConfigurationError, JournalError, WireError
from ftd.snapshots.protection import make_bounded_code
from ftd.transport.wire.public import (
    Answer,
    AnyRequest,
    DrainRequest,
    HistoryRequest,
    ReadmitRequest,
    SnapshotRequest,
    StatusRequest,
    StopRequest,
    SubmitRequest,
    decode_json,
    encode_json,
)
from ftd.transport.wire.topics import Topics
from planner.values import ModelProfile
from statemachine.events import (
    DrainRequested,
    ReadmitRequested,
    SnapshotRequested,
    StopRequested,
    SubmitRequested,
)
from statemachine.messages.values import MAX_COUNTER, CheckpointRecord, Job

_log = structlog.get_logger("ftd.requests")

_MAX_ANSWERS = 1000
"""Answers that are remembered for requests that QoS 1 delivers twice, or that a client repeats."""


class _Sender(msgspec.Struct, frozen=True):
    """The fields that are needed to reject an otherwise malformed request."""

    request: str
    reply: str


class RequestHandler:
    """The handler of the request topic. It passes requests that change the cluster to the machine and answers
    all others.
    """

    def __init__(
        self,
        *,
        topics: Topics,
        session: Leadership,
        driver: Driver,
        journal: Journal,
        checkpoints: CheckpointOperations,
        check_solver: Callable[[Callable[[str], None]], None],
        public_state: Callable[[], dict[str, Any]],
        job: Callable[[], Job | None],
    ) -> None:
        self._topics = topics
        self._session = session
        self._driver = driver
        self._journal = journal
        self._checkpoints = checkpoints
        self._check_solver = check_solver
        self._public_state = public_state
        self._job = job
        self._waiting: dict[str, str] = {}
        """Client id by request id, until the machine's ``AnswerRequest``."""
        self._answered: OrderedDict[str, Answer] = OrderedDict()

    def handle(self, payload: bytes) -> None:
        """Handle a message on the request topic.

        :raises WireError: it is no request. Its sender has been answered if it can be identified.
        """
        try:
            request = decode_json(payload, AnyRequest)
            require_name(request.reply, "reply")
            require_name(request.request, "request")
        except (WireError, ConfigurationError) as error:
            self._reject_malformed(payload, str(error))
            raise WireError(str(error)) from None
        if request.request in self._waiting:
            return
        if (known := self._answered.get(request.request)) is not None:
            self._send(request.reply, known)
            return
        self._waiting[request.request] = request.reply
        try:
            _check_integers(msgspec.to_builtins(request))
            self._serve(request)
        except (ConfigurationError, JournalError) as error:
            # What cannot be written ends the coordinator with the next write of its driver.
            self.answer(request.request, accepted=False, detail=str(error))

    def answer(
        self,
        request: str,
        *,
        accepted: bool,
        detail: str,
        outcome: str = "",
        data: dict[str, Any] | None = None,
    ) -> None:
        """Answer the client that sent ``request``; unknown ids (answered before a restart) are ignored."""
        reply = self._waiting.pop(request, None)
        if reply is None:
            return
        answer = Answer(request=request, accepted=accepted, detail=detail, outcome=outcome, data=data)
        if data is None:
            self._answered[request] = answer
            while len(self._answered) > _MAX_ANSWERS:
                self._answered.popitem(last=False)
        _log.info("answered", request=request, accepted=accepted, detail=detail)
        self._send(reply, answer)

    def forget_waiting(self) -> None:
        """Forget the requests that are not answered yet, since another coordinator leads: clients send them again."""
        self._waiting.clear()

    def _serve(self, request: AnyRequest) -> None:
        stamp = self._driver.stamp()
        match request:
            case SubmitRequest(request=number, job=data):
                job = job_from_data(
                    data,
                    # The id is derived from the request, so that a request served twice is still one job.
                    job_id=f"{data.name}-{uuid.uuid5(uuid.NAMESPACE_OID, number).hex[:8]}",
                    devices_per_node=data.policy.devices_per_node or self._usual_devices(),
                )
                check_installed(job.logging)
                self._submit(number, job, profile_from_data(data))
            case StopRequest(request=number, job=job_name):
                self._driver.feed(StopRequested(**stamp, request=number, job=job_name))
            case DrainRequest(request=number):
                if request.when_possible and request.cancel:
                    raise ConfigurationError("a drain cannot be cancelled when possible: ask for one of both")
                self._driver.feed(
                    DrainRequested(
                        **stamp,
                        request=number,
                        node=request.node,
                        when_possible=request.when_possible,
                        cancel=request.cancel,
                    )
                )
            case ReadmitRequest(request=number, node=node):
                self._driver.feed(ReadmitRequested(**stamp, request=number, node=node))
            case SnapshotRequest(request=number):
                check_interval(request.every_steps, "every")
                self._check_protection(request.protection)
                self._driver.feed(
                    SnapshotRequested(
                        **stamp,
                        request=number,
                        now=request.now,
                        every_steps=request.every_steps,
                        protection=request.protection,
                    )
                )
            case StatusRequest(request=number):
                self.answer(number, accepted=True, detail="", data=self._public_state())
            case HistoryRequest(request=number):
                self.answer(number, accepted=True, detail="", data=self._history(request))
            case _:
                assert_never(request)

    def _submit(self, request: str, job: Job, profile: ModelProfile | None) -> None:
        """Check the solver if the job needs one, then find the checkpoint that it begins from, if it may have
        one.
        """

        def submit(begin: CheckpointRecord | None, rejection: str) -> None:
            if request not in self._waiting:
                return  # Another coordinator has led since: this one decides nothing, and the client asks again.
            if rejection:
                self.answer(request, accepted=False, detail=rejection)
                return
            stamp = self._driver.stamp()
            self._driver.feed(
                SubmitRequested(**stamp, request=request, job=job, profile=profile, start_checkpoint=begin)
            )

        def begin(problem: str) -> None:
            if not problem and job.checkpoint.url:
                self._checkpoints.find_initial(job, submit)
            else:
                submit(None, problem)

        if job.policy.batch_solver == "pyomo":
            self._check_solver(begin)
        else:
            begin("")

    def _check_protection(self, scheme: str | None) -> None:
        """Check a protection for the job and its owners.

        :raises ConfigurationError: there is no such protection, or it does not fit.
        """
        job = self._job()
        if scheme is None or scheme == "auto" or job is None:
            return
        check_protection(scheme, zero1=job.policy.zero1, field="protect")
        owners = len(self._public_state()["pipelines"])
        try:
            make_bounded_code(scheme, max(1, owners))
        except ValueError as error:
            raise ConfigurationError(str(error), field="protect", remedy="auto takes the best one") from None

    def _history(self, request: HistoryRequest) -> dict[str, Any]:
        page = self._journal.events if request.what == "events" else self._journal.steps
        after = max(0, min(request.after, MAX_COUNTER))
        rows, last = page(after=after, limit=request.limit, newest=request.newest)
        return {request.what: rows, "last": last}

    def _usual_devices(self) -> int:
        """Return the number of devices that most nodes have: a job that does not name a number uses the
        cluster as it is.
        """
        nodes = self._public_state()["nodes"].values()
        counted = Counter(int(node["devices"]) for node in nodes if node["state"] != "OFFLINE")
        return counted.most_common(1)[0][0] if counted else 1

    def _reject_malformed(self, payload: bytes, detail: str) -> None:
        try:
            sender = decode_json(payload, _Sender)
            require_name(sender.reply, "reply")
        except (WireError, ConfigurationError):
            return
        self._send(sender.reply, Answer(request=sender.request, accepted=False, detail=detail))

    def _send(self, client: str, answer: Answer) -> None:
        self._session.publish(self._topics.reply(client), encode_json(answer))


def _check_integers(value: Any, where: str = "") -> None:
    """Check that the journal and messages to nodes can hold the whole numbers of a request.

    :param where: name of the value.
    :raises ConfigurationError: one of them cannot be encoded.
    """
    match value:
        case dict():
            for name, part in value.items():
                _check_integers(part, f"{where}.{name}" if where else str(name))
        case list() | tuple():
            for part in value:
                _check_integers(part, where)
        case int() if not -(2**63) <= value < 2**64:
            raise ConfigurationError(
                "the number has more than 64 bits", field=where, remedy="write a smaller one"
            )

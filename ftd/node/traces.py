"""Traces on demand: a client asks over MQTT what a trainer does, the trainer records it, and the node answers.

Tracing only observes, so neither the coordinator nor the state machines take part.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from ftd.config.daemon import DaemonConfig
from ftd.transport.wire.public import Answer, TraceData, TraceRequest, decode_json
from planner.reasons import count_noun
from runtime.monitoring.tracing import MAX_STEPS
from statemachine.messages.trace import Trace, Traced
from statemachine.messages.values import MAX_COUNTER

log = structlog.get_logger()

MOST_WITHIN_S = 3600.0
_MOST_WAITING = 16
_REMEMBERED = 64
"""Number of requests whose answer is remembered for a client that asks again because the first answer was lost
or late.
"""


class TraceService:
    """The server of the requests on the topic ``trace/<node>``; it answers with the trainers' ``Traced``
    reports.

    :param send: sends a frame to the trainer of a device; ``False`` if there is none.
    :param answer: sends an answer to a client, by the client's id.
    """

    def __init__(
        self,
        config: DaemonConfig,
        *,
        send: Callable[[int, Trace], bool],
        answer: Callable[[str, Answer], None],
    ) -> None:
        self._node, self._devices = config.node, config.devices
        self._send, self._answer = send, answer
        self._waiting: dict[str, tuple[TraceRequest, asyncio.TimerHandle]] = {}
        self._answered: dict[str, Answer] = {}

    def on_request(self, payload: bytes) -> None:
        """Check the request and pass it to the trainer; the same request is served once.

        :raises WireError: the payload is no trace request, so nobody can be answered.
        """
        request: TraceRequest = decode_json(payload, TraceRequest)
        if request.request in self._waiting:
            return
        if (known := self._answered.get(request.request)) is not None:
            self._answer(request.reply, known)
            return
        problem = self._problem(request)
        if problem is None:
            frame = Trace(request=request.request, first_step=request.first_step, steps=request.steps)
            if not self._send(request.device, frame):
                problem = f"{self._node} runs no trainer on device {request.device} now"
        if problem is not None:
            self._send_answer(request, accepted=False, detail=problem)
            return
        timer = asyncio.get_running_loop().call_later(request.within_s, self._abandon, request.request)
        self._waiting[request.request] = (request, timer)

    def on_traced(self, device: int, traced: Traced) -> None:
        """Answer the request with the trainer's report; ignore a report that is late."""
        found = self._waiting.pop(traced.request, None)
        if found is None:
            return
        request, timer = found
        timer.cancel()
        data = TraceData(
            node=self._node,
            device=device,
            rank=traced.rank,
            generation=traced.generation,
            dropped=traced.dropped,
            spans=[msgspec.structs.astuple(span) for span in traced.spans],
        )
        log.info("traced", device=device, spans=len(traced.spans), dropped=traced.dropped)
        detail = f"{count_noun(len(traced.spans), 'span')} of rank {traced.rank}"
        self._send_answer(request, accepted=True, detail=detail, data=msgspec.to_builtins(data))

    def on_trainer_ended(self, device: int) -> None:
        """Answer the requests that the device's trainer has taken with it."""
        for number, (request, timer) in list(self._waiting.items()):
            if request.device == device:
                timer.cancel()
                del self._waiting[number]
                detail = f"the trainer of {self._node}/{device} ended before it had recorded the steps"
                self._send_answer(request, accepted=False, detail=detail)

    def close(self) -> None:
        """Drop the requests that are not answered yet."""
        for _, timer in self._waiting.values():
            timer.cancel()
        self._waiting.clear()

    def _abandon(self, number: str) -> None:
        request, _ = self._waiting.pop(number)
        detail = (
            f"{self._node}/{request.device} did not train {count_noun(request.steps, 'step')} "
            f"within {request.within_s:g} s"
        )
        self._send_answer(request, accepted=False, detail=detail)

    def _problem(self, request: TraceRequest) -> str | None:
        """Return why this request is rejected, or ``None``."""
        if not 0 <= request.device < self._devices:
            return f"{self._node} has devices 0 to {self._devices - 1}, not {request.device}"
        if not 1 <= request.steps <= MAX_STEPS:
            return f"steps is {request.steps}; 1 to {MAX_STEPS} can be traced"
        if request.first_step < 0:
            return f"first_step is {request.first_step}; give 0 to begin with the next step"
        if request.first_step > MAX_COUNTER:
            return f"first_step is {request.first_step}; give at most {MAX_COUNTER}"
        if not 0 < request.within_s <= MOST_WITHIN_S:
            return f"within_s is {request.within_s:g}; give a positive number of at most {MOST_WITHIN_S:g} seconds"
        if len(self._waiting) >= _MOST_WAITING:
            return f"{self._node} is busy with {_MOST_WAITING} traces; ask again later"
        return None

    def _send_answer(
        self, request: TraceRequest, *, accepted: bool, detail: str, data: dict[str, Any] | None = None
    ) -> None:
        answer = Answer(request=request.request, accepted=accepted, detail=detail, data=data)
        self._answered[request.request] = answer
        while len(self._answered) > _REMEMBERED:
            del self._answered[next(iter(self._answered))]
        self._answer(request.reply, answer)

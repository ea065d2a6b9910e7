"""Requests for traces that a node rejects or cannot serve."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ftd.node.traces import TraceService
from ftd.transport.wire.public import Answer, TraceRequest, encode_json
from runtime.wire.frames import encode
from statemachine.messages.trace import Trace, Traced


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"device": 1}, "devices 0 to 0, not 1"),
        ({"steps": 0}, "steps is 0"),
        ({"first_step": -1}, "first_step is -1"),
        ({"first_step": 2**64}, "first_step is 18446744073709551616; give at most 9007199254740992"),
        ({"within_s": 0.0}, "within_s is 0"),
    ],
)
def test_impossible_requests_get_an_answer(fields: dict[str, int], expected: str) -> None:
    answers: list[Answer] = []

    def send(_device: int, frame: Trace) -> bool:
        return bool(encode(frame))

    config: Any = SimpleNamespace(node="node-1", devices=1)
    service = TraceService(config, send=send, answer=lambda _client, answer: answers.append(answer))
    service.on_request(encode_json(TraceRequest(request="r", reply="client", **fields)))
    [answer] = answers
    assert not answer.accepted and expected in answer.detail


def test_a_request_whose_trainer_ends_is_answered_at_once() -> None:
    async def scene() -> list[Answer]:
        answers: list[Answer] = []
        config: Any = SimpleNamespace(node="node-1", devices=2)
        service = TraceService(
            config, send=lambda _device, _frame: True, answer=lambda _client, answer: answers.append(answer)
        )
        for device in range(2):
            service.on_request(encode_json(TraceRequest(request=f"r{device}", reply="client", device=device)))
        service.on_trainer_ended(1)
        service.on_traced(1, Traced(request="r1", rank=3, generation=2, spans=(), dropped=0))
        service.close()
        return answers

    [answer] = asyncio.run(scene())
    assert (answer.request, answer.accepted) == ("r1", False)
    assert answer.detail == "the trainer of node-1/1 ended before it had recorded the steps"

"""State transfers over real gloo in one process: complete layers count, others do not."""

import threading
from collections.abc import Iterator

import pytest
import torch

from runtime.engine.engine import Engine
from runtime.groups.communicator import CommunicationAborted
from runtime.groups.gloo import GlooCommunicator
from runtime.layers.transfer import LayerEndpoint, StateExchange, TransferError
from runtime.monitoring.progress import ProgressMonitor
from statemachine.messages.trainer import TransferData
from tests.helpers.harness import formed_world
from tests.helpers.runtime_support import gpt_data

CPU = torch.device("cpu")


@pytest.fixture
def pair() -> Iterator[list[GlooCommunicator]]:
    with formed_world(2) as pair:
        yield pair


def engine_at(step: int) -> Engine:
    """Return an engine without state that was moved to ``step``."""
    with torch.random.fork_rng(devices=[]):
        engine = Engine(gpt_data(), CPU, ProgressMonitor())
    engine.commit_or_discard(step, None)
    return engine


def exchange(
    engine: Engine, communicator: GlooCommunicator, transfers: list[TransferData]
) -> StateExchange[TransferData]:
    return StateExchange(
        transfers,
        endpoint=LayerEndpoint(engine.states, engine.complete_layers, engine.parked),
        communicator=communicator,
        monitor=engine.monitor,
        device=CPU,
    )


def to_rank_1(*layers: int) -> list[TransferData]:
    return [TransferData(layer=layer, source=0, target=1) for layer in layers]


def test_layers_arrive_whole_and_bytes_are_counted(pair: list[GlooCommunicator]) -> None:
    source, target = engine_at(0), engine_at(3)
    transfers = to_rank_1(3, 0, 2)
    sending = threading.Thread(target=exchange(source, pair[0], transfers).run)
    sending.start()
    received_bytes = exchange(target, pair[1], transfers).run()
    sending.join(60)
    assert target.complete_layers == {0, 2, 3}
    assert received_bytes > sum(source.states.describe(layer)[0].size_bytes for layer in (0, 2, 3))
    for layer in (0, 2, 3):
        assert target.states.digest(layer) == source.states.digest(layer)


def test_everything_is_sent_if_a_whole_window_was_sent_while_the_source_did_something_else(
    pair: list[GlooCommunicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.layers.transfer.CHUNK_BYTES", 512)
    monkeypatch.setattr("runtime.layers.transfer.WINDOW_BYTES", 1024)
    post_sends = StateExchange._post_sends

    def post_and_dawdle(self: StateExchange[TransferData]) -> None:
        post_sends(self)
        for sending in self._sending:
            self._communicator.wait(sending.pending)

    monkeypatch.setattr(StateExchange, "_post_sends", post_and_dawdle)
    source, target = engine_at(0), engine_at(3)
    runs = [
        threading.Thread(target=exchange(engine, communicator, to_rank_1(0, 1)).run)
        for engine, communicator in zip((source, target), pair, strict=True)
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join(20)
    complete = set(target.complete_layers)
    for communicator in pair:
        communicator.abort()
    assert complete == {0, 1}


def test_a_layer_that_was_half_received_is_not_held(pair: list[GlooCommunicator]) -> None:
    source, target = engine_at(0), engine_at(3)
    receiving = exchange(target, pair[1], to_rank_1(0, 1))
    exchange(source, pair[0], to_rank_1(0))
    outcome: list[BaseException] = []

    def receive() -> None:
        try:
            receiving.run()
        except CommunicationAborted as error:
            outcome.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    exchange(source, pair[0], to_rank_1(0)).run()
    header, payload = source.states.pack(1)
    for tensor in (
        torch.tensor([len(header), payload.numel()]),
        torch.frombuffer(bytearray(header), dtype=torch.uint8),
    ):
        pair[0].wait(pair[0].send(tensor, 1, "state"))
    pair[1].abort()  # The header of layer 1 arrives, but its payload never does.
    thread.join(60)
    assert len(outcome) == 1
    assert target.complete_layers == {0}


def test_impossible_announcements(pair: list[GlooCommunicator]) -> None:
    target = engine_at(3)
    pair[0].send(torch.tensor([-1, 5]), 1, "state")
    with pytest.raises(TransferError, match="announced -1"):
        exchange(target, pair[1], to_rank_1(0)).run()


def test_a_source_must_hold_what_it_sends(pair: list[GlooCommunicator]) -> None:
    with pytest.raises(TransferError, match="layer 2"):
        exchange(engine_at(3), pair[0], to_rank_1(2)).run()

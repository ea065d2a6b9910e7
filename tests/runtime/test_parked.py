"""Layers for which a device has no room until a generation's first commit: in host memory, or dropped."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runtime.engine.engine import Engine
from runtime.layers import transfer
from statemachine.messages.trainer import TrainingData
from tests.helpers.fleet import Fleet, report_of
from tests.helpers.harness import pipeline
from tests.helpers.reference import load, reference_losses
from tests.helpers.runtime_support import gpt_data

THREE = (pipeline((0, 1, [0]), (1, 2, [1]), (2, 4, [2]), first_microbatch=0, microbatches=4),)
TWO = (pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=0, microbatches=4),)
MOVED = (pipeline((0, 1, [0]), (1, 3, [1]), (3, 4, [2]), first_microbatch=0, microbatches=4),)


def job() -> TrainingData:
    return gpt_data(arguments={"blocks": 2, "width": 8, "heads": 2, "length": 8, "megabytes": 1})


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Return a fleet whose chunks end in the middle of tensors."""
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 1000)
    with Fleet(job(), 3) as fleet:
        yield fleet


def memory_bytes(engine: Engine) -> int:
    """Return the bytes of parameters and of the optimizer's state."""
    tensors = {id(t.value): t.value for layer in range(4) for t in engine.model.tensors_of(layer)}
    named = [name for name, _ in engine.model.named_parameters(engine.model.held_layers)]
    states = [value for name in named for value in engine.optimization.parameter_state(name).values()]
    optimizer = engine.optimization._optimizer
    assert optimizer is not None
    assert len(optimizer.state) == len([name for name in named if engine.optimization.parameter_state(name)])
    all_tensors = [t for t in (*tensors.values(), *states) if isinstance(t, torch.Tensor) and not t.is_meta]
    return sum(t.numel() * t.element_size() for t in all_tensors)


def expect_reference(fleet: Fleet) -> None:
    data = fleet.job
    steps = max(fleet.losses)
    expected = reference_losses(load(data), data, steps)
    assert [fleet.losses[step] for step in sorted(fleet.losses)] == pytest.approx(expected, rel=1e-9)


def test_a_parked_layer_is_sent_from_host_memory_and_freed_at_the_first_commit(fleet: Fleet) -> None:
    fleet.enter(fleet.engines, THREE)
    fleet.steps(2)
    _, second, third = fleet.engines
    with_both = memory_bytes(third)
    fleet.parked = {2: (2,)}
    fleet.enter(fleet.engines, MOVED)
    assert third.parked.layers == {2} and third.model.held_layers == {3}
    assert report_of(third).held == (2, 3)
    assert memory_bytes(third) < with_both
    assert second.complete_layers == {1, 2}
    fleet.steps(1)
    assert not third.parked.layers and third.complete_layers == third.model.held_layers == {3}
    expect_reference(fleet)


def test_state_that_exists_only_in_a_parked_layer_is_sent_under_the_next_plan(fleet: Fleet) -> None:
    """The rank that should take the layer is lost before the first commit. The next plan gives the layer to
    another rank, and then back to the one that parked it.
    """
    fleet.enter(fleet.engines, THREE)
    fleet.steps(2)
    first, _, third = fleet.engines
    fleet.parked = {2: (2, 3)}
    # Ranks swap their positions: the state of rank 2 moves to rank 1, which is lost.
    swapped = (pipeline((0, 1, [0]), (1, 2, [2]), (2, 4, [1]), first_microbatch=0, microbatches=4),)
    fleet.enter(fleet.engines, swapped)
    assert third.parked.layers == {2, 3} and third.model.held_layers == {1}
    fleet.parked = {}
    fleet.enter([third, first], (pipeline((0, 1, [0]), (1, 4, [1]), first_microbatch=0, microbatches=4),))
    assert third.parked.layers == {2, 3} and first.complete_layers == {0, 1, 2, 3}
    fleet.enter([first, third], TWO)
    assert not third.parked.layers and third.model.held_layers >= {2, 3}
    fleet.steps(2)
    expect_reference(fleet)


def test_a_dropped_layer_is_freed_and_comes_from_others(fleet: Fleet) -> None:
    pipelines = (
        pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=0, microbatches=2),
        pipeline((0, 4, [2]), first_microbatch=2, microbatches=2),
    )
    fleet.enter(fleet.engines, pipelines)
    fleet.steps(2)
    third = fleet.engines[2]
    fleet.dropped = {2: (0, 1)}
    fleet.enter(
        fleet.engines,
        (
            pipeline((0, 2, [0]), (2, 4, [2]), first_microbatch=0, microbatches=2),
            pipeline((0, 4, [1]), first_microbatch=2, microbatches=2),
        ),
    )
    assert third.model.held_layers == third.complete_layers == {2, 3}
    memory_bytes(third)
    fleet.dropped = {}
    fleet.enter(fleet.engines, pipelines)
    fleet.steps(1)
    expect_reference(fleet)


def test_a_reset_leaves_nothing_parked(fleet: Fleet) -> None:
    fleet.enter(fleet.engines, THREE)
    fleet.steps(1)
    fleet.parked = {1: (1,)}
    fleet.enter(
        fleet.engines, (pipeline((0, 1, [1]), (1, 2, [0]), (2, 4, [2]), first_microbatch=0, microbatches=4),)
    )
    second = fleet.engines[1]
    assert second.parked.layers == {1}
    fleet.abort()
    second.commit_or_discard(5, None)
    assert not second.parked.layers and not second.complete_layers and not second.model.held_layers


def test_a_layer_that_arrived_partly_takes_no_memory_in_the_next_generation(
    fleet: Fleet, tmp_path: Path
) -> None:
    fleet.enter(fleet.engines, THREE)
    fleet.steps(1)
    first = fleet.engines[0]
    header, payload = fleet.engines[2].states.pack(2)
    writer = first.states.writer(2, header, payload.numel(), set())
    writer.write(0, payload[:1000])
    assert 2 in first.model.held_layers and 2 not in first.complete_layers
    fleet.enter(fleet.engines, THREE)
    assert first.model.held_layers == {0} == first.complete_layers
    fleet.steps(1)
    expect_reference(fleet)


def test_a_generation_leaves_nothing_to_the_next_but_its_state(fleet: Fleet) -> None:
    """This must not need the garbage collector, which runs seldom: gradients are as large as parameters."""
    fleet.enter(fleet.engines, THREE)
    fleet.steps(1)
    gc.disable()
    try:
        old = [
            weakref.ref(part) for engine in fleet.engines for part in (engine._gradients, engine._executor)
        ]
        assert all(part() is not None for part in old)
        fleet.enter(fleet.engines, MOVED)
        assert not any(part() is not None for part in old)
    finally:
        gc.enable()

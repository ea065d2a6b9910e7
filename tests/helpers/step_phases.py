"""Moments of a step at which a test kills a trainer."""

from collections.abc import Callable

from runtime.engine.engine import Engine
from runtime.groups.communicator import CommunicationAborted
from tests.helpers.fleet import Fleet
from tests.helpers.waiting import until


def in_compute(fleet: Fleet, victim: Engine) -> None:
    """Kill the victim before it has computed anything."""
    victim.step = die(fleet)  # type: ignore[method-assign]


def in_vote(fleet: Fleet, victim: Engine) -> None:
    """Kill the victim when the others have complete gradients and wait for its vote."""
    victim._hold_vote = die(fleet)  # type: ignore[method-assign]


def after_vote(fleet: Fleet, victim: Engine) -> None:
    """Kill the victim after all ranks committed; one survivor learns of the commit only from the coordinator."""
    late = fleet.engines[0]
    ask = late._hold_vote

    def vote_and_abort(*arguments: object) -> object:
        ask(*arguments)  # type: ignore[arg-type]
        raise CommunicationAborted

    late._hold_vote = vote_and_abort  # type: ignore[method-assign,assignment]
    in_gather(fleet, victim)


def in_gather(fleet: Fleet, victim: Engine) -> None:
    """Kill the victim after it updated its own part, which no rank has received; another survivor has passed
    the vote, too.
    """
    assert victim.sharding is not None
    death = die(fleet)

    def died(*_: object) -> None:
        others = [engine for engine in fleet.engines if engine is not victim]
        until(
            lambda: any(engine.committed_step >= victim.committed_step for engine in others),
            "another rank commits the step",
            every_s=0.001,
        )
        death()

    victim.sharding.gather_parameters = died  # type: ignore[method-assign]


def die(fleet: Fleet) -> Callable[..., None]:
    def died(*_: object) -> None:
        fleet.abort()
        raise CommunicationAborted

    return died

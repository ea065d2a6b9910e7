"""A node becomes slow while the job trains, and fast again: real processes that really sleep."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.playground import Json, Playground, Run, playground, tiny_job


@pytest.fixture
def quick_to_judge() -> Iterator[Playground]:
    """Yield four nodes, and a coordinator that judges a node to be slow sooner than in production."""
    timing = {"straggler_s": 1.0, "straggler_replan_s": 1.0}
    with playground(broker="embedded", timing=timing) as ground:
        ground.until(lambda: len(ground.state.get("nodes", {})) == 4, "four nodes")
        yield ground
        ground.contract_is_kept()


def shares(pipelines: list[Json]) -> dict[str, int]:
    """Return each node's number of microbatches, which is that of its pipeline."""
    return {
        device.partition("/")[0]: pipeline["microbatches"]
        for pipeline in pipelines
        for stage in pipeline["stages"]
        for device in stage["devices"]
    }


def test_a_slow_node_gets_less_and_then_its_share_back(
    quick_to_judge: Playground, tmp_path: Path, same_losses: Callable[[Run], None]
) -> None:
    ground = quick_to_judge
    run = ground.submit(tiny_job(tmp_path, devices=1, two_node_replicas=True, delay_s=0.004))
    ground.until_step(5)

    def equal() -> bool:
        return sorted(shares(ground.state["pipelines"]).values()) == [4, 4, 4, 4]

    def less() -> list[Json]:
        return [one for one in run.recoveries if shares(one["pipelines_after"]).get("node-2", 4) < 4]

    # A busy machine makes other nodes slow as well, now and then, so each wait is for what concerns node-2.
    ground.until(equal, "equal shares in the state")
    ground.inject(do="slow", node="node-2", factor=4.0)
    detected = ground.until_event("StragglerDetected", "node-2")
    assert 0.1 < detected["details"]["speed"] < 0.5
    ground.until(less, "a smaller share for node-2")
    slowed = less()[0]
    assert (slowed["cause"], slowed["recomputed_steps"]) == ("speed_changed", 0)
    assert "node-2" in slowed["nodes"] and max(shares(slowed["pipelines_after"]).values()) > 4
    ground.further()
    ground.inject(do="slow", node="node-2", factor=1.0)
    ground.until_event("StragglerRecovered", "node-2")
    ground.until(equal, "equal shares again")
    ground.further()
    same_losses(ground.stop_job())

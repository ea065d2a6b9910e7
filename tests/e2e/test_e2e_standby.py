"""A standby takes over from a leader that is killed, frozen or cut off: all processes are real."""

import contextlib
import gzip
import json
import os
import signal
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftd.config.job import load_job_data
from ftd.local.cluster import BROKER
from ftd.processes import module_command
from statemachine.cluster.durable import durable
from tests.helpers.playground import Playground, Run, tiny_job, write_job
from tests.helpers.shared_cluster import SharedCluster

SameLosses = Callable[[Run], None]
SILENCE_S = 2.0
LOST_RECORD_S = 600.0
"""Time that no test waits for."""
FROZEN_S = 6.0
"""Duration of a freeze: longer than a takeover, so that the leader is deposed when it continues."""
SNAPSHOTS = '[snapshot]\nevery_steps = 8\nprotection = "aec"\n'


@pytest.fixture
def ground(shared: SharedCluster, request: pytest.FixtureRequest) -> Iterator[Playground]:
    """Lend a cluster with a leader, a follower and four idle nodes."""
    timing = {"leader_silence_s": SILENCE_S, "lost_record_timeout_s": LOST_RECORD_S}
    with shared.lent(request.node, coordinators=2, dashboard=True, timing=timing) as ground:
        ground.until_standby()
        yield ground


def elected(ground: Playground, before: str, times: int = 1) -> str:
    """Wait for a leader other than the one before, and return its name."""
    event = ground.until_event("LeaderElected", times=times)
    leader = str(event["details"]["leader"])
    assert leader != before
    return leader


def deposed(ground: Playground, before: str, *, thawed: bool = False) -> None:
    """Wait until the former leader is shown as a follower; if it did not die, it must have noticed."""
    child = ground.cluster.processes.children[before]
    if thawed:
        ground.until(lambda: "stepped_down" in child.log.read_text(), f"{before} knows that it does not lead")
        child.log.write_text("")
    ground.until(lambda: before in ground.state.get("standbys", []), f"{before} follows")


def pages_show(ground: Playground, leader: str) -> None:
    """Check that the page of each coordinator, also the former leader's, shows the current cluster."""

    def current(page: str) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{page}now") as answer:
            known = json.loads(gzip.decompress(answer.read()))
            last = known["trend"][1][-1][0] if known["trend"][1] else 0
            return bool(known["state"]["leader"] == leader and last > committed)
        return False

    pages = ground.cluster.dashboards
    assert len(set(pages.values())) == 2
    committed = ground.state["step"]
    for page in pages.values():
        ground.until(lambda page=page: current(page), f"{page} shows that {leader} leads, and steps go on")


def check_undisturbed_steps(ground: Playground, same_losses: SameLosses) -> None:
    """Check that every step was committed once with the undisturbed run's loss, and that no generation was
    used twice.
    """
    ground.fill_gaps()
    run = ground.stop_job()
    same_losses(run)
    generations = [event["generation"] for event in run.named("GenerationStarted")]
    assert len(generations) == len(set(generations))


@pytest.mark.parametrize("fault", [{"do": "kill"}, {"do": "stop", "for_s": FROZEN_S}], ids=["kill", "stop"])
def test_a_leader_that_dies_while_training_is_replaced_and_no_trainer_notices(
    ground: Playground, tmp_path: Path, same_losses: SameLosses, fault: dict[str, Any]
) -> None:
    run = ground.submit(tiny_job(tmp_path))
    trainers, first = dict(ground.pids), ground.state["leader"]
    ground.until_step(5)
    ground.play({"after_s": 0, "role": "coordinator", **fault})
    second = elected(ground, first)
    ground.further()
    deposed(ground, first, thawed=fault["do"] == "stop")
    assert ground.state["leader"] == second
    ground.further()
    pages_show(ground, second)
    assert ground.pids == trainers
    assert [r["cause"] for r in run.recoveries] == ["start"]
    # The new leader repairs a failure as if it had led from the start.
    ground.inject(do="kill", node="node-2")
    ground.until_recovery("node_lost")
    ground.further()
    check_undisturbed_steps(ground, same_losses)


@pytest.mark.parametrize("phase", ["quiescing", "recovering"])
@pytest.mark.parametrize("fault", [{"do": "kill"}, {"do": "stop", "for_s": FROZEN_S}], ids=["kill", "stop"])
def test_a_leader_that_dies_in_a_recovery_leaves_it_to_the_standby(
    ground: Playground, tmp_path: Path, same_losses: SameLosses, fault: dict[str, Any], phase: str
) -> None:
    run = ground.submit(tiny_job(tmp_path))
    trainers, first = dict(ground.pids), ground.state["leader"]
    ground.until_step(5)
    ground.play(
        {"in_phase": phase, "role": "coordinator", **fault},
        {"after_s": 0, "do": "kill", "node": "node-1"},
    )
    elected(ground, first)
    ground.until(lambda: len(run.recoveries) > 1, "training goes on")
    ground.further()
    deposed(ground, first, thawed=fault["do"] == "stop")
    assert all(ground.pids[name, 0] == trainers[name, 0] for name in ("node-0", "node-2", "node-3"))
    check_undisturbed_steps(ground, same_losses)


@pytest.mark.parametrize("fault", [{"do": "kill"}, {"do": "stop", "for_s": FROZEN_S}], ids=["kill", "stop"])
def test_a_leader_that_dies_in_a_snapshot_costs_that_snapshot_at_most(
    ground: Playground, tmp_path: Path, same_losses: SameLosses, fault: dict[str, Any]
) -> None:
    path = write_job(tmp_path)
    path.write_text(path.read_text() + SNAPSHOTS)
    run = ground.submit(load_job_data(path))
    trainers, first = dict(ground.pids), ground.state["leader"]
    ground.play({"in_phase": "snapshotting", "role": "coordinator", **fault})
    elected(ground, first)
    known = len(run.named("SnapshotCompleted"))
    ground.until(lambda: len(run.named("SnapshotCompleted")) > known + 1, "snapshots are complete again")
    deposed(ground, first, thawed=fault["do"] == "stop")
    assert ground.pids == trainers
    check_undisturbed_steps(ground, same_losses)


def test_a_standby_with_an_emptied_broker_reuses_no_generation(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    """Leader and broker die together, and the broker comes back alone, without its retained messages."""
    run = ground.submit(tiny_job(tmp_path))
    trainers, first, before = dict(ground.pids), ground.state["leader"], ground.state["generation"]
    ground.until_step(5)

    async def black_out() -> None:
        await ground.cluster.kill(BROKER)  # First, so that the leader's last will reaches nobody.
        await ground.cluster.kill(first)
        await ground.cluster.start_broker()

    ground.on_loop(black_out())
    ground.until(lambda: ground.state.get("leader") not in (None, "", first), "the standby leads")
    ground.further()
    left_out = ground.state["generation"] - before
    assert left_out > 0 and left_out % durable.UNSEEN == 0
    assert ground.pids == trainers
    assert [r["cause"] for r in run.recoveries] == ["start"]
    ground.inject(do="kill", node="node-2")
    assert ground.until_recovery("node_lost")["generation"] > before + left_out
    ground.on_loop(ground.cluster.start_coordinator(first))
    deposed(ground, first)
    check_undisturbed_steps(ground, same_losses)


def test_coordinators_that_are_all_back_after_a_blackout_miss_nobody(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    """All coordinators and the broker are restarted, and the broker comes back without its retained messages."""
    run = ground.submit(tiny_job(tmp_path))
    trainers, coordinators = dict(ground.pids), tuple(ground.cluster.coordinators)
    ground.until_step(5)

    async def black_out() -> None:
        for name in (BROKER, *coordinators):
            await ground.cluster.kill(name)
        for name in (BROKER, *coordinators):
            await ground.cluster.restart(name)

    ground.on_loop(black_out())
    ground.further()
    assert ground.pids == trainers
    assert [r["cause"] for r in run.recoveries] == ["start"]
    ground.until(lambda: len(ground.state.get("standbys", [])) == 1, "the other one follows")
    check_undisturbed_steps(ground, same_losses)


def test_a_leader_that_is_cut_off_is_replaced_and_changes_nothing_when_it_is_back(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    run = ground.submit(tiny_job(tmp_path))
    trainers = dict(ground.pids)
    cluster = ground.cluster
    # The third coordinator connects through a relay, which stands for its cable: a stopped relay passes
    # nothing and closes nothing.
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        relay = module_command(
            "ftd.local.relay", str(listening.fileno()), "127.0.0.1", str(cluster.broker.port)
        )
        cable = ground.on_loop(cluster.processes.start("cable", relay, inherit=[listening.fileno()]))
    text = (cluster.directory / "coordinator.toml").read_text()
    config = cluster.directory / "far.toml"
    config.write_text(
        text.replace(f":{cluster.broker.port}", f":{port}")
        .replace('name = "coordinator"', 'name = "far"\npriority = 1')
        .replace("state-coordinator", "state-far")
        .replace('listen = "', 'listen = "" # "')
    )
    config.chmod(0o600)
    command = module_command("ftd.cli.main", "coordinator", "--config", str(config))
    ground.on_loop(cluster.processes.start("far", command))
    deposed(ground, "far")
    ground.play({"after_s": 0, "do": "kill", "role": "coordinator"})
    assert ground.until_event("LeaderElected")["details"]["leader"] == "far"  # It has the highest priority.
    ground.further()

    ground.until(lambda: len(ground.state.get("standbys", [])) == 2, "both others follow")
    os.kill(cable.pid, signal.SIGSTOP)
    ground.inject(do="kill", node="node-3")
    elected(ground, "far", times=2)
    ground.until_recovery("node_lost")
    ground.further()
    os.kill(cable.pid, signal.SIGCONT)
    deposed(ground, "far", thawed=True)
    ground.further()
    assert all(ground.pids[name, 0] == trainers[name, 0] for name in ("node-0", "node-1", "node-2"))
    assert [r["cause"] for r in run.recoveries] == ["start", "node_lost"]
    check_undisturbed_steps(ground, same_losses)
    ground.on_loop(cluster.processes.terminate(["far", "cable"], grace_s=10.0))

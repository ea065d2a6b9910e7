"""Faults at the worst moments, provoked in every seed, in addition to whatever the seed draws."""

from dataclasses import replace

import pytest

from ftd.faults.sim import faults, slow_faults
from ftd.faults.sim.faults import power_cut
from ftd.faults.sim.simulation import SeedOverrides, Simulation
from ftd.faults.sim.simulation_run import run_seed
from tests.helpers.seeds import RESTORED_BROKER

pytestmark = pytest.mark.long

SEEDS = 5


MOMENTS: dict[str, SeedOverrides] = {
    "the leader dies between journal and command": SeedOverrides(
        triggered_faults=(
            ("GenerationStarted", faults.kill_between_effects, 1),
            ("Quiesced", faults.kill_between_effects, 2),
            ("PlanChosen", faults.kill_between_effects, 3),
        )
    ),
    "hosts are lost between SnapshotCompleted and RetainSnapshot": SeedOverrides(
        protection="aec2", zero1=False, triggered_faults=(("SnapshotCompleted", faults.crash_two_hosts, 1),)
    ),
    "a node joins while a checkpoint is written": SeedOverrides(
        checkpoints=True, triggered_faults=(("CheckpointStarted", Simulation.add_node, 0),)
    ),
    "the protection is switched while rolling back": SeedOverrides(
        protection="aec",
        zero1=False,
        triggered_faults=(
            ("SnapshotCompleted", faults.fail_all_trainers, 1),
            ("RolledBack", faults.switch_protection, 0),
            ("RolledBack", faults.switch_protection, 0),
        ),
    ),
    "a standby takes over while a checkpoint is committed": SeedOverrides(
        checkpoints=True,
        coordinators=2,
        triggered_faults=(("CheckpointStarted", faults.kill_between_effects, 0),) * 3,
    ),
    "a deposed leader and a broker that forgot everything": SeedOverrides(
        coordinators=2, triggered_faults=(("RecoveryCompleted", faults.depose_leader_and_clear_broker, 0),)
    ),
    "hosts lose power, and their last wills come late": SeedOverrides(power_losses=True, churn=True),
    "everything is suspended": SeedOverrides(
        triggered_faults=(
            ("SnapshotCompleted", faults.freeze_everything, 0),
            ("Quiesced", faults.freeze_everything, 2),
        )
    ),
    "a daemon is killed, and its memory kept, while rolling back": SeedOverrides(
        protection="aec",
        zero1=False,
        triggered_faults=(
            ("SnapshotCompleted", faults.fail_all_trainers, 1),
            ("RolledBack", faults.restart_node, 0),
            ("RolledBack", faults.restart_node, 0),
        ),
    ),
    "the broker's host is the leader's, and loses power": SeedOverrides(
        triggered_faults=(("RecoveryCompleted", power_cut, 0), ("PlanChosen", power_cut, 1))
    ),
    "the one coordinator's host loses power as a generation begins, and the broker's is the same": SeedOverrides(
        coordinators=1,
        triggered_faults=(
            ("GenerationStarted", power_cut, 1),
            ("GenerationStarted", power_cut, 2),
            ("Quiesced", power_cut, 2),
        ),
    ),
    "power fails when it is decided to go on without a node that is cut off": SeedOverrides(
        coordinators=1,
        zero1=False,
        at_commits=tuple((commit, faults.cut_node) for commit in range(3, 80, 9)),
        triggered_faults=tuple(("PlanChosen", power_cut, passed) for passed in (1, 2, 3)),
    ),
    "a broker comes back with what it once saved, and the leader is away": RESTORED_BROKER,
    "the leader dies when a user asks for a snapshot": SeedOverrides(
        protection="aec+arc:1",
        zero1=False,
        triggered_faults=(
            ("RecoveryCompleted", faults.request_snapshot_now, 0),
            ("SnapshotCompleted", faults.request_snapshot_now, 0),
            ("SnapshotCompleted", faults.kill_between_effects, 0),
        ),
    ),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_no_invariant_breaks_at_the_worst_moments(moment: str) -> None:
    for seed in range(SEEDS):
        result = run_seed(seed, overrides=MOMENTS[moment])
        assert result.violation is None, (moment, seed, result.violation, result.faults)


@pytest.mark.parametrize(
    ("seed", "moment"),
    [
        (2005138, None),
        (2008194, None),
        (3007674, None),
        (3009390, None),
        (3011115, None),
        (5000607, None),
        (5003230, None),
        (7000111, None),
        (1406, "a standby takes over while a checkpoint is committed"),
        (1499, "a standby takes over while a checkpoint is committed"),
        (132, "a deposed leader and a broker that forgot everything"),
        (218, "a deposed leader and a broker that forgot everything"),
        (133, "the broker's host is the leader's, and loses power"),
        (3, "the one coordinator's host loses power as a generation begins, and the broker's is the same"),
        (1, "a broker comes back with what it once saved, and the leader is away"),
        (19, "a broker comes back with what it once saved, and the leader is away"),
        (98, "a broker comes back with what it once saved, and the leader is away"),
        (124, "a broker comes back with what it once saved, and the leader is away"),
    ],
)
def test_seeds_that_once_found_a_bug_hold(seed: int, moment: str | None) -> None:
    overrides = MOMENTS[moment] if moment is not None else SeedOverrides()
    result = run_seed(seed, overrides=replace(overrides, rare_faults=False))
    assert result.violation is None, (result.violation, result.faults)


@pytest.mark.parametrize(
    ("seed", "overrides"),
    [
        # The broker forgets the first leader's journal before the other coordinator has ever met anyone.
        (32281, SeedOverrides()),
        # A paused job waits for a node whose health check can only be compared later, at a tick.
        (287, SeedOverrides()),
        # A node is back with its part of an awaited snapshot, which it had reported before.
        (70142, SeedOverrides(coordinators=2, upgrades=True)),
        # The others cannot train without a node whose part of the snapshot is corrupt.
        (2615, SeedOverrides()),
        # A coordinator that met nobody leads under a lower term, after a broker that forgot everything.
        (50926, SeedOverrides()),
        # Trainers fail and return in an outage of the broker, while a boundary is awaited.
        (51193, SeedOverrides()),
        # A snapshot is complete in the same step in which an older one is written to the disk.
        (62001155, SeedOverrides(checkpoints=True, coordinators=2, rare_faults=False)),
        # The order to build and profile the model is lost.
        (67000093, SeedOverrides(checkpoints=True, rare_faults=True)),
        # A node that alone has some layers gets no Quiesce in time, since its messages are often lost.
        (20344, SeedOverrides(checkpoints=True, protection="aec", rare_faults=True)),
        # The coordinator that claimed leadership was frozen, and leads for a moment while another one does.
        (20360, SeedOverrides(checkpoints=True, protection="aec", rare_faults=True)),
        # The broker comes back with what it once saved, and the newer leader reconnects just after the
        # older one.
        (20947, SeedOverrides(coordinators=3)),
        # What the broker saved is older than what a leader knows that was cut off and deposed meanwhile.
        (22717, SeedOverrides(coordinators=3)),
        # A standby that knows less leads at once, after a broker that forgot the last term.
        (30791, SeedOverrides(rare_faults=True)),
        # A node was drained while it built the job, and then learned that the job is over.
        (21225, SeedOverrides(power_losses=True, churn=True)),
        # A trainer is lost before the group's first commit, and so is the report of it.
        (40507, SeedOverrides(power_losses=True, churn=True)),
        # An order from before a rollback reaches a node that was frozen meanwhile.
        (21847, SeedOverrides()),
        # The broker comes back with what it once saved, and the coordinator that knows less returns first.
        (40003, SeedOverrides(coordinators=2, upgrades=True)),
        (40075, SeedOverrides(checkpoints=True, protection="aec", rare_faults=True)),
        (40241, SeedOverrides(checkpoints=True, protection="aec", rare_faults=True)),
        # Of three coordinators two are restarted while the one that knows most is away, and the broker forgot all.
        (149, MOMENTS["the leader dies between journal and command"]),
        # A coordinator takes over before it hears the result of a node's health check, whose report was lost.
        (
            1100221,
            SeedOverrides(
                upgrades=True,
                corruption=True,
                rare_faults=True,
                triggered_faults=(
                    ("JobPrepared", faults.corrupt_parameter, 1),
                    ("ClusterPaused", faults.freeze_everything, 3),
                    ("NodeFenced", faults.partition_two, 1),
                ),
            ),
        ),
        # A node whose trainers raised is lost and back, and reports the error again.
        (
            2201389,
            SeedOverrides(
                zero1=False,
                checkpoints=True,
                upgrades=True,
                power_losses=True,
                triggered_faults=(
                    ("SnapshotFailed", faults.lose_all_memory, 0),
                    ("PlanChosen", faults.crash_two_hosts, 0),
                    ("GenerationStarted", faults.restore_broker, 2),
                ),
            ),
        ),
        # A leader that was cut off stores a user's request, after a broker that forgot everything.
        (
            3000592,
            SeedOverrides(
                checkpoints=True,
                coordinators=3,
                power_losses=True,
                evaluations=True,
                corruption=True,
                rare_faults=True,
                triggered_faults=(
                    ("SnapshotFailed", faults.lose_messages, 5),
                    ("NodeLost", faults.terminate_node, 1),
                    ("NodeLost", faults.restart_broker, 1),
                    ("ClusterPaused", faults.corrupt_shards, 1),
                    ("NodeFenced", faults.cut_several, 1),
                    ("TrainerLost", faults.depose_leader_and_clear_broker, 0),
                ),
            ),
        ),
        # The only two nodes' tests hang once, and there are too few others to compare their speeds with.
        (
            3002011,
            SeedOverrides(
                zero1=False,
                coordinators=3,
                rare_faults=True,
                triggered_faults=(
                    ("TrainingResumed", faults.corrupt_checkpoint, 1),
                    ("Quiesced", faults.reset_coordinator, 0),
                ),
            ),
        ),
        # A coordinator leads from an older journal, and does not know that the job is over.
        (
            6006482,
            SeedOverrides(
                checkpoints=True,
                coordinators=2,
                rare_faults=True,
                triggered_faults=(
                    ("JobPrepared", faults.restore_saved_broker, 1),
                    ("CheckpointCompleted", faults.raise_in_trainer, 1),
                    ("RolledBack", faults.reset_coordinator, 5),
                ),
            ),
        ),
        # A node retains a snapshot that no coordinator knows any more, since their journals were lost.
        (
            4002787,
            SeedOverrides(
                checkpoints=True,
                coordinators=2,
                churn=True,
                corruption=True,
                rare_faults=False,
                triggered_faults=(
                    ("RecoveryCompleted", slow_faults.slow_transfers, 0),
                    ("Quiesced", faults.restore_saved_broker, 0),
                    ("JobPrepared", faults.fill_disk, 0),
                    ("RecoveryCompleted", faults.hang_checkpoint_store, 5),
                    ("PlanChosen", faults.reset_session, 1),
                    ("ProtectionChanged", slow_faults.stutter_leader, 1),
                    ("CheckpointCompleted", faults.cut_node, 1),
                ),
            ),
        ),
    ],
)
def test_seeds_that_once_found_a_bug_with_overrides_hold(seed: int, overrides: SeedOverrides) -> None:
    result = run_seed(seed, overrides=overrides)
    assert result.violation is None, (result.violation, result.faults)


@pytest.mark.parametrize("seed", [5254, 7971, 11382, 11932])
def test_seeds_that_once_found_a_bug_with_three_coordinators_hold(seed: int) -> None:
    """Nodes' messages are lost (that the job is done, a Hello, that a trainer raised), and so is a leader
    that claimed leadership and died before its journal was at the broker.
    """
    result = run_seed(seed, overrides=SeedOverrides(coordinators=3))
    assert result.violation is None, (result.violation, result.faults)

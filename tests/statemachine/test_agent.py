"""Tests of the agent machine: what one node does for its trainers, for the coordinator, and on its own."""

from typing import Any

import pytest

from planner.values import StatePart
from statemachine.agent.commands import STEPS_PER_MESSAGE
from statemachine.agent.events import (
    AgentStarted,
    SnapshotRepaired,
    StagingFailed,
    TerminationRequested,
    TrainerConnected,
    TrainerFailed,
    TrainerReported,
    TrainerStarved,
)
from statemachine.agent.machine import AgentMachine
from statemachine.agent.state import LATE_S
from statemachine.effects import (
    EmitEvent,
    ExitDaemon,
    InstructTrainer,
    KillTrainer,
    PrepareTrainer,
    PublishNode,
    RemoveSnapshots,
    RenewIncarnation,
    ResumeTrainer,
    SetTimer,
    StartTrainer,
)
from statemachine.events import BrokerConnected, BrokerDisconnected
from statemachine.messages import trainer
from statemachine.messages.cluster import (
    Acknowledgement,
    Command,
    Fence,
    Heartbeat,
    Hello,
    Leaving,
    Prepare,
    Quiesced,
    Reject,
    Release,
    RequestHello,
    RequestSteps,
    RestoreFailed,
    Stepped,
    Stop,
    TrainerLost,
)
from statemachine.messages.common import (
    Finished,
    OptimizerReplicaDiverged,
    PeerSuspected,
    Prepared,
    Quiesce,
    Resumed,
)
from statemachine.messages.values import (
    BuildProgress,
    BuildStage,
    DeviceReport,
    Evaluation,
    NodeActivity,
    NodeState,
    TrainerState,
)
from statemachine.timing import Timing
from tests.helpers.agent_machine import Daemon
from tests.helpers.transcripts import Script, committed, facts, job, vote


def running(devices: int = 1) -> Daemon:
    daemon = Daemon(devices)
    daemon.prepared()
    daemon.training()
    return daemon


# --- from start to training ------------------------------------------------------------------------


def test_a_node_s_life_word_for_word() -> None:
    d = Daemon(devices=2)
    d.note("a job is built; the first trainer measures it")
    d.prepared(profile=True)
    d.note("the answers of two trainers become one")
    d.training()
    d.wait(0.1)
    d.stepped(1)
    d.stepped(1, device=1)
    d.note("a trainer dies: both start over")
    d.wait(0.02)
    d.feed(TrainerFailed, device=1, pid=51, cause_of_failure="exited", detail="signal 9")
    d.feed(TrainerFailed, device=0, pid=50, cause_of_failure="exited", detail="late news of one we killed")
    d.up(60)
    for device in (0, 1):
        d.feed(TrainerReported, device=device, report=Prepared(job_id="job-1", profile=None))
    d.compare("a_node_s_life")


def test_trainer_hung() -> None:
    d = running()
    d.failure(
        "trainer stopped or hung",
        "The trainer commits steps of 0.1 s, and then nothing is heard of it. Its node finds that after 0.6 s",
        "(hang_floor_s), kills it, reports the loss with the newest commit before it, and starts another trainer.",
    )
    d.stepped(1)
    d.wait(0.1)
    d.stepped(2)
    d.pass_time(0.9)
    d.note("the new trainer builds the job")
    d.up(60)
    d.feed(TrainerReported, device=0, report=Prepared(job_id="job-1", profile=None))
    d.compare("trainer_hung")


def test_device_gone() -> None:
    d = running(devices=2)
    d.failure(
        "a device is gone for good",
        "The second trainer of a node dies, and each one that follows cannot build the job. The first trainer is",
        "restarted with it each time. The pauses double up to restart_backoff_max_s; the node stays UNHEALTHY.",
    )
    d.feed(
        TrainerFailed,
        device=1,
        pid=51,
        cause_of_failure="exited",
        detail="CUDA error: unspecified launch failure",
    )
    for attempt in range(4):
        first_pid = 60 + 10 * attempt
        d.up(first_pid)
        detail = "RuntimeError: no CUDA device is available"
        d.feed(TrainerFailed, device=1, pid=first_pid + 1, cause_of_failure="unprepared", detail=detail)
        d.fire("restart", d.due["restart"] - d.now)
    d.compare("device_gone")


def test_trainers_start_warm_and_before_there_is_a_job() -> None:
    machine = Script(AgentMachine("a", Timing()))
    machine.feed(AgentStarted, incarnation=7, facts=facts(2))
    assert [effect.device for effect in machine.all(StartTrainer)] == [0, 1]


def test_only_the_first_trainer_measures() -> None:
    d = Daemon(devices=2)
    d.up()
    d.order(Prepare(job=job(), profile=True))
    assert [(e.device, e.profile) for e in d.all(PrepareTrainer)] == [(0, True), (1, False)]


def test_the_heartbeat_says_how_many_trainers_have_started() -> None:
    d = Daemon(devices=2)
    d.fire("heartbeat", 0.25)
    (heartbeat,) = d.signals()
    assert isinstance(heartbeat, Heartbeat)
    assert heartbeat.building == BuildProgress(stage=BuildStage.STARTING, done=0, total=2)
    d.up()
    d.fire("heartbeat", 0.5)
    (heartbeat,) = d.signals()
    assert isinstance(heartbeat, Heartbeat) and heartbeat.building is None


def test_the_heartbeat_says_how_far_a_trainer_is_with_building_the_job() -> None:
    d = Daemon(devices=2)
    d.up()
    d.order(Prepare(job=job(), profile=True))
    measuring = BuildProgress(stage=BuildStage.MEASURING, done=2, total=10)
    for device, doing in ((0, measuring), (1, None)):
        d.feed(
            TrainerReported,
            device=device,
            report=trainer.TrainerHeartbeat(progress=1, waiting=False, build_progress=doing),
        )
    d.fire("heartbeat", 0.25)
    (heartbeat,) = d.signals()
    assert isinstance(heartbeat, Heartbeat) and heartbeat.building == measuring


def test_the_heartbeat_says_how_often_changed_bytes_were_repaired() -> None:
    d = Daemon()
    for number in (1, 2):
        d.feed(SnapshotRepaired, step=5)
        d.fire("heartbeat", 0.25 * number)
        (heartbeat,) = d.signals()
        assert isinstance(heartbeat, Heartbeat) and heartbeat.repairs == number


def test_prepare_twice_is_answered_twice_and_done_once() -> None:
    d = Daemon()
    d.prepared()
    d.order(Prepare(job=job(), profile=False))
    assert d.signals() == [Prepared(job_id="job-1", profile=None)]
    assert not d.all(PrepareTrainer)


def test_a_profile_that_is_requested_late_is_measured_by_new_trainers() -> None:
    d = Daemon()
    d.prepared()
    d.order(Prepare(job=job(), profile=True))
    assert d.all(KillTrainer)
    assert d.all(StartTrainer)
    d.up(60)
    assert d.one(PrepareTrainer).profile


def test_a_late_prepare_of_a_job_that_is_over_is_ignored() -> None:
    d = Daemon()
    d.prepared()
    d.order(Stop(job_id="job-1", reason="finished"))
    d.up(60)
    d.order(Prepare(job=job(), profile=False))
    assert not d.all(PrepareTrainer)
    d.order(Prepare(job=job("job-2"), profile=False))
    assert d.all(PrepareTrainer)


def test_a_node_that_is_not_prepared_reports_so_at_once() -> None:
    d = Daemon()
    d.order(Prepare(job=job(), profile=False))
    d.order(Quiesce(generation=4, mode="abort"))
    assert d.signals() == [Quiesced(generation=4, reports=())]


def test_an_idle_node_forwards_the_resume_and_does_not_train() -> None:
    d = Daemon()
    d.prepared()
    d.quiesced(1)
    d.order(d.resume(1, 0, "b", "c"))
    assert d.all(ResumeTrainer)
    d.order(RequestHello())
    assert not d.signals(Hello)[0].training


# --- stale messages ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [Quiesce(generation=0, mode="abort"), Fence(reason=""), Stop(job_id="job-1", reason="")],
)
def test_commands_for_another_incarnation_do_nothing(command: Command) -> None:
    d = running()
    d.order(command, incarnation=6)
    assert [type(effect) for effect in d.last] == [EmitEvent]
    assert d.one(EmitEvent).name == "MessageIgnored"


def test_an_older_quiesce_and_an_unexpected_resume_are_ignored() -> None:
    d = running()
    d.quiesced(5, 3)
    d.order(Quiesce(generation=4, mode="abort"))
    assert not d.all(InstructTrainer)
    d.order(d.resume(4, 3))
    assert not d.all(ResumeTrainer)
    d.order(d.resume(5, 3))
    assert len(d.all(ResumeTrainer)) == 1
    d.order(d.resume(5, 3))
    assert not d.all(ResumeTrainer)


def test_a_repeated_quiesce_is_answered_again() -> None:
    d = running()
    d.quiesced(2, 1)
    d.order(Quiesce(generation=2, mode="abort"))
    assert len(d.signals(Quiesced)) == 1
    assert not d.all(InstructTrainer)


def test_a_higher_quiesce_overtakes_one_that_is_not_answered() -> None:
    d = running()
    d.order(Quiesce(generation=2, mode="boundary"))
    d.order(Quiesce(generation=3, mode="abort"))
    assert d.one(InstructTrainer).instruction == Quiesce(generation=3, mode="abort")
    d.answered(2, 1)
    assert not d.signals()
    d.answered(3, 1)
    assert d.signals(Quiesced)[0].generation == 3


# --- steps -------------------------------------------------------------------------------------------


def test_steps_are_reported_by_the_node_of_rank_zero_and_batched() -> None:
    d = running()
    d.stepped(1)
    assert [s.step for s in d.signals(Stepped)[0].steps] == [1]
    d.stepped(2)
    d.stepped(3)
    assert not d.signals()
    d.fire("stepped", 0.05)
    assert [s.step for s in d.signals(Stepped)[0].steps] == [2, 3]


def test_each_message_has_no_more_steps_than_fit_into_one_signal() -> None:
    """A daemon that was stopped receives many at once, and ``stepped_s`` may be long."""
    d = running()
    last = 2 * STEPS_PER_MESSAGE + 7
    for step in range(1, last + 1):
        d.stepped(step)
    d.fire("stepped", 0.05)
    parts = [[one.step for one in signal.steps] for signal in d.signals(Stepped)]
    assert [len(part) for part in parts] == [STEPS_PER_MESSAGE, STEPS_PER_MESSAGE, 6]
    assert [step for part in parts for step in part] == list(range(2, last + 1))


def test_other_nodes_remember_steps_for_requests() -> None:
    d = Daemon()
    d.prepared()
    d.quiesced(1)
    d.order(d.resume(1, 0, "b", "a"))
    d.feed(
        TrainerReported, device=0, report=Resumed(generation=1, bytes_moved=0, rendezvous_s=0.0, state_s=0.0)
    )
    for step in (1, 2, 3):
        d.stepped(step)
        assert not d.signals()
    d.order(RequestSteps(first=2, last=9))
    assert d.signals() == [
        Stepped(generation=1, steps=(committed(2), committed(3)), step_s=0.1, requested_first=2)
    ]
    d.order(RequestSteps(first=20, last=21))
    assert d.signals()[0].steps == ()


def test_a_roll_forward_is_remembered_and_an_undone_step_is_not() -> None:
    d = Daemon()
    d.prepared()
    d.training(1, 3)
    d.stepped(4)
    d.stepped(5)
    d.feed(TrainerFailed, device=0, pid=50, cause_of_failure="exited", detail="")
    d.up(60)
    d.feed(TrainerReported, device=0, report=Prepared(job_id="job-1", profile=None))
    assert 3 in d.machine.agent.history
    assert 4 not in d.machine.agent.history, "perhaps the whole group died with it"
    d.quiesced(2)
    d.order(d.resume(2, 6))
    assert 6 in d.machine.agent.history


def test_the_heartbeat_carries_the_newest_step_of_the_living_trainers() -> None:
    d = running()
    d.stepped(1)
    d.fire("heartbeat", 0.25)
    [heartbeat] = d.signals(Heartbeat)
    assert (heartbeat.generation, heartbeat.committed) == (1, committed(1))
    d.feed(TrainerFailed, device=0, pid=50, cause_of_failure="exited", detail="")
    assert [type(s) for s in d.signals()] == [Heartbeat, TrainerLost]
    d.fire("heartbeat", 0.25)
    [heartbeat] = d.signals(Heartbeat)
    assert (heartbeat.generation, heartbeat.committed) == (1, None)


def test_the_heartbeat_acknowledges_orders_and_mentions_reports() -> None:
    d = Daemon()

    def said() -> Acknowledgement:
        d.fire("heartbeat", 0.25)
        [heartbeat] = d.signals(Heartbeat)
        assert heartbeat.acknowledgement is not None
        return heartbeat.acknowledgement

    assert (said().activity, said().job_id) == (NodeActivity.NONE, None)
    d.prepared()
    assert (said().activity, said().job_id) == (NodeActivity.PREPARED, "job-1")
    d.order(Quiesce(generation=1, mode="abort"))
    assert said().activity is NodeActivity.QUIESCING
    d.answered(1, 0)
    assert said().activity is NodeActivity.QUIESCED
    d.order(d.resume(1, 0))
    assert said().activity is NodeActivity.RESUMING
    d.feed(StagingFailed, failure=RestoreFailed(generation=1, detail="no bytes"))
    assert said().restore_failed
    d.order(RequestHello())
    assert [one.detail for one in d.signals(RestoreFailed)] == ["no bytes"]


def test_a_repeated_quiesce_is_answered_again_also_without_trainers() -> None:
    d = Daemon()
    d.order(Prepare(job=job(), profile=False))
    for _ in range(2):
        d.order(Quiesce(generation=1, mode="abort"))
        assert d.signals(Quiesced) == [Quiesced(generation=1, reports=())]


def test_the_heartbeat_carries_how_long_each_device_computes() -> None:
    d = running(devices=2)

    def reported() -> tuple[float, ...] | None:
        d.fire("heartbeat")
        [heartbeat] = d.signals(Heartbeat)
        return heartbeat.microbatch_ms

    def step(number: int, *computed_ms: float) -> None:
        for device, value in enumerate(computed_ms):
            d.feed(
                TrainerReported,
                device=device,
                report=trainer.TrainerStepped(
                    generation=1,
                    step=number,
                    vote=vote(number),
                    step_s=0.1,
                    bubble_s=0.0,
                    microbatch_ms=value,
                ),
            )

    step(2, 5.0, 0.0)
    step(3, 5.0, 0.0)
    assert reported() is None, "two steps are too few"
    step(4, 5.5, 0.0)
    assert reported() == (5.0, 0.0), "a device that computes nothing is not known"
    step(5, 90.0, 7.0)
    assert reported() == (5.25, 0.0), "one slow step is a hiccup"
    for number in range(6, 12):
        step(number, 20.0, 7.0)
    assert reported() == (20.0, 7.0)
    d.quiesced(2, 11)
    assert reported() is None, "the next group computes other layers"
    d.resume(2, 11)
    assert reported() is None


def test_the_end_gathers_the_digests_of_all_devices() -> None:
    d = running(devices=2)
    d.feed(
        TrainerReported,
        device=0,
        report=Finished(generation=1, step=10, digests={0: "aa", 1: "bb"}, kind="gpu"),
    )
    assert not d.signals()
    d.feed(
        TrainerReported,
        device=1,
        report=Finished(generation=1, step=10, digests={1: "bX", 2: "cc"}, kind="cpu"),
    )
    digests = {0: "aa", 1: "bb|bX", 2: "cc"}
    assert d.signals() == [Finished(generation=1, step=10, digests=digests, kind="cpu, gpu")]


def test_the_last_evaluation_is_sent_and_repeated_with_the_digests() -> None:
    d = running()
    d.stepped(10)
    found = Evaluation(loss=0.5, weight=37.0, took_s=2.0)
    d.feed(
        TrainerReported, device=0, report=Finished(generation=1, step=10, digests={0: "aa"}, evaluation=found)
    )
    finished = Finished(generation=1, step=10, digests={0: "aa"}, evaluation=found)
    assert d.signals()[-1] == finished
    d.order(RequestHello())
    assert d.signals()[-1] == finished


def test_a_node_reports_all_that_a_trainer_says_of_its_state() -> None:
    d = Daemon(devices=2)
    d.prepared()
    d.quiesced(1)
    d.order(Quiesce(generation=2, mode="abort"))
    said: dict[str, Any] = {
        "committed_step": 8,
        "ready_step": 9,
        "vote": vote(8),
        "held": (0, 2),
        "lineage": 1,
        "parts": (StatePart(layer=2, start=2, end=4, of=4, replica=True),),
        "evaluation": Evaluation(loss=0.5, weight=37.0, took_s=2.0),
    }
    assert set(said) == set(TrainerState.__struct_fields__)
    for device in (1, 0):
        d.feed(TrainerReported, device=device, report=trainer.TrainerQuiesced(generation=2, **said))
    (quiesced,) = d.signals(Quiesced)
    assert quiesced.reports == tuple(DeviceReport(device=device, **said) for device in (0, 1))


def test_a_suspicion_is_passed_on() -> None:
    d = running()
    d.feed(TrainerReported, device=0, report=PeerSuspected(generation=1, detail="reset"))
    assert d.signals() == [PeerSuspected(generation=1, detail="reset")]


def test_a_replica_that_differed_is_reported() -> None:
    d = running()
    where = {"generation": 1, "step": 50, "layer": 3, "detail": "the momentum differs"}
    d.feed(TrainerReported, device=0, report=OptimizerReplicaDiverged(**where))
    assert d.signals() == [OptimizerReplicaDiverged(**where)]


# --- failures and hangs ---------------------------------------------------------------------------------


def watch(d: Daemon, seconds: float, **heartbeats: Any) -> list[TrainerLost]:
    """Let time pass with periodic checks of the trainers; return the losses that were found."""
    for _ in range(round(seconds / 0.1)):
        d.wait(0.1)
        if heartbeats:
            d.heartbeat(**heartbeats)
        d.fire("watch")
        if d.signals(TrainerLost):
            return d.signals(TrainerLost)
    return []


def test_a_stopped_trainer_is_found_by_its_missing_heartbeats() -> None:
    d = running()
    d.stepped(1)
    [lost] = watch(d, 2.0)
    assert (lost.cause, lost.device) == ("hung", 0)
    assert d.now < 0.85
    assert d.all(KillTrainer)
    assert d.all(StartTrainer)


def test_a_sleeping_trainer_is_found_although_it_sends_heartbeats() -> None:
    d = running()
    d.stepped(1)
    d.heartbeat(progress=5)
    [lost] = watch(d, 2.0, progress=5)
    assert "no progress" in lost.detail


def test_a_trainer_that_waits_for_others_does_not_hang() -> None:
    d = running()
    d.stepped(1)
    assert not watch(d, 20.0, progress=5, waiting=True)


def test_a_trainer_whose_host_is_busy_does_not_hang() -> None:
    """Time for which it waits for a processor does not count as silence, up to a limit."""

    def starving(d: Daemon, seconds: float, share: float) -> list[TrainerLost]:
        for _ in range(round(seconds / 0.1)):
            d.wait(0.1)
            d.feed(TrainerStarved, device=0, for_s=0.1 * share)
            d.fire("watch")
            if d.signals(TrainerLost):
                return d.signals(TrainerLost)
        return []

    d = running()
    d.stepped(1)
    for progress in (2, 3):
        assert not starving(d, 5.0, 0.9)
        d.heartbeat(progress=progress)
    [lost] = starving(d, 20.0, 1.0)
    assert 20.5 < d.now < 21.0 and "in which it could run (and 10.00 s more)" in lost.detail
    d = running()
    d.stepped(1)
    [lost] = starving(d, 5.0, 0.5)
    assert 1.2 < d.now < 1.7, "half of the time it could run, and said nothing"
    d = running()
    d.stepped(1)
    d.feed(TrainerStarved, device=0, for_s=100.0)  # More than it was silent: all of that, and no more.
    [lost] = watch(d, 2.0)
    assert d.now < 0.85


def test_long_steps_get_long_limits() -> None:
    d = running()
    d.feed(
        TrainerReported,
        device=0,
        report=trainer.TrainerStepped(generation=1, step=1, vote=vote(1), step_s=2.0, bubble_s=0.0),
    )
    assert not watch(d, 7.0)
    assert watch(d, 2.0)


def test_a_stalled_data_set_is_no_hang_within_a_longer_limit() -> None:
    d = running()
    d.stepped(1)
    assert not watch(d, 59.0, progress=5, reading=True)
    [lost] = watch(d, 3.0, progress=5, reading=True)
    assert "reading samples for 60." in lost.detail and "limit 60 s (timing: reading_s)" in lost.detail
    d = running()
    d.stepped(1)
    d.heartbeat(reading=True)
    [lost] = watch(d, 2.0)  # Stopped in the middle of it.
    assert "no heartbeat for" in lost.detail


def test_trainers_that_end_again_and_again_while_they_build_cannot_build() -> None:
    d = Daemon(1)
    d.order(Prepare(job=job(), profile=False))
    causes = []
    for pid in (70, 71, 72):
        d.feed(TrainerConnected, device=0, pid=pid)
        d.feed(TrainerFailed, device=0, pid=pid, cause_of_failure="exited", detail="killed by SIGSEGV")
        causes.append(d.signals(TrainerLost)[-1])
        d.fire("restart")
    assert [lost.cause for lost in causes] == ["exited", "exited", "unprepared"]
    assert causes[-1].detail.startswith("trainers ended 3 times while they built the model; the last: killed")


def test_the_pid_of_a_process_that_ended_earlier_comes_again() -> None:
    """The host gives pids again. A new process that fails before it connects is no late message of the old one."""
    d = Daemon(1)
    d.order(Prepare(job=job(), profile=False))
    for pid in (70, 71):
        d.feed(TrainerConnected, device=0, pid=pid)
        d.feed(TrainerFailed, device=0, pid=pid, cause_of_failure="exited", detail="")
        d.fire("restart")
    d.feed(TrainerFailed, device=0, pid=71, cause_of_failure="exited", detail="late")
    assert not d.signals(TrainerLost)
    d.feed(TrainerFailed, device=0, pid=70, cause_of_failure="exited", detail="")
    assert d.signals(TrainerLost)


def test_before_the_first_step_the_limits_are_long() -> None:
    d = running()
    assert not watch(d, 9.0)
    assert watch(d, 2.0)
    d = running()
    assert not watch(d, 50.0, progress=5)
    assert watch(d, 11.0, progress=5)


def test_a_daemon_that_was_suspended_itself_finds_no_hang() -> None:
    d = running()
    d.stepped(1)
    d.fire("watch", 30.0)
    assert not d.signals(TrainerLost)


def test_a_trainer_that_never_comes_up_is_a_failure() -> None:
    d = Daemon()
    d.order(Prepare(job=job(), profile=False))
    [lost] = watch(d, 70.0)
    assert "did not start" in lost.detail


def test_restarts_slow_down_while_nothing_works() -> None:
    d = running()
    delays = []
    for attempt in range(5):
        d.feed(TrainerFailed, device=0, pid=50 + attempt, cause_of_failure="exited", detail="")
        timers = [e.delay_s for e in d.all(SetTimer) if e.name == "restart"]
        delays.append(timers[0] if timers else 0.0)
        if timers:
            d.fire("restart", timers[0])
        assert d.all(StartTrainer)
        d.feed(TrainerConnected, device=0, pid=51 + attempt)
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0]


def test_the_death_of_an_idle_trainer_is_not_reported() -> None:
    d = Daemon()
    d.up()
    d.feed(TrainerFailed, device=0, pid=50, cause_of_failure="exited", detail="")
    assert not d.signals()
    assert d.all(StartTrainer)


# --- outages ---------------------------------------------------------------------------------------------


def test_facts_lost_in_an_outage_are_sent_again() -> None:
    d = running()
    d.feed(BrokerDisconnected)
    d.quiesced(2, 1)
    d.feed(BrokerConnected)
    assert [type(s) for s in d.signals()] == [Hello, Prepared, Heartbeat, Quiesced]
    assert d.signals(Hello)[0].quiesced
    d.order(d.resume(2, 1))
    d.feed(
        TrainerReported, device=0, report=Resumed(generation=2, bytes_moved=1, rendezvous_s=0.0, state_s=0.0)
    )
    d.feed(BrokerDisconnected)
    d.feed(TrainerReported, device=0, report=Finished(generation=2, step=10, digests={0: "aa"}))
    d.feed(BrokerConnected)
    assert [type(s) for s in d.signals()] == [Hello, Prepared, Heartbeat, Resumed, Finished]
    assert d.signals(Hello)[0].training


def test_a_trainer_lost_in_an_outage_is_reported_after_it() -> None:
    d = running()
    d.feed(BrokerDisconnected)
    d.feed(TrainerFailed, device=0, pid=50, cause_of_failure="raised", detail="ValueError")
    d.feed(BrokerConnected)
    assert [type(s) for s in d.signals()] == [Hello, TrainerLost, Heartbeat]
    assert d.one(PublishNode).state is NodeState.UNHEALTHY


def test_no_heartbeat_while_the_broker_is_away() -> None:
    d = running()
    d.feed(BrokerDisconnected)
    d.fire("heartbeat", 0.25)
    assert not d.last


def test_a_rejected_node_asks_again_every_second() -> None:
    d = Daemon()
    d.order(Reject(reason="another one is alive"))
    assert [t.delay_s for t in d.all(SetTimer)] == [1.0]
    d.fire("hello", 1.0)
    assert len(d.signals(Hello)) == 1
    d.order(Prepare(job=job(), profile=False))
    d.fire("hello", 1.0)
    assert not d.signals(Hello)


def test_a_fenced_agent_ends_its_trainers_and_is_silent_until_its_new_incarnation() -> None:
    d = running()
    d.order(Fence(reason="out"))
    assert d.all(KillTrainer)
    assert d.all(RenewIncarnation)
    d.stepped(2)
    d.fire("heartbeat", 1.0)
    d.order(Quiesce(generation=9, mode="abort"))
    assert not d.last
    d.feed(AgentStarted, incarnation=8, facts=facts())
    assert d.all(StartTrainer)
    assert d.signals(Hello)[0].generation == 0


# --- leaving -----------------------------------------------------------------------------------------------


def test_sigterm_asks_to_leave_and_goes_when_released() -> None:
    d = running()
    d.feed(TerminationRequested, reason="SIGTERM")
    assert d.signals() == [Leaving(reason="SIGTERM")]
    assert not d.all(ExitDaemon)
    d.order(Release())
    assert d.one(KillTrainer).grace_s == 2.0
    assert d.one(ExitDaemon).code == 0
    d.order(RequestHello())
    assert not d.last


def test_sigterm_does_not_wait_for_ever() -> None:
    d = running()
    d.feed(TerminationRequested, reason="SIGTERM")
    d.fire("leave", 30.0)
    assert d.all(ExitDaemon)


def test_a_second_sigterm_or_one_with_nothing_to_hand_over_goes_at_once() -> None:
    d = running()
    d.feed(TerminationRequested, reason="SIGTERM")
    d.feed(TerminationRequested, reason="SIGTERM")
    assert d.all(ExitDaemon)
    idle = Daemon()
    idle.feed(TerminationRequested, reason="SIGTERM")
    assert idle.all(ExitDaemon)


def test_a_leaving_node_that_is_fenced_leaves_at_once() -> None:
    """A new incarnation would start trainers, and nobody would stop the daemon."""
    d = running()
    d.feed(TerminationRequested, reason="SIGTERM")
    d.order(Fence(reason="out"))
    assert d.all(KillTrainer) and d.all(ExitDaemon) and not d.all(RenewIncarnation)
    assert d.all(PublishNode)[-1].state is NodeState.OFFLINE


def test_a_sigterm_between_a_fence_and_the_new_incarnation_counts() -> None:
    d = running()
    d.order(Fence(reason="out"))
    d.feed(TerminationRequested, reason="SIGTERM")
    assert d.one(ExitDaemon).code == 0


def test_a_drained_node_stays_without_trainers() -> None:
    d = running()
    d.order(Release())
    assert d.all(KillTrainer)
    assert not d.all(StartTrainer)
    assert not d.all(ExitDaemon)


def test_a_stopped_job_leaves_warm_trainers() -> None:
    d = running()
    d.order(Stop(job_id="job-1", reason="finished"))
    assert d.all(KillTrainer)
    assert d.all(StartTrainer)
    d.order(Stop(job_id="job-1", reason="finished"))
    assert [type(effect) for effect in d.last] == [RemoveSnapshots]


def test_a_stopped_job_is_prepared_again_if_a_coordinator_asks_for_it_for_long() -> None:
    """Only coordinators whose journals were lost could know that it was over."""
    d = running()
    d.order(Stop(job_id="job-1", reason="finished"))
    d.order(Prepare(job=job(), profile=False))
    assert d.machine._a.job is None
    d.wait(LATE_S)
    d.order(Prepare(job=job(), profile=False))
    assert d.machine._a.job == job()


def test_a_suspicion_is_repeated_after_an_outage_until_steps_commit() -> None:
    d = running()
    d.stepped(1)
    d.feed(TrainerReported, device=0, report=PeerSuspected(generation=1, detail="reset"))
    d.stepped(2)
    d.feed(BrokerConnected)
    assert d.signals(PeerSuspected)
    d.stepped(3)
    d.feed(BrokerConnected)
    assert not d.signals(PeerSuspected)


def test_a_late_message_of_an_ended_process_is_corrected_by_the_new_one() -> None:
    d = Daemon()
    d.order(Prepare(job=job(), profile=False))
    d.feed(TrainerConnected, device=0, pid=50)
    d.feed(TrainerConnected, device=0, pid=50)
    assert not d.all(PrepareTrainer)
    d.feed(TrainerConnected, device=0, pid=51)
    assert d.all(PrepareTrainer)

"""``ftd coordinator``: drives the cluster machine between the broker, the journal and the planner.

The order of things on a failure, all on one event loop: the last will arrives, the machine answers with
effects, the state is journaled, the commands go out. Everything slow is elsewhere (planning in a process and
a thread of its own) or limited (the public state goes out at most ten times a second).
"""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, assert_never, cast

import structlog

from ftd import systemd
from ftd.config.daemon import DaemonConfig
from ftd.config.reading import NAME
from ftd.coordinator.checkpoints import Checkpoints
from ftd.coordinator.commands import Commands
from ftd.coordinator.events import EventStream
from ftd.coordinator.hearing import Hearing
from ftd.coordinator.journal import Journal
from ftd.coordinator.leadership import FollowerCallbacks, LeaderCallbacks, Leadership, Takeover
from ftd.coordinator.plan_cache import PlanCache
from ftd.coordinator.planning import PlanningService
from ftd.coordinator.public_state import cancel_all, public_state
from ftd.coordinator.requests import Requests
from ftd.coordinator.restoring import check_restore
from ftd.dashboard.dashboard import Dashboard
from ftd.driver import Driver
from ftd.metrics.cluster import ClusterMetrics
from ftd.metrics.server import MetricsServer
from ftd.tracking.process import Tracking
from ftd.wire.checking import encode_state
from ftd.wire.coordinators import JournalCopy, packer
from ftd.wire.topics import Topics
from statemachine.cluster.durable.outbox import OUTBOX
from statemachine.cluster.durable.promises import promised
from statemachine.cluster.machine import ClusterMachine
from statemachine.effects import (
    AbandonCheckpoint,
    AnswerRequest,
    BroadcastCommand,
    BuildTemplates,
    CancelTemplates,
    CheckRestore,
    CommitCheckpoint,
    ComputePlan,
    Effect,
    EmitEvent,
    ExportCheckpoint,
    FindCheckpoint,
    ForeseePlan,
    ForgetNode,
    PersistState,
    PublishCluster,
    RecordSteps,
    SendCommand,
    WeighPlan,
)
from statemachine.election.leadership import Leader, Peer
from statemachine.events import BrokerConnected, BrokerLost, Event, StepsMissed
from statemachine.messages.cluster import Prepare
from statemachine.messages.values import ClusterPhase

_log = structlog.get_logger("ftd.coordinator")

STATE_PERIOD_S = 0.1
STATE_SHARE = 0.05
"""Of the time, at most, goes into the public state: one of a thousand nodes takes milliseconds."""
STATE_LATER = 25
"""Times as long as it takes it waits, at least: a decision among a thousand nodes comes first."""
GOODBYE_S = 1.0
ClusterEffect = (
    EmitEvent | SendCommand | BroadcastCommand | PersistState | PublishCluster | BuildTemplates
    | CancelTemplates | ForeseePlan | ComputePlan | WeighPlan | CheckRestore | CommitCheckpoint | ExportCheckpoint
    | AbandonCheckpoint | FindCheckpoint | AnswerRequest | ForgetNode | RecordSteps
)  # fmt: skip


class Coordinator:
    """One ``ftd coordinator``: ``await Coordinator(config).run()`` lasts until it is told to stop."""

    def __init__(self, config: DaemonConfig, *, anew: bool = False) -> None:
        """Open the journal.

        :param anew: forget the job, here and at the broker, once this coordinator leads.
        :raises JournalError: there is no usable journal in ``coordinator.state_dir``.
        """
        self._topics = Topics(cluster=config.cluster)
        self._incarnation = time.time_ns() // 1000
        self._journal = Journal(config.state_dir)
        self._pack = packer().fold
        self._stopping = False
        self._forced_for: tuple[Any, ...] = ()
        self._published_at, self._publish_took_s = -STATE_PERIOD_S, 0.0
        self._publish_timer: asyncio.TimerHandle | None = None
        self._timing = config.timing
        self._leading = False
        self._takeover = Takeover(config.timing, self._journal, anew=anew)
        self._machine = ClusterMachine(config.timing)
        self._driver = Driver(
            self._machine,
            self._perform,
            together=self._steps,
            carried_out=self._journal.flush,
        )
        self._planning = PlanningService(
            self._feed,
            self._driver,
            PlanCache(config.state_dir / "plans"),
            on_progress=self._publish_state_soon,
        )
        self._checkpoints = Checkpoints(self._feed, self._driver.now)
        self._tracking = Tracking(self._journal.path, failed=self._not_logged, missed=self._missed)
        self._metrics = ClusterMetrics(
            state=self._state,
            clock=self._driver.now,
            connected=lambda: self._session.online,
            leading=lambda: self._session.connected,
            internal_errors=lambda: self._driver.bugs,
        )
        self._metrics_server = MetricsServer(config.coordinator_metrics, self._metrics.own.registry)
        self._dashboard = Dashboard(config.dashboard, cluster=config.cluster)
        self._events = EventStream(
            self._topics,
            self._journal,
            emitted=self._metrics.emitted,
            heard=self._metrics.heard,
            shown=self._dashboard.on_event,
        )
        self._session = self._new_leadership(config)
        self._commands = Commands(self._topics, self._session)
        self._requests = Requests(
            topics=self._topics,
            session=self._session,
            driver=self._driver,
            journal=self._journal,
            checkpoints=self._checkpoints,
            check_solver=self._planning.check_solver,
            public_state=self._public_state,
            job=lambda: self._machine.job,
        )
        self._hearing = self._new_hearing()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Trainers go on: they need no coordinator to train.

        :raises JournalError: the journal cannot be written any more.
        :raises ConfigurationError: metrics or the dashboard cannot be served where they should.
        """
        await self._metrics_server.start()
        await self._dashboard.start(self._journal, self._public_state())
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        self._planning.warm_up()
        _log.info("run", cluster=self._topics.cluster)
        driving = asyncio.ensure_future(self._driver.run())
        others = [asyncio.ensure_future(self._session.run()), asyncio.ensure_future(systemd.watchdog())]
        stopping = asyncio.ensure_future(stop.wait())
        systemd.notify("READY=1", self._status())
        problem: Exception | None = None
        try:
            await asyncio.wait([driving, others[0], stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in (driving, others[0]):
                if task.done():
                    task.result()  # Only an error ends these: hand it on.
        except Exception as error:
            problem = error
            raise
        finally:
            systemd.notify("STOPPING=1")
            await self._end([driving, stopping], others, problem)

    async def _end(
        self,
        first: Sequence[asyncio.Future[Any]],
        last: Sequence[asyncio.Future[Any]],
        problem: Exception | None,
    ) -> None:
        """Stop deciding, say that nobody decides any more and why, then leave."""
        self._stopping = True
        await cancel_all(first)
        self._driver.stop_timers()
        if self._publish_timer is not None:
            self._publish_timer.cancel()
        why = "was stopped" if problem is None else f"ended: {str(problem) or type(problem).__name__}"
        gone = self._session.unreachable(f"the coordinator {why}", graceful=problem is None)
        await self._session.say_goodbye(gone, GOODBYE_S)
        await cancel_all(last)
        await self._metrics_server.close()
        await self._dashboard.close()
        await self._planning.close()
        self._journal.flush()
        await self._tracking.close()
        self._journal.close()
        _log.info("stopped")

    # --- setting up --------------------------------------------------------------------------------

    def _new_hearing(self) -> Hearing:
        return Hearing(
            self._topics,
            self._driver,
            requests=self._requests,
            events=self._events,
            commands=self._commands,
            unreachable=self._publish_state_soon,  # Somebody does lead.
            refused=self._refused,
        )

    def _new_leadership(self, config: DaemonConfig) -> Leadership:
        topics = self._topics
        me = Peer(
            name=config.coordinator,
            incarnation=self._incarnation,
            priority=config.priority,
            ineligible=self._takeover.ineligible,
        )
        return Leadership(
            config.broker,
            topics,
            me,
            config.timing,
            subscriptions=(topics.request, topics.cluster_state),
            # What many say at once, and what of our own words comes back.
            unacknowledged=(topics.node_signal(), topics.node_state(), topics.events, topics.command),
            leader=LeaderCallbacks(
                begin=self._begin,
                check=self._takeover.check,
                state=lambda: self._pack(self._durable()),
                end=self._end_lead,
                emit=self._emit,
                publish_state=self._publish_state_soon,
            ),
            follower=FollowerCallbacks(
                position=lambda: self._journal.position,
                met=self._journal.share,
                alive=self._dashboard.on_news,
                keep=self._takeover.keep,
                heard=self._events.overheard,
                seen=self._seen,
            ),
            shared=self._journal.shared,
            on_message=self._on_message,
            on_connected=self._on_connected,
            on_lost=self._on_lost,
            on_acknowledged=self._metrics.own.broker_round_trip.observe,
        )

    # --- what happens ------------------------------------------------------------------------------

    def _stamp(self) -> dict[str, Any]:
        return {"at": self._driver.now(), "cause": self._driver.cause()}

    # --- who leads ---------------------------------------------------------------------------------

    def _status(self) -> str:
        return f"STATUS={self._session.role_in_words()}, cluster {self._topics.cluster}"

    def _begin(self, leader: Leader, copy: JournalCopy | None) -> None:
        """Go on from the newest of what the last leader left at the broker and what is known here."""
        begun = self._takeover.begin(copy, self._driver.now())
        self._machine = begun.machine
        if self._machine.job_id is not None:
            self._journal.attribute(self._machine.job_id)
        self._driver.replace(self._machine)
        self._leading = True
        self._forced_for = ()
        self._events.go_on(self._session, begun.outbox, self._machine.plan_in_words)
        for effect in begun.effects:
            self._perform(effect)

    def _end_lead(self, leader: Leader) -> None:
        """What we know is not true any more: another coordinator decides."""
        self._leading = False
        if self._machine.job_id is not None:
            self._planning.cancel(CancelTemplates(cause="deposed", job_id=self._machine.job_id))
        self._machine = ClusterMachine(self._timing)
        self._tracking.follow(None, 0, None)
        self._events.outbox.clear()
        self._driver.replace(self._machine)
        if self._publish_timer is not None:
            self._publish_timer.cancel()
            self._publish_timer = None
        systemd.notify(self._status())

    def _feed(self, event: Event) -> None:
        """What was asked for as the leader counts for as long as we lead."""
        if self._leading:
            self._driver.feed(event)

    def _on_connected(self) -> None:
        self._commands.connected()
        systemd.notify(self._status())
        self._driver.feed(BrokerConnected(**self._stamp()))

    def _on_lost(self) -> None:
        systemd.notify("STATUS=waiting for the broker")
        self._driver.feed(BrokerLost(**self._stamp()))

    def _on_message(self, topic: str, payload: bytes, retained: bool) -> None:
        self._hearing.on_message(topic, payload, retained)

    def _refused(self, event: EmitEvent) -> None:
        """A payload that nobody can act on: tell the world, go on."""
        self._emit(event)
        self._journal.flush()

    # --- what the machine wants ----------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        effect = cast(ClusterEffect, effect)  # Timers are the driver's, and the rest is the agents'.
        match effect:
            case EmitEvent():
                self._emit(effect)
            case RecordSteps():
                self._events.recall(effect.steps, self._driver.now())
            case SendCommand(command=Prepare(profile=True)):
                self._planning.expect()
                self._commands.send(effect)
            case SendCommand() | BroadcastCommand() | ForgetNode():
                self._commands.send(effect)
            case PersistState():
                self._persist()
            case PublishCluster():
                self._publish_state_soon()
            case BuildTemplates():
                self._planning.build(effect)
            case CancelTemplates():
                self._planning.cancel(effect)
            case ForeseePlan() | ComputePlan() | WeighPlan():
                self._planning.ask(effect)
            case CheckRestore():
                self._driver.feed(check_restore(effect, self._driver.now()))
            case CommitCheckpoint():
                self._checkpoints.commit(effect)
            case AbandonCheckpoint():
                self._checkpoints.abandon(effect)
            case ExportCheckpoint():
                self._checkpoints.export(effect)
            case FindCheckpoint():
                self._checkpoints.find(effect)
            case AnswerRequest():
                self._requests.answer(effect.request, accepted=effect.accepted, detail=effect.detail)
            case _:
                assert_never(effect)

    def _emit(self, event: EmitEvent) -> None:
        self._events.emit(self._session, event, self._driver.now())

    def _durable(self) -> dict[str, Any]:
        """The state, and what is yet to be told of it."""
        return {**self._machine.durable_parts(), OUTBOX: self._events.outbox.entries}

    def _persist(self) -> None:
        """Forced to the disk when a promise is in it, written in any case."""
        state = self._durable()
        kept_as = self._pack(state)
        position = self._session.replicate(kept_as, self._driver.now())
        promise = promised(state)
        forced = promise != self._forced_for or state["generation"] > self._journal.reserved
        self._journal.save(kept_as, forced=forced, position=position)
        self._forced_for = promise

    def _steps(self, events: Sequence[Event], bug: Callable[[Event], None]) -> list[Effect]:
        effects = self._machine.steps(cast(Any, events), bug)
        self._events.decide(effects, self._driver.now())
        return effects

    def _state(self) -> dict[str, Any]:
        return self._machine.public_state()

    def _public_state(self) -> dict[str, Any]:
        coordinator = {"coordinator": self._incarnation, **self._session.public_state()}
        return public_state(self._state(), coordinator, self._planning.progress, self._driver.now())

    def _track(self) -> None:
        """Have the job's steps logged while we lead it."""
        if self._leading:
            phase = self._machine.phase
            outcome = str(phase) if phase in (ClusterPhase.FINISHED, ClusterPhase.FAILED) else None
            self._tracking.follow(self._machine.job, self._session.machine.term, outcome)

    def _missed(self, first: int, last: int) -> None:
        self._feed(StepsMissed(**self._stamp(), first=first, last=last))

    def _not_logged(self, sink: str, detail: str) -> None:
        if self._leading:
            details = {"sink": sink, "detail": detail}
            reason = f"{sink}: {detail}"
            self._emit(
                EmitEvent(cause=self._driver.cause(), name="LoggingFailed", reason=reason, details=details)
            )
            self._journal.flush()

    def _seen(self, state: dict[str, Any]) -> None:
        """The state that another coordinator publishes: the steps that it tells are of this job."""
        self._dashboard.on_state(state)
        job = state.get("job")
        if isinstance(job, dict) and isinstance(name := job.get("id"), str) and NAME.fullmatch(name):
            self._journal.attribute(name)

    def _publish_state_soon(self) -> None:
        """Behind what is more urgent, and not before a tenth of a second has passed since the last time."""
        if self._stopping or self._publish_timer is not None:
            return
        loop = asyncio.get_running_loop()
        due = self._published_at + max(STATE_PERIOD_S, self._publish_took_s / STATE_SHARE)
        wait_s = max(due - loop.time(), STATE_LATER * self._publish_took_s)
        self._publish_timer = loop.call_later(wait_s, self._publish_state)

    def _publish_state(self) -> None:
        self._publish_timer = None
        began_s, self._published_at = time.thread_time(), asyncio.get_running_loop().time()
        state = self._public_state()
        self._session.publish(self._topics.cluster_state, encode_state(state), retain=True)
        self._dashboard.on_state(state)
        self._track()
        self._publish_took_s = time.thread_time() - began_s
        if self._machine.phase is ClusterPhase.RUNNING:
            self._journal.tidy(generation=self._machine.generation)

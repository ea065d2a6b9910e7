"""Cost of a coordinator's durable write with 1,000 nodes: recovery from each loss waits for three of them.

    python -m benchmarks.durable_writes

It is CPU time of the coordinator's thread: gathering the state, encoding and deflating it
(``ftd.transport.wire.compression``), and the journal's transaction, without forcing it to the
disk. Between two writes the state changes as in a recovery: a node is lost, all nodes have reported and the
members are known, a plan is chosen, the group has resumed, a step is committed, a node sent Hello. Before
each write other memory is read, as the messages that are handled in between would do.
"""

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from benchmarks.common import Limit, Result, command_line, main
from ftd.coordinator.journal import Journal
from ftd.transport.wire.coordinator_messages import decompress_state, state_compressor
from planner.values import Device, PipelinePlacement, Plan, Policy, StagePlacement
from statemachine.cluster.durable import durable
from statemachine.cluster.node import NodeMachine
from statemachine.cluster.phases import ActiveRecovery, Planning, Quiescing, Resuming, Running
from statemachine.cluster.rules import Decision, Resumption
from statemachine.cluster.state import Cluster
from statemachine.messages.values import CommittedStep, Job, NodeFacts, NodeState, Vote
from statemachine.timing import Timing

LAYERS = 24
LIMIT_MS = 2.0
_ELSEWHERE = bytes(32 << 20)


def plan_of(names: list[str]) -> Plan:
    pipelines = tuple(
        PipelinePlacement(
            stages=tuple(
                StagePlacement(first_layer=layer, end_layer=layer + 1, devices=(Device(node=name, index=0),))
                for layer, name in enumerate(names[first : first + LAYERS])
            ),
            first_microbatch=first,
            microbatches=LAYERS,
            estimated_s=1.0,
        )
        for first in range(0, len(names) - LAYERS + 1, LAYERS)
    )
    return Plan(
        pipelines=pipelines, transfers=(), method="merge", reason="as it is", estimated_iteration_s=1.0
    )


def cluster(nodes: int) -> Cluster:
    """Return the state of a cluster with a job that trains and has recovered before."""
    policy = Policy(devices_per_node=1, tolerate=1, global_batch=4096, microbatch_rows=1)
    c = Cluster(timing=Timing(), generation=1, job=Job(job_id="job-1", name="j", steps=10**6, policy=policy))
    for number in range(nodes):
        facts = NodeFacts(
            devices=1, host=f"10.0.{number // 250}.{number % 250}", rendezvous_port=29500, snapshot_port=29501
        )
        name = f"node-{number:04d}"
        c.nodes[name] = NodeMachine(
            name=name, incarnation=1795315015071175 + 7919 * number, facts=facts, state=NodeState.HEALTHY,
            prepared=True, counted_in=1, obeyed=1,
        )  # fmt: skip
    names = list(c.nodes)
    plan = plan_of(names)
    c.resumption = Resumption(generation=1, step=1, vote=None, plan=plan)
    c.state = Running(
        generation=1, began_at=0.0, members=set(names), resumption=c.resumption, planned=plan.nodes
    )
    return c


def recovery(c: Cluster, number: int) -> Iterator[str]:
    """Apply the changes of one recovery and yield the label of each after which the state is written."""
    names = list(c.nodes)
    lost, generation = names[number % len(names)], c.generation + 1
    left = [name for name in names if name != lost]
    assert c.resumption is not None
    c.nodes[lost].state, c.generation = NodeState.OFFLINE, generation
    before = c.resumption.plan.pipelines
    record = ActiveRecovery(
        cause="node_lost",
        nodes=[lost],
        detected_how="last_will",
        detected_at=0.0,
        began_at=0.0,
        before=before,
    )
    expected = dict.fromkeys(left)
    c.state = Quiescing(generation=generation, recovery=record, mode="abort", began_at=0.0, expected=expected)
    yield "a node is lost"
    for name in left:
        c.nodes[name].obeyed = generation
    step = c.progress.known_step
    c.state = Planning(
        generation=generation,
        recovery=record,
        mode="abort",
        began_at=0.0,
        expected=expected,
        members=set(left),
        decision=Decision(step=step, vote=None, outcome="redo", holdings={}, ready={}, in_flight=False),
    )
    yield "all reported"
    for name in left:
        c.nodes[name].counted_in = generation
    plan = plan_of(left)
    c.resumption = replace(c.resumption, generation=generation, plan=plan)
    c.state = Resuming(
        generation=generation,
        recovery=record,
        began_at=0.0,
        members=set(left),
        resumption=c.resumption,
        planned=plan.nodes,
    )
    yield "a plan is chosen"
    record.resumed_at = 1.0
    c.state = group = Running.of(c.state)
    yield "all resumed"
    group.recovery = None
    c.progress.known = CommittedStep(step=c.progress.known_step + 1, vote=Vote(loss=1.0, gradient_norm=1.0))
    yield "a step is committed"
    c.nodes[lost] = replace(c.nodes[lost], incarnation=c.nodes[lost].incarnation + 1, state=NodeState.HEALTHY)
    yield "a node said Hello"


def measure(nodes: int, rounds: int) -> Result:
    result = Result(
        name="durable_writes",
        what=f"A coordinator's durable write with {nodes} nodes: CPU ms, medians of {rounds}",
        columns=("after", "gathered", "encoded, deflated", "journaled", "together", "p99"),
    )
    c, fold = cluster(nodes), state_compressor().compress
    spent: dict[str, list[tuple[float, float, float]]] = {}
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="ftd-durable-") as directory:
        journal, serial, kept = Journal(Path(directory)), 0, b""
        for number in range(rounds):
            for after in recovery(c, number):
                _ELSEWHERE.count(1)
                serial += 1
                moments = [time.thread_time()]

                def done(moments: list[float] = moments) -> None:
                    moments.append(time.thread_time())

                kept = write_durably(c, fold, journal, serial, done)
                ms = [1e3 * (later - earlier) for earlier, later in pairwise(moments)]
                spent.setdefault(after, []).append((ms[0], ms[1], ms[2]))
        journal.close()
    for after, all_ms in spent.items():
        together = sorted(sum(ms) for ms in all_ms)
        parts = [statistics.median(part) for part in zip(*all_ms, strict=True)]
        median, worst = statistics.median(together), together[int(0.99 * (len(together) - 1))]
        result.rows.append((after, *(f"{ms:.2f}" for ms in (*parts, median, worst))))
        result.data[after] = all_ms
        result.limits.append(Limit(name=f"{after}: ms", measured=median, limit=LIMIT_MS))
    result.notes.append(
        f"{len(decompress_state(kept))} bytes of state, {len(kept)} in the journal and at the broker"
    )
    return result


def write_durably(
    c: Cluster, fold: Callable[..., bytes], journal: Journal, serial: int, done: Callable[[], None]
) -> bytes:
    state = durable.write(c)
    done()
    kept = fold(state)
    done()
    journal.save(kept, forced=False, position=(1, serial))
    done()
    return kept


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=100)
    parsed = parser.parse_args()
    main(measure(parsed.nodes, parsed.rounds), parsed.out)

"""Strangers connect to the sockets of a cluster that trains: training continues."""

import os
from pathlib import Path

from ftd.local.cluster import COORDINATOR
from ftd.processes import descendant_pids
from tests.helpers.fuzzing import deep
from tests.helpers.listening import answer, doors_of, undocumented
from tests.helpers.playground import HOME, Playground, tiny_job


def test_nothing_listens_beyond_the_table_and_strangers_disturb_no_training(
    ground: Playground, tmp_path: Path
) -> None:
    run = ground.submit(tiny_job(tmp_path))
    ground.further(5)
    pids = {name: ground.cluster.processes.children[name].pid for name in (*HOME, COORDINATOR)}
    wrong = [problem for name in HOME for problem in undocumented("node", pids[name])]
    wrong += undocumented("coordinator", pids[COORDINATOR])
    doors = [door for pid in ground.pids.values() for door in doors_of(pid)]
    assert wrong == [] and doors, "trainers meet each other through gloo"
    others = {pid for root in pids.values() for pid in descendant_pids(root)} - set(ground.pids.values())
    assert {pid: doors_of(pid) for pid in others if Path(f"/proc/{pid}/fd").exists() and doors_of(pid)} == {}
    assert {(door.kind, door.on_loopback) for door in doors} == {("tcp", True)}
    for door in doors:
        for said in (
            b"",
            b"\x00" * 8,
            b"\xff" * 4096,
            b"GET / HTTP/1.1\r\n\r\n",
            os.urandom(512),
            deep(b"\x91"),
        ):
            answer(door, said, patience_s=0.05)
    ground.further(20)
    assert [e["cause"] for e in run.recoveries] == ["start"]
    ground.stop_job()

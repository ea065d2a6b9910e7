"""Every scenario of the library meets its expectations on the real service: broker, processes, torch, SIGKILL."""

import asyncio
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ftd.faults.chaos.player import ScenarioResult
from ftd.faults.chaos.report import encode_documents, render_junit, render_text
from ftd.faults.chaos.scenario import load_scenario
from ftd.faults.chaos.values import ClusterSetup, Scenario
from ftd.local.scenario_cluster import ScenarioCluster, cluster_key, missing_requirement, require_setup
from ftd.transport.mqtt.mosquitto import find_mosquitto

LIBRARY = sorted((Path(__file__).parents[2] / "examples" / "chaos").glob("*.toml"))
SCENARIO_LIMIT_S = 120.0
"""Limit of each scenario, so that one that waits for something in vain says what it is before its test ends."""


def by_cluster(path: Path) -> tuple[str, str]:
    """Return a sort key that puts scenarios with the same cluster next to each other."""
    return repr(cluster_key(require_setup(load_scenario(path)))), path.name


class Stages:
    """One cluster at a time, which stays up while scenarios want the same."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._key: ClusterSetup | None = None
        self._open = contextlib.AsyncExitStack()
        self._stage: ScenarioCluster | None = None

    def play(self, scenario: Scenario) -> ScenarioResult:
        return self._runner.run(self._play(scenario))

    async def _play(self, scenario: Scenario) -> ScenarioResult:
        key = cluster_key(require_setup(scenario))
        if self._stage is None or key != self._key:
            await self._open.aclose()
            self._key, self._stage = key, None
            self._stage = await self._open.enter_async_context(ScenarioCluster(key, report=_say))
        return await self._stage.play(scenario)

    def close(self) -> None:
        self._runner.run(self._open.aclose())
        self._runner.close()


def _say(line: str) -> None:
    print(line, file=sys.stderr)


@pytest.fixture(scope="module")
def stages() -> Iterator[Stages]:
    if find_mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    found = Stages()
    try:
        yield found
    finally:
        found.close()


def test_there_are_enough_of_them_and_each_says_what_for() -> None:
    loaded = [load_scenario(path) for path in LIBRARY]
    assert len(loaded) >= 15
    for scenario in loaded:
        assert scenario.purpose.endswith("."), scenario.name
        assert scenario.cluster is not None, scenario.name
        assert scenario.expect or any(fault.expect for fault in scenario.faults), scenario.name


@pytest.mark.parametrize("path", sorted(LIBRARY, key=by_cluster), ids=lambda path: path.stem)
def test_a_scenario_of_the_library(stages: Stages, path: Path) -> None:
    scenario = dataclasses.replace(load_scenario(path), limit_s=SCENARIO_LIMIT_S)
    if reason := missing_requirement(require_setup(scenario)):
        pytest.skip(reason)
    played = stages.play(scenario)
    story = [
        f"{at:.2f} {e['event']} {e['node']} g{e['generation']} {e['reason']}"
        for at, e in played.record.events
    ]
    assert played.met, "\n".join([render_text(played), *story])
    check_reports(played)


def check_reports(played: ScenarioResult) -> None:
    """Check that the JSON and JUnit reports agree with the result."""
    [document] = json.loads(encode_documents([played]))
    assert document["met"] and document["scenario"] == played.scenario.name
    assert [one["problem"] for one in document["faults"]] == [""] * len(played.scenario.faults)
    suite: Any = ElementTree.fromstring(render_junit([played])).find("testsuite")
    assert int(suite.get("tests")) == len(played.verdicts) == len(suite.findall("testcase"))
    assert suite.get("failures") == "0"

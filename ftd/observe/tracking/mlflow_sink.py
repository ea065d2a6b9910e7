"""Logs to MLflow: a tracking server or a directory.

MLflow keeps every value that it received, so superseded values cannot be taken back. After a rollback, the
run is ended and a new one with the whole valid history takes its place. The sink asks MLflow for the last
step of each metric, so that nothing is logged twice, whatever a killed writer had sent.
"""

import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow logs to a directory only with it.

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from ftd.observe.tracking.record import Cursor
from ftd.observe.tracking.rows import LoggedRow
from statemachine.messages.values import MlflowPolicy

_MAX_METRICS = 1000
_MAX_PARAMETERS = 100
_MAX_CHARACTERS = 500
"""Limits of one request and of a parameter's value."""
_TAG = "ftd.run"
_IN_EVERY_STEP = ("train/loss", "train/learning_rate", "train/gradient_norm", "train/step_s")


class MlflowSink:
    """A run in MLflow."""

    def __init__(self, policy: MlflowPolicy, run: str, parameters: Mapping[str, Any]) -> None:
        """:param run: the job's id.
        :param parameters: the job's parameters, shown with the run.
        """
        self._policy, self._run, self._parameters = policy, run, parameters
        self._client: MlflowClient | None = None
        self._id = ""
        self._last: dict[str, int] = {}
        """Newest step of each metric."""

    def reopen(self, superseded: Sequence[int]) -> Cursor:
        """See ``TrackingSink``."""
        client = self._client = MlflowClient(tracking_uri=self._policy.tracking_uri)
        found = client.get_experiment_by_name(self._policy.experiment)
        experiment = (
            client.create_experiment(self._policy.experiment) if found is None else found.experiment_id
        )
        tag = f"{self._run}#{len(superseded)}"
        for number, step in enumerate(superseded):
            for run in self._runs(experiment, f"{self._run}#{number}"):
                if run.info.status == "RUNNING":
                    client.set_tag(run.info.run_id, "ftd.superseded_from_step", str(step))
                    client.set_terminated(run.info.run_id, "KILLED")
        runs = self._runs(experiment, tag)
        if not runs:
            return self._begin(client, experiment, tag, superseded)
        self._id = runs[0].info.run_id
        logged = client.get_run(self._id).data
        self._last = {key: self._newest(client, key) for key in logged.metrics}
        self._log_parameters(client, logged.params)
        client.update_run(self._id, status="RUNNING")
        step = min((self._last.get(key, 0) for key in _IN_EVERY_STEP), default=0)
        return Cursor(step=step, evaluation=self._last.get("evaluation/loss", 0))

    def write(self, rows: Sequence[LoggedRow]) -> None:
        """See ``TrackingSink``."""
        assert self._client is not None
        metrics = [
            Metric(key, value, int(1000 * row.wall_time), row.step)
            for row in rows
            for key, value in ((_key(name), value) for name, value in row.scalars().items())
            if row.step > self._last.get(key, 0)
        ]
        for some in _chunks(metrics, _MAX_METRICS):
            self._client.log_batch(self._id, metrics=some)
            for metric in some:
                self._last[metric.key] = metric.step

    def close(self, outcome: str | None) -> None:
        """See ``TrackingSink``."""
        client, self._client = self._client, None
        if client is not None and outcome is not None:
            client.set_terminated(self._id, outcome)

    def _runs(self, experiment: str, tag: str) -> list[Any]:
        assert self._client is not None
        return list(self._client.search_runs([experiment], filter_string=f"tags.`{_TAG}` = '{tag}'"))

    def _begin(self, client: MlflowClient, experiment: str, tag: str, superseded: Sequence[int]) -> Cursor:
        name = self._run + (f" from step {superseded[-1]}" if superseded else "")
        self._id = client.create_run(
            experiment, run_name=name, tags={_TAG: tag, "ftd.job": self._run}
        ).info.run_id
        self._last = {}
        self._log_parameters(client, {})
        return Cursor()

    def _log_parameters(self, client: MlflowClient, known: Mapping[str, str]) -> None:
        """Log the parameters that the run lacks: all of a new one, or those that a killed writer had not sent."""
        given = {_key(name): str(value)[:_MAX_CHARACTERS] for name, value in self._parameters.items()}
        missing = [Param(key, value) for key, value in given.items() if key not in known]
        for some in _chunks(missing, _MAX_PARAMETERS):
            client.log_batch(self._id, params=some)

    def _newest(self, client: MlflowClient, key: str) -> int:
        return max((metric.step for metric in client.get_metric_history(self._id, key)), default=0)


def _key(name: str) -> str:
    """Return the name of a metric or parameter as MLflow accepts it: a path in normal form of few characters."""
    return posixpath.normpath(re.sub(r"[^/\w.\- :]", "_", name))


def _chunks(values: list[Any], size: int) -> Iterator[list[Any]]:
    for begin in range(0, len(values), size):
        yield values[begin : begin + size]

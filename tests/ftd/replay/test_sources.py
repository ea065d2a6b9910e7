"""Tests of the sources of a replay's job: each kind is read, and what cannot be replayed is refused with a reason."""

from pathlib import Path

import pytest

from ftd.config.profile_file import save_profile
from ftd.errors import ConfigurationError
from ftd.replay.cards import read_card
from ftd.replay.job import JobError
from ftd.replay.sources import load_replay_job
from planner.values import LayerProfile, ModelProfile
from tests.helpers.harness import ROOT
from tests.helpers.profile_files import profile_document

LAYER = LayerProfile(
    forward_ms=1.0,
    backward_ms=2.0,
    parameter_bytes=400,
    gradient_bytes=400,
    optimizer_bytes=800,
    activation_bytes=100,
    output_bytes=10,
)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    save_profile(path, profile_document(ModelProfile(layers=(LAYER,) * 6, microbatch_rows=4)))
    return path


def test_a_card_is_read_by_its_name_and_options_replace_its_policy() -> None:
    job = load_replay_job("bert-large", 30, tolerate=2)
    assert job.profile == read_card("bert-large").profile and job.published
    assert job.policy.tolerate == 2
    assert not load_replay_job("bert-large", 30, global_batch=4096).published


def test_a_profile_is_replayed_with_a_global_batch(profile: Path) -> None:
    job = load_replay_job(str(profile), 4, global_batch=32)
    assert (job.name, job.policy.global_batch, len(job.profile.layers)) == ("small", 32, 6)
    assert job.samples_per_s(4) > job.samples_per_s(1) > 0


def test_a_profile_without_a_global_batch_is_refused(profile: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--global-batch.*multiple of the microbatch of 4 rows"):
        load_replay_job(str(profile), 4)


def test_a_job_file_needs_a_measured_profile(profile: Path) -> None:
    mlp = str(ROOT / "examples" / "mlp.toml")
    with pytest.raises(ConfigurationError, match=r"have not been measured.*ftd profile .*mlp\.toml --output"):
        load_replay_job(mlp, 4)
    job = load_replay_job(mlp, 4, profile=profile)
    assert job.source == "job file mlp.toml with profile small.json" and job.samples_per_s(4) > 0


@pytest.mark.parametrize(
    ("nodes", "options", "message"),
    [
        (4, {"global_batch": 30}, "30 is not a multiple of the microbatch of 4"),
        (1, {"global_batch": 32, "tolerate": 1}, "needs 2 replicas of 1 node each"),
        (3, {"global_batch": 32, "devices_per_node": 32}, "6 layers cannot use the 32 devices of one node"),
    ],
)
def test_a_job_that_cannot_be_planned_is_refused(
    profile: Path, nodes: int, options: dict[str, int], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        load_replay_job(str(profile), nodes, **options)  # type: ignore[arg-type]


def test_the_remedy_for_too_many_tolerated_failures_is_the_option_or_the_key(profile: Path) -> None:
    with pytest.raises(
        JobError, match=r"--tolerate 3 needs 4 replicas .*set --tolerate to at most 1, or start"
    ):
        load_replay_job("gpt2", 2, tolerate=3)
    with pytest.raises(
        JobError, match=r"tolerance\.failures = 1 needs 2 .*set tolerance\.failures to 0, or start"
    ):
        load_replay_job(str(ROOT / "examples" / "mlp.toml"), 1, profile=profile)


def test_a_model_that_does_not_fit_on_the_nodes_is_refused() -> None:
    with pytest.raises(JobError, match="needs at least 4 nodes, but there are never more than 3"):
        load_replay_job("gpt3-6.7b", 3)


def test_a_superfluous_profile_or_an_unknown_source_is_an_error(profile: Path) -> None:
    with pytest.raises(ConfigurationError, match="has its own"):
        load_replay_job("gpt2", 30, profile=profile)
    with pytest.raises(ConfigurationError, match="neither a model card nor"):
        load_replay_job("gpt5", 30)

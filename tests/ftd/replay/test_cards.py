"""Tests of the model cards: their figures give the sizes and the throughput that the papers state."""

import pytest

from ftd.errors import ConfigurationError
from ftd.replay.cards import card_names, read_card
from ftd.replay.job import PublishedThroughput

PARAMETERS = {
    "bert-large": 340e6,
    "gpt2": 345e6,
    "gpt3-medium": 350e6,
    "gpt3-2.7b": 2.7e9,
    "gpt3-6.7b": 6.7e9,
    "llama2-1.3b": 1.3e9,
    "llama2-2.7b": 2.7e9,
    "llama2-6.7b": 6.7e9,
    "llama2-34b": 34e9,
}
"""Parameters by Oobleck's Table 1 and REFT's section 7.1."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_has_the_published_number_of_parameters(name: str) -> None:
    job = read_card(name)
    embedding, *blocks, head = job.profile.layers
    number = job.profile.layers[0].parameter_bytes // (4 if job.published else 2)
    total = sum(layer.parameter_bytes for layer in job.profile.layers) / embedding.parameter_bytes * number
    if job.published:
        total -= number  # The output matrix is the embedding, which Oobleck's Table 1 counts once.
    assert total == pytest.approx(PARAMETERS[name], rel=0.05)
    assert len(blocks) in (24, 32, 48) and len(set(blocks)) == 1
    assert head.backward_ms == pytest.approx(2 * head.forward_ms)


def test_all_cards_are_listed() -> None:
    assert set(card_names()) == set(PARAMETERS)


@pytest.mark.parametrize("name", ["bert-large", "gpt2", "gpt3-medium"])
def test_the_planner_has_the_published_throughput_on_the_cluster_of_the_paper(name: str) -> None:
    job = read_card(name)
    assert job.samples_per_s(30) == pytest.approx(job.published["oobleck"].throughput(30), rel=1e-3)


@pytest.mark.parametrize(("name", "fewest"), [("bert-large", 1), ("gpt3-2.7b", 2), ("gpt3-6.7b", 4)])
def test_memory_decides_how_many_nodes_hold_a_model(name: str, fewest: int) -> None:
    job = read_card(name)
    assert job.planner.n0 == fewest
    # State alone, without activations, needs at least so many devices of 40 GB.
    state_bytes = sum(
        layer.parameter_bytes + layer.gradient_bytes + layer.optimizer_bytes for layer in job.profile.layers
    )
    assert job.profile.device_memory_bytes is not None
    assert state_bytes <= fewest * job.profile.device_memory_bytes


def test_an_unknown_card_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"no model card 'gpt5'.*bert-large"):
        read_card("gpt5")


def test_measured_throughput_comes_before_the_power_law_and_the_law_continues_it() -> None:
    curve = PublishedThroughput(
        samples_per_s=100.0, nodes=4, exponent=1.0, global_batch=8, restart_s=1.0, measured=(90.0, 60.0)
    )
    assert [curve.throughput(nodes) for nodes in (5, 4, 3, 2, 0)] == [112.5, 90.0, 60.0, 40.0, 0.0]


def test_idle_nodes_add_no_throughput() -> None:
    curve = PublishedThroughput(
        samples_per_s=100.0, nodes=4, exponent=1.0, global_batch=8, restart_s=1.0, granularity=2
    )
    assert [curve.throughput(nodes) for nodes in (4, 3, 2, 1)] == [100.0, 50.0, 50.0, 0.0]

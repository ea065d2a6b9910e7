"""Every architecture, cut into stages of unequal pipelines whose layout changes, has the same losses as a
plain loop.
"""

import contextlib
from typing import Any

import msgspec
import pytest
import torch

from planner.values import Recompute
from runtime.data.sampling import Sampler
from runtime.engine.engine import Engine
from runtime.groups.communicator import CommunicationAborted
from runtime.layers.model import Model
from runtime.training import load_training
from tests.helpers.architecture_runs import (
    STEPS,
    Layout,
    alone,
    check,
    job_of,
    three_and_one,
    three_and_two,
    train,
)
from tests.helpers.architectures import ARCHITECTURES, SAMPLES, build, build_layers, take_out_casts
from tests.helpers.fleet import Fleet
from tests.helpers.harness import pipeline
from tests.helpers.plain_loop import plain_loop
from tests.helpers.zero import Pipelines


@pytest.fixture
def wholly_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    take_out_casts(monkeypatch.setattr)


@pytest.mark.usefixtures("wholly_float64")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_losses_equal_those_of_a_plain_loop(architecture: str) -> None:
    job = job_of(architecture)
    expected = plain_loop(lambda: build(architecture), job, STEPS)
    found = train(job, three_and_two, three_and_one, leaves=1)
    check(found, expected, ARCHITECTURES[architecture].relative)


def test_with_casts_to_float32_inside_losses_agree_to_its_rounding() -> None:
    job = job_of("llama")
    expected = plain_loop(lambda: build("llama"), job, STEPS)
    check(train(job, three_and_two, three_and_one, leaves=1), expected, relative=1e-6)


# --- stages on several devices ---------------------------------------------------------------------


def doubled(layers: int) -> Pipelines:
    """Return pipelines of six ranks: one has two stages of two devices each, the other two of one device
    each.
    """
    middle = (layers + 1) // 2
    return (
        pipeline((0, middle, [0, 1]), (middle, layers, [2, 3]), first_microbatch=0, microbatches=3),
        pipeline((0, 2, [4]), (2, layers, [5]), first_microbatch=3, microbatches=1),
    )


def doubled_otherwise(layers: int) -> Pipelines:
    """Return pipelines of five ranks: a stage of one device sends its rows to a stage of two, and this one to
    a stage of one.
    """
    middle = layers // 2
    return (
        pipeline((0, 1, [0]), (1, middle, [1, 2]), (middle, layers, [3]), first_microbatch=0, microbatches=2),
        pipeline((0, layers, [4]), first_microbatch=2, microbatches=2),
    )


@pytest.mark.usefixtures("wholly_float64")
@pytest.mark.parametrize("architecture", ["llama", "t5", "bert", "deberta-v2", "mixtral", "resnet"])
def test_stages_on_several_devices(architecture: str) -> None:
    """Devices of a stage share the rows, 1 and 2 of 3; where rows influence each other, the first takes all."""
    steps = 6
    job = job_of(architecture, steps=steps, global_batch=12, microbatch_rows=3)
    expected = plain_loop(lambda: build(architecture), job, steps)
    found = train(job, doubled, doubled_otherwise, leaves=4, steps=steps)
    check(found, expected, ARCHITECTURES[architecture].relative)


DROPOUT = {
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "attn_implementation": "eager"},
    "bert": {"hidden_dropout_prob": 0.1},
    "t5": {"dropout_rate": 0.1, "attn_implementation": "eager"},
}
"""Options with dropout. Fused attention draws its random numbers itself, so attention is eager or has no
dropout.
"""


@pytest.mark.usefixtures("wholly_float64")
@pytest.mark.parametrize("architecture", DROPOUT)
def test_dropout_does_not_depend_on_the_layout(architecture: str) -> None:
    steps = 6
    arguments = {"options": DROPOUT[architecture]}
    job = job_of(architecture, steps=steps, global_batch=12, microbatch_rows=3, arguments=arguments)
    with Fleet(job, 1) as fleet:
        fleet.enter(fleet.engines, alone(fleet.engines[0].model.layer_count))
        fleet.steps(steps)
        expected = [fleet.losses[step] for step in range(1, steps + 1)]
    found = train(job, doubled, doubled_otherwise, leaves=4, steps=steps)
    assert [vote.loss for vote in found] == pytest.approx(expected, rel=1e-9)
    without = plain_loop(lambda: build(architecture), job, 1)
    assert expected[0] != pytest.approx(without[0].loss, rel=1e-6)


# --- recomputation ---------------------------------------------------------------------------------


def recomputing(layout: Layout) -> Layout:
    """Return the same pipelines with stages that recompute selectively, fully and not at all, in turn."""
    ways: tuple[Recompute, ...] = ("selective", "full", "none")

    def recomputed(layers: int) -> Pipelines:
        return tuple(
            msgspec.structs.replace(
                one,
                stages=tuple(
                    msgspec.structs.replace(stage, recompute=way)
                    for stage, way in zip(one.stages, ways, strict=False)
                ),
            )
            for one in layout(layers)
        )

    return recomputed


@pytest.mark.parametrize("architecture", ["gpt2", "mixtral", "t5", "resnet"])
def test_recomputation_does_not_change_a_bit(architecture: str) -> None:
    """The jobs have dropout, auxiliary losses of experts, two streams through the pipeline, and running
    statistics.
    """
    arguments = {"options": DROPOUT[architecture]} if architecture in DROPOUT else {}
    job = job_of(architecture, steps=2, activation_checkpointing="auto", arguments=arguments)
    plain, recomputed = (
        train(job, first, second, leaves=1, steps=2)
        for first, second in (
            (three_and_two, three_and_one),
            (recomputing(three_and_two), recomputing(three_and_one)),
        )
    )
    assert recomputed == plain


# --- samples ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("wholly_float64")
@pytest.mark.parametrize("architecture", ["llama", "bert", "t5", "mixtral"])
def test_microbatches_of_different_lengths(architecture: str) -> None:
    """Each microbatch is padded to its own longest sample, so the shapes of activations differ."""
    steps = 6
    arguments = {"variable": True}
    job = job_of(architecture, steps=steps, arguments=arguments)
    expected = plain_loop(lambda: build(architecture, **arguments), job, steps)
    found = train(job, three_and_two, three_and_one, leaves=1, steps=steps)
    check(found, expected, ARCHITECTURES[architecture].relative)


@pytest.mark.usefixtures("wholly_float64")
@pytest.mark.parametrize("architecture", ["llama", "bert", "t5", "mixtral"])
@pytest.mark.parametrize("rows", [slice(0, 8), slice(0, 2), slice(6, 8), slice(2, 5)])
def test_samples_without_labels(architecture: str, rows: slice) -> None:
    """A global batch, its first or last microbatch, or one and a half in the middle, have no label but -100."""
    steps = 4
    job = job_of(architecture, steps=steps)
    arguments = {"unlabelled": Sampler(SAMPLES, job.global_batch, job.seed).indices(2)[rows]}
    job = job_of(architecture, steps=steps, arguments=arguments)
    expected = plain_loop(lambda: build(architecture, **arguments), job, steps)
    assert [step.skipped for step in expected] == [False, rows == slice(0, 8), False, False]
    found = train(job, three_and_two, three_and_one, leaves=1, steps=steps)
    check(found, expected, ARCHITECTURES[architecture].relative)


@pytest.mark.parametrize(("architecture", "counted"), [("llama", 14), ("bert", 16), ("t5", 16)])
def test_what_a_loss_is_a_mean_over_is_found_without_labels(architecture: str, counted: int) -> None:
    """The first samples have no label but -100. A causal model's loss does not count the first label of a row."""
    job = job_of(architecture, arguments={"unlabelled": [0, 1]})
    model = Model(load_training(job), job)
    _, weight = model.loss({"loss": torch.ones(())}, {"labels": torch.ones(2, 8, dtype=torch.int64)}, 2)
    assert int(weight) == counted


@pytest.mark.parametrize("rows", [slice(0), slice(0, 8), slice(6, 8)])
def test_layers_with_a_loss_that_is_a_sum_and_a_weight(rows: slice) -> None:
    steps = 6
    job = job_of("", steps=steps)
    arguments = {"unlabelled": Sampler(SAMPLES, job.global_batch, job.seed).indices(2)[rows]}
    job = msgspec.structs.replace(
        job, function="tests.helpers.architectures:build_layers", arguments=arguments
    )
    expected = plain_loop(lambda: build_layers(**arguments), job, steps)
    assert [step.skipped for step in expected].count(True) == (rows == slice(0, 8))
    check(train(job, three_and_two, three_and_one, leaves=1, steps=steps), expected)


# --- what is trained, and how ------------------------------------------------------------------------


@pytest.mark.usefixtures("wholly_float64")
@pytest.mark.parametrize("architecture", ["llama", "t5", "bert"])
def test_sharded_optimizer_state(architecture: str) -> None:
    steps = 6
    job = job_of(architecture, steps=steps, zero1=True)
    expected = plain_loop(lambda: build(architecture), job, steps)
    check(train(job, three_and_two, three_and_one, leaves=1, steps=steps), expected)


def in_parts(layers: int) -> Pipelines:
    """Return pipelines of six ranks: two devices of a stage compute parts of its layers, next to a stage with
    shards and a stage of one device.
    """
    middle = (layers + 1) // 2
    one, other = (
        pipeline(
            (0, middle, [0, 1]), (middle, layers, [2]), first_microbatch=0, microbatches=2, sharded=True
        ),
        pipeline(
            (0, middle, [3]), (middle, layers, [4, 5]), first_microbatch=2, microbatches=2, sharded=True
        ),
    )
    first, *others = one.stages
    return (
        msgspec.structs.replace(one, stages=(msgspec.structs.replace(first, within="tensor"), *others)),
        other,
    )


def in_other_parts(layers: int) -> Pipelines:
    """Return pipelines of five ranks: stages that had shards compute parts now."""
    middle = layers // 2
    one = pipeline((0, layers, [0, 1]), first_microbatch=0, microbatches=2)
    other = pipeline((0, middle, [2]), (middle, layers, [3, 4]), first_microbatch=2, microbatches=2)
    return tuple(
        msgspec.structs.replace(
            each, stages=tuple(msgspec.structs.replace(stage, within="tensor") for stage in each.stages)
        )
        for each in (one, other)
    )


@pytest.mark.usefixtures("wholly_float64")
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "gemma3", "phi3", "olmo2"])
def test_tensor_parallel_stages(architecture: str) -> None:
    """The plan is the one that Hugging Face gives the model."""
    steps = 6
    job = job_of(architecture, steps=steps, within_node="tensor")
    expected = plain_loop(lambda: build(architecture), job, steps)
    check(train(job, in_parts, in_other_parts, leaves=4, steps=steps), expected)


@pytest.mark.usefixtures("wholly_float64")
@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_adapters_alone_are_trained(architecture: str) -> None:
    """Frozen parameters move with their layers, but are not reduced and have no optimizer state."""
    steps = 8
    arguments = {"adapters": True}
    job = job_of(architecture, steps=steps, arguments=arguments)
    expected = plain_loop(lambda: build(architecture, **arguments), job, steps)
    assert expected[-1].loss != expected[0].loss
    check(train(job, three_and_two, three_and_one, leaves=1, steps=steps), expected)
    with Fleet(job, 1) as fleet:
        [engine] = fleet.engines
        fleet.enter(fleet.engines, alone(engine.model.layer_count))
        fleet.steps(1)
        names = set(engine.model.parameter_layers)
        assert names and all("lora_" in name for name in names)
        frozen = {
            tensor.name
            for layer in range(engine.model.layer_count)
            for tensor in engine.model.tensors_of(layer)
            if not tensor.trainable
        }
        assert any("embed" in name for name in frozen)
        for layer in range(engine.model.layer_count):
            header, _ = engine.states.describe(layer)
            assert {entry.name for entry in header.entries if entry.role == "optimizer"} <= names
            assert all(entry.role != "parameter" or entry.name in names | frozen for entry in header.entries)


@pytest.mark.parametrize(
    ("precision", "relative"), [("bfloat16", 2e-3), ("float16", 2e-3), ("float32", 1e-6)]
)
@pytest.mark.parametrize("architecture", ["llama", "bert", "t5"])
def test_lower_precisions(architecture: str, precision: str, relative: float) -> None:
    steps = 6
    job = job_of(architecture, steps=steps, precision=precision)
    expected = plain_loop(lambda: build(architecture), job, steps)
    found = train(job, three_and_two, three_and_one, leaves=1, steps=steps)
    assert [vote.loss for vote in found] == pytest.approx([step.loss for step in expected], rel=relative)


def scales(fleet: Fleet) -> set[float]:
    found = {
        engine.optimization.loss_scale.value for engine in fleet.engines if engine.optimization.loss_scale
    }
    assert len(found) == 1
    return found


def lose_the_vote(fleet: Fleet) -> None:
    """Make rank 0 vote for a step without committing it, while all others commit."""
    late = fleet.engines[0]
    ask = late._hold_vote

    def vote_and_abort(*arguments: Any) -> None:
        ask(*arguments)
        raise CommunicationAborted

    late._hold_vote = vote_and_abort  # type: ignore[method-assign,assignment]

    def step(rank: int, engine: Engine) -> None:
        with contextlib.suppress(CommunicationAborted):
            engine.step(lambda: False)

    fleet.each(step)
    del late._hold_vote


@pytest.mark.parametrize("rolls_forward", [1, 4])
def test_the_loss_scale_halves_at_overflows_and_moves_with_the_layers(rolls_forward: int) -> None:
    """In a step that overflows, or in one that does not, one rank learns the vote only from the recovery."""
    steps = 8
    job = job_of("llama", steps=steps, precision="float16")
    with Fleet(job, 4) as fleet:
        layers = fleet.engines[0].model.layer_count
        fleet.enter(fleet.engines, three_and_one(layers))
        for engine in fleet.engines:
            assert engine.optimization.loss_scale is not None
            engine.optimization.loss_scale.value = 2.0**21
        fleet.steps(rolls_forward - 1)
        lose_the_vote(fleet)
        assert fleet.enter([*fleet.engines, *fleet.join(1)], three_and_two(layers)) == rolls_forward
        fleet.steps(1)
        [scale] = scales(fleet)
        fleet.steps(steps - rolls_forward - 1)
        votes = [fleet.votes[step] for step in range(1, steps + 1)]
    overflows = {step for step, vote in enumerate(votes, 1) if vote.skipped}
    assert overflows and overflows == set(range(1, len(overflows) + 1)) and max(overflows) < 4
    assert [vote.loss_scale for vote in votes] == [2.0 ** (21 - min(i, len(overflows))) for i in range(steps)]
    assert scale == 2.0 ** (21 - min(rolls_forward + 1, len(overflows)))
    expected = plain_loop(lambda: build("llama"), job, steps, overflows)
    assert [vote.loss for vote in votes] == pytest.approx([step.loss for step in expected], rel=5e-4)
    norms = [vote.gradient_norm for vote in votes][len(overflows) :]
    assert norms == pytest.approx([step.gradient_norm for step in expected][len(overflows) :], rel=0.01)


@pytest.mark.usefixtures("wholly_float64")
def test_a_rank_that_learns_a_vote_from_the_recovery_divides_by_its_weight() -> None:
    steps = 6
    job = job_of("bert", steps=steps)
    expected = plain_loop(lambda: build("bert"), job, steps)
    with Fleet(job, 4) as fleet:
        layers = fleet.engines[0].model.layer_count
        fleet.enter(fleet.engines, three_and_one(layers))
        fleet.steps(2)
        lose_the_vote(fleet)
        assert fleet.enter([*fleet.engines, *fleet.join(1)], three_and_two(layers)) == 3
        fleet.steps(steps - 3)
        check([fleet.votes[step] for step in range(1, steps + 1)], expected)


def sharded(layers: int) -> Pipelines:
    """Return pipelines of five ranks: one has a stage of two devices with shards and a stage of one device,
    the other has one stage with shards.
    """
    middle = (layers + 1) // 2
    return (
        pipeline(
            (0, middle, [0, 1]), (middle, layers, [2]), first_microbatch=0, microbatches=2, sharded=True
        ),
        pipeline((0, layers, [3, 4]), first_microbatch=2, microbatches=2, sharded=True),
    )


def sharded_otherwise(layers: int) -> Pipelines:
    """Return one pipeline of four ranks: three devices share the input and the first half of the blocks, one
    has the rest.
    """
    middle = layers // 2
    return (
        pipeline(
            (0, middle, [1, 2, 3]), (middle, layers, [0]), first_microbatch=0, microbatches=4, sharded=True
        ),
    )


@pytest.mark.usefixtures("wholly_float64")
@pytest.mark.parametrize("architecture", ["bert", "deberta-v2", "gpt2", "llama", "mixtral", "resnet", "t5"])
def test_stages_with_shards(architecture: str) -> None:
    """Devices of a stage gather each layer while it runs, including tied weights and code around the blocks."""
    steps = 4
    job = job_of(architecture, steps=steps, global_batch=12, microbatch_rows=3, within_node="shard")
    expected = plain_loop(lambda: build(architecture), job, steps)
    found = train(job, sharded, sharded_otherwise, leaves=3, steps=steps)
    check(found, expected, ARCHITECTURES[architecture].relative)

"""Model cards: the models of the papers, with the figures from which their profiles follow.

A card is a TOML file in ``ftd/replay/cards``. It states a transformer's shape, the job, the cluster, one fitted rate
of computation, and what is published about other systems, each with its source. The time of a layer is its number
of floating-point operations at the fitted rate: two for each parameter of a matrix and token, and those of the
attention's products; the backward pass takes twice as many. Activations follow Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models" (MLSys 2023), equation 1, in which 2 bytes are a number.
"""

from pathlib import Path

import msgspec

from ftd.config.validation import convert, read_toml
from ftd.errors import ConfigurationError
from ftd.replay.job import PublishedThroughput, ReplayJob
from planner.values import ActivationCheckpointing, LayerProfile, Link, ModelProfile, Policy

_SHIPPED = Path(__file__).with_name("cards")
LOGITS = 3
"""Numbers of a logit's size that the loss keeps: the logit, its softmax and its gradient."""


class CardModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A transformer: an embedding, equal blocks, and a head."""

    blocks: int
    hidden: int
    heads: int
    sequence: int
    """Tokens of a sample."""
    vocabulary: int
    embedding_parameters: int
    block_parameters: int
    head_parameters: int
    parameter_bytes: int
    """Bytes of each parameter; likewise ``gradient_bytes`` and ``optimizer_bytes`` for each parameter."""
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Bytes of a number of an activation."""


class CardTraining(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The job as published."""

    global_batch: int
    microbatch_rows: int
    activation_checkpointing: ActivationCheckpointing
    tolerate: int


class CardCluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cluster of the paper. Each node counts as one device."""

    nodes: int
    device_memory_bytes: int
    link_bytes_per_s: float
    link_latency_ms: float


class CardFit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants that were fitted to published results or, where there are none, assumed."""

    flops_per_s: float
    """Floating-point operations per second of one device."""


class Card(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model card."""

    title: str
    source: str
    model: CardModel
    training: CardTraining
    cluster: CardCluster
    fitted: CardFit
    published: dict[str, PublishedThroughput] = {}


def card_names() -> tuple[str, ...]:
    """Return the names of the cards that ship with ftd."""
    return tuple(sorted(path.stem for path in _SHIPPED.glob("*.toml")))


def load_card(name: str) -> Card:
    """Return the content of a card.

    :raises ConfigurationError: there is no such card.
    """
    if name not in card_names():
        raise ConfigurationError(
            f"there is no model card {name!r}", field="JOB", remedy=f"one of {', '.join(card_names())}"
        )
    return convert(read_toml(_SHIPPED / f"{name}.toml"), Card, where="")


def read_card(name: str) -> ReplayJob:
    """Return the job of a card.

    :raises ConfigurationError: there is no such card.
    """
    return card_job(name, load_card(name))


def card_job(name: str, card: Card) -> ReplayJob:
    """Return the job that a card describes."""
    training = card.training
    return ReplayJob(
        name=name,
        source=f"model card {name}: {card.source}",
        profile=_profile(card),
        policy=Policy(
            global_batch=training.global_batch,
            microbatch_rows=training.microbatch_rows,
            activation_checkpointing=training.activation_checkpointing,
            tolerate=training.tolerate,
        ),
        published=card.published,
    )


def _profile(card: Card) -> ModelProfile:
    model, rows = card.model, card.training.microbatch_rows
    tokens = rows * model.sequence
    number = model.activation_bytes
    output_bytes = tokens * model.hidden * number
    # Equation 1 of Korthikanti et al. without tensor parallelism: s·b·h·(34 + 5·a·s / h) bytes for numbers of 2.
    block_bytes = tokens * (34 * model.hidden + 5 * model.heads * model.sequence) * number // 2
    # Scores and their use: two products of s × h with h × s and s × s with s × h, 2 operations each.
    attention = 4 * tokens * model.sequence * model.hidden
    embedding = _layer(card, model.embedding_parameters, 0, output_bytes, output_bytes)
    block = _layer(
        card,
        model.block_parameters,
        2 * tokens * model.block_parameters + attention,
        block_bytes,
        output_bytes,
    )
    logits_bytes = LOGITS * tokens * model.vocabulary * number
    # The head's output is one loss.
    head = _layer(card, model.head_parameters, 2 * tokens * model.head_parameters, logits_bytes, number)
    link = Link(latency_ms=card.cluster.link_latency_ms, bytes_per_s=card.cluster.link_bytes_per_s)
    return ModelProfile(
        layers=(embedding, *(block,) * model.blocks, head),
        microbatch_rows=rows,
        device_memory_bytes=card.cluster.device_memory_bytes,
        link=link,
        ring=link,
    )


def _layer(
    card: Card, parameters: int, operations: int, activation_bytes: int, output_bytes: int
) -> LayerProfile:
    """Return a layer whose forward pass of a microbatch takes so many floating-point operations."""
    model, forward_ms = card.model, operations / card.fitted.flops_per_s * 1e3
    return LayerProfile(
        forward_ms=forward_ms,
        backward_ms=2 * forward_ms,
        parameter_bytes=parameters * model.parameter_bytes,
        gradient_bytes=parameters * model.gradient_bytes,
        optimizer_bytes=parameters * model.optimizer_bytes,
        activation_bytes=activation_bytes,
        output_bytes=output_bytes,
    )

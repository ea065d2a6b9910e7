"""The reason for a plan, in one sentence for the user."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from planner.values import ConsideredPlan, Method, ReleasedLayers, Within

_STEPS: dict[Method, str] = {
    "simple": "each pipeline continues with the nodes that are left of it",
    "borrow": "a pipeline that was left too small borrowed nodes of pipelines that could spare some",
    "merge": "a pipeline that was left too small was merged with another, because none could spare a node",
    "grow": "the free nodes join the existing pipelines",
    "keep": "intact pipelines continue unchanged, and the other nodes are arranged again",
    "even": "the pipelines that have survivors share all nodes evenly",
    "rebalance": "the pipelines share the batch again, by the speed of their nodes",
}

WITHIN_WORDS: dict[Within, str] = {"replicate": "replicated", "shard": "sharded", "tensor": "tensor-parallel"}

"""Word for a stage of several devices, as in ``2 devices, sharded``."""

_NAMES: dict[Method, str] = {
    "simple": "going on with what is left of each pipeline",
    "borrow": "borrowing nodes",
    "merge": "merging pipelines",
    "grow": "filling up the pipelines",
    "keep": "keeping intact pipelines",
    "even": "pipelines of equal size",
    "best": "the best pipelines for these nodes",
}

SAME_TIME_TOLERANCE = 0.0005
"""Relative difference below which step times count as the same for people."""


def describe_within(within: Within, replicas: int = 1) -> str:
    """Return how the devices of a stage share its work, such as ``tensor-parallel in 2 replicas``."""
    return WITHIN_WORDS[within] + (f" in {replicas} replicas" if replicas > 1 else "")


def explain_plan(
    method: Method,
    sizes: Sequence[int],
    lost: Sequence[str],
    joined: Sequence[str],
    idle: Sequence[str],
    considered: Sequence[ConsideredPlan] = (),
    horizon_s: float = 0.0,
    slow: Mapping[str, float] | None = None,
    gone: Sequence[ReleasedLayers] = (),
    withins: Sequence[Within] = (),
) -> str:
    """Return the sentence.

    :param sizes: nodes of each pipeline of the plan.
    :param lost, joined: nodes that left or joined since the previous plan.
    :param slow: speeds of the plan's slow nodes.
    :param gone: old layers for which devices have no room until the first commit.
    :param withins: how the devices of each stage with several devices share its work.
    :param considered: the layouts that were compared, this plan's first, over ``horizon_s`` to the next
        failure.
    """
    news = [f"{join_names(lost)} left"] if lost else []
    news += [f"{join_names(joined)} joined"] if joined else []
    what = f"{pipelines_of(sizes)}; {describe_safety(len(sizes))}"
    match method:
        case "initial":
            sentence = f"the quickest way to use the nodes is {what}"
        case "unchanged":
            sentence = f"the nodes of the pipelines are the same, and so is the plan: {what}"
        case "best":
            sentence = f"the quickest way to use the nodes is now {what}"
        case _:
            sentence = f"{_STEPS[method]}: {what}"
    if idle:
        sentence += (
            f"; {join_names(idle)} {'is' if len(idle) == 1 else 'are'} idle, as no pipeline can use more"
        )
    if slow:
        speeds = " and ".join(f"{speed:.0%}" for speed in sorted(set(slow.values())))
        are, whose = ("is", "its") if len(slow) == 1 else ("are", "their")
        sentence += f"; {join_names(list(slow))} {are} slow ({speeds} of the usual speed)"
        sentence += f", which {whose} share allows for"
    for within, words in (("shard", "have their layers in shards"), ("tensor", "are tensor-parallel")):
        if count := withins.count(within):
            where = "all" if count == len(withins) else f"{count} of {len(withins)}"
            sentence += f"; {where} stages of several devices {words}"
    parking = list(dict.fromkeys(each.device.node for each in gone if each.parked))
    dropping = list(dict.fromkeys(each.device.node for each in gone if each.dropped))
    for nodes, verb, what in (
        (parking, "keep", "old layers in host memory to have room until the first step"),
        (dropping, "drop", "old layers, which others hold, to have room for the new ones"),
    ):
        if nodes:
            sentence += f"; {join_names(nodes)} {verb}{'s' if len(nodes) == 1 else ''} {what}"
    if len(considered) > 1:
        sentence += f"; {explain_tradeoff(considered[0], considered[1], horizon_s)}"
    return f"{' and '.join(news)}: {sentence}." if news else f"{sentence[0].upper()}{sentence[1:]}."


def explain_tradeoff(chosen: ConsideredPlan, other: ConsideredPlan, horizon_s: float) -> str:
    """Say why one layout was taken and not the next best."""
    this = _costs(chosen)
    that = f"{_NAMES[other.method]}: {_costs(other)}"
    if chosen.transfer_bytes is None or other.transfer_bytes is None:
        return f"{this} ({that})"
    slower = chosen.iteration_s > other.iteration_s * (1 + SAME_TIME_TOLERANCE)
    quicker = chosen.iteration_s < other.iteration_s * (1 - SAME_TIME_TOLERANCE)
    more = chosen.transfer_bytes > other.transfer_bytes
    if quicker and more:
        return f"{this}, which pays within the {_time(horizon_s)} expected to the next failure ({that})"
    if slower and not more:
        return f"{this}; a quicker step would not pay for its bytes within {_time(horizon_s)} ({that})"
    return f"{this} ({that})"


def _costs(considered: ConsideredPlan) -> str:
    step = f"{_time(considered.iteration_s)} a step"
    if considered.transfer_bytes is None:
        return step
    return f"{step} with {_size(considered.transfer_bytes)} to move"


def _time(seconds: float) -> str:
    """Format a time with three digits: milliseconds below a second, minutes from ten minutes on, hours from
    ten hours on.
    """
    if seconds < 1:
        return f"{three_digits(seconds * 1e3)} ms"
    if seconds < 600:
        return f"{seconds:.3g} s"
    if seconds < 36_000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


def _size(size_bytes: int) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= unit:
            return f"{three_digits(size_bytes / unit)} {name}"
    return f"{size_bytes} bytes"


@lru_cache(maxsize=1 << 16)
def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a key that sorts node-2 before node-10."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts)


def join_names(nodes: Sequence[str]) -> str:
    """Return at most four of these names, in words."""
    if not nodes:
        return "no node"
    if len(nodes) > 4:
        return f"{', '.join(nodes[:3])} and {len(nodes) - 3} more"
    return nodes[0] if len(nodes) == 1 else f"{', '.join(nodes[:-1])} and {nodes[-1]}"


def pipelines_of(sizes: Sequence[int]) -> str:
    """Return words such as ``3 pipelines (2 of 2 nodes, 1 of 3 nodes)``."""
    if len(set(sizes)) == 1:
        return f"{count_noun(len(sizes), 'pipeline')} of {count_noun(sizes[0], 'node')}"
    kinds = ", ".join(
        f"{sizes.count(size)} of {count_noun(size, 'node')}" for size in sorted(set(sizes), reverse=True)
    )
    return f"{len(sizes)} pipelines ({kinds})"


def describe_safety(pipelines: int) -> str:
    if pipelines == 1:
        return "there is one copy of the model, so the next failure may lose state"
    return f"any {count_noun(pipelines - 1, 'node')} can fail and a copy of every layer is left"


def three_digits(number: float) -> str:
    """Return a number with three significant digits and without an exponent: ``0.127``, ``12.7``, ``1274``."""
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:.0f}"


def count_noun(count: int, noun: str) -> str:
    """Return ``1 node``, ``2 nodes`` …"""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

"""No other assignment of nodes to slots moves fewer bytes."""

from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from planner.changes.assignment import Assigner, Assignment, Held, NodeSlot
from planner.changes.cover import cover, held_by, whole_layers
from planner.errors import StateLostError
from planner.values import ModelProfile
from tests.helpers.oracles import layer

LAYERS = 6
SIZES = (40, 4, 0, 12, 400, 8)
PROFILE = ModelProfile(layers=tuple(layer(state_bytes=size) for size in SIZES), microbatch_rows=4)
STATE = [one.state_bytes for one in PROFILE.layers]


def lacks(held: int, first: int, end: int) -> int:
    return sum(STATE[number] for number in range(first, end) if not held >> number & 1)


def moved(held: Held, place: NodeSlot) -> int:
    """Return the fewest bytes over all ways to put a node's devices into a slot."""
    return min(
        sum(lacks(mask, *part) for mask, part in zip(order, place, strict=True))
        for order in permutations(held)
    )


def fewest_bytes(places: list[NodeSlot], held: list[Held]) -> int:
    cost = np.array([[moved(of_node, place) for place in places] for of_node in held])
    rows, columns = linear_sum_assignment(cost)
    return int(cost[rows, columns].sum())


def bytes_of(found: Assignment, pipelines: list[list[NodeSlot]], masks: dict[str, Held]) -> int:
    pairs = zip(found.taken, pipelines, strict=True)
    return sum(moved(masks[n], p) for names, slots in pairs for n, p in zip(names, slots, strict=True))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[list[NodeSlot]], dict[str, Held], dict[str, tuple[int, int]]]:
    """Draw pipelines of one to three nodes, and nodes that come from such slots, hold more, or hold nothing."""
    devices = draw(st.integers(1, 3))

    def pipeline() -> list[NodeSlot]:
        nodes = draw(st.integers(1, LAYERS // devices))
        inner = draw(st.permutations(range(1, LAYERS)))[: nodes * devices - 1]
        edges = [0, *sorted(inner), LAYERS]
        parts = list(pairwise(edges))
        return [tuple(parts[first : first + devices]) for first in range(0, len(parts), devices)]

    pipelines = [pipeline() for _ in range(draw(st.integers(1, 3)))]
    known = [place for slots in (*pipelines, *(pipeline() for _ in range(2))) for place in slots]
    needed = sum(map(len, pipelines))
    masks: dict[str, Held] = {}
    for number in range(needed + draw(st.integers(0, 2))):
        parts = draw(st.permutations(draw(st.sampled_from(known))))
        extra = draw(st.sampled_from([0, 0, 0, 1, 5, (1 << LAYERS) - 1]))
        empty = draw(st.integers(0, 5)) == 0
        masks[f"n{number}"] = tuple(0 if empty else (1 << e) - (1 << f) | extra for f, e in parts)
    positions = [(p, o) for p, slots in enumerate(pipelines) for o in range(len(slots))]
    homes = draw(st.permutations([*positions, *((9, o) for o in range(4))]))
    habits = {name: home for name, home in zip(masks, homes, strict=False) if draw(st.booleans())}
    return pipelines, masks, habits


@given(layouts())
@settings(max_examples=300)
@pytest.mark.long
def test_no_assignment_moves_fewer_bytes(
    layout: tuple[list[list[NodeSlot]], dict[str, Held], dict[str, tuple[int, int]]],
) -> None:
    pipelines, masks, habits = layout
    nodes = list(masks)
    places = [place for slots in pipelines for place in slots]
    assigner = Assigner(PROFILE)
    try:
        found = assigner.assign(pipelines, nodes, masks, habits)
    except StateLostError:
        with pytest.raises(StateLostError):
            cover(nodes, whole_layers(masks, LAYERS), len(places))
        return
    used = [name for names in found.taken for name in names]
    assert len(used) == len(set(used)) == len(places) and set(used) <= set(nodes)
    assert held_by(used, masks) == (1 << LAYERS) - 1
    assert found.moved_bytes == bytes_of(found, pipelines, masks)
    fewest = fewest_bytes(places, list(masks.values()))
    if len(places) == len(nodes):
        assert found.moved_bytes == fewest
    else:
        assert found.moved_bytes >= fewest
    assert Assigner(PROFILE).assign(pipelines, nodes, masks, habits) == found
    check_loads(found, pipelines, masks, assigner)


def check_loads(
    found: Assignment, pipelines: list[list[NodeSlot]], masks: dict[str, Held], assigner: Assigner
) -> None:
    """Check the fullest receiver, and the fullest sender of bytes that are spread evenly, by counting."""
    received: list[int] = []
    wanted = [0.0] * LAYERS
    holders: list[int] = []
    for names, slots in zip(found.taken, pipelines, strict=True):
        for name, place in zip(names, slots, strict=True):
            held = masks[name]
            for index, (first, end) in zip(assigner.order_inside(held, place), place, strict=True):
                holders.append(held[index])
                received.append(lacks(held[index], first, end))
                for number in range(first, end):
                    wanted[number] += STATE[number] * (not held[index] >> number & 1)
    copies = [sum(mask >> number & 1 for mask in holders) for number in range(LAYERS)]
    sent = [sum(wanted[n] / copies[n] for n in range(LAYERS) if mask >> n & 1) for mask in holders]
    assert found.received_bytes == max(received)
    assert found.sent_bytes == pytest.approx(max(sent))


def test_nodes_that_hold_just_what_they_need_stay() -> None:
    """Four equal pipelines: the second lost a node, and the node that replaces it takes that very slot."""
    slots: list[NodeSlot] = [((0, 3),), ((3, 6),)]
    low, high = (0b000111,), (0b111000,)
    masks: dict[str, Held] = {f"n{p}{o}": (low, high)[o] for p in range(4) for o in (0, 1)}
    habits = {name: (int(name[1]), int(name[2])) for name in masks}
    masks["n11"] = (0,)
    del habits["n11"]
    found = Assigner(PROFILE).assign([slots] * 4, sorted(masks), masks, habits)
    assert found.taken == (("n00", "n01"), ("n10", "n11"), ("n20", "n21"), ("n30", "n31"))
    assert found.moved_bytes == found.received_bytes == sum(STATE[3:])


def test_of_equal_nodes_those_without_a_pipeline_fill_the_gaps() -> None:
    slots: list[NodeSlot] = [((0, 3),), ((3, 6),)]
    masks: dict[str, Held] = {"a": (0b111,), "b": (0b111,), "c": (0b111000,), "d": (0b111000,)}
    habits = {"a": (0, 0), "d": (0, 1)}
    assert Assigner(PROFILE).assign([slots] * 2, list("abcd"), masks, habits).taken == (
        ("a", "d"),
        ("b", "c"),
    )


def test_a_cover_takes_few_nodes_and_names_what_is_not_covered() -> None:
    masks = {"a": (0b0011,), "b": (0b0110,), "c": (0b1100,), "d": (0b0001,)}
    assert sorted(cover("abcd", whole_layers(masks, 4), 2)) == ["a", "c"]
    with pytest.raises(StateLostError, match="no pipeline has a place for"):
        cover("abcd", whole_layers(masks, 4), 1)
    with pytest.raises(StateLostError, match="no usable device holds layer 4") as raised:
        cover("abcd", whole_layers(masks, 5), 4)
    assert raised.value.layers == (4,)

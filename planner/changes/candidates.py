"""The layouts worth comparing after a change: Oobleck's steps, the optimum, and some between them.

All of them use as many nodes as the best instantiation does and have the pipelines that the user's
tolerance requires, so the choice among them is only a matter of time (``planner.changes.tradeoff``).

Oobleck's steps (§5.1, as published) are ``reinstantiate``. A pipeline that lost nodes is replaced by a
template of the size that is left of it (*simple*). If that is too small, it *borrows* nodes of pipelines
that can spare some, up to n₀. If no pipeline can, it is *merged* with another one. The steps are local and
can reach a dead end: with f = 1, n₀ = 2 and survivors [1, 1, 2] they may merge [3, 1] and then [4], one
pipeline, although 2 + 2 would keep two. The best instantiation for the survivors is always among the
layouts.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.pipelines.instantiation import Instantiation, Instantiator
from planner.values import Method

MAX_KEEP_LAYOUTS = 2
"""Number of compared layouts that keep intact pipelines."""


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """Template sizes in the plan's order, each with the previous pipeline that it continues, if any."""

    method: Method
    pipelines: tuple[tuple[int, int | None], ...]

    @property
    def sizes(self) -> list[int]:
        return [size for size, _ in self.pipelines]


def first_layout(best: Instantiation) -> PipelineLayout:
    """Return the layout at a job's start."""
    return PipelineLayout("initial", tuple((size, None) for size in best.sizes))


def candidate_layouts(
    before: Sequence[int],
    left: Sequence[int],
    nodes: int,
    instantiator: Instantiator,
    most: int,
) -> list[PipelineLayout]:
    """Return different layouts, always with the best instantiation among them; of equal ones the first of
    these is named.

    * *simple*, *borrow*, *merge*: the published steps, unless they reach a dead end or leave nodes out;
    * *grow*: nodes without a pipeline fill the gaps in those that lost some, then join the smallest;
    * *keep*: intact pipelines continue, the rest is instantiated again as is best for it alone; if it is
      too small, the smallest intact ones are instantiated with it;
    * *even*: as many pipelines as have survivors, of sizes as equal as possible;
    * *best*: the best instantiation.

    :param before, left: nodes of each previous pipeline, and the number of them that are present.
    :param nodes: all nodes that are present, whether or not a previous pipeline had them.
    :param most: largest number of pipelines for which the batch suffices.
    """
    best = instantiator.best(nodes)
    fewest = instantiator.required(nodes)
    templates = instantiator.templates.sizes
    available = set(templates)
    published = reinstantiate(before, left, templates)
    proposed = [
        *([] if published is None else [published]),
        *_grown(before, left, nodes, templates),
        *_kept(before, left, best.nodes, templates[0], instantiator),
        *_evened(before, left, best.nodes),
        PipelineLayout("best", _aligned(best.sizes, before, left, range(len(before)))),
    ]
    found: dict[tuple[int, ...], PipelineLayout] = {}
    for layout in proposed:
        sizes = layout.sizes
        fits = sum(sizes) == best.nodes and fewest <= len(sizes) <= most and available.issuperset(sizes)
        if fits:
            found.setdefault(tuple(sorted(sizes)), layout)
    return list(found.values())


def _grown(
    before: Sequence[int], left: Sequence[int], nodes: int, templates: Sequence[int]
) -> list[PipelineLayout]:
    free = nodes - sum(left)
    if not free or not any(left):
        return []
    grown, available = list(left), set(templates)
    # The smallest gaps come first, so that most pipelines are whole; pipelines without survivors come last.
    for index in sorted(range(len(left)), key=lambda i: (left[i] == 0, before[i] - left[i], i)):
        given = min(free, before[index] - grown[index])
        grown[index] += given
        free -= given
    while free:
        takers = [index for index, size in enumerate(grown) if size and size + 1 in available]
        if not takers:
            break
        grown[min(takers, key=lambda index: (grown[index], index))] += 1
        free -= 1
    repaired = reinstantiate(before, grown, templates)
    return [] if repaired is None else [PipelineLayout("grow", repaired.pipelines)]


def _kept(
    before: Sequence[int], left: Sequence[int], usable: int, n0: int, instantiator: Instantiator
) -> list[PipelineLayout]:
    intact = [index for index, count in enumerate(left) if count and count == before[index]]
    intact.sort(key=lambda index: (-before[index], index))
    found: list[PipelineLayout] = []
    while intact and len(found) < MAX_KEEP_LAYOUTS:
        kept = sum(before[index] for index in intact)
        rest = usable - kept
        if rest == 0:
            found.append(PipelineLayout("keep", tuple((before[index], index) for index in sorted(intact))))
        elif rest >= n0:
            others = sorted(set(range(len(left))).difference(intact))
            aligned = _aligned(instantiator.best(rest).sizes, before, left, others)
            going_on = [(before[index], index) for index in intact]
            known = sorted((index, size) for size, index in (*going_on, *aligned) if index is not None)
            new = tuple(pair for pair in aligned if pair[1] is None)
            found.append(PipelineLayout("keep", (*((size, index) for index, size in known), *new)))
        intact.pop()
    return found


def _evened(before: Sequence[int], left: Sequence[int], usable: int) -> list[PipelineLayout]:
    pipelines = sum(count > 0 for count in left)
    if not pipelines:
        return []
    size, larger = divmod(usable, pipelines)
    sizes = [size + 1] * larger + [size] * (pipelines - larger)
    return [PipelineLayout("even", _aligned(sizes, before, left, range(len(before))))] if size else []


def _aligned(
    sizes: Iterable[int], before: Sequence[int], left: Sequence[int], among: Iterable[int]
) -> tuple[tuple[int, int | None], ...]:
    """Return new sizes in the order of the previous pipelines: whole ones keep theirs, then the fullest
    choose.

    :param among: the previous pipelines to continue.
    """
    free = Counter(sizes)
    matched: dict[int, int] = {}
    survived = [index for index in among if left[index]]
    order = sorted(survived, key=lambda index: (left[index] != before[index], -left[index], index))
    for exact in (True, False):
        for index in order:
            if index in matched or not free or (exact and left[index] not in free):
                continue
            nearest = min(free, key=lambda size: (abs(size - left[index]), -size))
            matched[index] = nearest
            free[nearest] -= 1
            if not free[nearest]:
                del free[nearest]
    going_on: list[tuple[int, int | None]] = [(size, index) for index, size in sorted(matched.items())]
    return (*going_on, *((size, None) for size in sorted(free.elements(), reverse=True)))


def reinstantiate(
    before: Sequence[int], left: Sequence[int], templates: Sequence[int]
) -> PipelineLayout | None:
    """Apply the published steps to one pipeline after the other; the last step that was needed names the layout.

    :param before: nodes of each running pipeline before the failures.
    :param left: nodes of each that survived.
    :param templates: the existing sizes, ascending.
    :returns: ``None`` if the published steps reach a dead end.
    """
    sizes, available = list(left), set(templates)
    method: Method = "simple"
    for index, count in enumerate(left):
        if count == before[index] or sizes[index] == 0 or sizes[index] in available:
            continue
        borrowed = _borrow(sizes, index, templates[0], available)
        if borrowed is not None:
            sizes, method = borrowed, "merge" if method == "merge" else "borrow"
            continue
        merged = _merge(sizes, index, available)
        if merged is None:
            return None
        sizes, method = merged, "merge"
    if not any(sizes) or any(size and size not in available for size in sizes):
        return None
    return PipelineLayout(method, tuple((size, index) for index, size in enumerate(sizes) if size))


def _borrow(sizes: list[int], index: int, n0: int, available: set[int]) -> list[int] | None:
    """Take single nodes from the largest pipelines that stay instantiable, until ``index`` has n₀."""
    lent = list(sizes)
    while lent[index] < n0:
        donors = [other for other in range(len(lent)) if other != index and lent[other] - 1 in available]
        if not donors:
            return None
        lent[max(donors, key=lambda other: (lent[other], -other))] -= 1
        lent[index] += 1
    return lent if lent[index] in available else None


def _merge(sizes: list[int], index: int, available: set[int]) -> list[int] | None:
    """Join ``index`` with the smallest other pipelines until a template fits."""
    merged = list(sizes)
    while merged[index] not in available:
        others = [other for other in range(len(merged)) if other != index and merged[other]]
        if not others:
            return None
        smallest = min(others, key=lambda other: (merged[other], other))
        merged[index] += merged[smallest]
        merged[smallest] = 0
    return merged

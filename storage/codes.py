"""Erasure codes over the segments of one bucket: REFT's ARC and AEC, and a code for two losses (design §7).

A bucket with m owners is cut into m equal *segments*, a segment into equal *cells*. Every owner holds the
whole bucket, so each computes what it keeps by itself, without network traffic: its own segment, and further
cells that are the XOR of some cells of the bucket. All schemes here are such codes, so one description
serves all of them, also combined; what a code withstands is computed from it, not claimed; and decoding is
one method: solve for the lost cells over GF(2), then XOR.

    arc:k   what the next k owners keep, as it is, their parity included: any k losses, k bucket's bytes extra
    aec     one cell for every other owner's segment, rotated as in RAID-5: one loss, 1/(m·(m − 1)) extra
    aec2    row-diagonal parity, rotated: any two losses, 2/(m·(m − 2)) extra
    aor     nothing here: under ZeRO-1 a replica of the next owner's part is kept current
    buddy   no code: where a bucket has one owner, another host is sent a copy of its shard

Row-diagonal parity is after Corbett et al. (FAST 2004): XOR only, so it runs at the speed of memory.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations
from math import lcm

Cells = frozenset[int]
"""Cells of a bucket by number: segment i has cells ``i·c … (i + 1)·c − 1``."""

BUDDY = "buddy"
PLAIN = ("none", "aec", "aec2", "aor", BUDDY)
"""What a job may ask for beside ``arc:k``."""

MOST_OWNERS_AEC2 = 16
"""More owners would need thousands of cells a segment."""


@dataclass(frozen=True, kw_only=True)
class Code:
    """What each of ``owners`` owners keeps of a bucket of ``owners · cells`` cells."""

    owners: int
    cells: int
    """Cells of one segment, c."""
    extra: tuple[tuple[Cells, ...], ...]
    """Per owner, in the order of its arena: each is kept as the XOR of these cells of the bucket."""

    def segment(self, owner: int) -> range:
        """The cells that the owner keeps as they are."""
        return range(owner * self.cells, (owner + 1) * self.cells)

    @property
    def overhead(self) -> float:
        """Bytes kept beyond the bucket itself, by all owners, per byte of the bucket."""
        return sum(map(len, self.extra)) / (self.owners * self.cells)

    @cached_property
    def guarantee(self) -> int:
        """The largest number of owners *any* of which may be lost at once; 0 if no loss is covered."""
        losses = 0
        while losses + 1 < self.owners:
            lost = combinations(range(self.owners), losses + 1)
            if any(solve_lost_cells(self, frozenset(some)) is None for some in lost):
                break
            losses += 1
        return losses


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCell:
    """One cell in some owner's memory: a cell of its segment, or one of its extra cells."""

    owner: int
    index: int
    """Below ``Code.cells`` in its segment, then its extra cells in their order."""


Recipe = dict[int, tuple[StoredCell, ...]]
"""Cell of the bucket → the stored cells whose XOR it is."""


@cache
def solve_lost_cells(code: Code, lost: frozenset[int]) -> Recipe | None:
    """How to make the lost owners' segments from what the others keep; ``None`` if it cannot be done."""
    unknown = {cell: bit for bit, cell in enumerate(c for owner in sorted(lost) for c in code.segment(owner))}
    pivots: dict[int, tuple[int, int]] = {}
    sources = [
        (cells, StoredCell(owner=owner, index=code.cells + index))
        for owner in range(code.owners)
        if owner not in lost
        for index, cells in enumerate(code.extra[owner])
        if any(cell in unknown for cell in cells)
    ]
    # Rows are integers: bit b for unknown cell b. Beside each, which sources were added up to make it.
    for number, (cells, _) in enumerate(sources):
        row, made = sum(1 << unknown[cell] for cell in cells if cell in unknown), 1 << number
        for bit, (other, other_made) in pivots.items():
            if row >> bit & 1:
                row, made = row ^ other, made ^ other_made
        if not row:
            continue
        bit = row.bit_length() - 1
        for other_bit, (other, other_made) in list(pivots.items()):
            if other >> bit & 1:
                pivots[other_bit] = other ^ row, other_made ^ made
        pivots[bit] = row, made
    if len(pivots) < len(unknown):
        return None
    return {cell: _sum_of(code, sources, pivots[bit][1], cell) for cell, bit in unknown.items()}


def _sum_of(
    code: Code, sources: Sequence[tuple[Cells, StoredCell]], made: int, cell: int
) -> tuple[StoredCell, ...]:
    """The sources in ``made``, and the known cells that are in them an odd number of times."""
    used = [source for number, source in enumerate(sources) if made >> number & 1]
    known: set[int] = set()
    for cells, _ in used:
        known ^= cells
    known.discard(cell)
    plain = [StoredCell(owner=c // code.cells, index=c % code.cells) for c in sorted(known)]
    return (*(stored for _, stored in used), *plain)


# --- the schemes ------------------------------------------------------------------------------------


def make_code(scheme: str, owners: int) -> Code:
    """The code that ``scheme`` (``none``, ``arc:k``, ``aec``, ``aec2``, ``buddy``, or several joined by
    ``+``) is for so many owners; where there are too few for it, the best that there is: ``aec2`` of two
    owners is a copy, and what ``buddy`` keeps elsewhere is no part of it.

    :raises ValueError: no such scheme; says which there are.
    """
    return _make_code(tuple(parse_scheme(scheme)), owners)


def parse_scheme(scheme: str, plain: Sequence[str] = PLAIN) -> list[tuple[str, int]]:
    """``"aec+arc:1"`` → ``[("aec", 0), ("arc", 1)]``.

    :param plain: names beside ``arc:k``, ``none`` the first.
    :raises ValueError: no such scheme; says which there are.
    """
    parts: list[tuple[str, int]] = []
    for part in scheme.split("+"):
        name, colon, count = part.strip().partition(":")
        if name == "arc" and colon and count.isdecimal() and int(count) >= 1:
            parts.append((name, int(count)))
        elif name in plain and not colon:
            parts.append((name, 0))
        else:
            raise ValueError(
                f"{part.strip()!r} is no protection; "
                f"there are {plain[0]}, arc:k (k ≥ 1), {', '.join(plain[1:])}, joined by '+'"
            )
    if len(parts) > 1 and ("none", 0) in parts:
        raise ValueError(f"{scheme!r}: none cannot be joined with others")
    return parts


def has_buddy(scheme: str) -> bool:
    """Does it have another host keep the shards of groups with one owner?

    :raises ValueError: no such scheme.
    """
    return (BUDDY, 0) in parse_scheme(scheme)


@cache
def _make_code(parts: tuple[tuple[str, int], ...], owners: int) -> Code:
    """All parts over cells that suit each of them."""
    schemes = [_parity(name, owners) for name, _ in parts if name not in {"arc", "aor"}]
    cells = lcm(1, *(part_cells for part_cells, _ in schemes))
    made = [[(cells // part_cells, keeps[i]) for i in range(owners)] for part_cells, keeps in schemes]
    copies = min(sum(count for name, count in parts if name == "arc"), owners - 1)
    parity = [_refined(part[owner] for part in made) for owner in range(owners)]
    extra: list[tuple[Cells, ...]] = []
    for owner in range(owners):
        own = frozenset(range(owner * cells, (owner + 1) * cells))
        kept = dict.fromkeys(parity[owner])
        for other in ((owner + ahead) % owners for ahead in range(1, copies + 1)):
            kept |= dict.fromkeys(frozenset({other * cells + cell}) for cell in range(cells))
            # Two owners' parity is a copy: of what the copying one has anyway.
            kept |= dict.fromkeys(some for some in parity[other] if not some <= own)
        extra.append(tuple(kept))
    return Code(owners=owners, cells=cells, extra=tuple(extra))


SchemeCells = tuple[int, list[list[Cells]]]
"""Cells a segment, and what each owner keeps."""


def _parity(name: str, owners: int) -> SchemeCells:
    if name in {"none", BUDDY} or owners == 1:
        return 1, [[] for _ in range(owners)]
    if name == "aec" or owners == 2:
        return _aec(owners)
    return _aec2(owners)


def _aec(owners: int) -> SchemeCells:
    """Owner i keeps the XOR of cell (i − j − 1) mod m of every other owner j: every cell of j once."""
    cells = owners - 1
    return cells, [
        [frozenset(j * cells + (i - j - 1) % owners for j in range(owners) if j != i)] for i in range(owners)
    ]


def _aec2(owners: int) -> SchemeCells:
    """m stripes; of the others' units in stripe s owner s keeps the row parity, s + 1 the diagonal parity.

    A unit has p − 1 rows, p the first prime ≥ m − 1. With column p − 1 for the row parity, diagonal d is
    all (row, column) with row + column ≡ d mod p; diagonal p − 1 is not kept.
    """
    if owners > MOST_OWNERS_AEC2:
        raise ValueError(f"aec2 is for groups of up to {MOST_OWNERS_AEC2} owners, not {owners}")
    prime = _prime_from(owners - 1)
    rows, units = prime - 1, owners - 2
    keeps: list[list[Cells]] = [[] for _ in range(owners)]
    for stripe in range(owners):
        second = (stripe + 1) % owners
        columns = [owner for owner in range(owners) if owner not in (stripe, second)]

        def cell(row: int, column: int, stripe: int = stripe, columns: list[int] = columns) -> int:
            owner = columns[column]
            unit = (stripe - owner - 1) % owners  # The stripes that an owner has data in: all but 2.
            return owner * units * rows + unit * rows + row

        row_parity = [frozenset(cell(row, column) for column in range(units)) for row in range(rows)]
        keeps[stripe] += row_parity
        for diagonal in range(rows):
            there: set[int] = set()
            for column in range(units):
                row = (diagonal - column) % prime
                if row < rows:
                    there ^= {cell(row, column)}
            row = (diagonal - (prime - 1)) % prime
            if row < rows:
                there ^= row_parity[row]
            keeps[second].append(frozenset(there))
    return units * rows, keeps


def _refined(parts: Iterable[tuple[int, Sequence[Cells]]]) -> list[Cells]:
    """Cells as ``factor`` smaller ones each: the same XOR, part by part."""
    return [
        frozenset(cell * factor + part for cell in cells)
        for factor, kept in parts
        for cells in kept
        for part in range(factor)
    ]


def _prime_from(number: int) -> int:
    while number < 2 or any(number % d == 0 for d in range(2, number)):
        number += 1
    return number

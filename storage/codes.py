"""Erasure codes over the segments of one bucket: REFT's ARC and AEC, and a code for two losses.

A bucket with m owners is cut into m equal *segments*, and a segment into equal *cells*. Every owner has the
whole bucket, so each computes what it holds by itself, without network traffic: its own segment, and extra
cells that are the XOR of some cells of the bucket. All schemes here are such codes, also in combination, so
one description serves all of them. The losses that a code withstands are computed from it, and there is one
way to decode: solve for the lost cells over GF(2), then XOR.

    arc:k   what the next k owners hold, including their parity: any k losses, k times the bucket's bytes
        extra
    aec     one cell for every other owner's segment, rotated as in RAID-5: one loss, 1/(m·(m − 1)) extra
    aec2    row-diagonal parity, rotated: any two losses, 2/(m·(m − 2)) extra
    aor     nothing here: under ZeRO-1 a replica of the next owner's part is kept current
    buddy   no code: where a bucket has one owner, another host receives a copy of its shard

Row-diagonal parity follows Corbett et al. (FAST 2004). It needs XOR only, so it runs at the speed of
memory.
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
"""Schemes of a job besides ``arc:k``."""

MOST_OWNERS_AEC2 = 16
"""Largest group for ``aec2``: more owners would need thousands of cells in a segment."""


@dataclass(frozen=True, kw_only=True)
class Code:
    """Cells that each of ``owners`` owners holds of a bucket of ``owners · cells`` cells."""

    owners: int
    cells: int
    """Number of cells of one segment, c."""
    extra: tuple[tuple[Cells, ...], ...]
    """Cells of the bucket whose XOR each extra cell is, for each owner in the order of its arena."""

    def segment(self, owner: int) -> range:
        """Return the cells that the owner holds unchanged."""
        return range(owner * self.cells, (owner + 1) * self.cells)

    @property
    def overhead(self) -> float:
        """Bytes that all owners hold in addition to the bucket itself, as a fraction of the bucket."""
        return sum(map(len, self.extra)) / (self.owners * self.cells)

    @cached_property
    def guarantee(self) -> int:
        """Largest number of owners *any* of which may be lost at once; 0 if no loss is covered."""
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
    """Cells of the owner's segment come first (below ``Code.cells``), then its extra cells in their order."""


CellSources = dict[int, tuple[StoredCell, ...]]
"""For a cell of the bucket, the stored cells whose XOR it is."""


@cache
def solve_lost_cells(code: Code, lost: frozenset[int]) -> CellSources | None:
    """Return how the lost owners' segments are made from the other owners' cells, or ``None`` if that is
    impossible.
    """
    unknown = {cell: bit for bit, cell in enumerate(c for owner in sorted(lost) for c in code.segment(owner))}
    pivots: dict[int, tuple[int, int]] = {}
    sources = [
        (cells, StoredCell(owner=owner, index=code.cells + index))
        for owner in range(code.owners)
        if owner not in lost
        for index, cells in enumerate(code.extra[owner])
        if any(cell in unknown for cell in cells)
    ]
    # Rows are integers: bit b stands for unknown cell b. Each row records the sources that were added to
    # make it.
    for number, (cells, _) in enumerate(sources):
        row, combined = sum(1 << unknown[cell] for cell in cells if cell in unknown), 1 << number
        for bit, (other, other_made) in pivots.items():
            if row >> bit & 1:
                row, combined = row ^ other, combined ^ other_made
        if not row:
            continue
        bit = row.bit_length() - 1
        for other_bit, (other, other_made) in list(pivots.items()):
            if other >> bit & 1:
                pivots[other_bit] = other ^ row, other_made ^ combined
        pivots[bit] = row, combined
    if len(pivots) < len(unknown):
        return None
    return {cell: _sum_of(code, sources, pivots[bit][1], cell) for cell, bit in unknown.items()}


def _sum_of(
    code: Code, sources: Sequence[tuple[Cells, StoredCell]], combined: int, cell: int
) -> tuple[StoredCell, ...]:
    """Return the sources in ``combined``, and the known cells that occur in them an odd number of times."""
    used = [source for number, source in enumerate(sources) if combined >> number & 1]
    known: set[int] = set()
    for cells, _ in used:
        known ^= cells
    known.discard(cell)
    plain = [StoredCell(owner=c // code.cells, index=c % code.cells) for c in sorted(known)]
    return (*(stored for _, stored in used), *plain)


# --- the schemes ------------------------------------------------------------------------------------


def make_code(scheme: str, owners: int) -> Code:
    """Return the code of ``scheme`` for this number of owners: ``none``, ``arc:k``, ``aec``, ``aec2``,
    ``aor``, ``buddy``, or several joined by ``+``.

    With too few owners for the scheme it is the best code that exists: ``aec2`` of two owners is a copy.
    The copy that ``buddy`` puts on another host is not part of the code.

    :raises ValueError: there is no such scheme; the message lists the schemes.
    """
    return _make_code(tuple(parse_scheme(scheme)), owners)


def parse_scheme(scheme: str, plain: Sequence[str] = PLAIN) -> list[tuple[str, int]]:
    """Return the parts of a scheme with their numbers: ``"aec+arc:1"`` → ``[("aec", 0), ("arc", 1)]``.

    :param plain: names besides ``arc:k``, ``none`` first.
    :raises ValueError: there is no such scheme; the message lists the schemes.
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
                f"{part.strip()!r} is not a protection scheme; "
                f"use {plain[0]}, arc:k (k ≥ 1), {', '.join(plain[1:])}, joined by '+'"
            )
    if len(parts) > 1 and ("none", 0) in parts:
        raise ValueError(f"{scheme!r}: none cannot be combined with others")
    return parts


def has_buddy(scheme: str) -> bool:
    """Return whether another host holds the shards of groups with one owner.

    :raises ValueError: there is no such scheme.
    """
    return (BUDDY, 0) in parse_scheme(scheme)


@cache
def _make_code(parts: tuple[tuple[str, int], ...], owners: int) -> Code:
    """Combine all parts of a scheme over cells that suit each of them."""
    schemes = [_parity(name, owners) for name, _ in parts if name not in {"arc", "aor"}]
    cells = lcm(1, *(part_cells for part_cells, _ in schemes))
    combined = [[(cells // part_cells, keeps[i]) for i in range(owners)] for part_cells, keeps in schemes]
    copies = min(sum(count for name, count in parts if name == "arc"), owners - 1)
    parity = [_refined(part[owner] for part in combined) for owner in range(owners)]
    extra: list[tuple[Cells, ...]] = []
    for owner in range(owners):
        own = frozenset(range(owner * cells, (owner + 1) * cells))
        kept = dict.fromkeys(parity[owner])
        for other in ((owner + ahead) % owners for ahead in range(1, copies + 1)):
            kept |= dict.fromkeys(frozenset({other * cells + cell}) for cell in range(cells))
            # With two owners, parity is a copy of cells that the other owner holds anyway.
            kept |= dict.fromkeys(some for some in parity[other] if not some <= own)
        extra.append(tuple(kept))
    return Code(owners=owners, cells=cells, extra=tuple(extra))


SchemeCells = tuple[int, list[list[Cells]]]
"""Cells of a segment, and what each owner holds."""


def _parity(name: str, owners: int) -> SchemeCells:
    if name in {"none", BUDDY} or owners == 1:
        return 1, [[] for _ in range(owners)]
    if name == "aec" or owners == 2:
        return _aec(owners)
    return _aec2(owners)


def _aec(owners: int) -> SchemeCells:
    """Return the code in which owner i holds the XOR of cell (i − j − 1) mod m of every other owner j, so
    every cell of j once.
    """
    cells = owners - 1
    return cells, [
        [frozenset(j * cells + (i - j - 1) % owners for j in range(owners) if j != i)] for i in range(owners)
    ]


def _aec2(owners: int) -> SchemeCells:
    """Return the code of m stripes: of the other owners' units in stripe s, owner s holds the row parity and
    owner s + 1 the diagonal parity.

    A unit has p − 1 rows, where p is the first prime ≥ m − 1. With column p − 1 for the row parity,
    diagonal d consists of all (row, column) with row + column ≡ d mod p; diagonal p − 1 is not stored.
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
            unit = (stripe - owner - 1) % owners  # An owner has data in all stripes but two.
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
    """Split each cell into ``factor`` smaller ones with the same XOR."""
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

"""What ``benchmarks.crowd`` knows of each of its nodes, and of those that train together."""

import math
import socket
from dataclasses import dataclass, field
from typing import Any

import msgspec

from benchmarks.packets import Splitter
from statemachine.messages.values import NodeState


class Envelope(msgspec.Struct, frozen=True):
    """Of a command; see ``ftd.wire.codec``."""

    incarnation: int
    type: str
    body: msgspec.Raw


def pairs(**fields: Any) -> bytes:
    """Keys and values of a msgpack map, without its head."""
    return msgspec.msgpack.encode(fields)[1:]


@dataclass(slots=True, kw_only=True)
class Node:
    """One session, and what its trainers are imagined to hold."""

    name: str
    sock: socket.socket
    incarnation: int
    splitter: Splitter = field(default_factory=Splitter)
    number: int = 0
    job_id: str | None = None
    layers: int = 0
    prepared: bool = False
    generation: int = 0
    held: tuple[int, ...] = ()
    next_held: tuple[int, ...] = ()
    lineage: int = 0
    kept: int = 0
    beat_at: float = 0.0
    state_at: float = math.inf
    """When its state is to be told again."""
    state: NodeState = NodeState.HEALTHY
    reason: str = ""
    envelope: bytes = b""
    """What begins each signal of it, as msgpack."""
    out: bytearray = field(default_factory=bytearray)
    signal_topic: bytes = b""
    state_topic: bytes = b""


@dataclass(slots=True, kw_only=True)
class Group:
    """The trainers of the present generation."""

    generation: int = 0
    planned: frozenset[str] = frozenset()
    waited: set[str] = field(default_factory=set)
    first: str = ""
    step_at: float | None = None
    snap_at: float | None = None

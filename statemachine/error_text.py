"""Error messages: their comparison, since they often differ only in a number although their cause is the same,
and the sentence about the nodes that failed in a run.
"""

import re
from collections.abc import Iterable

from statemachine.messages.values import NodeErrors

_MOST_NODES = 3
"""Largest number of failing nodes that a sentence names."""
MAX_ERRORS = 50
"""Most different errors of a node that are counted."""
_MAX_CHARACTERS = 200
"""Most characters of an error that are kept."""
_CRASHES = tuple(f"killed by {name}" for name in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT"))
"""Beginnings of ``TrainerLost.detail`` of a process that an error of its own ended."""
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]*|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?")


def is_crash(detail: str) -> bool:
    """Return whether an error of its own ended a process, and not somebody's SIGKILL or SIGTERM."""
    return detail.startswith(_CRASHES)


def mask_numbers(text: str) -> str:
    """Return a message without its numbers and hexadecimal addresses: ``index # is out of range``.

    The same fault raises ``index 7 is out of range`` for one sample and ``index 123`` for another, and an
    address differs in every process. Use the result only to compare messages, and show the message itself.
    """
    return _NUMBER.sub("#", text)


def same_error(one: str, other: str, *, kept: int | None = None) -> bool:
    """Return whether two messages differ in numbers at most.

    :param kept: number of characters after which either message may have been cut off.
    """
    if kept is None or min(len(one), len(other)) < kept:
        return mask_numbers(one) == mask_numbers(other)
    short, long = sorted((mask_numbers(one[:kept]), mask_numbers(other[:kept])), key=len)
    return long.startswith(short)


def count_error(counted: NodeErrors | None, error: str) -> NodeErrors:
    """Return a node's errors with another one. Those that differ in numbers at most are counted together, and the
    last one is kept.
    """
    errors = dict(counted.errors) if counted is not None else {}
    shown = error[:_MAX_CHARACTERS]
    alike = next((one for one in errors if same_error(one, shown, kept=_MAX_CHARACTERS)), None)
    times = errors.pop(alike) if alike is not None else 0
    if alike is not None or len(errors) < MAX_ERRORS:
        errors[shown] = times + 1
    return NodeErrors(times=1 + (counted.times if counted is not None else 0), errors=errors)


def describe_failing_nodes(failing: Iterable[tuple[str, NodeErrors]]) -> str:
    """Return which nodes' trainers failed, how often, and the most frequent error, such as ``node-2 failed 15
    times: ValueError: …``; nodes with the same error together. The result is empty if none did.
    """
    alike: dict[str, list[str]] = {}
    for node, counted in failing:
        most = max(counted.errors, key=lambda error: counted.errors[error])
        more = len(counted.errors) - 1
        others = f" (and {more} other error{'s' if more > 1 else ''})" if more else ""
        often = "once" if counted.times == 1 else f"{counted.times} times"
        alike.setdefault(f"failed {often}: {most}{others}", []).append(node)
    texts, named, left_out = [], 0, 0
    for what, nodes in alike.items():
        if named >= _MOST_NODES:
            left_out += len(nodes)
            continue
        shown = nodes[: _MOST_NODES - named]
        named += len(shown)
        *first, last = shown + ([_more_nodes(len(nodes) - len(shown))] if len(nodes) > len(shown) else [])
        texts.append(f"{', '.join(first)} and {last} {what}" if first else f"{last} {what}")
    return "; ".join(texts + ([f"{_more_nodes(left_out)} failed"] if left_out else []))


def _more_nodes(count: int) -> str:
    return f"{count} more node{'s' if count > 1 else ''}"

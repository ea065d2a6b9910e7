"""Check whether a snapshot can be restored from the nodes that are present, by its codes (``storage.codes``)."""

from functools import partial

from statemachine.effects import CheckRestore
from statemachine.events import RestoreChecked
from statemachine.messages.values import SnapshotGroup
from storage.codes import make_code, solve_lost_cells


def check_restore(effect: CheckRestore, at: float) -> RestoreChecked:
    """Return whether every group can be decoded from the shards of the owners that are present, or has a copy."""
    answer = partial(RestoreChecked, at=at, cause=effect.cause, generation=effect.generation)
    present = frozenset(effect.present)
    decoded: list[str] = []
    whole: list[str] = []
    copied: list[str] = []
    for group in effect.record.groups:
        lost = frozenset(i for i, owner in enumerate(group.owners) if owner not in present)
        if not lost:
            continue
        absent = ", ".join(group.owners[i] for i in sorted(lost))
        layers = f"layers {group.first_layer} to {group.end_layer - 1}"
        if group.replica_peer and group.owners[0] in effect.copied:
            copied.append(f"{layers} from the copy of {absent} at {group.replica_peer}")
            continue
        if group.whole and len(lost) < len(group.owners):
            here = ", ".join(owner for owner in group.owners if owner in present)
            whole.append(f"{layers} are held whole by {here}")
            continue
        code = make_code(group.protection, len(group.owners))
        # If all shards are lost, so is the small part, of which every owner has a whole copy.
        if len(lost) == len(group.owners) or solve_lost_cells(code, lost) is None:
            withstood = f"the loss of any {code.guarantee}" if code.guarantee else "no loss"
            reason = (
                f"{layers} cannot be restored without {absent}: {group.protection!r} of "
                f"{len(group.owners)} owners withstands {withstood}{_about_replica_peer(group)}"
            )
            return answer(possible=False, reason=reason)
        decoded.append(f"{layers} without {absent}")
    if copied:
        return answer(possible=True, reason="; ".join(copied), tier="buddy")
    if decoded:
        return answer(possible=True, reason=f"decoded {'; '.join(decoded)}", tier="decoded")
    reason = "; ".join(whole) or "every shard is in its owner's memory"
    return answer(possible=True, reason=reason)


def _about_replica_peer(group: SnapshotGroup) -> str:
    return f", and {group.replica_peer}, which had a copy, does not have it now" if group.replica_peer else ""

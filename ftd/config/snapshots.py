"""``[snapshot]`` of a job file and of a submitted job: checked, and as the machines take it."""

from ftd.config.validation import require_positive
from ftd.errors import ConfigurationError
from ftd.transport.wire.public import SnapshotData
from statemachine.cluster.snapshots.intervals import FIRST_EVERY_STEPS
from statemachine.cluster.snapshots.protections import AUTO
from statemachine.messages.values import SnapshotPolicy
from storage.codes import parse_scheme


def protection_or_default(written: str | None, *, zero1: bool) -> str:
    """What the user wrote, or what suits the way that state is kept."""
    return written or ("aor" if zero1 else "aec")


def check_snapshot(table: SnapshotData, *, zero1: bool) -> None:
    """:raises ConfigurationError: names the field and the remedy."""
    check_interval(table.every_steps, "snapshot.every_steps")
    require_positive(table.cheap_share, "snapshot.cheap_share")
    protection = protection_or_default(table.protection, zero1=zero1)
    if protection != AUTO:
        check_protection(protection, zero1=zero1, field="snapshot.protection")


def check_protection(protection: str, *, zero1: bool, field: str) -> None:
    """Codes are over what all owners hold alike; with ZeRO-1 each has its own part, and with ``aor`` the next
    owner's, which is what a copy can be made of.

    :raises ConfigurationError: there is no such scheme, or it does not go with how state is kept.
    """
    try:
        parts = parse_scheme(protection)
    except ValueError as error:
        raise ConfigurationError(str(error), field=field, remedy="or auto") from None
    names, copies = [name for name, _ in parts], sum(count for _, count in parts)
    if not zero1 and "aor" in names:
        raise ConfigurationError(
            "aor keeps replicas of the parts of ZeRO-1",
            field=field,
            remedy="set training.zero1 = true, or leave aor out",
        )
    unfit = [name for name in names if name in {"aec", "aec2"}]
    if zero1 and unfit:
        raise ConfigurationError(
            f"{unfit[0]} is made of what all owners hold, and with training.zero1 each holds its own part",
            field=field,
            remedy="write aor: replicas of the parts, kept current, survive the loss of a node",
        )
    if zero1 and copies > ("aor" in names):
        raise ConfigurationError(
            f"{protection} copies parts that an owner does not have with training.zero1",
            field=field,
            remedy="write arc:1+aor: the copy is made of the replica",
        )


def check_interval(every_steps: int | str | None, field: str) -> None:
    """:raises ConfigurationError: it is negative."""
    if isinstance(every_steps, int) and every_steps < 0:
        raise ConfigurationError(
            f"{every_steps} is not allowed",
            field=field,
            remedy="write 1 or more, or auto; 0 takes no snapshots",
        )


def snapshot_policy(data: SnapshotData, *, zero1: bool) -> SnapshotPolicy:
    """What a submitted job says of its snapshots, checked.

    :raises ConfigurationError: names the field and the remedy.
    """
    check_snapshot(data, zero1=zero1)
    protection = protection_or_default(data.protection, zero1=zero1)
    auto = data.every_steps == "auto"
    return SnapshotPolicy(
        every_steps=FIRST_EVERY_STEPS if data.every_steps == "auto" else data.every_steps,
        protection="none" if protection == AUTO else protection,
        auto_protection=protection == AUTO,
        auto_interval=auto,
        cheap_share=data.cheap_share,
    )

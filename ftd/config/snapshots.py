"""Checks ``[snapshot]`` of job files and submitted jobs, and converts it for the state machines."""

from ftd.config.validation import require_positive
from ftd.errors import ConfigurationError
from ftd.transport.wire.public import SnapshotData
from statemachine.cluster.snapshots.intervals import FIRST_EVERY_STEPS
from statemachine.cluster.snapshots.protections import AUTO
from statemachine.messages.values import SnapshotPolicy
from storage.codes import parse_scheme


def protection_or_default(written: str | None, *, zero1: bool) -> str:
    """Return the protection that the user wrote, or the default for the way that state is held."""
    return written or ("aor" if zero1 else "aec")


def check_snapshot(table: SnapshotData, *, zero1: bool) -> None:
    """Check the table.

    :raises ConfigurationError: a value is wrong; the error names the field and the remedy.
    """
    check_interval(table.every_steps, "snapshot.every_steps")
    require_positive(table.cheap_share, "snapshot.cheap_share")
    protection = protection_or_default(table.protection, zero1=zero1)
    if protection != AUTO:
        check_protection(protection, zero1=zero1, field="snapshot.protection")


def check_protection(protection: str, *, zero1: bool, field: str) -> None:
    """Check that a protection scheme exists and suits the job.

    Codes protect what all owners hold alike. With ZeRO-1, each owner holds only its own part, and with
    ``aor`` also that of the next owner, of which a copy can be made.

    :raises ConfigurationError: there is no such scheme, or it does not suit the way that state is held.
    """
    try:
        parts = parse_scheme(protection)
    except ValueError as error:
        raise ConfigurationError(str(error), field=field, remedy="write one of these, or auto") from None
    names, copies = [name for name, _ in parts], sum(count for _, count in parts)
    if not zero1 and "aor" in names:
        raise ConfigurationError(
            "aor holds replicas of the parts of ZeRO-1, which this job does not use",
            field=field,
            remedy="set training.zero1 = true, or remove aor",
        )
    unfit = [name for name in names if name in {"aec", "aec2"}]
    if zero1 and unfit:
        raise ConfigurationError(
            f"{unfit[0]} protects state that all owners hold, but with training.zero1 each owner has its own part",
            field=field,
            remedy="write aor: it keeps current replicas of the parts, which survive the loss of a node",
        )
    if zero1 and copies > ("aor" in names):
        raise ConfigurationError(
            f"{protection} copies parts that an owner does not have with training.zero1",
            field=field,
            remedy="write arc:1+aor, which makes the copy from the replica",
        )


def check_interval(every_steps: int | str | None, field: str) -> None:
    """Check that an interval is not negative.

    :raises ConfigurationError: the interval is negative.
    """
    if isinstance(every_steps, int) and every_steps < 0:
        raise ConfigurationError(
            f"{every_steps} is not allowed",
            field=field,
            remedy="write 1 or more, auto, or 0 to take no snapshots",
        )


def snapshot_policy(data: SnapshotData, *, zero1: bool) -> SnapshotPolicy:
    """Return the checked snapshot policy of a submitted job.

    :raises ConfigurationError: a value is wrong; the error names the field and the remedy.
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

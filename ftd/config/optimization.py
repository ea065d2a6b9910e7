"""Checks ``[optimizer]`` and ``[schedule]`` of a job file on the user's machine."""

from typing import Any

from ftd.config.error_collector import ErrorCollector
from runtime.wire.recipe import OptimizerTable, ScheduleTable

_OPTIMIZERS_OF = {"betas": ("adamw", "adam"), "eps": ("adamw", "adam"), "momentum": ("sgd",)}
_SCHEDULES_OF = {
    "decay_ratio": ("wsd",),
    "final_ratio": ("cosine", "linear", "wsd"),
}
"""Keys that only some optimizers and schedules have, with the names of those."""


def check_optimizer(table: OptimizerTable, *, zero1: bool, shard: bool, collector: ErrorCollector) -> None:
    """Collect errors for keys and options that do not work together.

    :param shard: whether the devices of a node must hold shards.
    """
    _reject_inapplicable_keys(table, OptimizerTable(), _OPTIMIZERS_OF, "optimizer", collector)
    if zero1 and table.name == "adafactor":
        collector.reject(
            "adafactor needs sums over rows and columns, but training.zero1 divides parameters into parts",
            field="optimizer.name",
            remedy='write name = "adamw", or remove training.zero1',
        )
    if shard and table.name == "adafactor":
        collector.reject(
            "adafactor needs sums over rows and columns, but shards divide parameters into parts",
            field="optimizer.name",
            remedy='write name = "adamw", or planner.within_node = "replicate"',
        )


def check_schedule(table: ScheduleTable, *, steps: int, collector: ErrorCollector) -> None:
    """Collect errors for keys that do not work together, and for a warm-up that never ends."""
    _reject_inapplicable_keys(table, ScheduleTable(), _SCHEDULES_OF, "schedule", collector)
    if table.warmup_steps is None:
        return
    if table.warmup_ratio is not None:
        collector.reject(
            "warmup_steps already gives the length of the warm-up",
            field="schedule.warmup_ratio",
            remedy="remove warmup_ratio or warmup_steps",
        )
    if table.warmup_steps >= steps > 0:
        collector.reject(
            f"a warm-up of {table.warmup_steps} steps is not shorter than the job, which has {steps} steps",
            field="schedule.warmup_steps",
            remedy="write a smaller number, or warmup_ratio = 0.03 for 3% of the job's steps",
        )


def _reject_inapplicable_keys(
    table: Any, defaults: Any, names_of: dict[str, tuple[str, ...]], where: str, collector: ErrorCollector
) -> None:
    for key, names in names_of.items():
        if table.name not in names and getattr(table, key) != getattr(defaults, key):
            problem = f"{table.name} does not have this key, only {' and '.join(names)}"
            collector.reject(problem, field=f"{where}.{key}", remedy=f"remove {key}")

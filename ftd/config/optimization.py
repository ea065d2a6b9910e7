"""``[optimizer]`` and ``[schedule]`` of a job file: checked on the user's machine."""

from typing import Any

from ftd.config.error_collector import ErrorCollector
from ftd.errors import ConfigurationError
from runtime.wire.recipe import OptimizerTable, ScheduleTable

_OPTIMIZERS_OF = {"betas": ("adamw", "adam"), "eps": ("adamw", "adam"), "momentum": ("sgd",)}
_SCHEDULES_OF = {
    "decay_ratio": ("wsd",),
    "final_ratio": ("cosine", "linear", "wsd"),
}
"""Keys that some of the names have, and those names."""


def check_optimizer(table: OptimizerTable, *, zero1: bool, shard: bool, mistakes: ErrorCollector) -> None:
    """Note what does not go together.

    :param shard: the devices of a node must hold shards.
    """
    _note_useless_keys(table, OptimizerTable(), _OPTIMIZERS_OF, "optimizer", mistakes)
    if zero1 and table.name == "adafactor":
        mistakes.add(
            ConfigurationError(
                "adafactor keeps sums over rows and columns, and training.zero1 cuts parameters into parts",
                field="optimizer.name",
                remedy='write name = "adamw", or leave training.zero1 out',
            )
        )
    if shard and table.name == "adafactor":
        mistakes.add(
            ConfigurationError(
                "adafactor keeps sums over rows and columns, and shards cut parameters into parts",
                field="optimizer.name",
                remedy='write name = "adamw", or planner.within_node = "replicate"',
            )
        )


def check_schedule(table: ScheduleTable, *, steps: int, mistakes: ErrorCollector) -> None:
    """Note what does not go together, and a warm-up that never ends."""
    _note_useless_keys(table, ScheduleTable(), _SCHEDULES_OF, "schedule", mistakes)
    if table.warmup_steps is None:
        return
    if table.warmup_ratio is not None:
        mistakes.add(
            ConfigurationError(
                "warmup_steps says already how long it is",
                field="schedule.warmup_ratio",
                remedy="leave out warmup_ratio or warmup_steps",
            )
        )
    if table.warmup_steps >= steps > 0:
        mistakes.add(
            ConfigurationError(
                f"{table.warmup_steps} steps are not fewer than the job's {steps}",
                field="schedule.warmup_steps",
                remedy="write fewer, or warmup_ratio = 0.03 for 3% of the steps, whatever their number",
            )
        )


def _note_useless_keys(
    table: Any, defaults: Any, names_of: dict[str, tuple[str, ...]], where: str, mistakes: ErrorCollector
) -> None:
    for key, names in names_of.items():
        if table.name not in names and getattr(table, key) != getattr(defaults, key):
            problem = f"{table.name} has no such key, only {' and '.join(names)}"
            mistakes.add(ConfigurationError(problem, field=f"{where}.{key}", remedy=f"leave {key} out"))

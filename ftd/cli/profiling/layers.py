"""Measures a job's model layer by layer on this machine's own device."""

from typing import TYPE_CHECKING

import msgspec

from ftd.cli.profiling.process import ProgressCallback, run_measurement

if TYPE_CHECKING:
    from runtime.wire.measurement import LayerMeasurements
    from statemachine.messages.values import Job


async def measure_layers(
    job: "Job", on_progress: ProgressCallback, *, activation_checkpointing: str = "auto"
) -> "LayerMeasurements":
    """Return all measurements, by default with every kind of recomputation.

    :param activation_checkpointing: kind to plan with, whatever the job says.
    :param on_progress: called with the number of measured layers and of all layers.
    :raises ConfigurationError: the training function, or what it returns, cannot be used.
    """
    from runtime.wire.measurement import LayerMeasurements

    return await run_measurement(
        "runtime.profiling.layer_profile",
        "--devices-per-node",
        str(job.policy.devices_per_node),
        order=msgspec.json.encode({**job.training, "activation_checkpointing": activation_checkpointing}),
        answer=LayerMeasurements,
        on_progress=on_progress,
    )

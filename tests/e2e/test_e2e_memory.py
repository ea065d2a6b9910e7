"""Devices too small for all activations: some stages recompute theirs, and the losses do not show it."""

from pathlib import Path

import msgspec
import pytest

from ftd.config.job import load_job_data
from tests.e2e.conftest import RELATIVE
from tests.e2e.playground import Json, Playground, training_data, write_job
from tests.runtime.reference import load, reference_losses

ROWS, MICROBATCHES = 32, 8
MEMORY_KIB = 80
"""The last stage of two or three has room for its activations, and the first one has none for several
microbatches'."""


def ways(pipelines: list[Json]) -> list[list[str]]:
    return [[stage["recompute"] for stage in pipeline["stages"]] for pipeline in pipelines]


def test_stages_that_would_not_fit_recompute_and_the_losses_are_the_same(
    ground: Playground, tmp_path: Path
) -> None:
    path = write_job(tmp_path, delay_s=0.01, arguments="width = 16")
    text = path.read_text().replace("global_batch = 16", f"global_batch = {MICROBATCHES * ROWS}")
    text = text.replace("microbatch = 2", f'microbatch = {ROWS}\nactivation_checkpointing = "auto"')
    path.write_text(text + f"[planner]\ndevice_memory_mib = {MEMORY_KIB / 1024}\n")
    run = ground.submit(load_job_data(path))
    chosen = run.named("PlanChosen")[-1]["details"]["pipelines"]
    assert len(chosen) == 2
    for of_pipeline in ways(chosen):
        assert of_pipeline[0] in ("full", "selective") and of_pipeline[-1] == "none"
    ground.until_step(5)
    ground.inject(do="kill", node="node-1")
    ground.until_recovery("node_lost")
    (left,) = ways(ground.state["pipelines"])
    assert len(left) == 3 and left[0] != "none" and left[-1] == "none"
    ground.further()
    losses = ground.stop_job().losses
    data = msgspec.structs.replace(
        training_data(run.job), steps=len(losses), arguments={"width": 16}, activation_checkpointing="none"
    )
    assert [losses[step] for step in sorted(losses)] == pytest.approx(
        reference_losses(load(data), data, len(losses)), rel=RELATIVE
    )

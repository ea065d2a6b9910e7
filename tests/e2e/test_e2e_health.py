"""Health checks with real processes: a node with a bad device is not taken in again, until it is readmitted."""

import io
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from ftd.observe.view.status import render_status
from tests.helpers.playground import Playground, Run, tiny_job

FAULT_S = 15.0


def status_of(ground: Playground) -> str:
    """Return what ``ftd status`` prints, without line breaks."""
    page = io.StringIO()
    Console(file=page, width=400).print(render_status(ground.state))
    return page.getvalue()


def test_a_node_whose_device_computes_wrongly_stays_out_until_it_is_readmitted(
    ground: Playground, tmp_path: Path, same_losses: Callable[[Run], None]
) -> None:
    run = ground.submit(tiny_job(tmp_path, two_node_replicas=True, delay_s=0.01))
    ground.until_step(8)
    ground.inject(do="bad_device", node="node-1", device=1, how="wrong", for_s=FAULT_S)
    ground.inject(do="raise", node="node-1", device=0)
    aside = ground.until_event("NodeQuarantined", "node-1")
    assert aside["details"]["cause"] == "wrong_device"
    [evidence] = aside["details"]["evidence"]
    assert "device 1: a product of float32 matrices is wrong in 1 of 256 rows" in evidence["detail"]
    ground.until_recovery("trainer_lost")
    ground.further(10)
    assert not ground.state["nodes"]["node-1"]["in_plan"]
    page = status_of(ground)
    assert "node-1: its health check failed: device 1: a product of float32 matrices is wrong" in page
    assert "to readmit it: ftd readmit node-1" in page
    time.sleep(FAULT_S)
    assert "it takes part again if it passes another health check" in ground.readmit("node-1")
    back = ground.until_recovery("node_returned")
    assert back["nodes"] == ["node-1"]
    assert ground.state["nodes"]["node-1"]["health"]["problem"] == ""
    ground.further()
    assert len(run.named("NodeQuarantined")) == 1
    same_losses(ground.stop_job())

"""Tests of ``benchmarks/gpu.py`` without a GPU: the same code runs on the CPU, or the benchmark says what is
missing.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.harness import ROOT


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_all_parts_of_one_process_run_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu" / "here.json"
    parts = "train,snapshot,link,xor,restore"
    done = run("--device", "cpu", "--tiny", "--parts", parts, "--out", str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())["data"]
    assert {name.partition(",")[0] for name in found} == {"where", *parts.split(",")}
    assert found["where"] == {"device": "cpu"}
    assert min(found["train"]["ours_s"]) > 0 and len(found["snapshot"]["stall_s"]) >= 4
    assert "tokens/s" in out.with_suffix(".txt").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_benchmark_says_so_and_measures_nothing(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "x.json"))
    assert done.returncode == 3
    assert "no GPU that torch can use" in done.stderr and list(tmp_path.iterdir()) == []

"""Tests of the copier with a device: which operations its side stream gets, and in which order."""

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import runtime.script.copier
from runtime.script.copier import ScriptCapture, SnapshotCopier
from runtime.script.tensor_image import CopyRange, CopyUnit
from runtime.side_stream import SideStreams
from storage.arena import Slot
from tests.helpers.waiting import PATIENCE_S

DEVICE = torch.device("cuda", 0)


class SlowStreams(SideStreams):
    """Copy streams whose copies are complete only when ``arrive`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.arrive = threading.Event()
        self.held: list[set[torch.device]] = []

    def begin(self, devices: set[torch.device]) -> None:
        pass

    def prepare_thread(self, devices: set[torch.device]) -> None:
        pass

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        yield

    def make_compute_wait(self, devices: set[torch.device]) -> None:
        self.held.append(devices)

    def finish(self, devices: set[torch.device]) -> None:
        self.asked.set()
        assert self.arrive.wait(PATIENCE_S)

    def pin(self, number: int, view: Any) -> None:
        pass


def capture(source: torch.Tensor) -> ScriptCapture:
    size = source.numel()
    piece = CopyRange(entry=0, start=0, offset=0, size_bytes=size)
    return ScriptCapture(
        step=1,
        rank=0,
        units=[CopyUnit(0, size, (piece,))],
        shared_units=0,
        sources=[source],
        body_bytes=size,
        header=lambda: b"header",
        layout={},
        devices={DEVICE},
    )


def test_a_step_runs_after_copies_that_the_device_has_not_finished() -> None:
    done: list[int] = []
    streams = SlowStreams()
    copier = SnapshotCopier(
        open_slot=lambda size: Slot(0, np.zeros(size, dtype=np.uint8)),
        complete=lambda step, slot, parts, layout: done.append(step),
        failed=lambda step, error: pytest.fail(f"step {step}: {error}"),
        streams=streams,
    )
    try:
        copier.begin(capture(torch.arange(64, dtype=torch.uint8)))
        assert streams.asked.wait(PATIENCE_S), "every unit was asked for"
        copier.finish()
        assert streams.held == [{DEVICE}] and not done
    finally:
        streams.arrive.set()
        copier.close()
    assert done == [1]
    streams.held.clear()
    copier.finish()
    assert streams.held == [], "what is complete holds nobody up"


def test_a_slot_is_not_given_away_while_the_device_may_write_into_it() -> None:
    calls: list[str] = []

    class Torn(SlowStreams):
        def finish(self, devices: set[torch.device]) -> None:
            super().finish(devices)
            calls.append("the device is through")

    streams = Torn()
    broken = capture(torch.arange(64, dtype=torch.uint8))
    broken.units.append(CopyUnit(64, 1, (CopyRange(entry=9, start=0, offset=64, size_bytes=1),)))
    copier = SnapshotCopier(
        open_slot=lambda size: Slot(0, np.zeros(size, dtype=np.uint8)),
        complete=lambda step, slot, parts, layout: pytest.fail("it is not complete"),
        failed=lambda step, error: calls.append(type(error).__name__),
        streams=streams,
    )
    streams.arrive.set()
    copier.begin(broken)
    copier.close()
    assert calls == ["the device is through", "IndexError"]


def test_an_xor_waits_for_copies_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parity is that of a tensor on the device and of one in host memory."""
    asked: list[tuple[Any, torch.Tensor]] = []
    monkeypatch.setattr(
        runtime.script.copier, "copy_async", lambda target, source: asked.append((target, source))
    )

    class Late(SlowStreams):
        def finish(self, devices: set[torch.device]) -> None:
            while asked:
                target, source = asked.pop(0)
                target[:] = source.numpy()

    slot = np.full(64 + len(b"header"), 0xA5, dtype=np.uint8)
    there, here = torch.arange(64, dtype=torch.uint8), np.full(64, 0x3C, dtype=np.uint8)
    mixed = capture(there)
    mixed.sources.append(here)
    added = CopyRange(entry=1, start=0, offset=0, size_bytes=64, is_xor=True)
    mixed.units[0] = CopyUnit(0, 64, (*mixed.units[0].ranges, added))
    copier = SnapshotCopier(
        open_slot=lambda size: Slot(0, slot),
        complete=lambda step, slot, parts, layout: None,
        failed=lambda step, error: pytest.fail(f"step {step}: {error}"),
        streams=Late(),
    )
    copier.begin(mixed)
    copier.close()
    assert (slot[:64] == there.numpy() ^ here).all()


def test_memory_that_the_driver_rejects_causes_no_later_error(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(cudaHostRegister=lambda address, size, flags: 712)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    started: list[str] = []

    def refused(size: int, *, device: str) -> torch.Tensor:
        started.append(device)
        raise RuntimeError("CUDA error: part or all of the requested memory range is already mapped")

    monkeypatch.setattr(torch, "zeros", refused)
    streams = SideStreams()
    streams.pin(0, np.ones(4096, dtype=np.uint8))
    assert started == ["cuda"], "a kernel that nobody needs takes the error with it"
    streams.close()


def test_a_slot_s_memory_is_registered_once_though_its_contents_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, int]] = []

    driver = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: said.append(("register", size)) or 0,
        cudaHostUnregister=lambda address: said.append(("unregister", address)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    memory = np.zeros(3 * 4096, dtype=np.uint8)
    streams = SideStreams()
    for size in (5000, 5001, 4999):
        streams.pin(0, memory[:size])
    assert said == [("register", 8192)]
    streams.pin(0, memory[:8193])
    streams.close()
    address = memory.ctypes.data
    assert said[1:] == [("unregister", address), ("register", 12288), ("unregister", address)]

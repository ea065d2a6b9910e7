"""Free memory where control groups have limits."""

from pathlib import Path

import pytest

from storage import free_memory

GIB = 1 << 30


def group(directory: Path, limit: str, used: int, files: int = 0) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon {used - files}\nfile {files}\ninactive_file {files}\n")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own").write_text("0::/pods/training\n")
    monkeypatch.setattr(free_memory, "_OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(free_memory, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(free_memory, "_machine_bytes", lambda: 1 << 62)
    (tmp_path / "groups").mkdir()
    return tmp_path / "groups"


def test_the_tightest_control_group_counts(groups: Path) -> None:
    group(groups / "pods" / "training", str(8 * GIB), 2 * GIB)
    assert free_memory._group_bytes() == 6 * GIB
    group(groups / "pods", str(9 * GIB), 7 * GIB)
    assert free_memory._group_bytes() == 2 * GIB


def test_cached_files_do_not_fill_a_control_group(groups: Path) -> None:
    group(groups / "pods" / "training", str(8 * GIB), 8 * GIB, files=5 * GIB)
    assert free_memory._group_bytes() == 5 * GIB


def test_control_groups_without_a_limit_are_skipped(groups: Path) -> None:
    assert free_memory._group_bytes() == 1 << 62
    group(groups / "pods" / "training", "max", 3 * GIB)
    (groups / "pods" / "memory.max").write_text("many")
    assert free_memory._group_bytes() == 1 << 62


def test_a_full_control_group_and_a_full_file_system_have_nothing_left(groups: Path) -> None:
    group(groups / "pods", str(GIB), 2 * GIB)
    assert free_memory.free_bytes(groups) == 0

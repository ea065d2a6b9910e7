"""The package that users install: the wheel holds all that ftd needs, and the documentation site builds."""

import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
LIMIT_S = 240.0


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Return what a command prints; fail with its output if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the files that git tracks, so that building leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("sources")
    names = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    return copy


@pytest.mark.processes
def test_the_wheel_installs_and_trains_in_a_clean_environment(sources: Path, tmp_path: Path) -> None:
    """The wheel is built from the source archive. Dependencies come from this environment."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", sources, cwd=tmp_path)
    wheel = tmp_path / "dist" / f"ftd-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if not name.startswith("ftd-")} == {
        "ftd", "planner", "runtime", "statemachine", "storage",
    }  # fmt: skip
    assert any(name.endswith("licenses/LICENSE") for name in names)
    with tarfile.open(tmp_path / "dist" / f"ftd-{VERSION}.tar.gz") as archive:
        assert f"ftd-{VERSION}/LICENSE" in archive.getnames()

    clean = tmp_path / "clean"
    venv.create(clean, with_pip=False)
    python = clean / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=tmp_path,
    )
    [packages] = clean.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    code = "import ftd; from ftd import Snapshotter, Training; print(ftd.__version__, ftd.__file__, Training)"
    version, file, *_ = run(python, "-c", code, cwd=tmp_path).split(" ")
    assert version == VERSION and Path(file).is_relative_to(clean)
    for name in ("mlp.py", "mlp.toml"):
        (tmp_path / name).write_bytes((ROOT / "examples" / name).read_bytes())
    said = run(clean / "bin" / "ftd", "local", "mlp.toml", "--nodes", "2", "--no-view", cwd=tmp_path)
    assert "finished" in said


@pytest.mark.processes
def test_the_documentation_site_builds_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    run(sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", tmp_path / "site", cwd=ROOT)
    page = (tmp_path / "site" / "reference" / "api" / "index.html").read_text(encoding="utf-8")
    assert 'id="ftd.Training"' in page and 'id="ftd.Snapshotter"' in page
    assert (tmp_path / "site" / "project" / "ARCHITECTURE" / "index.html").is_file()
    assert (tmp_path / "site" / "project" / "examples" / "gpt.py").is_file()

"""Tests of ``ftd checkpoint``."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
from typer.testing import CliRunner

from ftd.cli.main import app
from ftd.cli.options import parse_size
from ftd.errors import CheckpointError, ConfigurationError
from storage.checkpoint import Checkpoint, CheckpointStore
from storage.layerstate import DTYPE_BYTES
from storage.safetensors_file import DTYPE_NAMES
from tests.helpers.kept_checkpoints import LAYERS, layer_state, write

ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    store = CheckpointStore.at(str(tmp_path / "kept"), create=True)
    for step in (5, 7):
        write(store, step)
    return tmp_path / "kept"


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["checkpoint", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def json_of(*arguments: str, code: int = 0) -> dict[str, Any]:
    return json.loads(run(*arguments, "--json", code=code))


def error_of(*arguments: str) -> CheckpointError | ConfigurationError:
    error = CliRunner().invoke(app, ["checkpoint", *arguments]).exception
    assert isinstance(error, CheckpointError | ConfigurationError), error
    return error


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_list_shows_the_newest_first_and_the_skipped_ones(checkpoints: Path) -> None:
    CheckpointStore.at(str(checkpoints)).begin(9)
    (checkpoints / "step-000000000005" / "layer-0001.bin").unlink()
    answer = json_of("list", str(checkpoints))
    assert [one["step"] for one in answer["checkpoints"]] == [7]
    assert answer["checkpoints"][0]["vote"] == {"loss": 2.5, "gradient_norm": 1.0}
    assert len(answer["problems"]) == 1 and len(answer["unfinished"]) == 1
    page = " ".join(run("list", str(checkpoints)).split())
    assert "gpt" in page and "2.5000" in page and "layer-0001.bin is missing" in page


def test_an_empty_list(tmp_path: Path) -> None:
    assert "no complete checkpoint" in run("list", str(tmp_path))
    assert json_of("list", f"memory://{tmp_path}")["checkpoints"] == []


def test_verify_reports_corrupt_checkpoints_with_exit_code_1(checkpoints: Path) -> None:
    assert run("verify", str(checkpoints)).count("sound") == 2
    flip(checkpoints / "step-000000000007" / "layer-0002.bin")
    answer = json_of("verify", str(checkpoints), code=1)
    assert [bool(one["problems"]) for one in answer["checkpoints"]] == [True, False]
    page = run("verify", str(checkpoints), code=1)
    assert "DAMAGED" in page and "layer-0002.bin" in page
    assert "sound" in run("verify", str(checkpoints), "--step", "5")
    (checkpoints / "step-000000000007" / "manifest.json").unlink()
    assert len(json_of("verify", str(checkpoints), code=1)["problems"]) == 1


def test_verify_accepts_a_checkpoint_that_is_being_written(checkpoints: Path) -> None:
    CheckpointStore.at(str(checkpoints)).begin(9)
    answer = json_of("verify", str(checkpoints))
    assert answer["problems"] == [] and "step-000000000009" in answer["unfinished"][0]
    assert "it is being written, or its writer was stopped" in " ".join(
        run("verify", str(checkpoints)).split()
    )


def test_verify_goes_on_when_the_job_removes_an_old_checkpoint(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = Checkpoint.verify

    def then_pruned(checkpoint: Checkpoint) -> tuple[str, ...]:
        CheckpointStore.at(str(checkpoints)).prune(1)
        return verify(checkpoint)

    def removed(checkpoint: Checkpoint) -> tuple[str, ...]:
        checkpoint.location.remove(checkpoint.directory)
        return verify(checkpoint)

    monkeypatch.setattr(Checkpoint, "verify", then_pruned)
    answer = json_of("verify", str(checkpoints))
    assert [(one["step"], one["problems"]) for one in answer["checkpoints"]] == [(7, [])]
    monkeypatch.setattr(Checkpoint, "verify", removed)
    assert "does not exist" in str(error_of("verify", str(checkpoints), "--step", "7"))


def test_the_safetensors_package_reads_an_export(checkpoints: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.safetensors"
    answer = json_of("export", str(checkpoints), str(file), "--format", "safetensors", "--step", "5")
    assert answer["tensors"] == 2 * LAYERS and answer["size_bytes"] == file.stat().st_size
    read = dict(safetensors.deserialize(file.read_bytes()))
    assert set(read) == {f"{layer}.{name}" for layer in range(LAYERS) for name in ("weight", "seen")}
    for layer in range(LAYERS):
        _, payload = layer_state(layer, 5)
        weight = read[f"{layer}.weight"]
        assert (weight["dtype"], weight["shape"]) == ("BF16", [100, 10])
        assert bytes(weight["data"]) == payload[:2000].tobytes()
        assert bytes(read[f"{layer}.seen"]["data"]) == payload[6000:6008].tobytes()
    assert "6 tensors" in run("export", str(checkpoints), str(file), "--format", "safetensors")
    with safetensors.safe_open(file, framework="numpy") as opened:
        assert opened.metadata() == {"format": "pt", "job": "gpt", "step": "7"}
        assert opened.get_tensor("1.seen").tobytes() == layer_state(1, 7)[1][6000:6008].tobytes()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_every_type_is_exported_or_rejected() -> None:
    assert set(DTYPE_BYTES) - set(DTYPE_NAMES) == {"complex128"}


def test_a_corrupt_layer_is_not_exported_and_the_old_file_stays(checkpoints: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.safetensors"
    file.write_text("old")
    flip(checkpoints / "step-000000000007" / "layer-0002.bin")
    assert "layer-0002.bin" in str(error_of("export", str(checkpoints), str(file), "--format", "safetensors"))
    assert file.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept", "out.safetensors"]


def test_errors_name_the_wrong_input(checkpoints: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "x.safetensors")
    for arguments, words in (
        (("list", str(tmp_path / "nowhere")), "does not exist"),
        (("list", "s3://"), "s3:// cannot be used: it names no bucket or directory"),
        (
            ("list", "ftp://127.0.0.1:1/x"),
            "ftp://127.0.0.1:1/x cannot be used: [Errno 111] Connection refused",
        ),
        (("verify", str(tmp_path)), "has no checkpoint"),
        (("verify", str(checkpoints), "--step", "6"), "no checkpoint of step 6; complete ones: 7, 5"),
        (
            ("export", str(checkpoints), out, "--format", "safetensors", "--step", "6"),
            "no checkpoint of step 6",
        ),
        (("export", str(tmp_path), out, "--format", "safetensors"), "no complete checkpoint"),
        (("list", "nosuch://x"), "nosuch"),
        (("export", str(checkpoints), str(tmp_path), "--format", "safetensors"), "OUTPUT: "),
        (("export", str(checkpoints), "/proc/x", "--format", "huggingface"), "cannot be written"),
        (("export", str(checkpoints), str(checkpoints), "--format", "torch"), "already exists"),
        (
            ("export", str(checkpoints), out, "--format", "torch", "--merge"),
            "it does not apply to --format torch",
        ),
        (
            ("export", str(checkpoints), out, "--format", "safetensors", "--max-shard-size", "1MB"),
            "--max-shard-size: it does not apply to --format safetensors",
        ),
        (("export", str(checkpoints), out, "--format", "torch", "--dtype", "float16"), "the exact numbers"),
        (
            ("export", str(checkpoints), out, "--format", "huggingface", "--max-shard-size", "5 x"),
            "is not a size",
        ),
        (
            ("export", str(checkpoints), out, "--format", "huggingface", "--files-from", "no"),
            "no is not a directory",
        ),
        (("export", str(checkpoints), str(tmp_path / "no" / "x"), "--format", "torch"), "does not exist"),
        (("export", str(checkpoints), "/proc/x", "--format", "safetensors"), "cannot be written"),
    ):
        assert words in str(error_of(*arguments))
    run("verify", str(checkpoints), "--step", "-1", code=2)
    run("export", str(checkpoints), out, code=2)
    run("export", str(checkpoints), out, "--format", "pickle", code=2)


def test_an_unreadable_file_to_copy_is_not_called_an_unwritable_output(
    checkpoints: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").symlink_to("/proc/self/mem")
    error = error_of(
        "export", str(checkpoints), str(tmp_path / "out"), "--format", "huggingface",
        "--files-from", str(model),
    )  # fmt: skip
    assert f"--files-from: {model} cannot be read" in str(error)


@pytest.mark.parametrize("text", ["{", "[]", '"x"', "\xff", pytest.param(100_000 * "[", id="nested")])
def test_a_configuration_to_copy_that_is_none_is_named(checkpoints: Path, tmp_path: Path, text: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(text, encoding="latin-1")
    error = error_of(
        "export", str(checkpoints), str(tmp_path / "out"), "--format", "huggingface",
        "--files-from", str(model),
    )  # fmt: skip
    assert f"--files-from: {model / 'config.json'} is not a JSON object" in str(error)


def test_the_empty_current_directory_is_not_replaced(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for kind in ("torch", "huggingface"):
        error = error_of("export", str(checkpoints), ".", "--format", kind)
        assert "OUTPUT: . is the current directory" in str(error)


def test_a_link_or_a_mount_point_is_rejected_before_anything_is_written(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for kind in ("torch", "huggingface"):
        error = error_of("export", str(checkpoints), str(tmp_path / "link"), "--format", kind)
        assert f"OUTPUT: {tmp_path / 'link'} is a link or a mount point, which cannot be replaced" in str(
            error
        )
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "empty")
    assert "mount point" in str(
        error_of("export", str(checkpoints), str(tmp_path / "empty"), "--format", "torch")
    )
    run("export", str(checkpoints), str(tmp_path / "empty" / "new"), "--format", "torch")


def test_sizes_are_parsed() -> None:
    sizes = {"5GB": 5 * 10**9, "1.5 MiB": 1.5 * 2**20, "10b": 10, "2TB": 2 * 10**12}
    assert {text: parse_size(text, "x") for text in sizes} == sizes


@pytest.mark.processes
def test_an_error_is_one_line_and_a_code_and_torch_is_not_loaded(checkpoints: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom ftd.cli.main import main\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules, 'torch'"
    )

    def ftd(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, "checkpoint", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, cwd=ROOT)

    done = ftd("list", str(tmp_path / "nowhere"))
    assert done.returncode == 1 and done.stderr.startswith("ftd: ") and done.stderr.count("\n") == 1
    assert ftd("list", "nosuch://x").returncode == 2
    assert ftd("export", str(checkpoints), str(tmp_path / "x"), "--format", "safetensors").returncode == 0

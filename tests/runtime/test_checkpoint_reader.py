"""Tests of persistent checkpoints of a trained model, read by torch and by a new trainer."""

import os
import re
import runpy
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from runtime.checkpoint_reader import FtdCheckpointReader
from runtime.description import describe
from runtime.layers.model import Model
from runtime.layers.optimizer import Optimization
from runtime.layers.state import LayerStates
from runtime.training import load_training
from storage.checkpoint import CheckpointStore
from storage.description import encode_description
from storage.errors import CheckpointMissingError, CorruptDataError, LocationError
from storage.layerstate import decode_header, fingerprint_of
from tests.helpers.kept_checkpoints import about
from tests.helpers.layer_states import Trainer
from tests.helpers.runtime_support import data_for, training_of

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(trainer: Trainer, url: Path | str, step: int) -> CheckpointStore:
    store = CheckpointStore.at(str(url), create=True)
    draft = store.begin(step)
    store.write_description(draft, encode_description(describe(layers_of(trainer))))
    files = []
    for layer in trainer.layers:
        header, payload = trainer.states.pack(layer)
        files.append(store.write_layer(draft, layer, header, [payload.numpy()]))
    store.commit(draft, files, **about())
    return store


def trained(steps: int, dtype: str = "float64") -> Trainer:
    trainer = Trainer(dtype)
    for step in range(1, steps + 1):
        trainer.step(step)
    return trainer


def layers_of(trainer: Trainer) -> nn.Sequential:
    return nn.Sequential(*trainer.training.layers)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_new_trainer_resumes_from_disk_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    old, new = trained(3, dtype), Trainer(dtype)
    checkpoint = save(old, tmp_path, 3).open()
    packed = [new.states.pack(layer) for layer in new.layers]
    headers = [decode_header(h, k, p.numel()) for k, (h, p) in enumerate(packed)]
    assert checkpoint.manifest.fingerprint == fingerprint_of(headers)
    new.model.drop(new.layers)
    for layer in (2, 0, 3, 1):
        header, _, payload = checkpoint.read_layer(layer)
        new.states.unpack(layer, header, torch.from_numpy(payload))
    assert new.digests() == old.digests()
    assert [new.step(step) for step in (4, 5)] == [old.step(step) for step in (4, 5)]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_torch_fills_a_model_by_its_names(tmp_path: Path, dtype: str) -> None:
    old, new = trained(2, dtype), Trainer(dtype)
    save(old, tmp_path, 2)
    model, wanted = layers_of(new), layers_of(old).state_dict()
    # The token table is tied: the last layer uses it as well, and it is available under both names.
    assert {"model.0.token.weight", "model.3.weight"} < names_in(tmp_path)
    state = {"model": model.state_dict()}
    dcp.load(state, storage_reader=FtdCheckpointReader(tmp_path))
    model.load_state_dict(state["model"])
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    assert new.digests() == old.digests()


def test_the_documented_recipe_loads_the_demos_model(tmp_path: Path) -> None:
    job = tomllib.loads((ROOT / "examples" / "gpt.toml").read_text())["training"]
    data = data_for(job["function"], arguments=job["arguments"], path=str(ROOT / "examples"))
    training = load_training(data)
    model = Model(training, data)
    states = LayerStates(model, Optimization(model))
    wanted = {name: value.clone() for name, value in nn.Sequential(*training.layers).state_dict().items()}
    store = CheckpointStore.at(str(tmp_path), create=True)
    draft = store.begin(1000)
    store.write_description(draft, encode_description(describe(nn.Sequential(*training.layers))))
    packed = [states.pack(layer) for layer in range(len(training.layers))]
    files = [store.write_layer(draft, k, h, [p.numpy()]) for k, (h, p) in enumerate(packed)]
    store.commit(draft, files, **about())

    page = (ROOT / "docs" / "how-to" / "checkpoints.md").read_text()
    (recipe,) = re.findall(r"```python\n(import torch\.distributed\.checkpoint.*?)```", page, re.DOTALL)
    names = {"layers": load_training(msgspec.structs.replace(data, seed=9)).layers}
    exec(recipe.replace("/checkpoints/gpt", str(tmp_path)), names)
    found = names["model"].state_dict()
    assert found["7.weight"] is not None and found.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())


def names_in(url: Path) -> set[str]:
    return set(FtdCheckpointReader(url).read_metadata().state_dict_metadata)


def test_plain_torch_resumes_model_and_optimizer_where_the_engine_stopped(tmp_path: Path) -> None:
    training = training_of([nn.Linear(6, 5), nn.Linear(5, 1)])
    model = Model(training, data_for("unused.py:build"))
    optimization = Optimization(model)
    states = LayerStates(model, optimization)
    x, target = training.dataset[:8]

    def engine_step(step: int) -> float:
        loss = training.loss(model.forward(0, 2, x, step=step, row=0), target)
        torch.autograd.backward(loss)
        optimization.step((0, 1))
        for _, parameter in model.named_parameters((0, 1)):
            parameter.grad = None
        return float(loss.detach())

    for step in (1, 2, 3):
        engine_step(step)
    store = CheckpointStore.at(str(tmp_path), create=True)
    draft = store.begin(3)
    packed = [states.pack(layer) for layer in range(2)]
    files = [store.write_layer(draft, k, h, [p.numpy()]) for k, (h, p) in enumerate(packed)]
    store.commit(draft, files, **about())

    plain = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1)).to(torch.float64)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    state = {"model": plain.state_dict(), "optim": get_optimizer_state_dict(plain, optimizer)}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, storage_reader=FtdCheckpointReader(tmp_path, step=3), planner=planner)
    set_optimizer_state_dict(plain, optimizer, state["optim"])

    def plain_step() -> float:
        loss = nn.functional.mse_loss(plain(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    assert [plain_step() for _ in range(3)] == [engine_step(step) for step in (4, 5, 6)]


def test_the_example_validates_a_jobs_checkpoint(tmp_path: Path) -> None:
    training = load_training(data_for("mlp.py:build", precision="float64", global_batch=48))
    model = Model(training, data_for("mlp.py:build"))
    states = LayerStates(model, Optimization(model))
    store = CheckpointStore.at(str(tmp_path), create=True)
    draft = store.begin(3)
    packed = [states.pack(layer) for layer in range(model.layer_count)]
    files = [store.write_layer(draft, k, h, [p.numpy()]) for k, (h, p) in enumerate(packed)]
    store.commit(draft, files, **about())
    validate = runpy.run_path(str(ROOT / "examples" / "scripts" / "validate.py"))["validate"]
    loss, right = validate(str(tmp_path), samples=300)
    torch.manual_seed(10_000)
    points = runpy.run_path(str(ROOT / "examples" / "mlp.py"))["Spirals"](300, 3, 0.15)
    with torch.no_grad():
        output = nn.Sequential(*training.layers).eval()(points.points)
    assert loss == float(training.loss(output, points.arm))
    assert right == float((output.argmax(dim=1) == points.arm).double().mean())


def test_a_name_or_a_shape_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    save(trained(1), tmp_path, 1)
    name = "0.token.weight"
    for state, words in (
        ({"0.other": torch.zeros(3)}, r"Missing key in checkpoint state_dict: model\.0\.other"),
        ({name: torch.zeros(3)}, "Size mismatch"),
    ):
        with pytest.raises(CheckpointException, match=words):
            dcp.load({"model": state}, storage_reader=FtdCheckpointReader(tmp_path))


def test_damage_is_found_before_a_tensor_of_that_layer_is_filled(tmp_path: Path) -> None:
    save(trained(1), tmp_path, 1)
    path = tmp_path / "step-000000000001" / "layer-0001.bin"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    name = "1.norm_1.weight"
    state = {name: torch.full((8,), 7.0, dtype=torch.float64)}
    with pytest.raises(CheckpointException) as raised:
        dcp.load({"model": state}, storage_reader=FtdCheckpointReader(tmp_path))
    assert any(isinstance(error[0], CorruptDataError) for error in raised.value.failures.values())
    assert (state[name] == 7).all()


def test_a_missing_checkpoint_is_reported_before_torch_reads(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMissingError, match="no complete checkpoint"):
        FtdCheckpointReader(tmp_path)
    with pytest.raises(LocationError, match="does not exist"):
        FtdCheckpointReader(tmp_path / "nowhere")
    assert FtdCheckpointReader.validate_checkpoint_id(tmp_path)
    assert not FtdCheckpointReader.validate_checkpoint_id("nosuch://x")


def test_the_newest_or_a_named_step_or_another_url_is_read(tmp_path: Path) -> None:
    save(trained(1), tmp_path / "a", 1)
    save(trained(2), tmp_path / "a", 2)
    save(trained(1), f"memory://{tmp_path}", 5)
    assert FtdCheckpointReader(tmp_path / "a").step == 2
    reader = FtdCheckpointReader(tmp_path / "a", step=1)
    reader.reset(reader.checkpoint_id)
    assert reader.step == 1
    reader.reset(f"memory://{tmp_path}")
    assert reader.step == 5 and reader.checkpoint_id.endswith("step-000000000005")


SHARDED = """
import sys, torch
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor, zeros
from runtime.checkpoint_reader import FtdCheckpointReader
rank, port, path, name, rows, width = int(sys.argv[1]), *sys.argv[2:5], *map(int, sys.argv[5:7])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
tensor = zeros(rows, width, dtype=torch.float64, device_mesh=mesh, placements=[Shard(0)])
dcp.load({"model": {name: tensor}}, storage_reader=FtdCheckpointReader(path))
print(tensor.to_local().shape[0], float(tensor.full_tensor().sum()))
dist.destroy_process_group()
"""


@pytest.mark.processes
def test_ranks_fill_their_shards_of_a_distributed_tensor(tmp_path: Path) -> None:
    trainer = trained(1)
    save(trainer, tmp_path, 1)
    name = "0.token.weight"
    weight = dict(trainer.model.named_parameters([0]))[name]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shape = [str(length) for length in weight.shape]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SHARDED, str(rank), str(port), str(tmp_path), name, *shape],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    rows, sums = zip(*(line.split() for line, _ in outputs), strict=True)
    assert sum(map(int, rows)) == len(weight)
    assert float(sums[0]) == pytest.approx(float(weight.detach().sum()), rel=1e-12)

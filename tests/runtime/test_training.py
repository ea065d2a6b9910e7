"""Tests of finding, calling and checking a training function: each mistake gets an error that names it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from runtime.errors import TrainingError
from runtime.layers.model import first_batch
from runtime.training import Training, load_training
from tests.helpers.runtime_support import data_for, gpt_data, script

GOOD = """
def build(width=4):
    return Training(layers=[nn.Linear(3, width), nn.Linear(width, 1)], loss=functional.mse_loss,
                    optimizer=sgd, dataset=Rows())
"""


@pytest.fixture(autouse=True)
def import_path_restored() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name in {"neighbour", "package", "package.training"}:
            del sys.modules[name]


def changed(text: str, **parts: str) -> str:
    """Return GOOD with one field of Training changed."""
    fields = {
        "layers": "[nn.Linear(3, 4), nn.Linear(4, 1)]",
        "loss": "functional.mse_loss",
        "optimizer": "sgd",
        "dataset": "Rows()",
    } | parts
    inside = ", ".join(f"{name}={value}" for name, value in fields.items())
    return f"{text}\ndef build():\n    return Training({inside})\n"


def test_a_function_in_a_file_is_called_with_the_arguments(tmp_path: Path) -> None:
    script(tmp_path, GOOD)
    training = load_training(data_for("mine.py:build", tmp_path, arguments={"width": 7}))
    assert isinstance(training, Training)
    assert training.layers[0].weight.shape == (7, 3)


def test_a_file_may_lie_deeper_and_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    script(tmp_path / "models", "from neighbour import WIDTH\n" + GOOD.replace("width=4", "width=WIDTH"))
    (tmp_path / "models" / "neighbour.py").write_text("WIDTH = 9\n")
    training = load_training(data_for("models/mine.py:build", tmp_path))
    assert training.layers[0].weight.shape == (9, 3)


def test_a_function_in_a_package(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    script(tmp_path / "package", GOOD, name="training.py")
    assert len(load_training(data_for("package.training:build", tmp_path)).layers) == 2


def test_the_same_seed_gives_the_same_model_and_another_seed_another(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        import random
        import numpy
        def build():
            layer = nn.Linear(3, 1)
            layer.register_buffer("drawn", torch.tensor([random.random(), numpy.random.rand()]))
            return Training(layers=[layer], loss=functional.mse_loss, optimizer=sgd, dataset=Rows())
        """,
    )
    one, again, other = (
        load_training(data_for("mine.py:build", tmp_path, seed=seed)).layers[0].state_dict()
        for seed in (1, 1, 2)
    )
    for name, value in one.items():
        assert torch.equal(value, again[name])
        assert not torch.equal(value, other[name])


@pytest.mark.parametrize(
    ("precision", "dtype"), [("float32", "float32"), ("float64", "float64"), ("bfloat16", "float32")]
)
def test_parameters_and_data_have_the_precisions_parameter_type(
    tmp_path: Path, precision: str, dtype: str
) -> None:
    script(tmp_path, GOOD)
    training = load_training(data_for("mine.py:build", tmp_path, precision=precision))
    x, target = first_batch(training, 2, getattr(torch, dtype))
    dtypes = {p.dtype for layer in training.layers for p in layer.parameters()} | {x.dtype, target.dtype}
    assert dtypes == {getattr(torch, dtype)}
    assert len(training.dataset) == 40


def test_integer_data_is_left_alone_and_ties_survive_the_cast() -> None:
    training = load_training(gpt_data())
    assert training.dataset[0][0].dtype == torch.int64
    assert training.layers[0].token.weight is training.layers[-1].weight


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("mine.py", "must be written file.py:name or package.module:name"),
        ("mine.py:", "must be written"),
        (":build", "must be written"),
        ("mine.py:not a name", "must be written"),
        ("missing.py:build", r"training script .*missing\.py does not exist"),
        ("mine.py:bild", "defines no 'bild'; it defines sgd, build"),
        ("mine.py:WIDTH", "is a int, not a function"),
        ("no_such_package.module:build", "importing no_such_package.module .* raised ModuleNotFoundError"),
        ("storage.buckets:derive_buckets", "belongs to ftd"),
    ],
)
def test_a_function_that_cannot_be_found(tmp_path: Path, function: str, message: str) -> None:
    script(tmp_path, "WIDTH = 3\n" + GOOD)
    with pytest.raises(TrainingError, match=message):
        load_training(data_for(function, tmp_path))


def test_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"directory .*nowhere.* does not exist"):
        load_training(data_for("mine.py:build", tmp_path / "nowhere"))


def test_a_script_that_cannot_be_imported(tmp_path: Path) -> None:
    path = script(tmp_path, "x = 1 / 0\n" + GOOD)
    with pytest.raises(TrainingError, match=rf"importing {path} raised ZeroDivisionError.*mine.py, line \d+"):
        load_training(data_for("mine.py:build", tmp_path))


def test_arguments_that_the_function_does_not_take(tmp_path: Path) -> None:
    script(tmp_path, GOOD)
    with pytest.raises(TrainingError, match=r"\['depth'\].*unexpected keyword.*its signature is \(width=4\)"):
        load_training(data_for("mine.py:build", tmp_path, arguments={"depth": 3}))


def test_a_function_that_raises_names_the_line(tmp_path: Path) -> None:
    script(tmp_path, "def build():\n    raise LookupError('no data here')\n")
    with pytest.raises(TrainingError, match=r"LookupError: no data here \(mine.py, line \d+, in build\)"):
        load_training(data_for("mine.py:build", tmp_path))


def test_a_function_that_ends_the_process_names_the_line(tmp_path: Path) -> None:
    script(tmp_path, "import sys\ndef build():\n    sys.exit('no data here')\n")
    with pytest.raises(TrainingError, match=r"SystemExit: no data here \(mine.py, line \d+, in build\)"):
        load_training(data_for("mine.py:build", tmp_path))


def test_samples_may_be_numpy_arrays_and_numbers(tmp_path: Path) -> None:
    rows = "class Plain(Rows):\n    def __getitem__(self, index): return np.zeros(3), index % 2\n"
    script(tmp_path, changed("import numpy as np\n" + rows, dataset="Plain()"))
    x, target = first_batch(load_training(data_for("mine.py:build", tmp_path)), 2, torch.float64)
    assert (x.dtype, target.dtype, target.tolist()) == (torch.float64, torch.int64, [0, 1])


LINEARS = """
def share():
    one, two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    two.weight.data = one.weight.data
    return [one, two]

def twice():
    layer = nn.Linear(3, 3)
    return [layer, nn.ReLU(), layer]

def hooked():
    layer = nn.Linear(3, 1)
    layer.weight.register_hook(lambda gradient: gradient / 2)
    return [layer]

class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

class Empty(Rows):
    def __len__(self): return 0

class Broken(Rows):
    def __getitem__(self, index): raise KeyError("row")

class Single(Rows):
    def __getitem__(self, index): return torch.zeros(3)

class Named(Rows):
    def __getitem__(self, index): return {"x": torch.zeros(3), "y": 1}

class Words(Rows):
    def __getitem__(self, index): return "a sentence", 1
"""


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"layers": "[]"}, "a list of at least one nn.Module"),
        ({"layers": "nn.Linear(3, 1)"}, "a list of at least one nn.Module"),
        (
            {"layers": "[nn.Linear(3, 1), torch.relu]"},
            "layer 1 is a builtin_function_or_method, not an nn.Module",
        ),
        ({"layers": "twice()"}, "layer 2 is the same module as layer 0"),
        ({"layers": "share()"}, "parameters 0.weight and 1.weight share memory but are two"),
        ({"layers": "[nn.LazyLinear(4)]"}, "parameter weight of layer 0 is uninitialised"),
        (
            {"layers": "hooked()"},
            "parameter weight has a hook, which is lost when its layer moves; .*autograd.Function",
        ),
        (
            {"layers": "None", "model": "torch.compile(nn.Linear(3, 1))"},
            r"was compiled with torch.compile; .* compile = true in \[training\]",
        ),
        ({"loss": "None"}, "Training.loss is missing; only a model has a loss of its own"),
        ({"loss": "Loss()"}, "Training.loss has parameters"),
        ({"optimizer": "torch.ones(1)"}, "Training.optimizer must be a function"),
        ({"scheduler": "3"}, "Training.scheduler must be a function .* or None, not a int"),
        ({"files_from": "'/tmp'"}, "Training.files_from must be a list of directories"),
        ({"files_from": "['/nowhere']"}, "Training.files_from: /nowhere does not exist"),
        (
            {"dataset": "iter([])"},
            "a list_iterator, which has no .*impossible in a stream.*map-style data set",
        ),
        ({"dataset": "Empty()"}, "Training.dataset is empty"),
        ({"dataset": "Broken()"}, r"Training.dataset\[0\] raised KeyError"),
        (
            {"dataset": "torch.utils.data.DataLoader(Rows())"},
            "Training.dataset is a DataLoader; pass the loader's dataset",
        ),
        ({"dataset": "Single()"}, r"must be a pair \(input, target\), not a Tensor"),
        ({"dataset": "Named()"}, r"must be a pair \(input, target\), not a dict with 'x', 'y'"),
        ({"dataset": "Words()"}, r"Training.dataset\[0\]: the input must be a tensor, .* not a str"),
    ],
)
def test_a_training_that_cannot_be_used(tmp_path: Path, parts: dict[str, str], message: str) -> None:
    script(tmp_path, changed(LINEARS, **parts))
    with pytest.raises(TrainingError, match=message):
        load_training(data_for("mine.py:build", tmp_path))


def test_a_result_that_is_not_a_training_is_rejected(tmp_path: Path) -> None:
    script(tmp_path, "def build():\n    return [nn.Linear(3, 1)]\n")
    with pytest.raises(TrainingError, match=r"must return a Training, not list"):
        load_training(data_for("mine.py:build", tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"precision": "float8"},
            "precision 'float8' is not one of float32, tf32, bfloat16, float16, float64",
        ),
        ({"steps": 0}, "steps must be at least 1"),
        ({"global_batch": 10}, "global_batch 10 must be a positive multiple of microbatch 4"),
        ({"microbatch_rows": 0}, "must be a positive multiple of microbatch 0"),
        ({"seed": -1}, "seed -1 must lie between"),
        ({"clip_gradient_norm": 0.0}, "clip_gradient_norm must be above 0"),
        ({"clip_gradient_norm": float("nan")}, "clip_gradient_norm must be above 0"),
    ],
)
def test_numbers_out_of_range(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    script(tmp_path, GOOD)
    with pytest.raises(TrainingError, match=message):
        load_training(data_for("mine.py:build", tmp_path, **changes))


@pytest.mark.parametrize("clash", ["planner.py", "storage/__init__.py", "runtime/things.py", "ftd.py"])
def test_a_module_named_like_one_of_ours_is_a_named_clash(tmp_path: Path, clash: str) -> None:
    script(tmp_path, GOOD)
    (tmp_path / clash).parent.mkdir(exist_ok=True)
    (tmp_path / clash).write_text("")
    name = clash.removesuffix(".py").partition("/")[0]
    with pytest.raises(TrainingError, match=rf"{name}(\.py)? has the name of ftd's own package '{name}'"):
        load_training(data_for("mine.py:build", tmp_path))


def test_a_folder_of_data_named_like_one_of_ours_is_no_clash(tmp_path: Path) -> None:
    script(tmp_path, GOOD)
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / "rows.csv").write_text("")
    load_training(data_for("mine.py:build", tmp_path))


def test_a_job_in_ftds_own_repository_is_allowed() -> None:
    data = gpt_data()
    root = Path(data.path).parent
    load_training(msgspec.structs.replace(data, function="examples/gpt.py:build", path=str(root)))

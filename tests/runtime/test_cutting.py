"""Modules that are cut into layers: which are found, which are rejected and why, and ids beyond the
vocabulary.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from runtime.data.batches import cast_floating, default_collate, slice_rows
from runtime.errors import TrainingError
from runtime.layers.model import Model
from runtime.layers.modes import begin_training
from runtime.training import Training, load_training
from tests.helpers.architecture_runs import alone, check, job_of
from tests.helpers.architectures import ARCHITECTURES, Samples, lora
from tests.helpers.fleet import Fleet
from tests.helpers.harness import ROOT, pipeline
from tests.helpers.plain_loop import plain_loop
from tests.helpers.runtime_support import data_for, script

WIDTH = 6


class Points(Samples):
    """Rows of numbers under the names of ``forward``'s arguments."""

    def __init__(self) -> None:
        super().__init__("points")

    def _make(self, generator: torch.Generator) -> dict[str, Tensor]:
        x = torch.randn(WIDTH, generator=generator)
        return {"x": x, "y": x.sin()}


def squares(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.mse_loss(output, batch["y"])


def training_of(model: nn.Module | Callable[[], nn.Module], **changes: Any) -> Training:
    fields: dict[str, Any] = {
        "model": model,
        "loss": squares,
        "dataset": Points(),
        "optimizer": lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
    }
    return Training(**(fields | changes))


def model_of(root: nn.Module, **changes: Any) -> Model:
    return Model(training_of(root.double(), **changes), data_for("unused.py:build"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.linear(x).tanh()
        return out


class Masked(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = super().forward(x * mask)
        return out


class Chain(nn.Module):
    """An input, four blocks and an output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.outer(x)
        return out


# --- modules that are found ------------------------------------------------------------------------------


class Around(Chain):
    """A module with parameters of its own before, between and after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(WIDTH))
        self.between = nn.Parameter(torch.ones(WIDTH))
        self.after = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x) + self.place
        for block in self.blocks:
            x = block(x) * self.between
        out: Tensor = self.outer(x * self.after)
        return out


class Reading(Chain):
    """A module that reads parameters of submodules that it does not call there."""

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.inner.weight
        for block in self.blocks:
            x = block(x) + self.inner.bias
        out: Tensor = self.outer(x) @ self.outer.weight
        return out


class TiedByHand(Chain):
    """A module whose output has the weight of its input."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.outer(x), self.inner.weight)


class Shortcut(Chain):
    """A module that uses the result of its input after the blocks, too."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return x + 1e-4 * first


class Conditioned(nn.Module):
    """A diffusion transformer: its blocks and its output take an embedding of the time step."""

    class Modulated(Block):
        def forward(self, x: Tensor, condition: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x * condition)

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout))
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.narrow = nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(dropout))
        self.blocks = nn.ModuleList(self.Modulated() for _ in range(3))
        self.outer = self.Modulated()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        condition = self.narrow(self.embed(x).tanh())
        for block in self.blocks:
            hidden = block(hidden, condition)
        out: Tensor = self.outer(hidden, condition)
        return out


class Named(nn.Module):
    """A module whose blocks take and return everything by name; a scalar is passed on from block to block."""

    class Inner(Block):
        def forward(self, *, state: dict[str, Tensor], scale: float) -> dict[str, Tensor]:  # type: ignore[override]
            hidden = super().forward(state["hidden"] * scale)
            return {"hidden": hidden, "total": state["total"] + hidden.square().mean()}

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.Inner() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        state = {"hidden": self.inner(x), "total": x.new_zeros(())}
        for block in self.blocks:
            state = block(state=state, scale=0.5)
        return state["hidden"] * state["total"]


class Counted(Chain):
    """A module whose blocks add to a number for each row, which the module returns as the last block does."""

    class Adding(Block):
        def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), total + x.square().mean(1)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Adding() for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, total = self.inner(x), x.new_zeros(len(x))
        for block in self.blocks:
            x, total = block(x, total)
        return self.outer(x), total


def squares_and_total(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return squares(output[0], batch) + 0.1 * output[1].mean()


@dataclass
class State:
    hidden: Tensor


torch.export.register_dataclass(State)


class Stateful(Chain):
    """A module whose blocks take and return a dataclass."""

    class Inner(Block):
        def forward(self, state: Any) -> Any:
            return type(state)(super().forward(state.hidden))

    state: Any = State

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        state = self.state(self.inner(x))
        for block in self.blocks:
            state = block(state)
        out: Tensor = self.outer(state.hidden)
        return out


class Indexed(Chain):
    """A module whose blocks each take an embedding of their own."""

    sparse = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masked() for _ in range(3))
        self.tables = nn.ModuleList(nn.Embedding(2, WIDTH, sparse=self.sparse) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        found = [table((x[:, 0] > 0).long()) for table in self.tables]
        x = self.inner(x)
        for block, values in zip(self.blocks, found, strict=True):
            x = block(x, values)
        out: Tensor = self.outer(x)
        return out


class Backwards(nn.Module):
    """A module whose second list runs first."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.ModuleList(Block() for _ in range(2))
        self.early = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.early, *self.late):
            x = block(x)
        return x


class Wrapped(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def unlike() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH), Block())


FOUND: dict[str, tuple[Callable[[], nn.Module], Sequence[str] | None, list[str]]] = {
    "parameters around": (Around, None, [f"blocks.{i}" for i in range(4)]),
    "parameters read elsewhere": (Reading, None, [f"blocks.{i}" for i in range(4)]),
    "tied by hand": (TiedByHand, None, [f"blocks.{i}" for i in range(4)]),
    "used after the blocks": (Shortcut, None, [f"blocks.{i}" for i in range(4)]),
    "conditioned": (Conditioned, None, [f"blocks.{i}" for i in range(3)]),
    "by name": (Named, None, [f"blocks.{i}" for i in range(3)]),
    "returned as it is": (Counted, None, [f"blocks.{i}" for i in range(3)]),
    "next to a list of embeddings": (Indexed, None, [f"blocks.{i}" for i in range(3)]),
    "dataclasses": (Stateful, None, [f"blocks.{i}" for i in range(3)]),
    "in the order that they run": (Backwards, None, ["early.0", "early.1", "late.0", "late.1"]),
    "a sequential": (lambda: Wrapped(unlike()), None, [f"net.{i}" for i in range(4)]),
    "the blocks inside": (
        lambda: Wrapped(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Block(), Block()))),
        None,
        ["net.1.0", "net.1.1"],
    ),
    "split": (Chain, ["inner", "blocks.1", "outer"], ["inner", "blocks.1", "outer"]),
}


def loss_for(make: Any) -> Any:
    return squares_and_total if make is Counted else squares


@pytest.mark.parametrize("case", FOUND)
def test_a_module_is_cut_before_its_blocks(case: str) -> None:
    make, split, names = FOUND[case]
    model = model_of(make(), split=split, loss=loss_for(make))
    found = [model.layer_name(layer).split(" ")[0] for layer in range(1, model.layer_count - 1)]
    assert found == names


MAKERS: dict[str, Callable[[], nn.Module]] = {name: make for name, (make, _, _) in FOUND.items()}


def build(case: str, deferred: bool = False) -> Training:
    make = MAKERS[case]
    return training_of(make if deferred else make(), split=FOUND[case][1], loss=loss_for(make))


@pytest.mark.parametrize(
    ("case", "deferred"),
    [
        *((case, False) for case in FOUND),
        ("parameters read elsewhere", True),
        ("tied by hand", True),
        ("conditioned", True),
    ],
)
def test_layers_train_like_the_whole(case: str, deferred: bool) -> None:
    """Each layer is a stage of its own, next to a pipeline of one stage."""
    steps = 4
    job = msgspec.structs.replace(
        job_of("", steps=steps),
        function="tests.runtime.test_cutting:build",
        arguments={"case": case, "deferred": deferred},
    )
    expected = plain_loop(lambda: build(case), job, steps)
    layers = len(FOUND[case][2]) + 2
    with Fleet(job, layers + 1) as fleet:
        stages = [(layer, layer + 1, [layer]) for layer in range(layers)]
        fleet.enter(
            fleet.engines,
            (
                pipeline(*stages, first_microbatch=0, microbatches=3),
                pipeline((0, layers, [layers]), first_microbatch=3, microbatches=1),
            ),
        )
        fleet.steps(steps)
        check([fleet.votes[step] for step in range(1, steps + 1)], expected)


def test_embeddings_with_sparse_gradients_get_dense_ones_which_ranks_can_sum() -> None:
    class Sparse(Indexed):
        sparse = True

    root = Sparse()
    model = model_of(root)
    batch = {"x": torch.ones(2, WIDTH, dtype=torch.float64)}
    model.forward(0, model.layer_count, None, step=1, row=0, batch=batch).sum().backward()
    gradient = root.tables[0].weight.grad
    assert gradient is not None and gradient.layout == torch.strided


def test_a_module_that_is_itself_a_sequential_has_its_own_names() -> None:
    class Rows(Points):
        def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
            return super().__getitem__(index)["x"]

    model = model_of(
        nn.Sequential(Block(), Block()),
        dataset=Rows(),
        loss=lambda output, batch: functional.mse_loss(output, batch.sin()),
    )
    assert list(model.parameter_layers)[:2] == ["0.linear.weight", "0.linear.bias"]
    assert model.layer_name(2) == "1 (Block)"


# --- modules that are rejected ---------------------------------------------------------------------------


class NoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.other(self.one(x).tanh())
        return out


class Twice(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(block(x))
        return x


class Unused(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[1:]:
            x = block(x)
        return x


class EarlyExit(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            if x.abs().sum() > 0:
                x = block(x)
        return x


class Collected(Chain):
    def forward(self, x: Tensor) -> Tensor:
        found = []
        for block in self.blocks:
            x = block(x)
            found.append(x)
        return torch.stack(found).sum(0)


class FaintShortcut(Chain):
    """A difference of 1e-4, which rounding cannot explain."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.blocks[0](self.inner(x))
        for block in self.blocks[1:]:
            x = block(x)
        return x + 1e-4 * first


class SkipsOne(Chain):
    """A residual connection past one block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.inner(x))
        x = self.blocks[2](x + self.blocks[1](x))
        return self.blocks[3](x)  # type: ignore[no-any-return]


class Measured(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x) * x.max().item()
        return x


class Counting(Chain):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        return x * self.calls


class Averaging(Chain):
    """A module that changes a buffer of its own in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.training:
            self.average.mul_(0.9).add_(x.detach().mean(0))
        for block in self.blocks:
            x = block(x)
        return x + self.average


class Assigning(Averaging):
    """A module that assigns another tensor to a buffer of its own in training."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return x


class Scoring(Averaging):
    """A module with a loss of its own that changes a buffer of its own in training."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": functional.mse_loss(super().forward(x), y)}


class Placed(Chain):
    """A chain with dropout that also takes a tensor without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Block(), nn.Dropout(0.5)) for _ in range(2))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + places.sum())


def test_a_batch_that_begins_with_a_tensor_without_rows_may_be_cut() -> None:
    def collate(samples: list[Any]) -> dict[str, Tensor]:
        return {"places": torch.ones(3, 3), **default_collate(samples)}

    model = model_of(Placed(), collate=collate)
    batch = cast_floating(collate([Points()[i] for i in range(4)]), torch.float64)

    def run(start: int, end: int) -> Tensor:
        rows = slice_rows(batch, start, end, 4)
        out: Tensor = model.forward(0, 4, None, step=1, row=start, rows=end - start, batch=rows)
        return out

    torch.testing.assert_close(torch.cat([run(0, 1), run(1, 4)]), run(0, 4))


class Output(NamedTuple):
    y: Tensor


class Named(Chain):
    def forward(self, x: Tensor) -> Any:
        return Output(super().forward(x))


def test_a_loss_gets_a_named_output_as_the_model_returns_it() -> None:
    def loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
        return functional.mse_loss(output.y, batch["y"])

    assert model_of(Named(), loss=loss).layer_count == 6


class ReadingBlock(Chain):
    """A module that reads a parameter of a block around the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.blocks[1].linear.bias)


class Overwriting(Chain):
    """A chain whose code changes the output of a block in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x).relu_()
        return self.outer(x)


class Keeping(Chain):
    """A module whose blocks keep a part of the loss in an attribute."""

    class Inner(Block):
        balance: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.balance = x.square().mean()
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.blocks[0].balance


class Gathering(Keeping):
    """A module whose blocks keep parts of the loss in one list."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(lambda block, _, output: self.found.append(block.balance))

    def forward(self, x: Tensor) -> Tensor:
        self.found.clear()
        return Chain.forward(self, x) + sum(self.found)


@dataclass
class Unregistered:
    hidden: Tensor


class UnknownState(Stateful):
    state = Unregistered


class Complex(Chain):
    """A module whose blocks take complex numbers."""

    class Inner(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.complex(super().forward(x.real), x.imag)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.complex(self.inner(x), x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.outer(x.abs())
        return out


class Bounded(Chain):
    """A module that changes a parameter while it runs."""

    class Inner(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.linear.weight.clamp_(-1, 1)
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(3))


class Forgetting(Chain):
    """A module whose blocks keep a table, and an average that gets lost, in buffers that are not persistent."""

    class Inner(Block):
        counts = True

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", None, persistent=False)
            self.register_buffer("average", torch.ones(WIDTH), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.arange(WIDTH, dtype=x.dtype)
            if self.training and self.counts:
                self.average = 0.9 * self.average + 0.1 * x.detach().abs().mean(0)
            return super().forward(x * self.average + self.table)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Inner() for _ in range(3))


class Remembering(Forgetting):
    """The same without the average: a table is computed by every stage that needs it."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.counts = False


class Hooked(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].register_full_backward_hook(lambda module, given, received: None)


WAYS_OUT = r"Training\(split=\[\.\.\.\]\).*Training\(layers=\[\.\.\.\]\)"
REFUSED = [
    (NoBlocks, {}, rf"NoBlocks has no list of equal blocks .*{WAYS_OUT}"),
    (Twice, {}, rf"Twice cannot be cut at blocks.0 … blocks.3: blocks.0 runs more than once.*{WAYS_OUT}"),
    (Unused, {}, rf"Unused cannot be cut at .*: blocks.0 did not run; .*{WAYS_OUT}"),
    (EarlyExit, {}, rf"EarlyExit cannot be cut .*: blocks.0 did not run; its forward chooses .*{WAYS_OUT}"),
    (
        Collected,
        {},
        r"Collected cannot be cut .*: the output of the model is also computed from the output of blocks.0, past "
        rf"blocks.1 … blocks.3; .* of blocks.2, past blocks.3; .*{WAYS_OUT}",
    ),
    (
        FaintShortcut,
        {},
        r"from the output of blocks.0, past blocks.1 … blocks.3; only what a block takes crosses",
    ),
    (
        SkipsOne,
        {},
        r"the input of blocks.2 is also computed from the output of blocks.0, past blocks.1; only",
    ),
    (Measured, {}, r"Measured cannot be cut .*depends on the values that it computes"),
    (
        Overwriting,
        {},
        r"The input or output of a block is changed in place; write x = f\(x\), or inplace=False",
    ),
    (Counting, {}, r"Counting cannot be cut .*keeps state from one call to the next"),
    (Averaging, {}, rf"Averaging cannot be cut .*: its forward changes average around .*{WAYS_OUT}"),
    (Assigning, {}, r"Assigning cannot be cut .*: its forward changes average around "),
    (
        ReadingBlock,
        {},
        rf"ReadingBlock cannot be cut .*: code outside of blocks.1 reads a parameter of it.*{WAYS_OUT}",
    ),
    (
        Keeping,
        {},
        r"Keeping cannot be cut .*running what runs after blocks.3 alone raised TypeError.*blocks keep tensors in "
        r"attributes \(blocks.0.balance, .* let each block take and return such a value",
    ),
    (Gathering, {}, r"Gathering cannot be cut .*blocks keep tensors in attributes \(blocks.0.balance"),
    (UnknownState, {}, r"blocks.0 takes or returns an object of class Unregistered, .*register_dataclass"),
    (Complex, {}, r"what runs before blocks.0 passes a complex tensor on, .*torch.view_as_real"),
    (Bounded, {}, r"blocks.0 \(Inner\) changes its parameter blocks.0.linear.weight while it runs"),
    (Forgetting, {}, r"blocks.0 \(Inner\) changes the buffer blocks.0.average .*persistent=True"),
    (Hooked, {}, r"Hooked cannot be cut .*: blocks.2 has a backward hook, .*submodule of a block"),
    (Scoring, {"loss": None}, r"Scoring cannot be cut .*: its forward changes average around "),
    (
        Chain,
        {"split": ["blocks.0", "head"]},
        r"split names 'head', which Chain does not have; .* inner, blocks",
    ),
    (Chain, {"split": []}, "Training.split is empty"),
    (Chain, {"split": ["blocks", "blocks.1"]}, r"split names 'blocks.1', which is inside of 'blocks'"),
    (Chain, {"split": ["inner", "inner"]}, "split names 'inner' twice"),
    (Chain, {"split": ["outer", "inner"]}, r"Chain cannot be cut .*: they run in the order inner, outer"),
    (Chain, {"loss": None}, r"Chain returned no loss; the samples have no 'labels'"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), REFUSED)
def test_a_module_that_cannot_be_cut_is_rejected(
    kind: type[nn.Module], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        model_of(kind(), **changes)


class Calls(Chain):
    """A module that returns how often it was called."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * 0 + self.calls


def test_a_comparison_with_the_whole_names_means_and_not_sums() -> None:
    with pytest.raises(TrainingError, match=r"it returns \d+, run as a whole \d,"):
        model_of(Calls(), loss=lambda output, batch: output.mean())


class Adapted(Chain):
    """A wrapper that passes everything on, as a model of peft does."""

    def get_base_model(self) -> nn.Module:
        return self.inner

    def __init__(self) -> None:
        super().__init__()
        self.inner = Chain()

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        out: Tensor = self.inner(*arguments, **named)
        return out


@pytest.mark.parametrize("kind", [Remembering, Adapted])
def test_a_module_is_accepted(kind: type[nn.Module]) -> None:
    assert model_of(kind(), split=None if kind is Remembering else ["inner.blocks.1"]).layer_count > 2


class Random(Chain):
    """A module that skips blocks at random once ``starts`` is set."""

    starts = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.starts:
                x = block(x)
        return x


def test_a_module_that_skips_blocks_later_ends_the_step() -> None:
    root = Random()
    model = model_of(root)
    root.starts = True
    batch = {"x": torch.ones(4, WIDTH, dtype=torch.float64)}
    with pytest.raises(TrainingError, match=r"Random cannot be cut .*: blocks.0 did not run; its forward"):
        model.forward(0, 2, None, step=1, row=0, batch=batch)


def test_a_loss_that_is_not_a_number_is_not_blamed_on_the_cut() -> None:
    """The job begins, and its first steps say where the value comes from."""
    root = Chain()
    with torch.no_grad():
        next(root.parameters()).fill_(float("nan"))
    assert model_of(root).layer_count == 6


class OwnCheckpointing(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if torch.is_grad_enabled() else block(x)
        return x


def test_a_module_that_checkpoints_its_blocks_itself_is_rejected_in_the_first_step() -> None:
    """Run again without its window, a block would not take the received tensors."""
    model = model_of(OwnCheckpointing())
    batch = {"x": torch.ones(4, WIDTH, dtype=torch.float64), "y": torch.ones(4, WIDTH, dtype=torch.float64)}
    output = model.forward(0, model.layer_count, None, step=1, row=0, batch=batch)
    with pytest.raises(
        TrainingError, match=r"torch.utils.checkpoint around its blocks.*activation_checkpointing"
    ):
        model.loss(output, batch, 4)[0].backward()


MADE = """
    def build(change="", **options):
        from transformers import AutoConfig, AutoModelForCausalLM
        config = AutoConfig.for_model(
            "opt", hidden_size=8, ffn_dim=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=20,
            max_position_embeddings=16, word_embed_proj_dim=8, **options)
        model = AutoModelForCausalLM.from_config(config)
        if change == "placed":
            model.hf_device_map = {"": 0}
        if change == "quantised":
            model.is_quantized = True
        if change == "checkpointing":
            model.gradient_checkpointing_enable()
        if change == "frozen":
            model.requires_grad_(False)
        if change == "none":
            model = "facebook/opt-125m"
        if change == "maker":
            model = lambda: "facebook/opt-125m"
        return Training(model=model, optimizer=sgd, dataset=Rows())
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"change": "placed"}, "OPTForCausalLM was loaded with device_map.*load it without device_map"),
        ({"change": "quantised"}, "OPTForCausalLM is quantised.*in full precision"),
        (
            {"change": "checkpointing"},
            "has gradient checkpointing enabled.*activation_checkpointing = ",
        ),
        ({"change": "frozen"}, "OPTForCausalLM has no trainable parameter"),
        ({"change": "none"}, "Training.model must be an nn.Module or a function that makes one, not a str"),
        ({"change": "maker"}, "Training.model must make an nn.Module, not a str"),
        ({"layerdrop": 0.1}, r"leaves out blocks by chance \(layerdrop\).*set layerdrop = 0"),
    ],
)
def test_a_model_that_cannot_be_trained_is_rejected(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    script(tmp_path, MADE)
    with pytest.raises(TrainingError, match=message):
        load_training(data_for("mine.py:build", tmp_path, arguments=arguments))


# --- losses ------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """A language model without a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def mean_over_tokens(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def sum_over_tokens(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def weighed(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return sum_over_tokens(output, batch), (batch["labels"] != -100).sum()


def wrongly_weighed(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return mean_over_tokens(output, batch), len(output)


def test_a_mean_over_unequal_numbers_of_tokens_is_rejected_with_the_remedy() -> None:
    with pytest.raises(
        TrainingError, match=r"unequal numbers of targets that are -100.*return \(sum, weight\)"
    ):
        model_of(Tokens(), dataset=Samples("masked"), loss=mean_over_tokens)


@pytest.mark.parametrize("loss", [sum_over_tokens, wrongly_weighed])
def test_a_loss_that_is_neither_a_mean_nor_a_sum_over_its_weight_is_rejected(loss: Any) -> None:
    with pytest.raises(TrainingError, match=r"unequal numbers of|so it would depend on how rows are grouped"):
        model_of(Tokens(), dataset=Samples("masked"), loss=loss)


def test_a_loss_that_is_detached_is_rejected() -> None:
    with pytest.raises(TrainingError, match=r"the loss has no gradient: .*return the tensor itself"):
        model_of(Chain(), loss=lambda output, batch: squares(output, batch).detach())


def test_a_loss_that_reads_parameters_of_earlier_stages_is_rejected() -> None:
    root = Chain()

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return squares(output, batch) + sum(parameter.square().sum() for parameter in parameters)

    parameters = list(root.outer.parameters())
    assert model_of(root, loss=loss).layer_count == 6
    root = Chain()
    parameters = list(root.parameters())
    with pytest.raises(TrainingError, match=r"the loss reads the parameter inner.weight, .*weight_decay"):
        model_of(root, loss=loss)


def contrastive(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output @ batch["y"].T, torch.arange(len(output)))


def in_fours(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output @ batch["y"].T, torch.arange(4))


@pytest.mark.parametrize("loss", [contrastive, in_fours])
def test_a_loss_that_compares_rows_is_rejected_with_the_remedy(loss: Any) -> None:
    with pytest.raises(TrainingError, match=r"contrastive\), let a sample be a group of .* microbatch = 1"):
        model_of(Chain(), loss=loss)


def test_a_sum_and_its_weight_are_accepted() -> None:
    model = model_of(Tokens(), dataset=Samples("masked"), loss=weighed)
    assert model.loss.nominal_weight > 1


def test_masks_that_become_unequal_later_end_the_step() -> None:
    """The first samples have equal numbers of labels."""

    class Equal(Samples):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {key: value for key, value in super().__getitem__(index).items() if key != "labels"} | {
                "labels": torch.arange(self.length)
            }

    model = model_of(Tokens(), dataset=Equal("masked"), loss=mean_over_tokens)
    labels = torch.arange(20).view(2, 10)
    labels[1, 3:] = -100
    batch = {"input_ids": torch.zeros(2, 10, dtype=torch.int64), "labels": labels}
    output = model.forward(0, model.layer_count, None, step=1, row=0, batch=batch)
    with pytest.raises(
        TrainingError, match=r"unequal numbers of targets that are -100.*return \(sum, weight\)"
    ):
        model.loss(output, batch, 2)
    own = model.forward(0, model.layer_count, None, step=1, row=0, batch=slice_rows(batch, 0, 1, 2))
    with pytest.raises(TrainingError, match=r"unequal numbers of targets"):  # on every device of a stage
        model.loss(own, slice_rows(batch, 0, 1, 2), 1, microbatch=(batch, 2))


def test_a_mean_over_the_rows_with_a_class_is_rejected_like_one_over_tokens() -> None:
    class Classes(Points):
        def _make(self, generator: torch.Generator) -> dict[str, Tensor]:
            return {"x": torch.randn(WIDTH, generator=generator), "y": torch.tensor(1)}

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(output, batch["y"])

    model = model_of(Chain(), dataset=Classes(), loss=loss)
    batch = {"x": torch.zeros(3, WIDTH, dtype=torch.float64), "y": torch.tensor([1, -100, 2])}
    with pytest.raises(TrainingError, match=r"unequal numbers of targets that are -100"):
        model.loss(torch.zeros(3, WIDTH), batch, 3)
    assert float(model.loss(torch.zeros(3, WIDTH), batch | {"y": torch.tensor([1, 2, 2])}, 3)[1]) == 3


# --- random numbers around the blocks -----------------------------------------------------------------------


class Masking(Chain):
    """A chain whose blocks take a mask that the code around them draws before the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masked() for _ in range(4))

    def draw(self) -> Tensor:
        return (torch.rand(WIDTH) > 0.5 if self.training else torch.ones(WIDTH)).double()

    def forward(self, x: Tensor) -> Tensor:
        mask = self.draw()
        x = self.inner(x)
        for block in self.blocks:
            x = block(x, mask)
        return x * mask


class MaskingEach(Masking):
    """A chain that draws a mask between its blocks and uses it together with the one before."""

    def forward(self, x: Tensor) -> Tensor:
        x, mask = self.inner(x), self.draw()
        for block in self.blocks:
            x, mask = block(x, mask), mask + self.draw()
        return x * mask


class MaskingByDropout(Masking):
    def draw(self) -> Tensor:
        return functional.dropout(torch.ones(1, WIDTH), 0.5, self.training).double()


class MaskingByNumpy(Masking):
    def draw(self) -> Tensor:
        return torch.from_numpy(np.random.rand(WIDTH)) if self.training else super().draw()


class MaskingEarly(Conditioned):
    """A module whose submodules before the first block draw masks."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)


@pytest.mark.parametrize("kind", [Masking, MaskingEach, MaskingByDropout, MaskingByNumpy, MaskingEarly])
def test_code_around_the_blocks_draws_the_same_numbers_in_every_stage(kind: type[nn.Module]) -> None:
    model = model_of(kind())
    batch = {"x": torch.randn(2, WIDTH, dtype=torch.float64)}
    count = model.layer_count

    def run(*starts: int) -> Tensor:
        x: Any = None
        for first, end in itertools.pairwise((*starts, count)):
            x = model.forward(first, end, x, step=1, row=0, batch=batch)
        return x  # type: ignore[no-any-return]

    whole = run(0)
    for starts in ((0, 3), (0, 1, 2, count - 1), range(count)):
        assert torch.equal(run(*starts), whole)


class Diffusing(Chain):
    """A module with a loss of its own that predicts noise, which it draws in evaluation mode, too."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        noise = torch.randn_like(x)
        return {"loss": functional.mse_loss(super().forward(x + noise), noise)}


class Drawing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn_like(x)


class DrawingBlocks(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Drawing() for _ in range(4))


def noisy_squares(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return squares(output + torch.randn_like(output), batch)


@pytest.mark.parametrize(
    ("kind", "loss"), [(Diffusing, None), (DrawingBlocks, squares), (Chain, noisy_squares)]
)
def test_a_model_may_draw_random_numbers_in_evaluation_mode(kind: type[nn.Module], loss: Any) -> None:
    assert model_of(kind(), loss=loss).layer_count == 6


# --- training and evaluation mode --------------------------------------------------------------------------


class Normal(nn.Module):
    """A block with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.linear(self.norm(x))
        return out


class Normalised(Chain):
    """A chain whose input and first block are in evaluation mode, and whose second block is in part."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Normal() for _ in range(3))
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).eval()
        self.blocks[0].eval()
        self.blocks[1].norm.eval()


def build_normalised(deferred: bool) -> Training:
    return training_of(Normalised if deferred else Normalised())


@pytest.mark.parametrize("deferred", [False, True])
def test_modules_that_the_user_put_into_evaluation_mode_stay_there(deferred: bool) -> None:
    steps = 4
    arguments = {"deferred": deferred}
    job = msgspec.structs.replace(
        job_of("", steps=steps),
        function="tests.runtime.test_cutting:build_normalised",
        arguments=arguments,
    )
    expected = plain_loop(lambda: build_normalised(deferred), job, steps)
    with Fleet(job, 2) as fleet:
        layers = fleet.engines[0].model.layer_count
        fleet.enter(
            fleet.engines,
            (pipeline((0, 2, [0]), (2, layers, [1]), first_microbatch=0, microbatches=4),),
        )
        fleet.steps(steps)
        check([fleet.votes[step] for step in range(1, steps + 1)], expected)


def pretrained(**options: Any) -> Any:
    """Return a model in evaluation mode, as ``from_pretrained`` does."""
    return ARCHITECTURES["bert"].make(**options).eval()


class Headed(nn.Module):
    """A pretrained model with a new head, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body = pretrained(hidden_dropout_prob=0.1)
        self.teacher = pretrained(hidden_dropout_prob=0.1).requires_grad_(False)
        self.head = nn.Linear(4, 4)


def test_pretrained_models_are_in_evaluation_mode_only_if_the_user_put_them_there() -> None:
    whole = pretrained()
    begin_training([whole])
    assert all(module.training for module in whole.modules())

    part = pretrained().train()
    part.bert.embeddings.eval()
    part.bert.encoder.eval()
    begin_training([part])
    assert part.training and part.bert.training
    assert not any(m.training for m in (*part.bert.embeddings.modules(), *part.bert.encoder.modules()))

    headed = Headed()
    begin_training([headed])
    assert headed.training and all(module.training for module in headed.body.modules())
    assert not any(module.training for module in headed.teacher.modules())

    adapted = lora(pretrained())
    begin_training([adapted])
    assert all(module.training for module in adapted.modules())


# --- ids beyond the vocabulary -------------------------------------------------------------------------

CORRUPTED = """
    import sys
    sys.path.insert(0, {root!r})
    from tests.helpers.architectures import ARCHITECTURES, Samples

    class Corrupted(Samples):
        def __getitem__(self, index):
            sample = {{key: value.clone() for key, value in super().__getitem__(index).items()}}
            if index == self.corrupt:
                sample[self.key][1] = self.number
            return sample

    def build(architecture, key, number, corrupt):
        dataset = Corrupted(ARCHITECTURES[architecture].task)
        dataset.key, dataset.number, dataset.corrupt = key, number, corrupt
        return Training(model=ARCHITECTURES[architecture].make(), optimizer=sgd, dataset=dataset)
"""


@pytest.mark.parametrize(
    ("architecture", "key", "number", "message"),
    [
        (
            "llama",
            "input_ids",
            64,
            r"has the token id 64 in 'input_ids', but the vocabulary of Llama.* 64 ids",
        ),
        ("bert", "input_ids", -1, r"has the token id -1 in 'input_ids'"),
        ("t5", "labels", 70, r"has the label 70, but T5.* predicts one of 64 ids"),
        ("gpt2", "labels", -1, r"has the label -1, .* give positions that do not count the label -100"),
    ],
)
def test_an_id_beyond_the_vocabulary_is_named_with_its_sample(
    tmp_path: Path, architecture: str, key: str, number: int, message: str
) -> None:
    """The error occurs when the model is created if the id is in the first samples, and otherwise in its step."""
    script(tmp_path, CORRUPTED.format(root=str(ROOT)))
    arguments = {"architecture": architecture, "key": key, "number": number}
    job = data_for("mine.py:build", tmp_path, arguments=arguments | {"corrupt": 1})
    with pytest.raises(TrainingError, match=f"sample 1 of Training.dataset {message}"), Fleet(job, 1):
        pass
    job = msgspec.structs.replace(job, arguments=arguments | {"corrupt": 50})
    with Fleet(job, 1) as fleet:
        fleet.enter(fleet.engines, alone(fleet.engines[0].model.layer_count))
        with pytest.raises(
            TrainingError, match=rf"microbatch \d of step \d .*: sample 50 of Training.* {message}"
        ):
            fleet.steps(4)

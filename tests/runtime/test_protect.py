"""Tests of ``protect`` within one process: what it rejects, and where a loader continues."""

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from ftd import SnapshotError, Snapshotter, protect
from runtime.script.integrations.resumable_loader import ResumableLoader, ResumePoint
from runtime.script.random_states import random_states

NUMBERS = TensorDataset(torch.arange(20))


class Noisy(IterableDataset[Tensor]):
    """Data in an order that the global generator decides."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.randperm(20)


def with_own_generator() -> DataLoader[Any]:
    sampler = RandomSampler(NUMBERS, generator=torch.Generator().manual_seed(5))
    return DataLoader(NUMBERS, batch_size=3, sampler=sampler)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "global generator": lambda: DataLoader(NUMBERS, batch_size=3, shuffle=True),
    "own generator": with_own_generator,
    "iterable": lambda: DataLoader(Noisy(), batch_size=3),
    "workers that stay": lambda: DataLoader(
        NUMBERS, batch_size=3, shuffle=True, num_workers=1, persistent_workers=True
    ),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_a_loader_continues_in_its_second_epoch_with_the_batches_that_are_left(
    make: Callable[[], DataLoader[Any]],
) -> None:
    torch.manual_seed(1)
    whole = ResumableLoader(make())
    list(whole)
    batches = iter(whole)
    for _ in range(4):
        next(batches)
        torch.rand(1)  # The model draws random numbers, too.
    point = ResumePoint(start=whole.start, batches=4, random=random_states())
    left = [str(batch) for batch in batches] + [str(torch.rand(1))]
    following = [str(batch) for batch in whole]

    torch.manual_seed(99)
    other = ResumableLoader(make())
    other.resume(point)
    assert [str(batch) for batch in other] + [str(torch.rand(1))] == left
    assert [str(batch) for batch in other] == following


def test_an_epoch_that_was_completed_is_not_repeated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def protected() -> Any:
        model = nn.Linear(2, 1)
        return protect(
            DataLoader(NUMBERS, batch_size=10, shuffle=True),
            "job",
            epochs=3,
            model=model,
            directory=tmp_path,
        )

    first = protected()
    assert len(list(first)) == 2
    next(iter(first))
    first.snapshots.close()
    second = protected()
    assert second.step == 2 and list(second.epochs()) == [0, 1, 2]
    assert list(second) == []  # The last snapshot is that of the epoch's last batch.
    assert [len(list(second)) for _ in range(2)] == [2, 2]
    assert not (tmp_path / "job").exists()
    assert "code after each" not in caplog.text  # The script uses epochs().
    next(iter(second))  # A look at a batch is no epoch.
    with pytest.raises(SnapshotError, match=r"trains more epochs than protect\(\) was given \(epochs=3\)"):
        list(second)


def test_a_script_whose_code_after_completed_epochs_runs_again_is_warned_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def protected() -> Any:
        loader = DataLoader(NUMBERS, batch_size=10)
        return protect(loader, "job", epochs=3, model=nn.Linear(2, 1), directory=tmp_path)

    first = protected()
    lengths = [len(list(first)) for _ in range(2)]
    next(batches := iter(first))
    next(batches)
    first.snapshots.close()
    second = protected()
    assert lengths + [len(list(second)) for _ in range(3)] == [2, 2, 0, 0, 1]
    assert caplog.text.count("the 2 epochs that were completed before the restart") == 1
    assert "loader.epochs()" in caplog.text


def test_after_an_epoch_that_was_left_early_the_next_one_begins(tmp_path: Path) -> None:
    def protected() -> Any:
        loader = DataLoader(NUMBERS, batch_size=2)
        return protect(loader, "job", epochs=3, model=nn.Linear(2, 1), directory=tmp_path)

    def run(loader: Any, seen: list[Any], until: int) -> None:
        for epoch in loader.epochs():
            for batch in loader:
                seen.append((epoch, batch[0].tolist()[0]))
                if len(seen) == until:
                    loader.snapshots.close()
                    return
                if batch[0].tolist() == [6, 7]:
                    break
        loader.snapshots.remove()

    whole: list[Any] = []
    run(protected(), whole, 0)
    assert whole == [(epoch, first) for epoch in range(3) for first in (0, 2, 4, 6)]
    parts: list[Any] = []
    run(protected(), parts, 7)
    assert parts.pop() == (1, 4)  # Its snapshot follows the code of the batch.
    run(protected(), parts, 0)
    assert parts == whole


class Script:
    """Three epochs over a protected loader, of which the optimizer and the generators remember everything."""

    def __init__(self, loader: DataLoader[Any], folder: Path) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.loader = protect(
            loader, "job", epochs=3, model=self.model, optimizer=self.optimizer, directory=folder
        )

    def step(self, batch: Any) -> str:
        values = (batch[0] if isinstance(batch, list) else batch)[:, None].float()
        noise = torch.rand(1)
        self.optimizer.zero_grad()
        (self.model(values) + noise).square().mean().backward()
        self.optimizer.step()
        return f"{values.flatten().tolist()} {noise.item()} {self.model.weight.item()}"


def peeking(script: Script) -> Iterator[str]:
    next(iter(script.loader), None)  # The first epoch may be over.
    for _ in script.loader.epochs():
        for batch in script.loader:
            yield script.step(batch)


def peeking_in_the_loop(script: Script) -> Iterator[str]:
    for epoch in script.loader.epochs():
        for batch in script.loader:
            seen = next(iter(script.loader)) if script.loader.step % 6 == 4 else ""
            yield f"{epoch} {seen} {script.step(batch)}"


def first_batches(script: Script) -> Iterator[str]:
    for epoch in script.loader.epochs():
        for batch in script.loader:
            yield f"{epoch} {script.loader.step} {script.step(batch)}"
            break
    script.loader.snapshots.remove()


def stateful() -> DataLoader[Any]:
    loader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    torch.manual_seed(1)  # Its sampler draws a seed now.
    made: DataLoader[Any] = loader(NUMBERS, batch_size=3, shuffle=True)
    return made


@pytest.mark.parametrize(
    ("run", "make", "length"),
    [
        *((peeking, make, 21) for make in (*LOADERS.values(), stateful)),
        (peeking_in_the_loop, LOADERS["global generator"], 21),
        *((first_batches, make, 3) for make in LOADERS.values()),
    ],
    ids=[
        *(f"peek, {name}" for name in (*LOADERS, "stateful")),
        "peek in the loop",
        *(f"first, {n}" for n in LOADERS),
    ],
)
def test_a_loop_that_looks_at_batches_or_leaves_at_the_first_one_continues_where_it_was(
    run: Callable[[Script], Iterator[str]], make: Callable[[], DataLoader[Any]], length: int, tmp_path: Path
) -> None:
    whole = list(run(Script(make(), tmp_path)))
    assert len(set(whole)) == length
    assert not (tmp_path / "job").exists()
    parts: list[str] = []
    for count in (length // 3 + 3, length // 3, length):
        script = Script(make(), tmp_path)
        part = list(itertools.islice(run(script), count))
        parts += part[:-1] if count < length else part  # Its snapshot follows the code of a batch.
        script.loader.snapshots.close()
        if len(parts) >= length:
            break
    assert parts == whole


def test_a_loader_whose_workers_stay_may_be_looked_at_before_it_is_protected(tmp_path: Path) -> None:
    def run(count: int) -> list[str]:
        loader = DataLoader(NUMBERS, batch_size=3, shuffle=True, num_workers=1, persistent_workers=True)
        next(iter(loader))
        script = Script(loader, tmp_path)
        steps = (script.step(batch) for _ in script.loader.epochs() for batch in script.loader)
        part = list(itertools.islice(steps, count))
        script.loader.snapshots.close()
        return part

    whole = run(22)
    assert len(whole) == 21 and run(4)[:3] + run(22) == whole


def test_what_cannot_be_protected_is_rejected_by_name() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(SnapshotError, match=r"cannot protect a Linear.*data loader"):
        protect(model, "job")
    with pytest.raises(SnapshotError, match="every must be a number of steps from 1 on, not 0"):
        protect(DataLoader(NUMBERS), "job", every=0, epochs=1, model=model)
    with pytest.raises(SnapshotError, match="how often the script runs over the loader, not None"):
        protect(DataLoader(NUMBERS), "job", model=model)


def test_lightning_epochs_of_one_batch_are_rejected(tmp_path: Path) -> None:
    pl = pytest.importorskip("pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    class Model(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return (self.weight * batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = protect(
        pl.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ),
        "job",
        directory=tmp_path,
    )
    with pytest.raises(SnapshotError, match="epochs have one batch each"):
        trainer.fit(Model(), DataLoader(NUMBERS, batch_size=20))
    Snapshotter("job", directory=tmp_path).close()  # It is not in use any more, so one may fit again.


def test_a_trainer_that_was_interrupted_trains_again_in_the_same_process(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": (self.weight * x).square().mean()}

    class Interrupt(transformers.TrainerCallback):  # type: ignore[misc]
        at = 3

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == self.at:
                raise KeyboardInterrupt

    interrupt = Interrupt()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=5,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    data = [{"x": torch.ones(1)}] * 64
    trainer = transformers.Trainer(Model(), arguments, train_dataset=data, callbacks=[interrupt])
    protect(trainer, "job", directory=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    interrupt.at = -1
    assert trainer.train().global_step == 5
    assert not (tmp_path / "job").exists()


def test_a_trainer_whose_workers_stay_continues_with_the_losses_of_an_undisturbed_run(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            losses.append(nn.functional.dropout(self.layer(x)).square().mean())
            if len(losses) == stop:
                raise KeyboardInterrupt
            return {"loss": losses[-1]}

    def run() -> list[float]:
        losses.clear()
        transformers.set_seed(1)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"),
            num_train_epochs=2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            dataloader_num_workers=1,
            dataloader_persistent_workers=True,
        )
        data = [{"x": torch.full((4,), float(number))} for number in range(32)]
        trainer = transformers.Trainer(Model(), arguments, train_dataset=data)
        protect(trainer, "job", directory=tmp_path)
        with contextlib.suppress(KeyboardInterrupt):
            trainer.train()
        return [loss.item() for loss in losses]

    losses: list[Tensor] = []
    stop = 0
    whole = run()
    stop = 3
    first = run()
    stop = 0
    assert len(whole) == 8 and first[:2] + run() == whole


def test_a_loader_that_cannot_continue_may_be_protected_again(tmp_path: Path) -> None:
    def protected(width: int, **options: Any) -> Any:
        model = nn.Linear(width, 1)
        return protect(
            DataLoader(NUMBERS, batch_size=10), "job", epochs=1, model=model, directory=tmp_path, **options
        )

    first = protected(2)
    batches = iter(first)
    next(batches)
    next(batches)
    first.snapshots.close()
    with pytest.raises(SnapshotError, match=r"restore\(missing='fresh'\)"):
        protected(3)
    assert len(list(protected(3, missing="fresh"))) == 2


class CheckpointManager:
    """The calls of torchtitan's class, by whose module and name it is known."""

    __module__ = "torchtitan.components.checkpoint"

    def __init__(self) -> None:
        self.states = {"train_state": {"step": 0}}
        self.broken = self.closed = False

    def load(self, step: int = -1) -> bool:
        if self.broken:
            raise OSError("the checkpoint cannot be read")
        return False

    def save(self, curr_step: int, last_step: bool = False) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_a_checkpoint_manager_that_was_interrupted_is_followed_by_another_in_the_same_process(
    tmp_path: Path,
) -> None:
    def protected() -> CheckpointManager:
        manager: CheckpointManager = protect(CheckpointManager(), "job", directory=tmp_path)
        return manager

    unreadable = protected()
    unreadable.broken = True
    with pytest.raises(OSError, match="cannot be read"):
        unreadable.load()
    interrupted = protected()
    assert not interrupted.load()
    interrupted.save(1)
    interrupted.close()  # torchtitan does that after an exception.
    assert interrupted.closed
    last = protected()
    assert last.load()
    last.save(2, last_step=True)
    last.close()
    assert not (tmp_path / "job").exists()

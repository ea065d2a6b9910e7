"""The life of a trainer process: zygote, errors of the user, injected faults, and that nothing outlives its
parent.
"""

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from runtime.errors import TrainingError
from runtime.process.trainer import Trainer
from runtime.training import torch_device
from statemachine.messages import trainer as p
from statemachine.messages.common import Prepared
from statemachine.messages.values import BuildProgress, BuildStage
from storage.description import ModelDescription, decode_description
from tests.helpers.harness import Cluster, pipeline
from tests.helpers.runtime_support import data_for, gpt_data, script
from tests.helpers.waiting import until


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def alive(pid: int) -> bool:
    """Return whether the process runs and is not a zombie that process 1 has yet to reap."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def test_a_trainer_leads_its_group_and_its_exit_is_reported(cluster: Cluster) -> None:
    first, second = cluster.fork(2)
    assert os.getpgid(first.pid) == first.pid != os.getpgid(second.pid)
    first.kill(signal.SIGKILL)
    assert cluster.wait_exit(first.pid) == -signal.SIGKILL
    second.send(p.Exit())
    assert cluster.wait_exit(second.pid) == 0


def test_a_trainer_whose_gpu_is_missing_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for options in ({"backend": "nccl"}, {"device": "cuda"}):
        with pytest.raises(
            TrainingError, match=r"trainer finds none \(CUDA_VISIBLE_DEVICES=5\).* node\.devices"
        ):
            torch_device(gpt_data(**options))
    assert torch_device(gpt_data()) == torch.device("cpu")


def test_a_trainer_ends_with_its_connection(cluster: Cluster) -> None:
    (trainer,) = cluster.fork(1)
    trainer.close()
    assert cluster.wait_exit(trainer.pid) == 0


def test_sigterm_ends_a_trainer(cluster: Cluster) -> None:
    (trainer,) = cluster.fork(1)
    trainer.kill(signal.SIGTERM)
    assert cluster.wait_exit(trainer.pid) == -signal.SIGTERM


def test_an_error_of_the_user_is_reported_and_output_is_captured(cluster: Cluster, tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        import sys
        def build():
            print("to stdout")
            print("to stderr", file=sys.stderr)
            raise KeyError("no such thing")
        """,
    )
    (trainer,) = cluster.fork(1)
    trainer.send(p.PrepareJob(job_id="job", training=data_for("mine.py:build", tmp_path), profile=False))
    raised = trainer.take(p.Raised)
    assert raised.where == "prepare"
    assert "KeyError: 'no such thing'" in raised.detail and "mine.py, line" in raised.detail
    assert cluster.wait_exit(trainer.pid) == 1
    until(lambda: b"to stdout" in trainer.output and b"to stderr" in trainer.output)


def test_a_layer_that_raises_while_training_ends_its_trainer(cluster: Cluster, tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        class Bomb(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.runs = nn.Linear(3, 1), 0
            def forward(self, x):
                self.runs += 1
                if self.runs > 5:
                    raise ArithmeticError("boom")
                return self.inner(x)

        def build():
            return Training(layers=[Bomb()], loss=functional.mse_loss, optimizer=sgd, dataset=Rows())
        """,
    )
    trainers = cluster.fork(1)
    data = data_for("mine.py:build", tmp_path, global_batch=8, microbatch_rows=4)
    cluster.prepare(trainers, data)
    cluster.quiesce(trainers)
    cluster.resume(trainers, (pipeline((0, 1, [0]), first_microbatch=0, microbatches=2),), step=0)
    raised = trainers[0].take(p.Raised)
    assert raised.where == "training" and "ArithmeticError: boom" in raised.detail
    assert cluster.wait_exit(trainers[0].pid) == 1


def test_a_layer_that_ends_its_process_is_an_error_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []

    class Link:
        def __init__(self, *_: object) -> None:
            self.send = sent.append

    def train(_trainer: Trainer, _instruction: object) -> None:
        raise SystemExit("the loss is not finite")

    monkeypatch.setattr("runtime.process.trainer.NodeConnection", Link)
    monkeypatch.setattr("runtime.process.trainer.Mailbox.next", lambda _: p.StartSnapshot(generation=1))
    monkeypatch.setattr(Trainer, "_take_last_snapshot", train)
    assert Trainer("", 0).run() == 1
    [raised] = sent
    assert isinstance(raised, p.Raised) and raised.where == "training"
    assert raised.detail.endswith("SystemExit: the loss is not finite\n")


def test_a_trainer_reports_its_build_progress_until_it_is_prepared(cluster: Cluster, tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        import time
        class Slow(nn.Linear):
            def forward(self, x):
                time.sleep(0.1)
                return super().forward(x)

        def build():
            return Training(
                layers=[nn.Linear(3, 3), Slow(3, 1)], loss=functional.mse_loss, optimizer=sgd, dataset=Rows()
            )
        """,
    )
    (trainer,) = cluster.fork(1)
    trainer.send(p.PrepareJob(job_id="job", training=data_for("mine.py:build", tmp_path), profile=True))
    measuring = BuildProgress(stage=BuildStage.MEASURING, done=1, total=2)
    until(lambda: trainer.last_beat is not None and trainer.last_beat.build_progress == measuring)
    trainer.take(Prepared)
    until(lambda: trainer.last_beat is not None and trainer.last_beat.build_progress is None)


def test_an_abort_waits_for_one_layer_and_not_for_a_stage(cluster: Cluster, tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        import pathlib, time
        slow = pathlib.Path(__file__).with_name("slow")
        class Wait(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                time.sleep(0.1 if slow.exists() else 0.0)
                return x.clone()
            @staticmethod
            def backward(ctx, gradient):
                time.sleep(0.1 if slow.exists() else 0.0)
                return gradient
        class Slow(nn.Linear):
            def forward(self, x):
                return Wait.apply(super().forward(x))

        def build():
            layers = [*(Slow(3, 3) for _ in range(15)), nn.Linear(3, 1)]
            return Training(layers=layers, loss=functional.mse_loss, optimizer=sgd, dataset=Rows())
        """,
    )
    trainers = cluster.fork(1)
    data = data_for("mine.py:build", tmp_path, global_batch=4, microbatch_rows=4, steps=10**6)
    cluster.prepare(trainers, data)
    alone = (pipeline((0, 16, [0]), first_microbatch=0, microbatches=1),)
    (tmp_path / "slow").touch()
    for moment_s in (0.7, 2.2):  # A step takes 1.5 s forward, then 1.5 s backward.
        report = cluster.quiesce(trainers)[0]
        cluster.resume(trainers, alone, step=report.committed_step)
        time.sleep(moment_s)
        asked_at = time.monotonic()
        report = cluster.quiesce(trainers)[0]
        assert time.monotonic() - asked_at < 0.6
        assert report.committed_step == 0 and report.ready_step is None


def test_a_step_that_takes_longer_than_the_timeout_of_a_group_is_committed_in_the_end(
    cluster: Cluster, tmp_path: Path
) -> None:
    script(
        tmp_path,
        """
        import time
        from runtime.groups import communicator
        communicator.MIN_GROUP_TIMEOUT_S = 0.5

        class Slow(nn.Linear):
            def forward(self, x):
                time.sleep(0.0 if x.device.type == "meta" else 1.3)
                return super().forward(x)

        def build():
            return Training(
                layers=[Slow(3, 3), nn.Linear(3, 1)], loss=functional.mse_loss, optimizer=sgd, dataset=Rows()
            )
        """,
    )
    trainers = cluster.fork(2)
    data = data_for("mine.py:build", tmp_path, global_batch=4, microbatch_rows=4, steps=1)
    cluster.prepare(trainers, data)
    plan = (pipeline((0, 1, [0]), (1, 2, [1]), first_microbatch=0, microbatches=1),)
    expired = 0

    def ended(generation: int) -> bool:
        return trainers[1].sent(p.Finished) or trainers[1].sent(p.PeerSuspected, generation=generation)

    while not trainers[1].sent(p.Finished):
        reports = cluster.quiesce(trainers)
        cluster.resume(trainers, plan, step=reports[0].committed_step)
        until(partial(ended, cluster.generation))
        expired += trainers[1].sent(p.PeerSuspected, generation=cluster.generation)
        assert expired < 4
    assert expired > 1


def test_the_profile_comes_with_prepared(cluster: Cluster) -> None:
    (trainer,) = cluster.fork(1)
    trainer.send(p.PrepareJob(job_id="job", training=gpt_data(), profile=True, devices_per_node=2))
    prepared = trainer.take(Prepared)
    assert prepared.profile is not None and len(prepared.profile.layers) == 4
    assert [[s.devices for s in layer.split] for layer in prepared.profile.layers] == [[2]] * 4
    trainer.close()


def test_the_model_is_described_on_request(cluster: Cluster) -> None:
    (trainer,) = cluster.fork(1)
    trainer.send(p.PrepareJob(job_id="job", training=gpt_data(), profile=False, describe=True))
    described = trainer.take(p.ModelDescribed)
    assert described.job_id == "job"
    assert decode_description(described.description, "it") == ModelDescription(
        aliases={"0.token.weight": ("3.weight",)}
    )
    trainer.take(Prepared)
    trainer.close()


def test_a_model_that_cannot_be_described_is_trained_anyway(cluster: Cluster, tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        class Rows:
            def __len__(self):
                return 8

            def __getitem__(self, index):
                return torch.ones(2), torch.ones(2)

        class Secretive(nn.Linear):
            def state_dict(self, *args, **kwargs):
                raise ArithmeticError("boom")

        def build():
            sgd = lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
            return Training(layers=[Secretive(2, 2)], loss=functional.mse_loss, optimizer=sgd, dataset=Rows())
        """,
    )
    (trainer,) = cluster.fork(1)
    data = data_for("mine.py:build", tmp_path)
    trainer.send(p.PrepareJob(job_id="job", training=data, profile=False, describe=True))
    assert trainer.take(p.ModelDescribed).description == b""
    trainer.take(Prepared)
    until(lambda: b"keep no configuration of the model: ArithmeticError: boom" in trainer.output)
    trainer.close()


def test_a_sleeping_main_thread_shows_in_the_heartbeats(cluster: Cluster) -> None:
    trainers = cluster.fork(1)
    (trainer,) = trainers
    cluster.prepare(trainers, gpt_data(steps=1_000_000))
    until(lambda: trainer.last_beat is not None and trainer.last_beat.waiting)
    cluster.quiesce(trainers)
    cluster.resume(trainers, (pipeline((0, 4, [0]), first_microbatch=0, microbatches=4),), step=0)
    trainer.take(p.TrainerStepped)
    trainer.send(p.Sleep(seconds=3600.0))

    def stands_still() -> bool:
        before = trainer.last_beat
        time.sleep(0.4)
        beat = trainer.last_beat
        assert before is not None and beat is not None
        return not beat.waiting and beat is not before and beat.progress == before.progress

    until(stands_still)
    trainer.kill()


def test_a_sleep_reaches_an_idle_trainer(cluster: Cluster) -> None:
    trainers = cluster.fork(1)
    (trainer,) = trainers
    until(lambda: trainer.last_beat is not None and trainer.last_beat.waiting)
    trainer.send(p.Sleep(seconds=3600.0))
    until(lambda: trainer.last_beat is not None and not trainer.last_beat.waiting)
    trainer.kill()


def test_modules_are_loaded_for_all_trainers_unless_they_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "sound.py").write_text("")
    (tmp_path / "broken.py").write_text("raise ValueError('no such device')")
    (tmp_path / "busy.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=[60], daemon=True).start()"
    )
    script(
        tmp_path,
        """
        import sys
        def build():
            raise KeyError([name for name in ("sound", "broken", "busy", "absent") if name in sys.modules])
        """,
    )
    with Cluster("sound", "absent", "broken", "busy", path=tmp_path) as cluster:
        (trainer,) = cluster.fork(1)
        trainer.send(p.PrepareJob(job_id="job", training=data_for("mine.py:build", tmp_path), profile=False))
        assert "KeyError: ['sound']" in trainer.take(p.Raised).detail


def test_nothing_outlives_the_zygote() -> None:
    with Cluster() as cluster:
        pids = [trainer.pid for trainer in cluster.fork(2)]
        cluster.zygote.kill()
        until(lambda: not any(alive(pid) for pid in pids))


def test_fifty_reconfigurations_leave_no_threads_and_no_descriptors(cluster: Cluster) -> None:
    trainers = cluster.fork(2)
    cluster.prepare(trainers, gpt_data(steps=1_000_000))
    split = (pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=0, microbatches=4),)

    def sizes() -> list[tuple[int, int]]:
        return [
            (len(list(Path(f"/proc/{t.pid}/task").iterdir())), len(list(Path(f"/proc/{t.pid}/fd").iterdir())))
            for t in trainers
        ]

    step, vote = 0, None
    before: list[tuple[int, int]] = []
    for count in range(50):
        report = cluster.quiesce(trainers, mode="boundary")[0]
        step, vote = report.committed_step, report.vote
        cluster.resume(trainers, split, step, vote)
        trainers[0].take(p.TrainerStepped, step=step + 1)
        if count == 4:
            before = sizes()
    until(
        lambda: all(
            now[0] <= then[0] + 2 and now[1] <= then[1] + 2 for now, then in zip(sizes(), before, strict=True)
        )
    )
    for trainer in trainers:
        trainer.close()

"""A layer's state as bytes: nothing is lost on the way, and state that does not fit is rejected."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from runtime.layers.model import Model
from runtime.layers.optimizer import Optimization
from runtime.layers.state import LayerHeader, LayerStates, StateError, TensorEntry, host_entries
from tests.helpers.layer_states import Trainer
from tests.helpers.runtime_support import data_for, training_of


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_joiner_continues_training_exactly(precision: str) -> None:
    old, new = Trainer(precision), Trainer(precision)
    for step in (1, 2, 3):
        old.step(step)
    new.model.drop(new.layers)
    for layer in (2, 0, 3, 1):
        header, payload = old.states.pack(layer)
        assert payload.dtype == torch.uint8
        assert payload.is_contiguous()
        assert len(payload) == old.states.describe(layer)[0].size_bytes
        new.states.unpack(layer, header, payload)
    assert new.model.held_layers == set(new.layers)
    assert new.digests() == old.digests()
    assert [old.step(step) for step in (4, 5)] == [new.step(step) for step in (4, 5)]
    assert new.digests() == old.digests()


def test_a_pristine_layer_travels_too_and_replaces_older_state() -> None:
    pristine, used = Trainer(), Trainer()
    used.step(1)
    for layer in used.layers:
        used.states.unpack(layer, *pristine.states.pack(layer))
    assert used.digests() == pristine.digests()
    assert used.optimization.parameter_state("1.norm_1.weight") == {}
    assert used.step(1) == pristine.step(1)


def test_a_layer_travels_in_chunks_that_end_anywhere() -> None:
    """Targets that are not row-major work, too. The optimizer has none of the state before all of it has
    arrived.
    """
    old, new = Trainer(), Trainer()
    old.step(1)
    for trainer in (old, new):
        turned = [t for t in trainer.model.tensors_of(1) if t.value.dim() == 2]
        for tensor in turned:
            tensor.replace(tensor.value.detach().t().contiguous().t())
        assert turned
    reader, (header, payload) = old.states.reader(1), old.states.pack(1)
    assert (reader.header, reader.size_bytes) == (header, len(payload))
    writer = new.states.writer(1, header, len(payload), set())
    for start in range(0, len(payload), 77):
        assert new.optimization.parameter_state("1.norm_1.weight") == {}
        chunk = reader.read(start, min(start + 77, len(payload)))
        assert torch.equal(chunk, payload[start : start + 77])
        writer.write(start, chunk)
    writer.finish()
    assert torch.equal(new.states.pack(1)[1], payload)
    assert new.states.digest(1) == old.states.digest(1)


def test_the_payload_is_a_copy() -> None:
    trainer = Trainer()
    header, payload = trainer.states.pack(1)
    before = payload.clone()
    trainer.step(1)
    assert torch.equal(payload, before)
    other = Trainer()
    other.states.unpack(1, header, payload)
    payload.zero_()
    assert other.states.digest(1) == Trainer().states.digest(1)


def test_a_tied_layer_fills_the_one_tensor_that_both_layers_use() -> None:
    old, new = Trainer(), Trainer()
    old.step(1)
    new.model.drop(new.layers)
    new.states.unpack(3, *old.states.pack(3))
    assert new.model.held_layers == {3}
    tied = dict(new.model.named_parameters([0]))["0.token.weight"]
    assert not tied.is_meta
    assert new.states.digest(3) == old.states.digest(3)
    new.states.unpack(0, *old.states.pack(0))
    assert dict(new.model.named_parameters([3]))["0.token.weight"] is tied
    assert new.states.digest(0) == old.states.digest(0)


def with_buffers(seed: int) -> tuple[Model, LayerStates]:
    torch.manual_seed(seed)
    layer = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    layer[0].weight.requires_grad_(False)
    layer.register_buffer("empty", torch.zeros(0, 3))
    model = Model(training_of([layer, nn.Linear(6, 1)]), data_for("unused.py:build"))
    return model, LayerStates(model, Optimization(model))


def test_frozen_parameters_and_persistent_buffers_travel() -> None:
    (one, one_states), (other, other_states) = with_buffers(1), with_buffers(2)
    for row in range(3):
        one.forward(0, 2, torch.rand(4, 6, dtype=torch.float64), step=1, row=row)
    digest = other_states.digest(0)
    other.drop([0])
    other_states.unpack(0, *one_states.pack(0))
    for left, right in zip(one.tensors_of(0), other.tensors_of(0), strict=True):
        assert torch.equal(left.value, right.value)
        assert left.value.dtype == right.value.dtype
    assert other.training.layers[0][1].num_batches_tracked == 3
    assert other_states.digest(0) == one_states.digest(0) != digest


def test_digests_depend_on_every_parameter_but_not_on_running_statistics() -> None:
    model, states = with_buffers(1)
    digest = states.digest(0)
    model.forward(0, 1, torch.rand(4, 6, dtype=torch.float64), step=1, row=0)
    assert states.digest(0) == digest
    with torch.no_grad():
        model.named_parameters([0])[0][1].view(-1)[-1] += 1e-15
    assert states.digest(0) != digest


def test_a_layer_that_is_not_held_has_no_state() -> None:
    trainer = Trainer()
    trainer.model.drop([1])
    for ask in (trainer.states.pack, trainer.states.digest, trainer.states.describe):
        with pytest.raises(RuntimeError, match="layer 1 is not held"):
            ask(1)


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def edit(header: bytes) -> bytes:
        plain = msgspec.msgpack.decode(header)
        change(plain)
        return msgspec.msgpack.encode(plain)

    return edit


def entry(**changes: Any) -> Callable[[bytes], bytes]:
    """Return a header whose first entry, the parameter 1.norm_1.weight, (8,) float64, is changed."""
    return edited(lambda header: header["entries"][0].update(changes))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda header: header[:-5], "malformed"),
        (lambda header: b"\x80", "malformed"),
        (edited(lambda h: h.update(format=2)), "header of layer 1 is of format 2"),
        (edited(lambda h: h.update(surprise=2)), "malformed"),
        (edited(lambda h: h.update(layer=2)), "a header of layer 2 .* was found instead of layer 1"),
        (
            edited(lambda h: h.update(size_bytes=5)),
            "a header of layer 1 with 5 bytes was found instead of layer 1",
        ),
        (edited(lambda h: h["entries"].pop(0)), "1.norm_1.weight is missing"),
        (edited(lambda h: h["entries"].insert(0, h["entries"][0])), "overlaps or is repeated"),
        (edited(lambda h: h["scalars"].update(other={"step": 1})), "optimizer state for other"),
        (edited(lambda h: h["schedule"].update(groups=[])), "belongs to a different optimizer"),
        (edited(lambda h: h.update(schedule={})), "layer 1"),
        (entry(name="1.nothing"), "no parameter or buffer '1.nothing'"),
        (entry(name="2.norm_1.weight"), "no parameter or buffer"),
        (entry(dtype="float8"), r"64 bytes from \d+ of \d+ cannot be \(8,\) of float8"),
        (
            entry(dtype="int64"),
            r"a parameter of \(8,\) int64, but this model has a parameter of \(8,\) float64",
        ),
        (entry(shape=(4, 2)), r"received a parameter of \(4, 2\) float64"),
        (entry(shape=(7,)), r"64 bytes from \d+ of \d+ cannot be \(7,\) of float64"),
        (entry(shape=(-8, -1)), r"64 bytes from \d+ of \d+ cannot be"),
        (entry(offset=-16), r"64 bytes from -16 of \d+ cannot be"),
        (entry(offset=8), "offset 8 is not a multiple of 16"),
        (entry(offset=1 << 40), r"64 bytes from \d+ of \d+ cannot be"),
        (entry(role="buffer"), "a buffer of"),
        (entry(role="optimizer"), "not trained"),
        (entry(role="code"), "malformed"),
    ],
)
def test_a_header_that_does_not_fit_is_rejected_and_changes_nothing(
    edit: Callable[[bytes], bytes], message: str
) -> None:
    source, target = Trainer(), Trainer()
    source.step(1)
    header, payload = source.states.pack(1)
    before = target.digests()
    with pytest.raises(StateError, match=message):
        target.states.unpack(1, edit(header), payload)
    assert target.digests() == before
    target.model.drop([1])
    with pytest.raises(StateError, match=message):
        target.states.unpack(1, edit(header), payload)
    assert 1 not in target.model.held_layers


@pytest.mark.parametrize(
    "payload", [lambda p: p[:-1], lambda p: p.view(torch.int64), lambda p: p.view(1, -1)]
)
def test_a_payload_of_a_different_size_is_rejected(payload: Callable[[Tensor], Tensor]) -> None:
    trainer = Trainer()
    header, whole = trainer.states.pack(1)
    with pytest.raises(StateError, match=r"payload of|was found instead of"):
        trainer.states.unpack(1, header, payload(whole))


def test_the_header_is_plain_msgpack_that_describes_the_bytes() -> None:
    trainer = Trainer()
    trainer.step(1)
    header, payload = trainer.states.pack(1)
    decoded = msgspec.msgpack.decode(header, type=LayerHeader)
    assert decoded.entries[0] == TensorEntry(
        name="1.norm_1.weight",
        role="parameter",
        key="",
        dtype="float64",
        shape=(8,),
        on_host=True,
        offset=0,
        size_bytes=64,
    )
    weight = dict(trainer.model.named_parameters([1]))["1.norm_1.weight"]
    assert torch.equal(payload[:64].view(torch.float64), weight)
    assert {e.key for e in decoded.entries if e.role == "optimizer"} == {"exp_avg", "exp_avg_sq", "step"}


def test_state_that_was_trained_on_a_cpu_follows_its_parameter_to_a_gpu() -> None:
    trainer = Trainer()
    trainer.step(1)
    header = msgspec.msgpack.decode(trainer.states.pack(1)[0], type=LayerHeader)
    numbers = {(entry.name, entry.key) for entry in header.entries if entry.key == "step"}
    assert numbers and host_entries(header) == numbers
    offloaded = msgspec.structs.replace(
        header,
        entries=tuple(
            msgspec.structs.replace(entry, on_host=entry.role == "optimizer") for entry in header.entries
        ),
    )
    assert host_entries(offloaded) == {(e.name, e.key) for e in header.entries if e.role == "optimizer"}

"""Tests of the state layout that is reused from snapshot to snapshot: every change is detected."""

import copy
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ftd import SnapshotError
from runtime.script.contents import SnapshotContents
from runtime.script.copier import ScriptCapture
from runtime.script.plain_state import thaw
from runtime.script.protection import ScriptProtection
from runtime.script.registered import RegisteredObject
from runtime.script.state_layout import StateLayout


class Counted(nn.Module):
    """A module with extra state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(3))

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


class Scene:
    """A script with objects of every kind and two contents of it: one reuses layouts, the other does not."""

    def __init__(self, *, shares: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Counted(), nn.Linear(4, 4))
        self.frozen = nn.Linear(4, 4)
        first, last = list(self.model[0].parameters()), list(self.model[3].parameters())
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            [{"params": first}, {"params": last, "lr": 0.1}], lr=0.5
        )
        self.progress: dict[str, Any] = {"epoch": 0, "losses": [], "mean": torch.zeros(4)}
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.things = {
            "model": RegisteredObject(
                name="model", value=self.model, kind="module", guarded=False, replicated=shares
            ),
            "frozen": RegisteredObject.of("frozen", self.frozen, guarded=True),
            "optimizer": RegisteredObject.of("optimizer", self.optimizer, guarded=False),
            "progress": RegisteredObject.of("progress", self.progress, guarded=False),
            "scheduler": RegisteredObject.of("scheduler", self.scheduler, guarded=False),
        }
        self.protection = ScriptProtection(
            "job", "aec", None, None, active=True, owners=3, owner=1, shares=shares
        )
        self.remembering = self.contents()

    def contents(self) -> SnapshotContents:
        return SnapshotContents(self.protection, True, self.things)

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.full_like(p, 0.5)
        self.optimizer.step()

    def values_change(self) -> None:
        """Change everything that an iteration changes."""
        self.step()
        self.scheduler.step()
        self.model[2].count += 1
        self.progress["epoch"] += 1
        self.progress["losses"].append(random.random())
        torch.rand(3)
        for tensor in self.tensors():
            bump(tensor)

    def tensors(self) -> list[Tensor]:
        state = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        plain = [t for t in self.progress.values() if isinstance(t, Tensor)]
        modules = [*self.model.parameters(), *self.model.buffers(), *self.frozen.parameters()]
        return [*modules, *state, *plain]

    def parameter(self) -> nn.Parameter:
        found: nn.Parameter = self.model[3].weight
        return found

    def state(self) -> dict[str, Any]:
        """Return an optimizer's state of one parameter."""
        if self.parameter() not in self.optimizer.state:
            self.step()
        found: dict[str, Any] = self.optimizer.state[self.parameter()]
        return found

    def check(self) -> None:
        """Check that the contents which reuse layouts capture the same bytes as those that do not."""
        try:
            expected = self.contents().capture(1)
        except SnapshotError as error:
            with pytest.raises(SnapshotError) as raised:
                self.remembering.capture(1)
            assert str(raised.value) == str(error)
            return
        found = self.remembering.capture(1)
        assert found.header() == expected.header()
        assert (found.units, found.shared_units) == (expected.units, expected.shared_units)
        assert (found.body_bytes, found.layout) == (expected.body_bytes, expected.layout)
        assert body(found) == body(expected)
        # What was copied at once no longer changes, and guarded tensors are read later: both must be equal.
        for tensor in self.tensors():
            bump(tensor)
        assert body(found) == body(expected)
        for _ in range(2):
            self.remembering.capture(1)  # A state that stays unchanged once is reused.


def bump(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


def body(capture: ScriptCapture) -> bytes:
    """Return the bytes that a copier would write."""
    made = np.zeros(capture.body_bytes, dtype=np.uint8)
    for unit in capture.units:
        for piece in unit.ranges:
            source = capture.sources[piece.entry][piece.start : piece.start + piece.size_bytes]
            made[piece.offset : piece.offset + piece.size_bytes] ^= np.asarray(source)
    return made.tobytes()


# --- what may change -----------------------------------------------------------------------------


def other_memory(s: Scene) -> None:
    s.parameter().data = s.parameter().data.clone()


def other_offset_in_the_same_memory(s: Scene) -> None:
    wide = torch.randn(3, 4)
    s.model[3].bias.data = wide[0]
    s.check()
    s.model[3].bias.data = wide[1]


def turned(s: Scene) -> None:
    s.parameter().data = s.parameter().data.t()


def other_shape(s: Scene) -> None:
    s.model[3].bias.data = s.model[3].bias.data.view(2, -1)


def without_rows(s: Scene) -> None:
    """Replace a parameter's memory by one with gaps, which has to be gathered."""
    s.parameter().data = torch.randn(4, 8)[:, ::2]


def other_set(s: Scene) -> None:
    with torch.no_grad():
        s.frozen.weight.set_(torch.randn(4, 4))


def resized(s: Scene) -> None:
    with torch.no_grad():
        s.frozen.bias.requires_grad_(False).resize_(s.frozen.bias.numel() - 1 or 4)


def other_dtype(s: Scene) -> None:
    s.frozen.weight.data = s.frozen.weight.data.half()


def other_dtype_in_the_same_memory(s: Scene) -> None:
    s.frozen.weight.data = s.frozen.weight.data.half()
    s.check()
    s.frozen.weight.data = s.frozen.weight.data.view(torch.bfloat16)


def conjugated(s: Scene) -> None:
    s.frozen.bias = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    s.check()
    s.frozen.bias.data = s.frozen.bias.data.conj()


def empty(s: Scene) -> None:
    s.frozen.bias.data = torch.empty(0)
    s.check()
    # It does not have an address either.
    torch.utils.swap_tensors(s.frozen.bias, nn.Parameter(torch.empty(0, device="meta")))
    s.check()
    s.frozen.bias = nn.Parameter(torch.empty(0))
    s.check()
    s.frozen.bias.data = torch.empty(0, 3)


def two_swapped(s: Scene) -> None:
    one, other = s.parameter(), s.frozen.weight
    one.data, other.data = other.data, one.data


def two_swapped_whole(s: Scene) -> None:
    torch.utils.swap_tensors(s.model[2].scale, s.frozen.bias)


def other_parameter(s: Scene) -> None:
    s.model[3].weight = nn.Parameter(torch.randn(4, 4))


def a_parameter_more(s: Scene) -> None:
    s.model[3].register_parameter(f"more{random.random()}".replace(".", ""), nn.Parameter(torch.ones(2)))


def a_parameter_less(s: Scene) -> None:
    s.model[2].scale = None


def tied(s: Scene) -> None:
    s.model[0].weight = s.model[3].weight


def silently_untied(s: Scene) -> None:
    """Give two parameters that shared memory separate memory."""
    s.model[0].weight.data = s.model[3].weight.data
    s.check()
    s.model[0].weight.data = s.model[3].weight.data.clone()


def other_order_of_parameters(s: Scene) -> None:
    held = s.model[3]._parameters
    held["weight"] = held.pop("weight")


def a_module_more(s: Scene) -> None:
    s.model.append(nn.Linear(1, 1))


def a_parameter_becomes_a_buffer(s: Scene) -> None:
    s.frozen.register_buffer("kept", s.frozen._parameters.pop("bias"))


def other_buffer(s: Scene) -> None:
    s.model[2].seen = torch.ones(3)


def a_buffer_no_longer_persistent(s: Scene) -> None:
    s.model[2]._non_persistent_buffers_set.add("seen")


def a_hook(s: Scene) -> None:
    def halved(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        state["3.weight"] = state["3.weight"].detach() / 2

    s.model._register_state_dict_hook(halved)


def a_state_of_its_own(s: Scene) -> None:
    s.model.state_dict = lambda **_: {"all": torch.ones(2), "epoch": s.progress["epoch"]}  # type: ignore[method-assign]


def a_state_that_cannot_be_saved(s: Scene) -> None:
    s.model[2].count = object()  # type: ignore[assignment]
    s.check()
    s.model[2].count = 3


def first_step(s: Scene) -> None:
    s.optimizer.state.clear()
    s.check()
    s.step()


def state_of_one_parameter_removed(s: Scene) -> None:
    s.optimizer.state.pop(s.parameter(), None)


def state_of_a_removed_parameter(s: Scene) -> None:
    """Add the state of a parameter that belongs to no object any more."""
    s.optimizer.state[torch.zeros(2)] = {"it": s.progress["mean"]}


def other_momentum(s: Scene) -> None:
    s.state()["exp_avg"] = torch.ones(4, 4)


def swapped_momenta(s: Scene) -> None:
    state = s.state()
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


def other_order_of_state(s: Scene) -> None:
    s.state()["exp_avg"] = s.state().pop("exp_avg")


def a_key_more(s: Scene) -> None:
    s.state()["more"] = 1


def other_key(s: Scene) -> None:
    s.state()["other"] = s.state().pop("exp_avg_sq", torch.ones(4))
    s.check()
    s.state()["exp_avg_sq"] = s.state().pop("other")


def a_number_becomes_a_tensor_and_back(s: Scene) -> None:
    for value in (3, torch.ones(()), 4.5, None, -0.0, 0.0, float("nan"), 2**70, True, 1, np.float64(2), "a"):
        s.state()["odd"] = value
        s.check()
        s.check()


def nested(s: Scene) -> None:
    state = s.state()
    state["nested"] = {
        "factors": [torch.ones(2), torch.ones(3)],
        "counts": [1, 2],
        5: {"deep": torch.ones(1)},
    }
    s.check()
    state["nested"]["factors"][1] = torch.full((3,), 2.0)
    s.check()
    state["nested"]["factors"].append(torch.ones(1))
    s.check()
    state["nested"]["counts"].append(3)
    s.check()
    state["nested"]["counts"].append(torch.ones(1))
    s.check()
    state["nested"]["factors"] = tuple(state["nested"]["factors"])
    s.check()
    state["nested"]["factors"] = (torch.ones(4),)


def moved_from_one_dict_to_the_next(s: Scene) -> None:
    """Move a key so that all keys and values in a row stay the same."""
    s.state()["a"] = {"x": torch.ones(2), "y": torch.ones(2)}
    s.state()["b"] = {"z": torch.ones(2)}
    s.check()
    s.state()["b"] = {"y": s.state()["a"].pop("y"), **s.state()["b"]}


def keys_that_are_no_plain_ones(s: Scene) -> None:
    s.state()["pairs"] = {(1, 2): torch.ones(2)}
    s.check()
    s.state()["pairs"][1, 2] = torch.zeros(2)
    s.check()
    s.state()["pairs"] = {1: torch.zeros(2)}
    s.check()
    s.state()["pairs"] = {True: s.state()["pairs"][1]}


def an_ordered_dict(s: Scene) -> None:
    s.state()["ordered"] = OrderedDict(a=torch.ones(2), b=torch.zeros(2))
    s.check()
    s.state()["ordered"].move_to_end("a")


def other_rate(s: Scene) -> None:
    for group in s.optimizer.param_groups:
        group["lr"] = random.random()
        group["betas"] = (random.random(), 0.5)


def a_rate_that_is_a_tensor(s: Scene) -> None:
    for rate in (torch.tensor(0.25), torch.tensor(0.125), 0.5):
        s.optimizer.param_groups[1]["weight_decay"] = rate
        s.check()


def an_option_more(s: Scene) -> None:
    s.optimizer.param_groups[0]["note"] = [random.random(), {"a": b"b"}]


def a_group_more(s: Scene) -> None:
    known = {id(p) for group in s.optimizer.param_groups for p in group["params"]}
    new = [p for p in (s.model[2].scale, s.frozen.weight) if p is not None and id(p) not in known]
    s.optimizer.add_param_group({"params": new or [nn.Parameter(torch.ones(2))]})


def other_shape_of_a_parameter_without_a_model(s: Scene) -> None:
    parameter = nn.Parameter(torch.ones(4))
    s.optimizer.add_param_group({"params": [parameter]})
    s.check()
    parameter.data = parameter.data.view(2, 2)


def other_group(s: Scene) -> None:
    first, second, *_ = s.optimizer.param_groups
    if first["params"]:
        second["params"].insert(0, first["params"].pop())


def no_longer_guarded(s: Scene) -> None:
    """Remove a parameter from its group, so that it is not guarded any more."""
    if s.optimizer.param_groups[1]["params"]:
        s.optimizer.param_groups[1]["params"].pop()


def loaded(s: Scene) -> None:
    s.model.load_state_dict(copy.deepcopy(s.model.state_dict()), strict=False)
    s.optimizer.load_state_dict(copy.deepcopy(s.optimizer.state_dict()))


def loaded_in_place(s: Scene) -> None:
    s.frozen.load_state_dict(copy.deepcopy(s.frozen.state_dict()), assign=True)


def plain_data_with_tensors(s: Scene) -> None:
    s.progress["mean"] = s.progress["mean"] + 1
    s.progress["all"] = [torch.ones(2), {"deep": torch.zeros(1)}]
    s.check()
    s.progress["all"].append(torch.ones(3))


def the_same_tensor_twice(s: Scene) -> None:
    s.progress["same"] = s.parameter()
    s.progress["memory"] = s.parameter().data
    s.check()
    s.progress["memory"] = s.parameter().data.clone()


def a_thing_more(s: Scene) -> None:
    s.things["more"] = RegisteredObject.of("more", nn.Linear(2, 2), guarded=False)


def a_thing_less(s: Scene) -> None:
    s.things.pop("frozen", None)


def other_object_of_the_same_name(s: Scene) -> None:
    s.things["frozen"] = RegisteredObject.of("frozen", s.frozen, guarded=False)


def shared_no_more(s: Scene) -> None:
    s.protection.shares = not s.protection.shares


def other_owner(s: Scene) -> None:
    s.protection.owner = (s.protection.owner + 1) % 3


CHANGES: list[Callable[[Scene], None]] = [
    other_memory,
    other_offset_in_the_same_memory,
    turned,
    other_shape,
    without_rows,
    other_set,
    resized,
    other_dtype,
    other_dtype_in_the_same_memory,
    conjugated,
    empty,
    two_swapped,
    two_swapped_whole,
    other_parameter,
    a_parameter_more,
    a_parameter_less,
    tied,
    silently_untied,
    other_order_of_parameters,
    a_module_more,
    a_parameter_becomes_a_buffer,
    other_buffer,
    a_buffer_no_longer_persistent,
    a_hook,
    a_state_of_its_own,
    a_state_that_cannot_be_saved,
    first_step,
    state_of_one_parameter_removed,
    state_of_a_removed_parameter,
    other_momentum,
    swapped_momenta,
    other_order_of_state,
    a_key_more,
    other_key,
    a_number_becomes_a_tensor_and_back,
    nested,
    moved_from_one_dict_to_the_next,
    keys_that_are_no_plain_ones,
    an_ordered_dict,
    other_rate,
    a_rate_that_is_a_tensor,
    an_option_more,
    a_group_more,
    other_shape_of_a_parameter_without_a_model,
    other_group,
    no_longer_guarded,
    loaded,
    loaded_in_place,
    plain_data_with_tensors,
    the_same_tensor_twice,
    a_thing_more,
    a_thing_less,
    other_object_of_the_same_name,
    shared_no_more,
    other_owner,
]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_seen(change: Callable[[Scene], None], shares: bool) -> None:
    scene = Scene(shares=shares)
    scene.check()
    other_rate(scene)  # The optimizer has no state yet.
    scene.check()
    scene.values_change()
    for _ in range(2):
        scene.check()
    change(scene)
    for _ in range(2):
        scene.check()


@given(
    changes=st.lists(st.sampled_from([*CHANGES, Scene.values_change]), max_size=8),
    shares=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=20)
def test_any_changes_one_after_the_other_are_seen(
    changes: list[Callable[[Scene], None]], shares: bool, seed: int
) -> None:
    random.seed(seed)
    scene = Scene(shares=shares)
    for change in changes:
        scene.check()
        change(scene)
    scene.check()
    scene.values_change()
    scene.check()


# --- what need not be walked again ---------------------------------------------------------------


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that gets one item for each walk."""
    walks: list[None] = []
    walk = StateLayout.of

    def counted(*args: Any, **options: Any) -> StateLayout:
        walks.append(None)
        return walk(*args, **options)

    monkeypatch.setattr(StateLayout, "of", counted)
    return walks


def test_an_iteration_like_the_one_before_is_not_walked(walks: list[None]) -> None:
    scene = Scene()
    scene.values_change()
    for _ in range(3):
        scene.remembering.capture(1)
    assert len(walks) == 2
    for _ in range(5):
        scene.values_change()
        other_rate(scene)
        plain_data_with_tensors(scene)
        del walks[:]
        scene.remembering.capture(1)
        assert not walks


def test_a_number_of_an_optimizer_changes_without_a_walk(walks: list[None]) -> None:
    scene = Scene()
    scene.state()["seen"] = 1
    for _ in range(2):
        scene.remembering.capture(1)
    del walks[:]
    for number in range(5):
        scene.state()["seen"] = number
        thawed = thaw(scene.remembering.capture(1).header())
        assert thawed["objects"]["optimizer"]["state"]["state"][2]["seen"] == number
    assert not walks

"""Cuts a module into layers by running windows of it through the module's own ``forward``.

A module with a chain of blocks (the decoder layers of a language model, the stages of a residual network)
is cut before each block and after the last one. The layers are: the code that runs before the first block,
each block together with the code between it and the next one, and the code that runs after the last block.
To run layers [first, end) on a microbatch, the module's own ``forward`` runs on that microbatch, so that
masks, rotary tables and the loss come from the module's own code in every window, with three changes:

* Blocks before the window do nothing, and the window's first block takes what was *received* in place of
  the arguments that depend on earlier layers.
* Submodules outside of the blocks that hold parameters (embeddings, norms, heads) return zeros of the right
  shape unless they belong to the window.
* The first block after the window raises ``_WindowEnd`` with the tensors that cross the cut.

Which arguments depend on earlier layers is *recorded* in one run of the whole module, in which every output
of a block or other submodule requires a gradient. An argument that is the very tensor that the previous
block took is *carried*: every block of the window takes it from what was received. A parameter that code
reads without calling the parameter's module belongs to all layers that run this code. A submodule that runs
before the first block, and whose result is used after a block too (the embedding of a diffusion model's time
step), runs in every window.

The window's results are compared with those of the whole module (``WindowedModule.verify``). A module that
keeps state of its own, or whose code around the blocks takes a value past a block (a shortcut), is
therefore rejected rather than trained wrongly. Every run checks that each block runs once and in order.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as tree

from runtime.data.batches import signature
from runtime.data.sampling import seed_host
from runtime.errors import TrainingError
from runtime.layers.chain import normalises_over_rows
from runtime.layers.experts import ExpertBalance
from runtime.layers.modes import evaluating
from runtime.training import Batch

CUT_REMEDIES = (
    "name the submodules to cut before with Training(split=[...]), in the order in which they run, "
    "or hand over a list with Training(layers=[...])"
)

IN_PLACE_REMEDY = "write x = f(x), or inplace=False"
"""Remedy for code that overwrites what a stage receives from the one before."""

DYNAMIC_BLOCKS = (
    "its forward chooses which blocks run (layer drop, an early exit, a condition on what it computed), "
    "and every stage would choose by itself"
)


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


class _WindowEnd(Exception):
    """The exception that carries the tensors which cross the cut at a window's end out of the module's
    ``forward``.
    """

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors


@dataclass(slots=True)
class _Cut:
    """The recorded inputs and outputs of one block."""

    needed: list[int]
    """Leaves of its arguments that depend on earlier layers."""
    carried: dict[int, int]
    """Leaves that are the very tensors which the previous block took, with the index of that block's leaf."""
    per_row: list[bool] = field(default_factory=list)
    """Whether dim 0 of each of ``needed`` are the rows."""
    output: Any = None
    """Structure of its output."""
    skipped: list[Any] = field(default_factory=list)
    """Replacement for each leaf of its output when the block is skipped: ``_Same`` stands for the first tensor
    argument, ``_Zeros`` for zeros, anything else for itself.
    """


@dataclass(frozen=True, slots=True)
class _Zeros:
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Same:
    pass


@dataclass(slots=True)
class _Window:
    """One run of layers [first, end)."""

    first: int
    end: int
    rows: int
    received: tuple[Tensor, ...]
    scopes: "LayerScopes"
    segment: int = 0
    """The layer to which the code that is running belongs."""
    part: int = 0
    """The part of that layer's code outside of its block."""
    due: int = 0
    """The number of the block that must run next."""
    scope: AbstractContextManager[None] | None = None
    before: list[Any] | None = None
    """Leaves of the previous block's arguments."""
    balance: tuple[Tensor, ...] = ()
    """Accumulators of expert balancing."""


class LayerScopes:
    """Contexts that surround a layer's code while it runs; by default there are none."""

    def around(self, layer: int, part: int) -> AbstractContextManager[None]:
        """Surround code of ``layer`` outside of its block; ``part`` is 0 before the block and counts from 1
        after it.
        """
        return nullcontext()

    def outside(self, layer: int, part: int) -> AbstractContextManager[None]:
        """Surround code of a ``layer`` before the window; it must draw the numbers that it draws in its own
        window, because later code may use them.
        """
        return nullcontext()

    def run_block(self, layer: int, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Run the block of ``layer``."""
        return function(*arguments, **named)


class ParameterReads(TorchFunctionMode):
    """A mode that reports each parameter from which an operation makes a tensor."""

    def __init__(self, report: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        read = [leaf for leaf in tree.tree_leaves((args, kwargs)) if isinstance(leaf, nn.Parameter)]
        try:
            result = func(*args, **kwargs)
        except Exception:  # The parameter may have no memory.
            for parameter in read:
                self._report(parameter)
            raise
        if read and any(isinstance(leaf, Tensor) for leaf in tree.tree_leaves(result)):
            for parameter in read:
                self._report(parameter)
        return result


class WindowedModule:
    """A module cut at its chain of blocks: layer 0 precedes the first block, layer i + 1 is block i.

    :param batch: a microbatch to record with; its rows are in dim 0.
    :param has_loss: the loss is not the module's own, so the last entry of a tuple is its target.
    :param present: returns a context in which modules that have no memory have some, while the whole module
        runs.
    :raises TrainingError: the module cannot be cut; the message says what was tried, where it failed, and
        what to do.
    """

    def __init__(
        self,
        root: nn.Module,
        split: Sequence[str] | None,
        batch: Batch,
        rows: int,
        present: Callable[[Iterable[nn.Module]], AbstractContextManager[None]],
        *,
        has_loss: bool,
    ) -> None:
        self.root = root
        self._has_loss = has_loss
        self._present = present
        names = list(split) if split is not None else find_blocks(root)
        if split is not None:
            _check_split(root, names)
        self._names = names
        self._blocks = [root.get_submodule(name) for name in names]
        self._ancestors = _ancestors(root, self._blocks)
        self._units = _units(root, self._ancestors, self._blocks)
        self._layers_of_unit: dict[str, set[int]] = {}
        self._read_units: set[str] = set()
        """Units of which other code reads parameters, without calling them."""
        self._early_units: set[str] = set()
        """Units that run before the first block, and whose results are used after a block, too. They run in every
        window.
        """
        self._window: _Window | None = None
        self._shaping = False
        """Whether a unit is running on the meta device to find the shapes of its outputs."""
        self._cuts: list[_Cut] = []
        self._exit: list[int] = []
        self._exit_per_row: list[bool] = []
        self._shortcuts: list[str] = []
        """Values that code around the blocks takes past a block, in words."""
        self._shapes: dict[Any, Any] = {}
        self._balance = ExpertBalance.find(root)
        self._check_backward_hooks()
        self._attributes = {module: _plain_attributes(module) for module in root.modules()}
        """Plain attributes of all modules before their first run, and the items of those that are lists or dicts."""
        order = self._record(batch, rows)
        if split is None and sorted(order) == list(range(len(names))) != order:
            # For example, a decoder that is registered before its encoder.
            self._names = [names[number] for number in order]
            self._blocks = [self._blocks[number] for number in order]
            order = self._record(batch, rows)
        self._check_order(order)
        self._patch()

    @property
    def layer_count(self) -> int:
        return len(self._blocks) + 2

    @property
    def roots(self) -> list[nn.Module]:
        return [self.root]

    def modules(self) -> Iterator[tuple[str, nn.Module, tuple[int, ...]]]:
        """Yield every module with its name and the layers that it belongs to, in model order."""
        for name, module in self.root.named_modules(remove_duplicate=False):
            yield name, module, self.layers_of(name)

    def signature(self, batch: Batch, rows: int) -> Any:
        """Return the signature that the shapes of tensors which cross cuts depend on."""
        return signature(batch, rows)

    def name(self, layer: int) -> str:
        """Return the layer's name for messages."""
        if 0 < layer <= len(self._blocks):
            return f"{self._names[layer - 1]} ({type(self._blocks[layer - 1]).__name__})"
        if layer == 0:
            return f"what runs before {self._names[0]}"
        return f"what runs after {self._names[-1]}"

    def kind(self, layer: int) -> str:
        """Return the name of the layer's class, which does not contain its position."""
        if 0 < layer <= len(self._blocks):
            return type(self._blocks[layer - 1]).__name__
        return "input" if layer == 0 else "output"

    @property
    def couples_rows(self) -> bool:
        """Whether the rows of a microbatch influence each other, by expert balancing or batch normalisation."""
        return self._balance is not None or normalises_over_rows(self.root)

    def in_block(self, name: str) -> bool:
        """Return whether the submodule is a block or part of one."""
        return any(name == block or name.startswith(block + ".") for block in self._names)

    def code_scopes(self, first: int, end: int) -> Iterator[tuple[int, bool]]:
        """Yield the code that layers [first, end) run, in order: the layer, and whether the code is its block."""
        last = self.layer_count - 1
        for layer in range(first, end):
            if 0 < layer < last:
                yield layer, True
            if layer != last - 1:
                yield layer, False

    def layers_of(self, name: str) -> tuple[int, ...]:
        """Return the layers that use the submodule's own parameters and buffers, ascending."""
        for number, block in enumerate(self._names):
            if name == block or name.startswith(block + "."):
                return (number + 1,)
        for unit, layers in self._layers_of_unit.items():
            if name == unit or name.startswith(unit + "."):
                return tuple(sorted(layers)) or (self.layer_count - 1,)
        # A parameter of a module around the blocks: the code that uses it runs in every window.
        return tuple(range(self.layer_count))

    def run(
        self, first: int, end: int, batch: Batch, received: tuple[Tensor, ...], rows: int, scopes: LayerScopes
    ) -> Any:
        """Run layers [first, end) on a microbatch; return the module's output, or the tensors that cross the
        cut.

        :param received: the output of the previous window; empty if ``first`` is 0.
        """
        balance: tuple[Tensor, ...] = ()
        if first > 0:
            needed = len(self._exit if first == self.layer_count - 1 else self._cuts[first - 1].needed)
            received, balance = received[:needed], received[needed:]
        window = _Window(first, end, rows, received, scopes, balance=balance)
        self._window = window
        self._switch(window, 0, 0)
        try:
            with self._balancing(window):
                output = self._call(batch)
        except _WindowEnd as stop:
            return stop.tensors
        finally:
            self._leave(window)
            self._window = None
        if window.due < len(self._blocks):
            raise TrainingError(
                f"{self._uncut}: {self._names[window.due]} did not run; {DYNAMIC_BLOCKS}; {CUT_REMEDIES}"
            )
        return output

    def _call(self, batch: Batch) -> Any:
        """Run the module on a batch.

        A dictionary is passed by keyword, with the entries that ``forward`` takes, a tuple by position,
        anything else as the only argument.
        """
        if isinstance(batch, Mapping):
            return self.root(**_accepted(self.root, batch))
        if isinstance(batch, tuple | list):
            return self.root(*(batch[:-1] if self._has_loss and len(batch) > 1 else batch))
        return self.root(batch)

    @property
    def _uncut(self) -> str:
        return f"{type(self.root).__name__} cannot be cut at {self._names[0]} … {self._names[-1]}"

    def verify(
        self,
        batch: Batch,
        rows: int,
        compare: Callable[[Any], Tensor],
        tolerance: float,
        with_layer: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        """Compare the layers, run one by one, with the whole module in evaluation mode. Before that, the module
        must be in training mode.

        :param compare: converts the module's output to one tensor.
        :param tolerance: relative difference that is attributed to rounding.
        :param with_layer: returns a context in which a layer that has no memory has some.
        :raises TrainingError: the results differ.
        """
        with self._whole():
            self._check_state(batch)
        with evaluating(self.root), torch.no_grad(), self._equal_random_numbers():
            self._restore_attributes()
            with self._whole():
                _seed(0)
                wanted = compare(self._call(batch))
            # A stage does not have what blocks of other stages keep in attributes.
            kept = [name for name in self._restore_attributes() if self.in_block(name)]
            tensors: Any = ()
            for layer in range(self.layer_count):
                with with_layer(layer), self._only_layer(layer):
                    _seed(0)
                    tensors = self._verified(layer, batch, tensors, rows, kept)
                    self._restore_attributes()
            found = compare(tensors)
        found, wanted = found.double(), wanted.double()
        # A loss that is not a number says nothing about the cut; its steps are skipped, and named.
        if found.shape != wanted.shape or not torch.allclose(
            found, wanted, rtol=tolerance, atol=tolerance / 100, equal_nan=True
        ):
            results = f"run layer by layer it returns {_first_values(found)}, run as a whole {_first_values(wanted)}"
            if self._shortcuts:
                raise TrainingError(
                    f"{self._uncut}: {'; '.join(self._shortcuts[:3])}; only what a block takes crosses a cut "
                    f"({results}); cut only where nothing is taken past a block, with Training(split=[...]), let the "
                    "blocks take and return that value, or hand over a list with Training(layers=[...])"
                )
            raise TrainingError(
                f"{self._uncut}: {results}, so its code around the blocks keeps state from one call to the next, or "
                f"depends on the values that it computes; {_remedies(kept)}"
            )

    @contextmanager
    def _equal_random_numbers(self) -> Iterator[None]:
        """Let each block, and the code after it, draw the same random numbers in all runs of this context.

        Some models draw in evaluation mode, too: a diffusion model draws the noise that it predicts.
        """
        handles = []
        for number, block in enumerate(self._blocks):
            handles.append(block.register_forward_pre_hook(lambda *_, seed=2 * number + 1: _seed(seed)))
            handles.append(block.register_forward_hook(lambda *_, seed=2 * number + 2: _seed(seed)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _verified(
        self, layer: int, batch: Batch, tensors: tuple[Tensor, ...], rows: int, kept: Sequence[str]
    ) -> Any:
        try:
            return self.run(layer, layer + 1, batch, tensors, rows, LayerScopes())
        except TrainingError:
            raise
        except Exception as error:
            raise TrainingError(
                f"{self._uncut}: running {self.name(layer)} alone raised {type(error).__name__}: {error}; "
                f"{_remedies(kept)}"
            ) from error

    def _restore_attributes(self) -> list[str]:
        """Restore the plain attributes whose tensors have changed since the first run, and return their names."""
        changed = []
        for prefix, module in self.root.named_modules():
            before = self._attributes[module]
            for key, (_, items) in _plain_attributes(module).items():
                was, had = before.get(key, (None, None))
                if list(map(id, _tensors_in(items))) == list(map(id, _tensors_in(had))):
                    continue
                changed.append(f"{prefix}.{key}" if prefix else key)
                if key not in before:
                    del module.__dict__[key]
                    continue
                module.__dict__[key] = was
                if isinstance(was, list):
                    was[:] = had
                elif isinstance(was, dict):
                    was.clear()
                    was.update(had)
        return changed

    def _check_state(self, batch: Batch) -> None:
        """Reject a module that changes buffers around its blocks during training.

        That code runs in every window, and in all but one of them it gets stand-ins as input. The module must
        be whole (``_whole``).
        """
        saved = [
            (f"{name}.{key}" if name else key, module, key, buffer, buffer.clone())
            for name, module in self.root.named_modules()
            for key, buffer in module.named_buffers(recurse=False)
        ]
        own = [one for one in saved if id(one[1]) in self._ancestors]
        if not own:
            return
        try:
            with torch.no_grad(), torch.random.fork_rng():
                self._call(batch)
            # Code may change a buffer in place, or assign another tensor to it.
            changed = [
                name for name, module, key, _, value in own if not torch.equal(getattr(module, key), value)
            ]
        finally:
            for _, module, key, buffer, value in saved:
                buffer.copy_(value)
                setattr(module, key, buffer)
        if changed:
            raise TrainingError(
                f"{self._uncut}: its forward changes {', '.join(changed)} around the blocks; move such a buffer "
                f"into a submodule of its own that changes it; {CUT_REMEDIES}"
            )

    def _whole(self) -> AbstractContextManager[None]:
        """Return a context in which the module can run as a whole: its code around the blocks has memory."""
        read = [module for name in self._read_units for module in self._units[name].modules()]
        return self._present([*(m for m in self.root.modules() if id(m) in self._ancestors), *read])

    # --- recording -------------------------------------------------------------------------------

    def _record(self, batch: Batch, rows: int) -> list[int]:
        """Run the whole module and record in which order its parts run and what depends on what.

        :returns: numbers of the blocks in the order in which they ran.
        """
        while True:
            known = self._read_units.copy()
            try:
                order = self._record_once(batch, rows)
            except TrainingError:
                if self._read_units == known:
                    raise
            else:
                if self._read_units == known:
                    return order
            # Parameters had no memory when code around the blocks read them; now they will.

    def _record_once(self, batch: Batch, rows: int) -> list[int]:
        self._layers_of_unit = {name: set() for name in self._units}
        trainable = [parameter for parameter in self.root.parameters() if parameter.requires_grad]
        order: list[int] = []
        taken: list[list[Any]] = []
        results: list[list[Any]] = []
        handles = []
        found: dict[int, _Cut] = {}
        running: dict[nn.Module, ExitStack] = {}
        sources: list[tuple[Any, int, str]] = []
        self._shortcuts, self._early_units = [], set()

        def note_shortcuts(tensors: Iterable[Tensor], number: int, reader: str) -> None:
            """Record what was computed before block ``number - 1`` and reaches code after it in another way."""
            reached = _reached(tensors)
            for source, segment, name in sources:
                if segment >= number or id(source) not in reached:
                    continue
                # Losses of expert balancing are computed from all blocks, and made elsewhere (``_balancing``).
                if segment == 0 and self._balance is None:
                    self._early_units.add(name)
                else:
                    passed = " … ".join(
                        self._names[n] for n in dict.fromkeys((order[segment], order[number - 1]))
                    )
                    self._shortcuts.append(
                        f"{reader} is also computed from the output of {name}, past {passed}"
                    )

        def begin(module: nn.Module, arguments: Any) -> None:
            running[module] = ExitStack()
            running[module].enter_context(self._present(module.modules()))

        def end(module: nn.Module, arguments: Any, output: Any) -> None:
            running.pop(module).close()

        def enter(number: int, module: nn.Module, arguments: Any, named: Any) -> None:
            leaves, _ = tree.tree_flatten((arguments, named))
            self._check_leaves(number, leaves)
            needed = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
            before = taken[-1] if taken else []
            carried = {
                i: next(j for j, other in enumerate(before) if other is leaves[i])
                for i in needed
                if any(other is leaves[i] for other in before)
            }
            note_shortcuts(
                [leaves[i] for i in needed if i not in carried],
                len(order),
                f"the input of {self._names[number]}",
            )
            order.append(number)
            taken.append(leaves)
            found[number] = _Cut(needed, carried, [_has_rows(leaves[i], rows) for i in needed])

        def leave(number: int, module: nn.Module, arguments: Any, named: Any, output: Any) -> Any:
            leaves, structure = tree.tree_flatten(output)
            self._check_leaves(number, leaves)
            first = next((a for a in taken[-1] if isinstance(a, Tensor) and a.is_floating_point()), None)
            cut = found[number]
            cut.output = structure
            cut.skipped = [_describe_skipped(leaf, first) for leaf in leaves]
            fresh = [_require_gradient(leaf) for leaf in leaves]
            results.append(fresh)
            sources.extend(
                (leaf, len(order), self._names[number]) for leaf in fresh if isinstance(leaf, Tensor)
            )
            return tree.tree_unflatten(fresh, structure)

        def current_layer() -> int:
            last = order[-1] + 1 if order else 0
            inside = bool(order) and self._blocks[order[-1]] in running
            return self.layer_count - 1 if len(order) == len(self._blocks) and not inside else last

        def read(parameter: nn.Parameter) -> None:
            """Record that code which is running reads a parameter."""
            owners = self._owners(parameter)
            if not owners or any(owner in running for owner in owners.values()):
                return
            for name in owners:
                if name in self._units:
                    self._read_units.add(name)
                    # Code before the last layer's runs in later windows, too.
                    last = self.layer_count - 1
                    self._layers_of_unit[name] |= {last} if current_layer() == last else set(range(last + 1))
                    return
            raise TrainingError(
                f"{self._uncut}: code outside of {', '.join(owners)} reads a parameter of it, which other stages do "
                f"not have; {CUT_REMEDIES}"
            )

        def unit(name: str, module: nn.Module, arguments: Any, output: Any) -> Any:
            last = order[-1] + 1 if order else 0
            self._layers_of_unit[name].add(current_layer())
            leaves, structure = tree.tree_flatten(output)
            # If it already depends on a block, its path back to the block stays as it is.
            marked = [
                leaf if getattr(leaf, "requires_grad", False) else _require_gradient(leaf) for leaf in leaves
            ]
            new = [one for one, leaf in zip(marked, leaves, strict=True) if one is not leaf]
            if not order:  # Other units before the first block may lie on the way from an early unit.
                new += [one.grad_fn for one in marked if isinstance(one, Tensor) and one.grad_fn is not None]
            sources.extend((source, last, name) for source in new)
            return tree.tree_unflatten(marked, structure)

        try:
            for parameter in trainable:
                parameter.requires_grad_(False)
            for part in (*self._blocks, *self._units.values()):
                handles += [part.register_forward_pre_hook(begin), part.register_forward_hook(end)]
            for number, block in enumerate(self._blocks):
                handles.append(block.register_forward_pre_hook(partial(enter, number), with_kwargs=True))
                handles.append(block.register_forward_hook(partial(leave, number), with_kwargs=True))
            handles += [m.register_forward_hook(partial(unit, name)) for name, m in self._units.items()]
            with evaluating(self.root), torch.enable_grad(), self._whole(), ParameterReads(read):
                output = self._call(batch)
            ends = [leaf for leaf in tree.tree_flatten(_loss_of(output))[0] if isinstance(leaf, Tensor)]
            note_shortcuts(ends, len(order), "the output of the model")
            for name in self._early_units:
                self._layers_of_unit[name] = set(range(self.layer_count))
        except TrainingError:
            raise
        except Exception as error:
            remedy = ""
            if "requires grad is being used in an in-place operation" in str(error):
                remedy = f" The input or output of a block is changed in place; {IN_PLACE_REMEDY}"
            raise TrainingError(
                f"{type(self.root).__name__} raised {type(error).__name__} on the first samples: {error}{remedy}"
            ) from error
        finally:
            for handle in handles:
                handle.remove()
            for stack in running.values():
                stack.close()
            for parameter in trainable:
                parameter.requires_grad_(True)
        if sorted(order) != list(range(len(self._blocks))):
            return order
        self._cuts = [found[number] for number in range(len(self._blocks))]
        self._exit = self._used_later(results[-1], output)
        self._exit_per_row = [_has_rows(results[-1][i], rows) for i in self._exit]
        return order

    def _check_leaves(self, number: int, leaves: Iterable[Any]) -> None:
        """Reject objects in which tensors that depend on earlier layers cannot be found."""
        for leaf in leaves:
            attributes = getattr(leaf, "__dict__", {}).values() if not isinstance(leaf, Tensor) else ()
            if any(isinstance(value, Tensor) and value.requires_grad for value in attributes):
                kind = type(leaf).__name__
                raise TrainingError(
                    f"{self._uncut}: {self._names[number]} takes or returns an object of class {kind}, in which ftd "
                    "does not find the tensors that cross the cut; pass them in tuples, lists or dicts, or, if it is a "
                    f"dataclass, call torch.export.register_dataclass({kind}) after its definition"
                )

    def _check_backward_hooks(self) -> None:
        """Reject backward hooks of modules whose ``forward`` may begin or end in the middle of a stage."""
        blocks = {id(block) for block in self._blocks}
        for name, module in self.root.named_modules():
            if id(module) in self._ancestors | blocks and (
                module._backward_hooks or module._backward_pre_hooks
            ):
                raise TrainingError(
                    f"{self._uncut}: {name or 'the model itself'} has a backward hook, which a stage that begins there "
                    "does not call; register it on a submodule of a block"
                )

    def _owners(self, parameter: nn.Parameter) -> dict[str, nn.Module]:
        """Return the units and blocks that hold the parameter, by name; none if code around the blocks may always
        read it, because a module around them holds it.
        """
        for module in self.root.modules():
            if id(module) in self._ancestors and any(own is parameter for own in module._parameters.values()):
                return {}
        parts = self._units | dict(zip(self._names, self._blocks, strict=True))
        return {
            name: part for name, part in parts.items() if any(own is parameter for own in part.parameters())
        }

    def _check_order(self, order: list[int]) -> None:
        if order == list(range(len(self._blocks))):
            return
        twice = next((n for n in order if order.count(n) > 1), None)
        if twice is not None:
            problem = f"{self._names[twice]} runs more than once in a forward pass"
        else:
            missing = next((n for n in range(len(self._blocks)) if n not in order), None)
            if missing is not None:
                problem = f"{self._names[missing]} did not run"
            else:
                problem = "they run in the order " + ", ".join(self._names[n] for n in order)
        raise TrainingError(f"{self._uncut}: {problem}; {CUT_REMEDIES}")

    def _used_later(self, leaves: list[Any], output: Any) -> list[int]:
        """Return the leaves of the last block's output that the module's output depends on."""
        floating = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        ends, _ = tree.tree_flatten(_loss_of(output))
        roots = [t.sum() for t in ends if isinstance(t, Tensor) and t.requires_grad and t.grad_fn is not None]
        if not roots:
            return floating
        gradients = torch.autograd.grad(
            torch.stack([r.double() for r in roots]).sum(), [leaves[i] for i in floating], allow_unused=True
        )
        returned = {id(end) for end in ends}
        used = [
            i for i, g in zip(floating, gradients, strict=True) if id(leaves[i]) in returned or g is not None
        ]
        return used or floating

    # --- running ---------------------------------------------------------------------------------

    def _patch(self) -> None:
        """Replace the ``forward`` of blocks and units by one that consults the window.

        These are instance attributes, so names of modules and parameters do not change.
        """
        for number, block in enumerate(self._blocks):
            block.forward = partial(self._run_block, number, block.forward)
        for name, unit in self._units.items():
            unit.forward = partial(self._run_unit, name, unit.forward)

    def _run_block(self, number: int, original: Any, /, *arguments: Any, **named: Any) -> Any:
        window, layer = self._window, number + 1
        if window is None:
            if torch.is_grad_enabled() and self.root.training:
                raise TrainingError(
                    f"{self._names[number]} is run again in the backward pass by {type(self.root).__name__} itself "
                    "(torch.utils.checkpoint around its blocks); leave that out, and let ftd do it: "
                    'activation_checkpointing = "auto"'
                )
            with self._present(self._blocks[number].modules()):
                return original(*arguments, **named)
        if number != window.due:
            ran, due = self._names[number], self._names[window.due]
            raise TrainingError(
                f"{self._uncut}: {ran} ran where {due} was due; {DYNAMIC_BLOCKS}; {CUT_REMEDIES}"
            )
        window.due += 1
        cut = self._cuts[number]
        leaves, structure = tree.tree_flatten((arguments, named))
        last = number == len(self._blocks) - 1
        window.segment = layer
        if layer < window.first:
            if last and window.first == self.layer_count - 1:
                window.segment = window.first
                output = self._received_output(cut, leaves, window)
                self._switch(window, window.first, 0)
                return output
            output = self._skip(cut, leaves, window)
            self._switch(window, layer, 1)
            return output
        if layer == window.first:
            for leaf, tensor in zip(cut.needed, _from_rows(window.received, cut.per_row), strict=True):
                leaves[leaf] = tensor
        elif window.before is not None:
            for leaf, earlier in cut.carried.items():
                leaves[leaf] = window.before[earlier]
        if layer >= window.end:
            crossing = _to_rows([leaves[i] for i in cut.needed], cut.per_row, window.rows)
            raise _WindowEnd((*crossing, *window.balance))
        self._leave(window)
        window.before = leaves
        arguments, named = tree.tree_unflatten(leaves, structure)
        output = window.scopes.run_block(layer, original, *arguments, **named)
        if self._balance is not None:
            window.balance = self._balance.add(self._blocks[number], window.balance, window.rows)
        if last:
            if window.end <= layer + 1:
                results, _ = tree.tree_flatten(output)
                crossing = _to_rows([results[i] for i in self._exit], self._exit_per_row, window.rows)
                raise _WindowEnd((*crossing, *window.balance))
            window.segment = self.layer_count - 1
        # The code after the last block is its own layer, wherever the window begins.
        self._switch(window, window.segment, 0 if last else 1)
        return output

    def _skip(self, cut: _Cut, leaves: list[Any], window: _Window) -> Any:
        first = next((a for a in leaves if isinstance(a, Tensor) and a.is_floating_point()), None)
        results = [_fill_skipped(leaf, first, window.rows) for leaf in cut.skipped]
        return tree.tree_unflatten(results, cut.output)

    def _received_output(self, cut: _Cut, leaves: list[Any], window: _Window) -> Any:
        results, structure = tree.tree_flatten(self._skip(cut, leaves, window))
        for leaf, tensor in zip(self._exit, _from_rows(window.received, self._exit_per_row), strict=True):
            results[leaf] = tensor
        return tree.tree_unflatten(results, structure)

    def _run_unit(self, name: str, original: Any, /, *arguments: Any, **named: Any) -> Any:
        window = self._window
        if window is None:
            if self._shaping:
                return original(*arguments, **named)
            with self._present(self._units[name].modules()):
                return original(*arguments, **named)
        if name in self._early_units and window.scope is not None:
            # Units before it draw random numbers in one window only, so it has a stream of its own.
            self._switch(window, window.segment, window.part + 1)
            output = original(*arguments, **named)
            self._switch(window, window.segment, window.part + 1)
            return output
        if window.first <= window.segment < window.end:
            return original(*arguments, **named)
        return self._stand_in(name, original, arguments, named)

    def _stand_in(self, name: str, original: Any, arguments: Any, named: Any) -> Any:
        """Return zeros of the shapes that the unit would return, determined on the meta device."""
        leaves, structure = tree.tree_flatten((arguments, named))
        device = next((t.device for t in leaves if isinstance(t, Tensor)), torch.device("cpu"))
        key = (name, tuple((tuple(t.shape), t.dtype) if isinstance(t, Tensor) else repr(t) for t in leaves))
        if key not in self._shapes:
            unit = self._units[name]
            held = {n: t.to("meta") for n, t in (*unit.named_parameters(), *unit.named_buffers())}
            away, there = tree.tree_unflatten(
                [t.to("meta") if isinstance(t, Tensor) else t for t in leaves], structure
            )
            window, self._window, self._shaping = self._window, None, True
            try:
                with torch.no_grad():
                    output = torch.func.functional_call(unit, held, away, there)
            except Exception as error:
                raise TrainingError(
                    f"{type(self.root).__name__} cannot be cut: the shape that {name} ({type(unit).__name__}) returns "
                    f"depends on values: {type(error).__name__}: {error}; {CUT_REMEDIES}"
                ) from error
            finally:
                self._window, self._shaping = window, False
            results, made = tree.tree_flatten(output)
            self._shapes[key] = (
                [_Zeros(tuple(t.shape), t.dtype) if isinstance(t, Tensor) else t for t in results],
                made,
            )
        results, made = self._shapes[key]
        zeros = [
            torch.zeros(t.shape, dtype=t.dtype, device=device) if isinstance(t, _Zeros) else t
            for t in results
        ]
        return tree.tree_unflatten(zeros, made)

    def _switch(self, window: _Window, layer: int, part: int) -> None:
        """Leave the open scope and enter that of ``layer``."""
        self._leave(window)
        window.part = part
        if layer < window.end:
            scopes = window.scopes
            window.scope = (scopes.outside if layer < window.first else scopes.around)(layer, part)
            window.scope.__enter__()

    @staticmethod
    def _leave(window: _Window) -> None:
        if window.scope is not None:
            scope, window.scope = window.scope, None
            scope.__exit__(None, None, None)

    def _balancing(self, window: _Window) -> AbstractContextManager[None]:
        if self._balance is None or window.end < self.layer_count:
            return nullcontext()
        return self._balance.loss_from(lambda: window.balance)

    @contextmanager
    def _only_layer(self, layer: int) -> Iterator[None]:
        """Move the parameters outside of the blocks that belong to layers other than ``layer`` to meta, as in
        training.
        """
        saved: list[tuple[nn.Module, str, nn.Parameter]] = []
        kept = {
            id(parameter)
            for name, unit in self._units.items()
            if layer in self.layers_of(name)
            for parameter in unit.parameters()
        }
        for unit in self._units.values():
            for module in unit.modules():
                for key, parameter in list(module._parameters.items()):
                    if parameter is not None and id(parameter) not in kept:
                        saved.append((module, key, parameter))
                        module._parameters[key] = nn.Parameter(
                            torch.empty_like(parameter, device="meta"), requires_grad=False
                        )
        try:
            yield
        finally:
            for module, key, parameter in saved:
                module._parameters[key] = parameter


# --- finding the blocks --------------------------------------------------------------------------


def find_blocks(root: nn.Module) -> list[str]:
    """Return the names of the blocks of the outermost lists of equal blocks, in model order.

    Lists with less than a quarter of the largest one's parameters do not count as chains of blocks. If
    there is no such list, the submodules of the largest ``nn.Sequential`` are the blocks.

    :raises TrainingError: the model has neither such a list nor an ``nn.Sequential``.
    """
    lists: list[tuple[str, nn.Module, int]] = []
    chains: list[tuple[str, nn.Module, int]] = []
    for name, module in root.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
            continue
        if any(not outer or name.startswith(outer + ".") for outer, _, _ in lists):
            continue
        size = sum(parameter.numel() for parameter in module.parameters())
        # Embeddings take numbers, so they are no chain.
        if not size or any(
            isinstance(block, nn.ModuleList | nn.ModuleDict | nn.Embedding) for block in module
        ):
            continue
        if len({type(block) for block in module}) == 1:
            lists.append((name, module, size))
        elif isinstance(module, nn.Sequential):
            chains.append((name, module, size))
    if not lists and not chains:
        raise TrainingError(
            f"{type(root).__name__} has no list of equal blocks (nn.ModuleList or nn.Sequential of one class) "
            f"at which it could be cut; {CUT_REMEDIES}"
        )
    largest = max(size for _, _, size in lists or chains)
    chosen = (
        [(n, m) for n, m, size in lists if size >= largest / 4]
        if lists
        else [max(chains, key=lambda c: c[2])[:2]]
    )
    return [f"{name}.{key}" if name else key for name, module in chosen for key, _ in module.named_children()]


def _check_split(root: nn.Module, names: Sequence[str]) -> None:
    if not names:
        raise TrainingError("Training.split is empty; name at least one submodule")
    modules = dict(root.named_modules())
    unknown = [name for name in names if name not in modules or not name]
    if unknown:
        children = ", ".join(name for name, _ in root.named_children())
        raise TrainingError(
            f"Training.split names {', '.join(map(repr, unknown))}, which {type(root).__name__} does not have; "
            f"its own submodules are {children}"
        )
    for name in names:
        inside = next((other for other in names if other != name and name.startswith(other + ".")), None)
        if inside is not None:
            raise TrainingError(f"Training.split names {name!r}, which is inside of {inside!r}")
        if names.count(name) > 1:
            raise TrainingError(f"Training.split names {name!r} twice")


def _ancestors(root: nn.Module, blocks: Sequence[nn.Module]) -> set[int]:
    """Return the ids of all modules that contain a block, and of containers outside that are never called."""
    wanted = {id(block) for block in blocks}
    return {
        id(module)
        for module in root.modules()
        if id(module) not in wanted and any(id(inner) in wanted for inner in module.modules())
    }


def _units(root: nn.Module, ancestors: set[int], blocks: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return the outermost submodules outside of the blocks that hold parameters or buffers."""
    inside = {id(block) for block in blocks}
    units: dict[str, nn.Module] = {}

    def visit(prefix: str, module: nn.Module) -> None:
        for key, child in module.named_children():
            name = f"{prefix}{key}"
            if id(child) in inside:
                continue
            container = isinstance(child, nn.ModuleList | nn.ModuleDict)
            if id(child) in ancestors or container:
                visit(name + ".", child)
            elif next(child.parameters(), None) is not None:
                units[name] = child

    visit("", root)
    return units


# --- leaves --------------------------------------------------------------------------------------


def _require_gradient(leaf: Any) -> Any:
    """Return a floating-point tensor as one that requires a gradient, and other leaves as they are."""
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.detach().requires_grad_()
    return leaf


def _reached(tensors: Iterable[Tensor]) -> set[int]:
    """Return the ids of the leaves and nodes of the autograd graph that the tensors depend on."""
    tensors = list(tensors)
    leaves = {id(tensor) for tensor in tensors}
    nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):  # the graph ends in a leaf
            leaves.add(id(node.variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return leaves | {id(node) for node in seen}


def _describe_skipped(leaf: Any, first: Tensor | None) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if first is not None and leaf.shape == first.shape and leaf.dtype == first.dtype:
        return _Same()
    return _Zeros(tuple(leaf.shape), leaf.dtype)


def _fill_skipped(leaf: Any, first: Tensor | None, rows: int) -> Any:
    if isinstance(leaf, _Same):
        return first
    if isinstance(leaf, _Zeros):
        shape = leaf.shape if len(leaf.shape) == 0 or leaf.shape[0] == 1 else (rows, *leaf.shape[1:])
        return torch.zeros(shape, dtype=leaf.dtype, device=None if first is None else first.device)
    return leaf


def _has_rows(leaf: Tensor, rows: int) -> bool:
    return leaf.dim() > 0 and leaf.shape[0] == rows


def _to_rows(tensors: list[Tensor], per_row: list[bool], rows: int) -> list[Tensor]:
    """Return the tensors that cross a cut with the rows in dim 0; a tensor without rows is repeated for each
    row.
    """
    return [
        tensor if has_rows else tensor.unsqueeze(0).expand(rows, *tensor.shape)
        for tensor, has_rows in zip(tensors, per_row, strict=True)
    ]


def _from_rows(tensors: tuple[Tensor, ...], per_row: list[bool]) -> list[Tensor]:
    """Return the inverse of ``_to_rows``."""
    return [tensor if has_rows else tensor[0] for tensor, has_rows in zip(tensors, per_row, strict=True)]


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    seed_host(seed)


def _plain_attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return the module's own attributes that may hold tensors, each with a copy if it is a list or dict."""
    return {
        key: (value, value.copy() if isinstance(value, list | dict) else value)
        for key, value in vars(module).items()
        if key not in _MODULE_ATTRIBUTES and isinstance(value, Tensor | tuple | list | dict | None)
    }


def _tensors_in(value: Any) -> list[Tensor]:
    return [
        leaf
        for leaf in tree.tree_leaves(value)
        if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)
    ]


def _remedies(kept: Sequence[str]) -> str:
    """Return what to do about a module that does not run in parts.

    :param kept: attributes in which blocks keep tensors.
    """
    if not kept:
        return CUT_REMEDIES
    return (
        f"blocks keep tensors in attributes ({', '.join(kept[:3])}), which other stages do not have: let each block "
        f"take and return such a value; {CUT_REMEDIES}"
    )


def _loss_of(output: Any) -> Any:
    """Return the loss in a ``ModelOutput`` (an ordered mapping) if it has one, otherwise the whole output."""
    if not isinstance(output, Mapping):
        return output
    loss = output.get("loss")
    return dict(output) if loss is None else loss


def _first_values(tensor: Tensor) -> str:
    values = tensor.detach().flatten()[:3].tolist()
    return ", ".join(f"{value:.6g}" for value in values)


def _accepted(root: nn.Module, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = getattr(root, "get_base_model", None)
    if callable(inner):  # A model of peft passes everything on.
        return _accepted(inner(), batch)
    parameters = inspect.signature(root.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return batch
    names = {parameter.name for parameter in parameters}
    return {key: value for key, value in batch.items() if key in names}

"""Construction of a model without memory for its large tensors, each of which can be made later, bit for bit.

While a factory runs in the context ``recorded``, a large tensor gets an address but no memory, since pages get
memory only when they are written to. Operations that would write to it are *recorded* instead. A random
operation also runs on scratch memory, so that the generator advances as if the tensor had been filled, and
the generator's earlier state is recorded. ``Recording.make`` repeats, from these states, the operations on
which a tensor depends. So it produces the value that the factory's code would have made, whatever that code
does: scaled residual projections, orthogonal matrices, copies of other parameters.

Small tensors are computed as usual. An operation that needs the values of large tensors gets them, made for
that moment. Code that accesses memory without an operation of torch (``numpy``) gets the real tensor from
then on. A state of the generator that the factory's code reads has a meaning only while the factory runs.
"""

import copyreg
import ctypes
import mmap
import os
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.errors import TrainingError
from runtime.generator_skip import FEWEST_VALUES, draws_of, marked, skip

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
"""Values in Linux's <sys/mman.h>; this version of Python does not define them."""
_NOISE_BYTES = 1 << 22
"""Size of the noise that tensors map, a multiple of the size of a page."""
_STRIDE_BYTES = 37 * mmap.PAGESIZE
"""Distance between the starts of the noise of one tensor and the next."""
LARGE_BYTES = 1 << 16
"""Size in bytes from which a tensor gets no memory."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_aten = torch.ops.aten
_EMPTY = frozenset((_aten.empty.memory_format, _aten.empty_strided.default))
_FACTORIES = _EMPTY | frozenset(
    (
        _aten.zeros.default,
        _aten.ones.default,
        _aten.full.default,
        _aten.rand.default,
        _aten.rand.generator,
        _aten.randn.default,
        _aten.randn.generator,
        _aten.eye.default,
        _aten.eye.m,
    )
)
_VIEWS = frozenset((_aten._unsafe_view.default,))
"""Operations that return a view but are not marked as such."""
_OVERWRITES = frozenset(
    (
        _aten.normal_.default,
        _aten.uniform_.default,
        _aten.zero_.default,
        _aten.fill_.Scalar,
        _aten.fill_.Tensor,
        _aten.copy_.default,
    )
)
"""Operations whose result does not depend on the previous content of their first argument."""
_FIXED_DRAWS = {
    _aten.normal_.default: "normal_",
    _aten.uniform_.default: "uniform_",
    _aten.rand.default: "uniform_",
    _aten.rand.generator: "uniform_",
    _aten.randn.default: "normal_",
    _aten.randn.generator: "normal_",
}
"""Random operations that draw the same number of values whatever their arguments hold, with the method of tensors
that draws alike.
"""
_RESHAPING = ("set_", "resize_", "resize_as_")
_READERS = frozenset(
    (
        Tensor.numpy,
        Tensor.tolist,
        Tensor.__array__,
        Tensor.__dlpack__,
        Tensor.__reduce_ex__,
        Tensor.share_memory_,
        Tensor.data_ptr,
    )
)
"""Methods that give access to memory without an operation of torch."""


@dataclass(frozen=True, slots=True)
class StorageView:
    """The position of a tensor without memory: a view of a recorded storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def within(self, memory: torch.UntypedStorage) -> Tensor:
        """Return the tensor in ``memory``."""
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(memory, self.offset, self.size, self.stride)


class _RandomStream:
    """The words that a generator yields after the state ``base``."""

    def __init__(self, base: Tensor) -> None:
        self._states = {0: base}

    def state_at(self, words: int) -> Tensor:
        """Return the state of the generator after a number of words."""
        if words not in self._states:
            near = max(known for known in self._states if known < words)
            self._states[words] = skip(self._states[near], words - near)
        return self._states[words]

    def add(self, words: int, state: Tensor) -> None:
        """Add a state that is known, since the operation before it was executed."""
        self._states.setdefault(words, state)


@dataclass(frozen=True, slots=True)
class _Position:
    """Position of a generator when a recorded operation draws from it."""

    stream: _RandomStream
    words: int
    drawn: int | None
    """Number of words that the operation draws; ``None``: it is not known."""


class _Generators:
    """Generators whose values are skipped. Such a generator is in a state that stands for a position in a stream,
    so it is recognised when it is read and set again, and differs from any that the factory's code sets by itself.
    """

    def __init__(self) -> None:
        self._skipped: dict[bytes, tuple[_RandomStream, int]] = {}

    def position(self, generator: torch.Generator) -> tuple[_RandomStream, int]:
        """Return the stream of a generator, and the number of words that count as drawn from it."""
        state = generator.get_state()
        return self._skipped.get(state.numpy().tobytes()) or (_RandomStream(state), 0)

    def skip_to(self, generator: torch.Generator, stream: _RandomStream, words: int) -> None:
        """Let further operations draw from the stream as if so many words had been drawn."""
        state = marked(stream.state_at(0), len(self._skipped) + 1)
        self._skipped[state.numpy().tobytes()] = stream, words
        generator.set_state(state)

    def settle(self, generator: torch.Generator) -> None:
        """Give a generator the state that it would have if everything had been drawn."""
        stream, words = self.position(generator)
        if words:
            generator.set_state(stream.state_at(words))


@dataclass(frozen=True, slots=True)
class _Operation:
    """A recorded call, with a ``StorageView`` in place of each tensor without memory."""

    function: Any
    arguments: Any
    """(positional, by keyword)"""
    position: _Position | None
    """Position of the generator before the call."""
    results: tuple[StorageView, ...]
    """Views to which the returned tensors are written; empty for an in-place operation."""
    writes: frozenset[int]
    reads: frozenset[int]
    """Storages whose content before the call matters."""


class UntrackedWriteError(RuntimeError):
    """A tensor was written to by the thread that makes the model and by another thread."""


class Recording:
    """The operations on tensors without memory, from which their values can be made."""

    def __init__(self) -> None:
        self._operations: list[_Operation] = []
        self._storages: dict[int, torch.UntypedStorage] = {}
        """Storages by address, held so that no other storage gets the address."""
        self._sizes: dict[int, int] = {}
        self._scratch: torch.UntypedStorage | None = None
        self._ended = False

    def view_of(self, tensor: Tensor) -> StorageView | None:
        """Return the view of a tensor without memory; ``None`` for any other tensor."""
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return None
        key = tensor.untyped_storage()._cdata
        if key not in self._storages:
            return None
        return StorageView(
            key, tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset())
        )

    def make(self, place: StorageView, target: Tensor) -> None:
        """Write the value of a tensor into ``target``, which has its shape."""
        memory = _Memory(self._sizes)
        alike = (
            target.device.type == "cpu" and target.dtype == place.dtype and target.stride() == place.stride
        )
        in_place = alike and target.nbytes == self._sizes[place.storage] == target.untyped_storage().nbytes()
        if in_place:
            memory[place.storage] = target.untyped_storage()
        self._contents({place.storage}, memory)
        if not in_place:
            target.copy_(place.within(memory[place.storage]))

    def values_of(self, arguments: Any) -> Any:
        """Return the arguments with values in fresh memory in place of views."""
        memory = _Memory(self._sizes)
        self._contents(_storages(arguments), memory)
        return _filled(arguments, memory)

    def scratch(self, arguments: Any) -> Any:
        """Return the arguments with uninitialised memory in place of views, for a call that writes one tensor.

        The next call gets the same memory, because clearing fresh pages takes longer than drawing values.
        """
        storages = _storages(arguments)
        needed = max((self._sizes[storage] for storage in storages), default=0)
        if self._scratch is None or self._scratch.nbytes() < needed:
            self._scratch = _reserved(needed).untyped_storage()
        return _filled(arguments, dict.fromkeys(storages, self._scratch))

    def track(self, tensor: Tensor) -> StorageView:
        """Begin to record operations on a tensor whose memory has not been written to, and return its view."""
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage
        self._sizes[storage._cdata] = storage.nbytes()
        place = self.view_of(tensor)
        assert place is not None
        return place

    def was_written_elsewhere(self, place: StorageView) -> bool:
        """Return whether anything other than recorded operations, such as another thread, wrote to a tensor.

        :raises UntrackedWriteError: recorded operations wrote to it as well, so that its value is unknown.
        """
        storage = self._storages[place.storage]
        pages = (ctypes.c_ubyte * (-(-storage.nbytes() // mmap.PAGESIZE)))()
        address = ctypes.c_void_p(storage.data_ptr())
        if _LIBC.mincore(address, ctypes.c_size_t(storage.nbytes()), pages) != 0:
            raise OSError(ctypes.get_errno(), "mincore failed")
        if bytes(pages).count(0) == len(pages):
            return False
        if any(place.storage in operation.writes for operation in self._operations):
            raise UntrackedWriteError
        return True

    def materialise(self, tensor: Tensor) -> None:
        """Give a tensor, and all that share its memory, their values for good."""
        place = self.view_of(tensor)
        if place is not None:
            memory = _Memory(self._sizes)
            self._contents({place.storage}, memory)
            self._storages.pop(place.storage).copy_(memory[place.storage])

    def add(self, operation: _Operation) -> None:
        self._operations.append(operation)

    def end(self) -> None:
        """End recording, and release the addresses and the scratch memory."""
        self._storages.clear()
        self._scratch = None
        self._ended = True

    def _contents(self, storages: Collection[int], memory: "_Memory") -> None:
        """Execute the operations on which the content of the storages depends."""
        needed, chosen = set(storages), []
        for operation in reversed(self._operations):
            if not needed.isdisjoint(operation.writes):
                chosen.append(operation)
                needed -= operation.writes - operation.reads
                needed |= operation.reads
        with torch.no_grad():
            for operation in reversed(chosen):
                arguments, named = _filled(operation.arguments, memory)
                with self._drawing_from(operation.position, named.get("generator")):
                    returned = operation.function(*arguments, **named)
                results = [t for t in tree.tree_leaves(returned) if isinstance(t, Tensor)]
                for place, result in zip(operation.results, results, strict=False):
                    place.within(memory[place.storage]).copy_(result)

    @contextmanager
    def _drawing_from(self, position: _Position | None, generator: torch.Generator | None) -> Iterator[None]:
        """Return a context in which the generator, or torch's own, continues from a position; its state is
        restored afterwards.
        """
        if position is None:
            yield
            return
        used = generator or torch.default_generator
        before = used.get_state()
        used.set_state(position.stream.state_at(position.words))
        try:
            yield
            # While recording, this operation may have been recorded again instead of executed.
            if position.drawn is not None and self._ended:
                position.stream.add(position.words + position.drawn, used.get_state())
        finally:
            used.set_state(before)


class _Memory(dict[int, torch.UntypedStorage]):
    """Fresh memory for storages, allocated on first use."""

    def __init__(self, sizes: dict[int, int]) -> None:
        self._sizes = sizes

    def __missing__(self, key: int) -> torch.UntypedStorage:
        self[key] = _reserved(self._sizes[key]).untyped_storage()
        return self[key]


@contextmanager
def recorded(recording: Recording, *, exact: bool = True) -> Iterator[None]:
    """Return a context for the code that makes a model.

    :param exact: give large tensors the values that they would have if the model was built at once, which
        takes the time to draw all of them. Otherwise each tensor is drawn from a stream of its own when it
        is made.
    """
    streams = None if exact else random.Random(int(torch.randint(2**62, ())))
    generators = _Generators()
    try:
        with _Operations(recording, generators, streams), _Access(recording), _pickling(recording):
            yield
    finally:
        generators.settle(torch.default_generator)


@contextmanager
def _pickling(recording: Recording) -> Iterator[None]:
    """Return a context in which tensors are pickled with their values: torch asks no mode for plain tensors."""

    def reduce(tensor: Tensor) -> Any:
        recording.materialise(tensor)
        return tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]

    before = copyreg.dispatch_table.get(Tensor)
    copyreg.dispatch_table[Tensor] = reduce
    try:
        yield
    finally:
        if before is None:
            del copyreg.dispatch_table[Tensor]
        else:
            copyreg.dispatch_table[Tensor] = before


class Weights(Protocol):
    """Values of some of a model's tensors, such as those in files."""

    def has(self, name: str) -> bool:
        """Return whether there is a value for the tensor of this name."""

    def load_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors in place; those without a value stay as they are."""


@runtime_checkable
class ModelFactory(Protocol):
    """A factory of a model whose weights are read by name."""

    @property
    def exact(self) -> bool:
        """Whether ``build`` must give the values of a model that is built at once."""

    def build(self) -> nn.Module:
        """Make the model with values of its own."""

    def weights(self, model: nn.Module) -> Weights | None:
        """Return the values with which training begins; ``None`` for the model's own."""


class DeferredModule:
    """A module whose parameters and persistent buffers are on the meta device, and their initial values.

    Other tensors, which are few and small, are as the factory made them.

    :param root: made while ``recording``; its tensors never get memory.
    :param weights: initial values in place of those that the factory made.
    :raises UntrackedWriteError: several threads wrote to one tensor.
    """

    def __init__(self, root: nn.Module, recording: Recording, weights: Weights | None = None) -> None:
        self.root = root
        self._recording = recording
        self._weights = weights
        self._values: dict[str, StorageView | Tensor] = {}
        state = {n: t for n, t in root.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
        for name, tensor in state.items():
            place = recording.view_of(tensor)
            self._values[name] = (
                tensor.detach() if place is None or recording.was_written_elsewhere(place) else place
            )
        places = [place for place in self._values.values() if isinstance(place, StorageView)]
        self._numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
        """Numbers of places, one for all names of a tensor."""
        lasting = {id(tensor): _as_meta(tensor) for tensor in state.values()}
        for module in root.modules():
            for table in _tables(module):
                for key, value in table.items():
                    if id(value) in lasting:
                        table[key] = lasting[id(value)]
            for leaf in _tensors(
                [v for k, v in vars(module).items() if k not in ("_parameters", "_modules")]
            ):
                recording.materialise(leaf)
        recording.end()

    def to_device(self, device: torch.device) -> None:
        """Move the tensors that are not on the meta device."""
        for module in self.root.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[key] = buffer.to(device)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors in place with their initial values; keys are names in ``state_dict``."""
        if self._weights is not None:
            self._weights.load_into(tensors)
        with torch.no_grad():
            for name, tensor in tensors.items():
                if self._weights is None or not self._weights.has(name):
                    value = self._values[name]
                    if isinstance(value, StorageView):
                        self._recording.make(value, tensor.detach())
                    else:
                        tensor.copy_(value)

    def release(self) -> None:
        """Release everything from which the initial values are made."""
        self._recording, self._weights = Recording(), None
        self._values.clear()

    def make_placeholders(self, tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Return tensors like those given, with values that are quickly made, for runs whose results are
        discarded.

        Matrices get noise, so that what depends on them differs from row to row; vectors get ones. Buffers,
        small tensors and integers get their initial values.
        """
        made: dict[str, Tensor] = {}
        exact: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            place = self._values[name]
            kept = not isinstance(tensor, nn.Parameter) or not tensor.is_floating_point()
            if kept or not isinstance(place, StorageView):
                exact[name] = made[name] = torch.empty_like(tensor.detach(), device=device)
            elif tensor.dim() < 2:
                made[name] = torch.ones_like(tensor.detach(), device=device)
            else:
                made[name] = _noise(tensor.dtype).make(self._numbers[place], tensor.detach(), device)
        self.fill(exact)
        return made

    @contextmanager
    def materialised(
        self, modules: Iterable[nn.Module], device: torch.device, *, exact: bool = False
    ) -> Iterator[None]:
        """Return a context in which the modules' own tensors on the meta device are replaced by real ones.

        :param exact: whether they have their initial values; otherwise those of ``make_placeholders``.
        """
        names = {id(m): name for name, m in self.root.named_modules()}
        away: list[tuple[dict[str, Any], str, Tensor]] = []
        wanted: dict[int, tuple[str, Tensor]] = {}
        for module in modules:
            for table in _tables(module):
                for key, old in table.items():
                    if old is not None and old.is_meta:
                        name = names[id(module)]
                        wanted.setdefault(id(old), (f"{name}.{key}" if name else key, old))
                        away.append((table, key, old))
        tensors = dict(wanted.values())
        if exact:
            made = {name: torch.empty_like(old.detach(), device=device) for name, old in tensors.items()}
            self.fill(made)
        else:
            made = self.make_placeholders(tensors, device)
        fresh = {
            identity: nn.Parameter(made[name], requires_grad=old.requires_grad)
            if isinstance(old, nn.Parameter)
            else made[name]
            for identity, (name, old) in wanted.items()
        }
        for table, key, old in away:
            table[key] = fresh[id(old)]
        try:
            yield
        finally:
            for table, key, old in away:
                table[key] = old


class _Access(TorchFunctionMode):
    """A mode that materialises tensors whose memory is read without an operation."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _READERS:
            self._recording.materialise(args[0])
        return function(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records operations on large tensors."""

    def __init__(self, recording: Recording, generators: _Generators, streams: random.Random | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording
        self._generators = generators
        self._streams = streams

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = args, kwargs or {}
        placed = self._placed(given)
        if (not _storages(placed) and function not in _FACTORIES) or function.is_view or function in _VIEWS:
            return self._execute(function, given)
        written = _written(function, *given)
        if function._schema.name.partition("::")[2] in _RESHAPING:
            for tensor in _tensors(given):
                self._recording.materialise(tensor)
            try:
                return self._execute(function, given)
            except RuntimeError as error:
                if any(tensor.untyped_storage().resizable() for tensor in written):
                    raise
                name = function._schema.name.partition("::")[2]
                raise TrainingError(
                    f"Training.model enlarges a tensor with {name}, and its memory cannot grow; make it in its final "
                    "size, or give Training.model the module itself"
                ) from error
        if written:
            return self._in_place(function, given, placed, written)
        return self._functional(function, given, placed)

    def _placed(self, given: Any) -> Any:
        """Return the arguments of a call with views in place of tensors without memory."""
        return tree.tree_map_only(Tensor, lambda t: self._recording.view_of(t) or t, given)

    def _in_place(self, function: Any, given: Any, placed: Any, written: list[Tensor]) -> Any:
        places = [self._recording.view_of(tensor) for tensor in written]
        if not all(places):
            # A small tensor is computed from large ones. Operations on lists may write to large ones as well.
            for tensor in written:
                self._recording.materialise(tensor)
            self._execute(function, self._recording.values_of(self._placed(given)))
            return _returned(function, given, written)
        writes = frozenset(place.storage for place in places if place is not None)
        whole = function in _OVERWRITES and written[0].nbytes == written[0].untyped_storage().nbytes()
        reads = _storages(placed if not whole else (placed[0][1:], placed[1]))
        self._add(function, placed, (), writes, reads, drawn_into=written[0])
        return _returned(function, given, written)

    def _functional(self, function: Any, given: Any, placed: Any) -> Any:
        away = torch.device(given[1].get("device") or "cpu")
        if away.type != "cpu" and function in _FACTORIES:
            return self._execute(function, given)
        try:
            like = _on_meta(function, given) if away.type == "cpu" else None
        except Exception:
            like = None  # The shape of the result depends on values.
        results = [] if like is None else _tensors(like)
        if not results or sum(t.nbytes for t in results) < LARGE_BYTES:
            return self._execute(function, self._recording.values_of(placed))
        made = {id(t): _unwritten(t) for t in results}
        places = tuple(self._recording.track(made[id(t)]) for t in results)
        if function not in _EMPTY:
            writes = frozenset(place.storage for place in places)
            self._add(function, placed, places, writes, _storages(placed), drawn_into=results[0])
        return tree.tree_map_only(Tensor, lambda t: made[id(t)], like)

    def _execute(self, function: Any, arguments: Any) -> Any:
        """Execute an operation that is not recorded, or whose effect is known only when it has been executed."""
        args, kwargs = arguments
        if torch.Tag.nondeterministic_seeded in function.tags:
            self._generators.settle(kwargs.get("generator") or torch.default_generator)
        return function(*args, **kwargs)

    def _add(
        self,
        function: Any,
        placed: Any,
        results: tuple[StorageView, ...],
        writes: frozenset[int],
        reads: frozenset[int],
        *,
        drawn_into: Tensor,
    ) -> None:
        # Small tensors may change afterwards, so they are copied.
        kept = tree.tree_map_only(Tensor, lambda t: t.detach().clone(), placed)
        position = None
        if torch.Tag.nondeterministic_seeded in function.tags:
            generator = placed[1].get("generator") or torch.default_generator
            stream, words = self._generators.position(generator)
            drawn = None
            if self._streams is not None:
                generator.manual_seed(self._streams.getrandbits(63))
            else:
                drawn = _words_drawn(function, drawn_into)
                if drawn is not None:
                    self._generators.skip_to(generator, stream, words + drawn)
                else:
                    fixed = function in _FIXED_DRAWS
                    self._execute(
                        function, self._recording.scratch(kept) if fixed else self._recording.values_of(kept)
                    )
            position = _Position(stream, words, drawn)
        self._recording.add(_Operation(function, kept, position, results, writes, reads))


def _words_drawn(function: Any, into: Tensor) -> int | None:
    """Return how many words an operation draws that writes to a tensor, or ``None`` if only drawing
    shows it.
    """
    kind = _FIXED_DRAWS.get(function)
    if kind is None or not into.is_contiguous() or into.numel() < FEWEST_VALUES:
        return None
    return draws_of(kind, into.dtype, into.numel())


def _reserved(size_bytes: int) -> Tensor:
    """Return bytes that have no memory until they are written to, and return it to the system when they are
    released.

    An allocator would reuse memory that was written to before.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, max(size_bytes, 1), flags=flags), dtype=torch.uint8)


def _unwritten(like: Tensor) -> Tensor:
    memory = _reserved(like.untyped_storage().nbytes())
    empty = torch.empty(0, dtype=like.dtype)
    return empty.set_(memory.untyped_storage(), 0, like.size(), like.stride())


def _tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dicts of the module's own parameters and buffers."""
    return module._parameters, module._buffers


class Noise:
    """Noise of a dtype in a file in memory, which tensors in host memory map copy-on-write. So they need no time to
    be filled, and no memory of their own before they are written to.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        values = torch.empty(_NOISE_BYTES // dtype.itemsize)
        values.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
        self._file = os.memfd_create("noise")
        os.write(self._file, values.to(dtype).view(torch.uint8).numpy().tobytes())

    def make(self, number: int, like: Tensor, device: torch.device) -> Tensor:
        """Return a tensor of noise with the shape and strides of ``like``, the same each time for a number."""
        first = number * _STRIDE_BYTES % _NOISE_BYTES
        elements = 1 + sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True))
        if device.type == "cpu":
            memory = self._mapped(elements * like.dtype.itemsize, first).view(like.dtype)
        else:
            memory = torch.empty(elements, dtype=like.dtype, device=device)
            values = self._mapped(_NOISE_BYTES, first).view(like.dtype).to(device)
            for start in range(0, elements, len(values)):
                memory[start : start + len(values)] = values[: elements - start]
        return memory.as_strided(like.shape, like.stride())

    def _mapped(self, size_bytes: int, start: int) -> Tensor:
        """Return bytes, to which the file is mapped from ``start`` on, and then from its beginning again."""
        memory = _reserved(-(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        done = 0
        while done < len(memory):
            size = min(len(memory) - done, _NOISE_BYTES - start)
            access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
            address = memory.data_ptr() + done
            if _LIBC.mmap(address, size, access, kind, self._file, start) != address:
                raise OSError(ctypes.get_errno(), "mmap failed")
            done, start = done + size, 0
        return memory[:size_bytes]


_noise = cache(Noise)


def _as_meta(tensor: Tensor) -> Tensor:
    made = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)  # Attributes by which an optimizer may group parameters.
    return made


def _tensors(arguments: Any) -> list[Tensor]:
    return [leaf for leaf in tree.tree_leaves(arguments) if isinstance(leaf, Tensor)]


def _storages(placed: Any) -> frozenset[int]:
    """Return the storages of the views among the arguments of a call."""
    return frozenset(leaf.storage for leaf in tree.tree_leaves(placed) if isinstance(leaf, StorageView))


def _filled(placed: Any, memory: dict[int, torch.UntypedStorage]) -> Any:
    """Return the arguments of a call with tensors in ``memory`` in place of views."""
    return tree.tree_map_only(StorageView, lambda view: view.within(memory[view.storage]), placed)


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    found: list[Tensor] = []
    for number, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += _tensors(value)
    return found


def _returned(function: Any, given: Any, written: list[Tensor]) -> Any:
    """Return what an in-place operation returns: the tensors that it wrote to."""
    count = len(function._schema.returns)
    return None if not count else written[0] if count == 1 else tuple(written[:count])


def _on_meta(function: Callable[..., Any], given: Any) -> Any:
    """Return the operation's result on the meta device, without memory."""
    args, kwargs = tree.tree_map_only(
        Tensor, lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta"), given
    )
    kwargs = {key: value for key, value in kwargs.items() if key not in ("generator", "pin_memory")}
    if "device" in kwargs or function in _FACTORIES:
        kwargs["device"] = torch.device("meta")
    return function(*args, **kwargs)

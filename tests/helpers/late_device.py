"""A device for tests whose streams are late at random: an accelerator emulated on the CPU.

Each stream is a thread that runs its operations in order, after delays, while the host runs ahead. Within
``LateRuntime.on`` every operation of torch goes to the current stream: its result exists at once, as memory
full of garbage, and gets its values when the stream reaches the operation. Views are created at once, as on
a real device. An operation whose result the host needs (``item``, ``nonzero``, ``equal``) waits for the
current stream only, as on a real device. So do operations that draw random numbers, because their generator
is the host's.

Wrong numbers therefore reveal these mistakes: a stream that reads a value which another one has not
computed, a buffer that is overwritten while it is being copied, and a host that reads (``numpy``,
``tolist``, ``frombuffer``) without having waited. Memory that is freed too early is not revealed, because
queued operations keep their tensors.
"""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from runtime.device import CPU, DeviceRuntime

GARBAGE = 0xDB
_WAITS = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
    torch.Tag.inplace_view,
}


_COUNTS_CHANGES = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


class LateStream:
    """A stream that delays its operations.
    :param delay: returns the seconds before the next operation; called on the stream's thread.
    """

    def __init__(self, delay: Callable[[], float]) -> None:
        self._delay = delay
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="late-stream", daemon=True)
        self._thread.start()

    def give(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def wait(self, event: "LateEvent") -> None:
        reached = event.reached
        self.give(lambda: _await(reached))

    def synchronize(self) -> None:
        reached = threading.Event()
        self.give(reached.set)
        _await(reached)
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if (delay_s := self._delay()) > 0:
                time.sleep(delay_s)
            try:
                # Autograd saw the operation, and counted its change of a tensor, when it was queued.
                with (
                    torch._C._AutoDispatchBelowAutograd(),
                    torch._C._ExcludeDispatchKeyGuard(_COUNTS_CHANGES),
                ):
                    work()
            except BaseException as error:
                self.error = error
            del work


def _await(reached: threading.Event) -> None:
    assert reached.wait(60), "a stream waits for an event that does not come"


class LateEvent:
    """A position in a stream. An event that was never recorded counts as reached."""

    def __init__(self, runtime: "LateRuntime") -> None:
        self._runtime = runtime
        self.reached = threading.Event()
        self.reached.set()
        self._at_s = [0.0]

    def record(self) -> None:
        reached, at_s = threading.Event(), [0.0]
        self.reached, self._at_s = reached, at_s

        def mark() -> None:
            at_s[0] = time.perf_counter()
            reached.set()

        self._runtime.current().give(mark)

    def done(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        _await(self.reached)

    def ms_since(self, earlier: "LateEvent") -> float:
        earlier.synchronize()
        self.synchronize()
        return 1e3 * (self._at_s[0] - earlier._at_s[0])


class LateRuntime(DeviceRuntime):
    """A device whose tensors are, for torch, on the CPU.

    :param seed: seed of the delays.
    :param late: how often an operation is late, and by at most how many seconds.
    """

    is_async = True

    def __init__(self, seed: int = 0, *, late: tuple[float, float] = (0.02, 0.003)) -> None:
        super().__init__(CPU)
        self._random = random.Random(seed)
        self._late = late
        self._own = threading.local()
        self._streams: list[LateStream] = []
        self.default = self.stream()

    def _delay_s(self) -> float:
        often, most_s = self._late
        return self._random.random() * most_s if self._random.random() < often else 0.0

    def holds(self, tensor: Tensor) -> bool:
        return True

    def event(self) -> LateEvent:
        return LateEvent(self)

    def stream(self) -> LateStream:
        self._streams.append(LateStream(self._delay_s))
        return self._streams[-1]

    def current(self) -> LateStream:
        return getattr(self._own, "stream", self.default)

    @contextlib.contextmanager
    def on(self, stream: LateStream) -> Iterator[None]:
        before = self.current()
        outermost = not getattr(self._own, "given", False)
        self._own.stream, self._own.given = stream, True
        try:
            with _Queueing(self) if outermost else contextlib.nullcontext():
                yield
        finally:
            self._own.stream, self._own.given = before, not outermost

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a process whose tensors are on this device: all operations go to the default
        stream.
        """
        return self.on(self.default)

    def prepare_thread(self) -> None:
        pass

    def synchronize(self) -> None:
        for stream in list(self._streams):
            stream.synchronize()

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        return _plain(lambda: _garbage(torch.empty(numel, dtype=dtype)))

    def to_host(self, tensor: Tensor) -> Tensor:
        # As with ``cpu()`` on a real device, this copies at the end of the current stream, and the host
        # waits.
        self.current().synchronize()
        return _plain(lambda: tensor.detach().clone())

    def register(self, address: int, size_bytes: int) -> bool:
        return True

    def unregister(self, address: int) -> None:
        pass

    def end(self) -> None:
        for stream in self._streams:
            stream.end()


class _Queueing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that queues each operation on the current stream."""

    def __init__(self, runtime: LateRuntime) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._runtime = runtime

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        stream = self._runtime.current()
        tensors = [leaf for leaf in tree_flatten((args, named))[0] if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in tensors) or _is_meta(named.get("device")):
            return function(*args, **named)
        if function.is_view:
            return function(*args, **named)
        if "empty" in function._schema.name:
            return _garbage(function(*args, **named))
        waits = bool(_WAITS & set(function.tags))
        if not waits and (changed := _changed(function, args, named)) is not None:
            given, given_by_name = _aliases((args, named))
            stream.give(lambda: function(*given, **given_by_name))
            return changed[0] if function._schema.returns else None
        results = None if waits or function._schema.is_mutable else _results(function, args, named)
        if results is None:
            stream.synchronize()
            return function(*args, **named)
        places = tree_flatten(_aliases(results))[0]
        given, given_by_name = _aliases((args, named))

        def work() -> None:
            for place, value in zip(places, tree_flatten(function(*given, **given_by_name))[0], strict=True):
                if isinstance(place, Tensor):
                    place.copy_(value)

        stream.give(work)
        return results


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _aliases(tree: Any) -> Any:
    """Return tensors with the same memory, which stays the same even if the host replaces theirs
    (``parameter.data = …``).
    """
    return tree_map_only(Tensor, lambda tensor: tensor.detach(), tree)


def _changed(function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> list[Any] | None:
    """Return the arguments that are changed in place, if one of them or nothing is returned; else ``None``."""
    schema = function._schema
    changed = [
        args[i] if i < len(args) else named.get(argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return changed if changed and (not schema.returns or len(schema.returns) == len(changed) == 1) else None


def _results(function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return new memory for the results, or ``None`` if their shapes are not known beforehand."""
    schema = function._schema
    if any(str(one.type) not in ("Tensor", "List[Tensor]") for one in schema.returns):
        return None
    try:
        like = function(
            *tree_map_only(Tensor, _meta, args),
            **{
                k: v if k != "device" else torch.device("meta")
                for k, v in _with_device(function, named).items()
            },
        )
    except RuntimeError:
        return None
    return tree_map_only(
        Tensor, lambda t: _garbage(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)), like
    )


def _with_device(function: Any, named: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords for the meta device, on which functions that create tensors must create them."""
    takes = any(argument.name == "device" for argument in function._schema.arguments)
    given = {"device": CPU} | named if takes else named
    return {k: tree_map_only(Tensor, _meta, v) for k, v in given.items()}


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _garbage(tensor: Tensor) -> Tensor:
    if tensor.numel():
        tensor.untyped_storage().fill_(GARBAGE)
    return tensor


def _plain(read: Callable[[], Tensor]) -> Tensor:
    """Run at once an operation that would otherwise be queued on a stream."""
    with torch.utils._python_dispatch._disable_current_modes():
        return read()

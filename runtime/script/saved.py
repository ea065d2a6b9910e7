"""The bytes of a snapshot that was found: whether it fits the registered objects, and how it is loaded into
them.
"""

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from runtime.script.plain_state import SnapshotError, rebuild, thaw
from runtime.script.random_states import set_random_states
from runtime.script.registered import RegisteredObject
from runtime.script.tensor_filler import TensorFiller
from runtime.script.tensor_image import Bytes, ImageEntry

FORMAT = 4
EMPTY: Bytes = np.empty(0, dtype=np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSnapshot:
    """A snapshot's header and images.

    :param own: image of the rank's own state.
    :param shared: image of the state that is the same on all ranks.
    """

    content: dict[str, Any]
    entries: list[ImageEntry]
    own: Bytes
    shared: Bytes

    @classmethod
    def of(cls, header: Bytes, own: Bytes, shared: Bytes) -> "SavedSnapshot":
        """Return the snapshot with its intact header decoded; without entries if it has another format, which
        ``mismatch`` names.

        :raises SnapshotError: it holds kinds of values that this version does not know.
        """
        try:
            content = thaw(header.tobytes())
        except msgspec.DecodeError as error:
            raise SnapshotError(f"this version cannot read its header: {error}") from None
        entries = content["entries"] if content["format"] == FORMAT else []
        return cls(
            content=content, entries=msgspec.convert(entries, list[ImageEntry]), own=own, shared=shared
        )

    def mismatch(self, objects: Mapping[str, RegisteredObject]) -> str:
        """Return why it cannot be loaded into the registered objects; empty if it can."""
        if self.content["format"] != FORMAT:
            return f"it has format {self.content['format']}, and this version reads format {FORMAT}"
        saved = {name: saved["kind"] for name, saved in self.content["objects"].items()}
        here = {name: registered.kind for name, registered in objects.items()}
        if saved != here:
            return f"it holds {', '.join(sorted(saved))}, and {', '.join(sorted(here))} are registered"
        # Modules come first: their messages name the tensors.
        for registered in sorted(objects.values(), key=lambda r: r.kind != "module"):
            why = registered.mismatch(self.content["objects"][registered.name]["state"], self.entries)
            if why:
                return f"{registered.name}: {why}"
        return ""

    def prepare(self, objects: Mapping[str, RegisteredObject], *, random: bool) -> "PreparedRestore":
        """Find or allocate the tensors to load into; no registered object changes yet."""
        filler = TensorFiller(entries=self.entries, images={False: self.own, True: self.shared})
        steps = [
            registered.prepare_load(self.content["objects"][registered.name]["state"], filler.target_for)
            for registered in sorted(objects.values(), key=lambda r: r.kind not in ("module", "optimizer"))
        ]
        if random and self.content["random"] is not None:
            numbers = rebuild(self.content["random"], None, filler.target_for)
            steps.append(partial(set_random_states, numbers))
        return PreparedRestore(filler, steps)


@dataclass(frozen=True, slots=True)
class PreparedRestore:
    """A snapshot whose tensors are chosen, so that it can be loaded once its bytes are verified."""

    filler: TensorFiller
    _steps: list[Callable[[], None]]

    def load(self) -> None:
        """Load the state, once all bytes are verified."""
        self.filler.finish()
        for step in self._steps:
            step()


def map_bytes(path: str) -> Bytes:
    """Return a file's bytes, mapped into memory.

    :raises OSError: the file does not exist any more.
    """
    with Path(path).open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8)

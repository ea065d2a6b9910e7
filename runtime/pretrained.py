"""Pretrained weights: safetensors files of a hub snapshot, read by name, tensor by tensor.

A directory has ``model.safetensors``, or ``model.safetensors.index.json`` and the files that it names. The
names in these files may differ from the model's: a base model's files lack a prefix (``bert.``) that a
model with a head has, and some architectures merge several stored tensors (one for each expert) into one.
Both cases are handled as in ``from_pretrained``, with the tables of ``transformers``. ``PretrainedWeights``
reads the names and shapes in all files and rejects at once whatever does not fit. Tensors are read when
``load_into`` asks for them, so a process that needs a few layers reads only these.
"""

import fnmatch
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from runtime.adapters import base_model_of, base_name
from runtime.errors import TrainingError
from storage.safetensors_file import DTYPE_NAMES

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"

_DTYPES = {short: getattr(torch, name) for name, short in DTYPE_NAMES.items()}
_EACH = 12
"""Number of names that an error lists one by one; a longer list is given as patterns with counts."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in one of the files."""

    key: str
    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class _Source:
    """The stored tensors from which one or several tensors of the model are made."""

    stored: list[tuple[str, _Stored]] = field(default_factory=list)
    """Stored tensors in the order in which the converter takes them, each with the converter's pattern that it
    matched.
    """
    converter: Any = None
    """``WeightConverter`` of transformers; ``None`` if the one stored tensor is used as it is."""
    target: str = ""
    """Name of the first tensor that is made."""


class PretrainedWeights:
    """The weights in ``directory``, under the names of ``model``.

    :param model: its parameters may be on the meta device; they are not changed here. For a ``PeftModel``
        the files are those of its base model; what an adapter added stays as it is.
    :param new: names or patterns (``classifier.*``) of tensors that are not read, such as those of a new
        head. A tied tensor counts under its first name.
    :raises TrainingError: the files cannot be read, or do not fit the model; the message lists all names at
        once.
    """

    def __init__(self, directory: str | Path, model: nn.Module, *, new: Sequence[str] = ()) -> None:
        self.directory = Path(directory)
        self._base_model = base_model_of(model)
        self._canonical: dict[str, str] = {}
        self._base_names: dict[str, list[str]] = {}
        wanted = self._take_names(model)
        stored = [one for file in weight_files(self.directory) for one in _contents(file)]
        self._sources: dict[str, _Source] = {}
        self.unexpected: tuple[str, ...] = ()
        """Names in the files that the model does not use."""
        shapes = self._find_sources(stored)
        self._new = {name for name in wanted if any(fnmatch.fnmatchcase(name, pattern) for pattern in new)}
        missing = [name for name in wanted if not self._names_of_sources(name)]
        self.initialised = tuple(
            name for name in missing if name in self._new or self._ignored(name, "missing")
        )
        """Canonical names of tensors that keep the model's own initial values."""
        self._check(wanted, missing, shapes)

    def has(self, name: str) -> bool:
        """Return whether the files have a value for the tensor, which may be given by any of its names in the
        model.
        """
        return bool(self._names_of_sources(self._canonical[name]))

    def load_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill ``tensors`` in place, converted to the type and device of each; keys are names in the model.

        Tensors that ``initialised`` lists or that an adapter added stay as they are.

        :raises TrainingError: a file cannot be read, or tied tensors differ in the files.
        """
        made: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name not in self._canonical:
                raise TrainingError(f"{self.directory}: the model has no parameter or buffer {name}")
            names = self._names_of_sources(self._canonical[name])
            values = [self._value(one, made) for one in names]
            if not values:
                continue
            if any(not torch.equal(values[0], other) for other in values[1:]):
                raise TrainingError(
                    f"{self.directory}: {' and '.join(names)} are one tied tensor in the model and differ in "
                    "the files; write tie_word_embeddings = false into the model's configuration"
                )
            with torch.no_grad():
                tensor.copy_(values[0])

    # --- names -----------------------------------------------------------------------------------

    def _take_names(self, model: nn.Module) -> dict[str, Tensor]:
        """Record all names of parameters and persistent buffers; return those that files may have."""
        first: dict[int, str] = {}
        wanted: dict[str, Tensor] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                continue
            canonical = self._canonical[name] = first.setdefault(id(value), name)
            names = self._base_names.setdefault(canonical, [])
            base = base_name(model, name)
            if base is not None:
                names.append(base)
                wanted[canonical] = value
        return wanted

    def _names_of_sources(self, canonical: str) -> list[str]:
        if canonical in self._new:
            return []
        return [base for base in self._base_names[canonical] if base in self._sources]

    def _find_sources(self, stored: Sequence[_Stored]) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Set ``_sources`` and ``unexpected``; return the shape and type of each tensor that the sources make."""
        names = {base for bases in self._base_names.values() for base in bases}
        renaming = _Renaming(self._base_model, names)
        grouped: dict[str, _Source] = {}
        unexpected = []
        for one in sorted(stored, key=lambda one: _natural(one.key)):
            target, converter, pattern = renaming.target_of(one.key)
            if converter is None and target not in names:
                unexpected.append(one.key)
                continue
            source = grouped.setdefault(target, _Source(converter=converter, target=target))
            source.stored.append((pattern, one))
        shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        for source in grouped.values():
            found = {name: value for name, value in self._made(source, meta=True).items() if name in names}
            if not found:
                unexpected += [one.key for _, one in source.stored]
            for name, value in found.items():
                self._sources[name] = source
                shapes[name] = value.shape, value.dtype
        self.unexpected = tuple(key for key in unexpected if not self._ignored(key, "unexpected"))
        return shapes

    def _ignored(self, name: str, kind: str) -> bool:
        """Return whether the architecture itself allows such a name to be missing or unexpected."""
        patterns = getattr(self._base_model, f"_keys_to_ignore_on_load_{kind}", None) or ()
        return any(re.search(pattern, name) for pattern in patterns)

    def _check(
        self,
        wanted: Mapping[str, Tensor],
        missing: Iterable[str],
        shapes: Mapping[str, tuple[torch.Size, torch.dtype]],
    ) -> None:
        absent = [name for name in missing if name not in self.initialised]
        unlike, quantised = [], []
        for name, value in wanted.items():
            for source in self._names_of_sources(name):
                shape, dtype = shapes[source]
                if shape != value.shape:
                    unlike.append(f"{name} {tuple(shape)} instead of {tuple(value.shape)}")
                if value.is_floating_point() and not dtype.is_floating_point:
                    quantised.append(f"{name} of {dtype}".replace("torch.", ""))
        problems = [
            f"{what}: {_listed(names)}"
            for what, names in (
                ("missing", absent),
                ("of another shape", unlike),
                ("quantised, which cannot be trained", quantised),
            )
            if names
        ]
        if not problems:
            return
        if self.unexpected:
            problems.append(f"not used: {_listed(self.unexpected)}")
        kind = type(self._base_model).__name__
        raise TrainingError(
            f"the weights in {self.directory} do not fit {kind}; {'; '.join(problems)}. Use the "
            "configuration that belongs to these weights, or name tensors that are to begin with fresh "
            "values as new"
        )

    # --- values ----------------------------------------------------------------------------------

    def _value(self, name: str, made: dict[int, dict[str, Tensor]]) -> Tensor:
        """Return one tensor of the model.

        :param made: results of the last converter, held while tensors of one layer are filled.
        """
        source = self._sources[name]
        if source.converter is None:
            return _read(source.stored[0][1])
        if id(source) not in made:
            made.clear()
            made[id(source)] = self._made(source, meta=False)
        return made[id(source)][name]

    def _made(self, source: _Source, *, meta: bool) -> dict[str, Tensor]:
        """Return each tensor of the model that comes from ``source``, on the meta device or with its values."""

        def tensor(one: _Stored) -> Tensor:
            return torch.empty(one.shape, dtype=_DTYPES[one.dtype], device="meta") if meta else _read(one)

        if source.converter is None:
            return {source.target: tensor(source.stored[0][1])}
        converter = deepcopy(source.converter)
        for pattern, one in source.stored:
            converter.add_tensor(source.target, one.key, pattern, tensor(one))
        try:
            made = converter.convert(
                source.target, model=self._base_model, config=getattr(self._base_model, "config", None)
            )
        except Exception as error:
            keys = _listed([one.key for _, one in source.stored])
            raise TrainingError(
                f"{self.directory}: {keys} cannot be converted to {source.target}: {error}"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files in ``directory``.

    :raises TrainingError: files are missing; the message says what to do.
    """
    if not directory.is_dir():
        raise TrainingError(
            f"{directory} is not a directory; name the directory of a downloaded model (hf download MODEL "
            "--local-dir DIR), as nodes may have no network"
        )
    if (directory / WHOLE).is_file():
        return [directory / WHOLE]
    if (directory / INDEX).is_file():
        return _files_of_index(directory)
    there = sorted(path.name for path in directory.iterdir())
    if any(
        re.fullmatch(r"(pytorch_model|model|tf_model|flax_model).*\.(bin|h5|msgpack|pt|pth)", n)
        for n in there
    ):
        raise TrainingError(
            f"{directory} has no safetensors files; ftd does not read pickled weights. Convert them once: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR) with the class of your model"
        )
    if ADAPTER in there:
        raise TrainingError(
            f"{directory} holds an adapter only ({ADAPTER}); name the directory of its base model"
        )
    listed = f"it has {', '.join(there[:_EACH])}" if there else "it is empty"
    raise TrainingError(f"{directory} has neither {WHOLE} nor {INDEX}; {listed}")


def _files_of_index(directory: Path) -> list[Path]:
    path = directory / INDEX
    try:
        names = sorted(set(json.loads(path.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainingError(f"{path} is no index of safetensors files: {error!r}") from error
    files = []
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise TrainingError(f"{path} names {name!r}, which is not a file next to it")
        files.append(directory / name)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise TrainingError(f"{directory}: {', '.join(missing)} of {INDEX} are missing; download them again")
    return files


def _contents(file: Path) -> Iterable[_Stored]:
    """Yield the tensors of a file, without their values.

    :raises TrainingError: the file is not a safetensors file, or has a type that ftd does not know.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 (it is no dict)
                part = opened.get_slice(key)
                dtype = part.get_dtype()
                if dtype not in _DTYPES:
                    raise TrainingError(
                        f"{file}: {key} is of {dtype}; quantised weights cannot be trained, take the model "
                        "in bfloat16, float16 or float32"
                    )
                yield _Stored(key, file, dtype, tuple(part.get_shape()))
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"{file} cannot be read: {error}") from error


def _read(stored: _Stored) -> Tensor:
    try:
        with safe_open(stored.file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(stored.key)
            return tensor
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"{stored.file}: {stored.key} cannot be read: {error}") from error


class _Renaming:
    """The mapping from names in the files to names in the model.

    :param names: names of the model's parameters and buffers.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self._names = dict.fromkeys(names, True)
        self._prefix = getattr(model, "base_model_prefix", None) or None
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        if hasattr(model, "base_model_prefix"):
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter, WeightRenaming

            mapping = get_model_conversion_mapping(model)
            self._renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
            self._converters = [one for one in mapping if isinstance(one, WeightConverter)]

    def target_of(self, key: str) -> tuple[str, Any, str]:
        """Return the name in the model, and the converter and its pattern if the tensor must be converted."""
        if self._prefix is None:
            return key, None, key
        from transformers.core_model_loading import rename_source_key

        target, pattern = rename_source_key(key, self._renamings, self._converters, self._prefix, self._names)
        if target not in self._names and key in self._names:
            target, pattern = key, None
        if pattern is None:
            return target, None, key
        converter = next(one for one in self._converters if pattern in one.source_patterns)
        return target, converter, pattern


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which ``layers.10`` comes after ``layers.9``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _listed(names: Sequence[str]) -> str:
    """Return the names as a list; where they are many, those that differ only in numbers as one pattern."""
    if len(names) <= _EACH:
        return ", ".join(names)
    counts: dict[str, list[str]] = {}
    for name in names:
        counts.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(name)
    return ", ".join(
        group[0] if len(group) == 1 else f"{pattern} ({len(group)} of them)"
        for pattern, group in counts.items()
    )

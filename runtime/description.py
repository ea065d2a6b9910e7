"""The description of a model that is stored in its checkpoints (``storage.description``), made by the process
that has the model.
"""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from runtime.adapters import adapter_config, adapter_names, base_model_of, base_name, has_adapter
from storage.description import MAX_FILES_BYTES, ModelDescription, is_file_name

_PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_TOKENIZER = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
"""Files of tokenizers, small ones first."""


def describe(model: nn.Module, files_from: Iterable[str | Path] = ()) -> ModelDescription:
    """Describe ``model``, whose parameters may be on the meta device.

    :param files_from: directories that are searched for files of the tokenizer, or a file that is one,
        before the directory that the model itself was loaded from.
    """
    named = {
        name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)
    }
    names: dict[int, list[str]] = {}
    for name, value in named.items():
        names.setdefault(id(value), []).append(name)
    aliases = {first: tuple(others) for first, *others in names.values() if others}
    base: Any = base_model_of(model)
    if not _is_huggingface(base):
        return ModelDescription(aliases=aliases)
    in_adapter = adapter_names(model, named) if has_adapter(model) else {}
    weight_names: dict[str, tuple[str, ...]] = {}
    for first, *others in names.values():
        weight_keys = _names_in_weights(model, base, [first, *others], in_adapter)
        if weight_keys != (first,):
            weight_names[first] = weight_keys
    files, left_out = _files(base, files_from)
    return ModelDescription(
        aliases=aliases,
        architecture=type(base).__name__,
        weight_names=weight_names,
        files=files,
        adapter_names={name: key for name, key in in_adapter.items() if name == names[id(named[name])][0]},
        adapter_files={"adapter_config.json": adapter_config(model)} if has_adapter(model) else {},
        left_out=left_out,
    )


def _is_huggingface(model: nn.Module) -> bool:
    return hasattr(model, "config") and hasattr(model, "base_model_prefix")


def _names_in_weights(
    model: nn.Module, base: Any, names: list[str], in_adapter: dict[str, str]
) -> tuple[str, ...]:
    """Return the names under which ``from_pretrained`` needs a tensor that ``model`` knows as ``names``.

    ``from_pretrained`` ties what the architecture ties, and takes the value from any of these names.
    """
    own = [base_name(model, name) for name in names if name not in in_adapter]
    found = list(dict.fromkeys(name for name in own if name is not None))
    tied: dict[str, str] = getattr(base, "all_tied_weights_keys", None) or {}
    retied = [name for name in found if name in tied or name in tied.values()]
    if len(retied) < 2:
        return tuple(found)
    source = next((name for name in retied if name in tied.values()), retied[0])
    return tuple(name for name in found if name == source or name not in retied)


def _files(base: Any, files_from: Iterable[str | Path]) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return the files next to the weights, and the names of those that are too large."""
    config = copy.deepcopy(base.config)
    config.architectures = [type(base).__name__]
    _use_cache_again(config)
    files = {"config.json": config.to_json_string(use_diff=True).encode()}
    if base.can_generate() and getattr(base, "generation_config", None) is not None:
        files["generation_config.json"] = base.generation_config.to_json_string(use_diff=True).encode()
    left_out = []
    room = MAX_FILES_BYTES - sum(map(len, files.values()))
    for place in (*files_from, getattr(base.config, "_name_or_path", "")):
        # Files of two tokenizers must not be mixed.
        done = {*files, *(_TOKENIZER if files.keys() & set(_TOKENIZER) else ())}
        for name, path in _accompanying(place, has_code=hasattr(config, "auto_map")).items():
            if name in done:
                continue
            if path.stat().st_size > room:
                left_out.append(name)
                continue
            files[name] = path.read_bytes()
            room -= len(files[name])
    return files, tuple(left_out)


def _use_cache_again(config: Any) -> None:
    """Enable the cache of keys and values, which ``runtime.training`` disables and generation needs."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if getattr(part, "use_cache", None) is False:
            part.use_cache = True


def _accompanying(place: str | Path, *, has_code: bool) -> dict[str, Path]:
    """Return the files of a model's directory that are not weights; none if ``place`` is a name on the hub.

    :param place: the directory, or a tokenizer in a file of any name.
    :param has_code: include the model's own Python files.
    """
    path = Path(place)
    if path.is_file():
        return {"tokenizer.json": path}
    if not place or not path.is_dir():
        return {}
    found = [path / name for name in (*_PROCESSOR, *_TOKENIZER)]
    if has_code:
        found += sorted(path.glob("*.py"))
    return {one.name: one for one in found if one.is_file() and is_file_name(one.name)}

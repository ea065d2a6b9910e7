"""Models with an adapter of ``peft`` (LoRA and the like), and the names of their parameters in files.

``get_peft_model`` wraps a model, renames its parameters (``base_model.model.x.base_layer.weight``) and adds
its own. Files of the base model contain its weights under their original names; the adapter's file contains
the added parameters, under names without the adapter's.
"""

import copy
import tempfile
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

_WRAPPER = "base_model.model."


def base_model_of(model: nn.Module) -> nn.Module:
    """Return the model inside of a ``PeftModel``, or ``model`` itself."""
    inside: nn.Module = cast(Any, model).get_base_model() if _is_wrapped(model) else model
    return inside


def has_adapter(model: nn.Module) -> bool:
    """Return whether ``get_peft_model`` or ``add_adapter`` added parameters to ``model``."""
    return bool(getattr(model, "peft_config", None))


def base_name(model: nn.Module, name: str) -> str | None:
    """Return a parameter's name in the base model; ``None`` if an adapter added the parameter."""
    if not has_adapter(model):
        return name
    if _is_wrapped(model):
        if not name.startswith(_WRAPPER):
            return None
        name = name.removeprefix(_WRAPPER)
    parts = name.split(".")
    if any(part.startswith(prefix) for part in parts for prefix in _prefixes(model)):
        return None
    components = [part for part in parts if part not in ("base_layer", "original_module")]
    if "modules_to_save" in components:
        # This copy is trained in place of the original: ``modules_to_save.<adapter>.``
        at = components.index("modules_to_save")
        components = components[:at] + components[at + 2 :]
    return ".".join(components)


def adapter_names(model: nn.Module, named: dict[str, Tensor]) -> dict[str, str]:
    """Return the name of each tensor of the active adapter in the adapter's file, by its name in ``named``.

    :param named: parameters and persistent buffers of ``model`` by name.
    """
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(
        model, state_dict=named, adapter_name=_active_adapter(model), save_embedding_layers=False
    )
    # peft's files use the names of a wrapped model, whether this one is wrapped or not.
    prefix = "" if _is_wrapped(model) else _WRAPPER
    keys = {id(tensor): prefix + key for key, tensor in state.items()}
    return {name: keys[id(tensor)] for name, tensor in named.items() if id(tensor) in keys}


def adapter_config(model: nn.Module) -> bytes:
    """Return ``adapter_config.json`` of the active adapter."""
    config = copy.copy(cast(Any, model).peft_config[_active_adapter(model)])
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(
            getattr(base_model_of(model), "config", None), "_name_or_path", None
        )
    config.inference_mode = True
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        return (Path(directory) / "adapter_config.json").read_bytes()


def _active_adapter(model: Any) -> str:
    active = model.active_adapters
    names = active() if callable(active) else active
    return str(names[0])


def _is_wrapped(model: nn.Module) -> bool:
    return has_adapter(model) and hasattr(model, "get_base_model")


def _prefixes(model: Any) -> set[str]:
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    kinds = {config.peft_type for config in model.peft_config.values()}
    return {PEFT_TYPE_TO_PREFIX_MAPPING[kind] for kind in kinds if kind in PEFT_TYPE_TO_PREFIX_MAPPING}

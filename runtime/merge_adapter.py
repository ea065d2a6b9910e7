"""A process that merges an adapter into its base model, since ftd's own processes do not load torch.

``python -m runtime.merge_adapter`` reads the directories of the base model and the adapter, and writes a
directory that ``from_pretrained`` reads. It exits with ``INVALID_EXIT`` if the user has to change
something; the last line of stderr then says what.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from runtime.parent import die_with_parent
from runtime.wire.measurement import INVALID_EXIT


def merge(base: Path, adapter: Path, output: Path, max_shard_bytes: int) -> None:
    """Write the merged model in the type of the base model's weights, and copy the files next to them.

    :raises ValueError: the model's class is unknown, or the adapter cannot be merged.
    """
    import transformers
    from peft import PeftModel

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(base)
    (name,) = config.architectures
    kind: Any = getattr(transformers, name, None)
    if kind is None:
        raise ValueError(f"{name} is not a class of transformers; merge it with your own code and peft")
    model = PeftModel.from_pretrained(kind.from_pretrained(base), adapter)
    merge_and_unload: Any = getattr(model, "merge_and_unload", None)
    if merge_and_unload is None:
        raise ValueError("this kind of adapter cannot be merged into its base model; export the adapter")
    merge_and_unload().save_pretrained(output, max_shard_size=max_shard_bytes)
    for path in base.iterdir():
        is_weights = path.suffix == ".safetensors" or path.name == "model.safetensors.index.json"
        if not is_weights and not (output / path.name).exists():
            shutil.copyfile(path, output / path.name)


def main() -> int:
    """Run as a process."""
    parser = argparse.ArgumentParser(prog="python -m runtime.merge_adapter", description=merge.__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    parser.add_argument("--max-shard-bytes", type=int, required=True)
    for name in ("base", "adapter", "output"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        merge(arguments.base, arguments.adapter, arguments.output, arguments.max_shard_bytes)
    except ImportError as error:
        sys.stderr.write(f"merging needs transformers and peft: {error}\n")
        return INVALID_EXIT
    except ValueError as error:
        sys.stderr.write(f"{str(error).splitlines()[0]}\n")
        return INVALID_EXIT
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Our import packages have everyday names; a training script's neighbours may have the same.

The script's directory goes to the front of the import path, so ``planner.py`` beside it would be imported in
place of ours, and fail far from the cause. So it is refused at start, by name.
"""

from pathlib import Path

from ftd.errors import ConfigurationError

OUR_PACKAGES = ("planner", "statemachine", "storage", "runtime", "ftd")


def check_import_conflicts(directory: Path, field: str = "training.function") -> None:
    """:raises ConfigurationError: ``directory`` holds a module that would hide one of ours."""
    ours = Path(__file__).resolve().parents[2]
    directory = directory.resolve()
    if directory == ours:
        return
    for name in OUR_PACKAGES:
        script, package = directory / f"{name}.py", directory / name
        if script.is_file():
            clash = script
        elif package.is_dir() and any(package.glob("*.py")):
            clash = package
        else:
            continue
        raise ConfigurationError(
            f"{clash} would be imported in place of ftd's own package {name!r}",
            field=field,
            remedy=f"rename {clash.name}, or move the script to a directory of its own",
        )

"""Detects user modules that would be imported instead of ftd's own packages.

Our packages have everyday names, and the directory of the training script comes first on the import path. A
``planner.py`` next to the script would be imported instead of ours and fail far from the cause. Such a job is
rejected at start with the name of the file.
"""

from pathlib import Path

from ftd.errors import ConfigurationError

OUR_PACKAGES = ("planner", "statemachine", "storage", "runtime", "ftd")


def check_import_conflicts(directory: Path, field: str = "training.function") -> None:
    """Check that a directory on the import path hides none of ftd's packages.

    :raises ConfigurationError: ``directory`` holds a module with the name of one of our packages.
    """
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
            f"{clash} would be imported instead of ftd's own package {name!r}",
            field=field,
            remedy=f"rename {clash.name}, or move the training script to a separate directory",
        )

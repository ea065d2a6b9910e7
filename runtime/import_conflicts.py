"""Detection of user modules that would be imported instead of ftd's own packages. The module does not import
torch.

Our packages have everyday names, and the directory of the training script comes first on the import path.
A ``planner.py`` next to the script would be imported instead of ours and fail far from the cause.
"""

from pathlib import Path

OUR_PACKAGES = ("planner", "statemachine", "storage", "runtime", "ftd")


def find_import_conflict(directory: Path) -> tuple[Path, str] | None:
    """Return the module or package in a directory that hides one of ftd's packages, and that package's name;
    ``None`` if the directory can be on the import path.
    """
    directory = directory.resolve()
    if directory == Path(__file__).resolve().parents[1]:
        return None
    for name in OUR_PACKAGES:
        script, package = directory / f"{name}.py", directory / name
        if script.is_file():
            return script, name
        if package.is_dir() and any(package.glob("*.py")):
            return package, name
    return None

"""Job files for tests, written from dictionaries."""

from pathlib import Path
from typing import Any


def write(directory: Path, tables: dict[str, Any]) -> Path:
    """Write the tables as TOML, as far as job files need it."""
    (directory / "train.py").write_text("def build(): ...\n")
    lines: list[str] = []

    def literal(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')

    def table(name: str, content: dict[str, Any]) -> None:
        if name:
            lines.append(f"[{name}]")
        lines.extend(f"{k} = {literal(v)}" for k, v in content.items() if not isinstance(v, dict))
        for key, value in content.items():
            if isinstance(value, dict):
                table(f"{name}.{key}" if name else key, value)

    table("", tables)
    path = directory / "job.toml"
    path.write_text("\n".join(lines) + "\n")
    return path

"""Checks of those house rules of ARCHITECTURE.md that a machine can check."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import msgspec
import pytest
from packaging.specifiers import SpecifierSet

from tests.helpers.python_process import run_python

ROOT = Path(__file__).parents[1]
PACKAGES = ("planner", "statemachine", "storage", "runtime", "ftd")
MODULES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
WRITTEN = sorted(
    p
    for place in (*PACKAGES, "tests", "examples", "benchmarks", "tools")
    for p in (ROOT / place).rglob("*.py")
    if p != Path(__file__)
)
MESSAGES = [
    ROOT / "planner" / "values.py",
    *sorted((ROOT / "statemachine" / "messages").glob("[a-z]*.py")),
    *(ROOT / "statemachine" / f"{name}.py" for name in ("events", "effects", "agent/events")),
]

SHORT_LINES = 20
"""Length in lines up to which a public function needs no docstring; a value with only a name and fields needs
none either.
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def where(path: Path, node: ast.AST | None = None) -> str:
    line = getattr(node, "lineno", None)
    return f"{path.relative_to(ROOT)}" + (f":{line}" if line else "")


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def functions(tree: ast.AST) -> Iterator[Function]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def test_what_tests_share_is_a_helper() -> None:
    """The page of models is exempt: it is generated from the tests that run over them."""
    of_tests = re.compile(r"^from (tests\.(?!helpers\b)[\w.]+|test_\w+|conftest) import", re.M)
    files = [p for p in (ROOT / "tests").rglob("*.py") if p.name != "models_page.py"]
    assert len(files) > 100
    found = [
        f"{where(p)}: {module}"
        for p in files
        for module in of_tests.findall(p.read_text(encoding="utf-8"))
        if module != p.stem
    ]
    assert found == []


def test_the_packages_are_where_this_test_looks() -> None:
    assert len(MODULES) > 30
    assert {p.relative_to(ROOT).parts[0] for p in MODULES} == set(PACKAGES)


def dataclass_keywords(node: ast.ClassDef) -> dict[str, bool] | None:
    """Return the keywords of ``@dataclass``, or None if the class has no such decorator."""
    for decorator in node.decorator_list:
        call = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", None)
        if name == "dataclass":
            keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
            return {k.arg or "**": getattr(k.value, "value", False) for k in keywords}
    return None


@pytest.mark.parametrize("path", MESSAGES, ids=where)
def test_messages_are_frozen_and_named(path: Path) -> None:
    """Structs that carry many numbers are encoded as arrays; all others name their fields."""
    module = importlib.import_module(dotted(path))
    here = [kind for kind in vars(module).values() if getattr(kind, "__module__", "") == module.__name__]
    structs = [kind for kind in here if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    assert structs
    assert [kind for kind in structs if not kind.__struct_config__.frozen] == []
    named = [kind for kind in structs if not kind.__struct_config__.array_like]
    parameters = [parameter for kind in named for parameter in inspect.signature(kind).parameters.values()]
    assert {parameter.kind for parameter in parameters} <= {inspect.Parameter.KEYWORD_ONLY}


def undocumented(path: Path) -> Iterator[str]:
    """Yield the public names of a module that lack a docstring; a class with only a name and fields needs
    none.
    """
    tree = parsed(path)
    if path.stat().st_size and ast.get_docstring(tree) is None:
        yield f"{where(path)}: the module"
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            a_value = dataclass_keywords(node) is not None or any(
                isinstance(n, ast.Name) and n.id.endswith("Enum") for n in node.bases
            )
            only_fields = all(isinstance(n, ast.AnnAssign | ast.Expr | ast.Pass) for n in node.body)
            if ast.get_docstring(node) is None and not (a_value or only_fields):
                yield f"{where(path, node)}: class {node.name}"
            members = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            members = [node]
        else:
            continue
        if node.name.startswith("_"):
            continue
        for member in members:
            public = not member.name.startswith("_")
            if public and length(member) > SHORT_LINES and ast.get_docstring(member) is None:
                yield f"{where(path, member)}: {member.name}"


def test_what_is_public_is_explained() -> None:
    assert [line for path in MODULES for line in undocumented(path)] == []


FORBIDDEN = {
    "a promise instead of work": re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError"),
    "pickle": re.compile(r"^\s*(import|from)\s+(cloudpickle|dill|marshal|pickle|shelve)\b", re.MULTILINE),
    "a path of one machine": re.compile(r"/work/|/tmp/probe"),
}


@pytest.mark.processes
@pytest.mark.parametrize("what", FORBIDDEN)
def test_nothing_forbidden_is_in_the_code(what: str) -> None:
    assert [where(p) for p in WRITTEN if FORBIDDEN[what].search(p.read_text(encoding="utf-8"))] == []


def test_processes_do_not_pickle_through_torch_or_multiprocessing() -> None:
    """``torch.save`` and ``multiprocessing`` pickle; processes exchange msgpack, JSON and raw bytes."""
    pickling = re.compile(
        r"\btorch\.(save|load)\(|\bimport multiprocessing|\bfrom multiprocessing(?!\.shared)"
    )
    assert [where(p) for p in MODULES if pickling.search(p.read_text(encoding="utf-8"))] == []


@pytest.mark.processes
def test_every_target_of_the_makefile_can_be_made() -> None:
    targets = set(re.findall(r"^# make (\S+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert {"demo", "test", "gpu-test"} <= targets
    for target in targets:
        made = subprocess.run(
            ["make", "-n", target], check=False, cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert (made.returncode, made.stderr) == (0, ""), target


def test_pinned_packages_can_be_installed_with_the_oldest_python() -> None:
    """A pin that needs a newer Python makes ``make`` fail for users of the oldest one, and for nobody else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=") + ".0"
    pinned = [line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()]
    wanted = {name: metadata.metadata(name).get("Requires-Python") for name in pinned}
    assert {
        name: versions for name, versions in wanted.items() if oldest not in SpecifierSet(versions or "")
    } == {}


def test_every_package_says_that_it_is_typed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = project["tool"]["setuptools"]["package-data"]
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file()
        assert "py.typed" in declared[package]
    packages = {p.parent for p in MODULES}
    assert [where(p) for p in packages if not (p / "__init__.py").is_file()] == []


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.processes
def test_no_daemon_loads_torch() -> None:
    """A fresh interpreter imports all modules but runtime's at once, so indirect imports count as well."""
    names = [dotted(p) for p in MODULES if p.relative_to(ROOT).parts[0] != "runtime" and p.stem != "__main__"]
    assert {"ftd.coordinator.daemon", "ftd.node.daemon", "ftd.cli.main", "ftd.observe.view.live"} <= set(
        names
    )
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'{name} loads torch')\n"
        "print(len(sys.modules))"
    )
    assert int(run_python(code)) > 100


@pytest.mark.processes
def test_the_snapshotter_leaves_out_sharded_tensors() -> None:
    """A script that does not shard tensors starts half a second sooner."""
    code = (
        "import sys, torch.distributed\n"
        "from ftd import Snapshotter\n"
        "print(sorted({'torch', 'torch.distributed.tensor'} & set(sys.modules)))"
    )
    assert run_python(code).strip() == "['torch']"


def test_the_pure_packages_use_nothing_impure() -> None:
    """Our own code there uses no clock, randomness, threads or I/O: it does not import them or call ``open``
    or ``print``.
    """
    impure = {
        "asyncio",
        "os",
        "random",
        "socket",
        "subprocess",
        "threading",
        "time",
        "pathlib",
        "secrets",
        "uuid",
    }
    found = []
    for path in (p for p in MODULES if p.relative_to(ROOT).parts[0] in ("planner", "statemachine")):
        for node in ast.walk(parsed(path)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = ["os"] if node.func.id in ("open", "print", "input", "exec", "eval") else []
            found += [f"{where(path, node)}: {name}" for name in names if name in impure]
    assert found == []


@pytest.mark.processes
def test_imports_run_downwards() -> None:
    command = Path(sys.executable).parent / "lint-imports"
    if not command.exists():
        pytest.skip("import-linter is not installed next to this interpreter")
    done = subprocess.run([command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr

"""Change the rules of recovery, rollback and election one place at a time, and report what no test notices.

A *mutant* is the program with one small change: a clause dropped from an ``and`` or ``or``, a condition
negated, ``<`` exchanged with ``<=``, a statement that has an effect dropped, or a constant replaced. Each
mutant runs the unit tests that execute the changed lines, until one of them fails. A mutant that survives
them runs a fixed set of simulator seeds. Of the mutants that survive both, ``equivalent_mutants.toml``
names those that change no behaviour, each with the reason; all others are reported, and the exit status is
1.

    python -m tools.mutants                          all modules
    python -m tools.mutants rollback --seeds 0       modules whose path contains "rollback", unit tests only
    python -m tools.mutants --list                   the mutants, without running them

All mutants run in forks of one process that has imported and collected everything, so that one costs about
a second. The changed function gets the code object of the mutant, so that a module that imported the
function by name runs it too.
"""

import argparse
import ast
import functools
import gc
import importlib
import inspect
import json
import os
import resource
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from planner.planner import Planner
from planner.values import Plan, Situation

ROOT = Path(__file__).parents[1]
SCOPE = (
    *(
        f"statemachine/cluster/**/{name}.py"
        for name in ("recovery", "rollback", "rules", "signals", "trainers", "boundaries", "acknowledgement")
    ),
    "statemachine/election/*.py",
)
"""Patterns of the modules that are changed; each must match at least one."""
UNIT_TESTS = ("tests/statemachine", "--ignore=tests/statemachine/test_recovery_path.py")
"""Arguments that collect the tests. The ignored test drives a coordinator in real time and waits minutes for what a
mutant prevents.
"""
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
SEEDS = 150
UNIT_CPU_S = 60
"""Processor time after which a mutant counts as killed by the unit tests, since it loops without end, in
seconds.
"""
SEEDS_CPU_S = 600
"""The same limit for the simulator."""

_NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
}  # fmt: skip
_BORDER: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt
}  # fmt: skip
_WORDS = {"abort": "boundary", "boundary": "abort"}
"""Words that decide something; all other strings are for people."""
_NOT_CHANGED = (ast.arguments, ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom, ast.MatchValue)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    path: str
    number: int
    """Position among the mutants of the module."""
    function: str
    """Qualified name; empty: a constant of the module."""
    line: int
    lines: range
    """Lines of the statement, or of its head, that hold the change."""
    before: str
    """Source of the changed part."""
    after: str
    statement: str
    """First line of the statement that the change is in."""
    change: str
    """``drop CLAUSE``, ``drop STATEMENT``, or ``BEFORE -> AFTER``; numbered where a function has it several times."""

    @property
    def key(self) -> tuple[str, str]:
        """Return the key of the mutant, which stays when lines move."""
        return (self.function, self.change)


@dataclass(kw_only=True)
class MutantResult:
    mutant: Mutant
    status: str = "waiting"
    """``waiting`` until it has run, then ``killed`` or ``open``; or ``equivalent``."""
    by: str = ""
    """The test or the seed that killed it, or the reason why it is equivalent."""


# --- changes -------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Finder:
    """A visitor that finds every place of a module that can be changed."""

    found: list[tuple[Mutant, Callable[[], None]]] = field(default_factory=list)
    path: str
    _changes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of times that each change was found in each function."""

    def module(self, tree: ast.Module) -> None:
        for node in tree.body:
            self._definitions(node, "")

    def _definitions(self, node: ast.stmt, inside: str) -> None:
        match node:
            case ast.ClassDef():
                for inner in node.body:
                    self._definitions(inner, f"{inside}{node.name}.")
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._body(node.body, f"{inside}{node.name}")
            case ast.Assign(targets=[ast.Name()], value=ast.Constant(value=int() | float())) if not inside:
                self._expression(node.value, "", node, functools.partial(setattr, node, "value"))
            case _:
                pass

    def _body(self, body: list[ast.stmt], function: str) -> None:
        for number, statement in enumerate(body):
            self._statement(statement, function, functools.partial(body.__setitem__, number))

    def _statement(self, node: ast.stmt, function: str, put: Callable[[Any], None]) -> None:
        if isinstance(node, _NOT_CHANGED) or _is_text(node):
            return
        if _has_effect(node):
            apply = functools.partial(put, ast.copy_location(ast.Pass(), node))
            self._add(node, function, node, "pass", apply, f"drop {ast.unparse(node)}")
        self._children(node, function, node)

    def _children(self, node: ast.AST, function: str, statement: ast.stmt) -> None:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "pattern") or (
                name == "value" and getattr(node, "arg", "") == "strict"
            ):
                continue
            for child, put in _put_in(node, name, value):
                if isinstance(child, ast.stmt):
                    self._statement(child, function, put)
                elif isinstance(child, ast.expr) and not isinstance(child, _NOT_CHANGED):
                    if name in ("test", "ifs", "guard"):
                        self._condition(child, function, statement, put)
                    self._expression(child, function, statement, put)
                elif isinstance(child, ast.keyword | ast.comprehension | ast.match_case | ast.ExceptHandler):
                    self._children(child, function, statement)

    def _condition(
        self, node: ast.expr, function: str, statement: ast.stmt, put: Callable[[Any], None]
    ) -> None:
        if not isinstance(node, ast.Compare | ast.BoolOp | ast.UnaryOp):
            self._replace(node, ast.UnaryOp(op=ast.Not(), operand=node), function, statement, put)

    def _expression(
        self, node: ast.expr, function: str, statement: ast.stmt, put: Callable[[Any], None]
    ) -> None:
        if isinstance(node, ast.BoolOp):
            for clause, rest in _without_each(node):
                self._replace(node, rest, function, statement, put, f"drop {ast.unparse(clause)}")
        for other in _others(node):
            self._replace(node, other, function, statement, put)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return
        self._children(node, function, statement)

    def _replace(
        self,
        node: ast.expr,
        other: ast.expr,
        function: str,
        statement: ast.stmt,
        put: Callable[[Any], None],
        change: str = "",
    ) -> None:
        ast.copy_location(other, node)
        ast.fix_missing_locations(other)
        after = ast.unparse(other)
        if not change:
            change = f"{ast.unparse(node)} -> {after}"
        if isinstance(node, ast.Constant):
            change += f" in {ast.unparse(statement).splitlines()[0]}"
        self._add(node, function, statement, after, functools.partial(put, other), change)

    def _add(
        self,
        node: ast.expr | ast.stmt,
        function: str,
        statement: ast.stmt,
        after: str,
        apply: Callable[[], None],
        change: str,
    ) -> None:
        first, last = statement.lineno, statement.end_lineno or statement.lineno
        if isinstance(statement, ast.Match):
            first, last = node.lineno, node.end_lineno or node.lineno
        elif isinstance(statement, ast.If | ast.While | ast.For | ast.With):
            last = max(statement.body[0].lineno - 1, statement.lineno)
        number = self._changes[function, change] = self._changes[function, change] + 1
        mutant = Mutant(
            change=change if number == 1 else f"{change} ({number})",
            path=self.path,
            number=len(self.found),
            function=function,
            line=node.lineno,
            lines=range(first, last + 1),
            before=ast.unparse(node),
            after=after,
            statement=ast.unparse(statement).splitlines()[0],
        )
        self.found.append((mutant, apply))


def _put_in(node: ast.AST, name: str, value: Any) -> Iterator[tuple[Any, Callable[[Any], None]]]:
    """Yield each child in this field, with the function that puts another node in its place."""
    if isinstance(value, list):
        for number, child in enumerate(value):
            yield child, functools.partial(value.__setitem__, number)
    else:
        yield value, functools.partial(setattr, node, name)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _has_effect(node: ast.stmt) -> bool:
    match node:
        case (
            ast.Expr()
            | ast.AugAssign()
            | ast.Delete()
            | ast.Continue()
            | ast.Break()
            | ast.Return(value=None)
        ):
            return True
        case ast.Assign(targets=targets):
            return any(
                isinstance(part, ast.Attribute | ast.Subscript) for one in targets for part in ast.walk(one)
            )
        case ast.AnnAssign(target=ast.Attribute(), value=ast.expr()):
            return True
        case _:
            return False


def _without_each(node: ast.BoolOp) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each clause, with the condition that remains without it."""
    for number, clause in enumerate(node.values):
        left = node.values[:number] + node.values[number + 1 :]
        yield clause, left[0] if len(left) == 1 else ast.BoolOp(op=node.op, values=left)


def _others(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the expressions that may replace this one."""
    match node:
        case ast.Compare(left=first, ops=ops, comparators=others):
            for table in (_NEGATED, _BORDER):
                for number, old in enumerate(ops):
                    if type(old) in table:
                        changed = [*ops[:number], table[type(old)](), *ops[number + 1 :]]
                        yield ast.Compare(left=first, ops=changed, comparators=others)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(value=not value)
        case ast.Constant(value=int() as value):
            yield ast.Constant(value=value + 1)
        case ast.Constant(value=float() as value):
            yield ast.Constant(value=2.0 * value if value else 1.0)
        case ast.Constant(value=str() as value) if value in _WORDS:
            yield ast.Constant(value=_WORDS[value])
        case _:
            pass


def mutants_of(path: str) -> list[Mutant]:
    """Return every mutant of the module at ``path``, relative to the root of the project."""
    return [mutant for mutant, _ in _parsed(path)[1]]


@functools.cache
def _parsed(path: str) -> tuple[ast.Module, list[tuple[Mutant, Callable[[], None]]]]:
    return _found(path, (ROOT / path).read_text(encoding="utf-8"))


def _found(path: str, source: str) -> tuple[ast.Module, list[tuple[Mutant, Callable[[], None]]]]:
    tree = ast.parse(source, filename=str(ROOT / path))
    finder = _Finder(path=path)
    finder.module(tree)
    return tree, finder.found


def changed_source(source: str) -> list[str]:
    """Return the source of each mutant of a module."""
    changed = []
    for number in range(len(_found("", source)[1])):
        tree, found = _found("", source)
        found[number][1]()
        changed.append(ast.unparse(tree))
    return changed


# --- running the mutant in this process ----------------------------------------------------------


def become(mutant: Mutant) -> None:
    """Turn the imported program into this mutant, for good: the process cannot become another one."""
    tree, found = _parsed(mutant.path)
    found[mutant.number][1]()
    module = importlib.import_module(
        mutant.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    )
    code = compile(ast.fix_missing_locations(tree), str(ROOT / mutant.path), "exec")
    if not mutant.function:
        _replace_constant(module, mutant, tree)
        return
    target: Any = module
    for name in mutant.function.split("."):
        target = inspect.getattr_static(target, name)
    function = _function(target)
    function.__code__ = next(one for one in _codes(code) if one.co_qualname == mutant.function)


def _function(target: Any) -> FunctionType:
    match target:
        case property():
            target = target.fget
        case staticmethod() | classmethod():
            target = target.__func__
        case _:
            pass
    function = inspect.unwrap(target)
    assert isinstance(function, FunctionType), f"{target} is not a function"
    return function


def _codes(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _codes(inner)


def _replace_constant(module: ModuleType, mutant: Mutant, tree: ast.Module) -> None:
    """Give the constant its new value in every module that imported it."""
    [statement] = [one for one in tree.body if isinstance(one, ast.Assign) and one.lineno == mutant.line]
    name, value = ast.unparse(statement.targets[0]), ast.literal_eval(statement.value)
    old = vars(module)[name]
    for other in list(sys.modules.values()):
        if getattr(other, "__name__", "").startswith("statemachine") and vars(other).get(name) is old:
            setattr(other, name, value)


# --- unit tests ----------------------------------------------------------------------------------


class _Lines:
    """Trace function that records the executed lines of some files."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = {str(ROOT / path): path for path in paths}
        self.executed: set[tuple[str, int]] = set()

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        return self._line if frame.f_code.co_filename in self._paths else None

    def _line(self, frame: Any, event: str, _: Any) -> Any:
        self.executed.add((self._paths[frame.f_code.co_filename], frame.f_lineno))
        return self._line


def _remember_plans() -> None:
    """Let the planner, which no mutant changes, answer repeated questions from memory."""
    plan, answers = Planner.plan, dict[str, Plan]()

    @functools.wraps(plan)
    def remembered(planner: Planner, situation: Situation) -> Plan:
        question = repr((planner.profile, planner.policy, situation))
        if question not in answers:
            answers[question] = plan(planner, situation)
        return answers[question]

    Planner.plan = remembered  # type: ignore[method-assign, assignment]


def _fails(item: pytest.Item) -> bool:
    from _pytest.runner import runtestprotocol

    return any(one.failed for one in runtestprotocol(item, log=False, nextitem=None))


class MutantRunner:
    """Pytest plugin that runs mutants in place of the tests."""

    def __init__(
        self,
        results: Sequence[MutantResult],
        seeds: Sequence[int] = (),
        jobs: int = 1,
        json_path: Path | None = None,
    ) -> None:
        self.results, self.seeds, self.jobs, self._json = results, seeds, jobs, json_path
        self._results = Path(tempfile.mkdtemp(prefix="ftd-mutants-"))
        self._running: dict[int, tuple[MutantResult, Path]] = {}
        self._done = 0
        self._kills: Counter[str] = Counter()
        """Number of mutants that each test has killed."""

    def write(self) -> None:
        """Write every mutant with its status so far."""
        if self._json is not None:
            shown = ("path", "line", "function", "statement", "before", "after", "change")
            entries = [
                {name: getattr(one.mutant, name) for name in shown} | {"status": one.status, "by": one.by}
                for one in self.results
            ]
            self._json.write_text(json.dumps(entries, indent=1), encoding="utf-8")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run all mutants."""
        if session.testsfailed:
            raise session.Interrupted("the unit tests cannot be collected")
        _remember_plans()
        tests = self._tests_of_lines(session.items)
        by_unit_tests = functools.partial(self._unit_tests, tests)
        waiting = [result for result in self.results if result.status == "waiting"]
        self._stage("unit tests", waiting, by_unit_tests, UNIT_CPU_S)
        if self.seeds:
            left = [result for result in self.results if result.status == "open"]
            self._stage("simulator", left, self._simulator, SEEDS_CPU_S)
        return True

    def _tests_of_lines(self, items: Sequence[pytest.Item]) -> dict[tuple[str, int], list[pytest.Item]]:
        """Return the tests that execute each line of the modules, the quickest first."""
        executed: dict[tuple[str, int], list[tuple[float, int]]] = {}
        tests: list[pytest.Item] = []
        paths = {result.mutant.path for result in self.results}

        for item in items:  # In this process, so that forks share what the planner caches.
            lines, began = _Lines(paths), time.process_time()
            sys.settrace(lines)
            try:
                failed = _fails(item)
            finally:
                sys.settrace(None)
            if failed:
                raise pytest.UsageError(f"{item.nodeid} fails without a mutant")
            for place in lines.executed:
                executed.setdefault(place, []).append((time.process_time() - began, len(tests)))
            tests.append(item)
        gc.collect()
        gc.freeze()  # Forks share the pages of what exists now.
        return {place: [tests[number] for _, number in sorted(costs)] for place, costs in executed.items()}

    def _fork(self, work: Callable[[], dict[str, Any]], path: Path, cpu_s: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
            path.write_text(json.dumps(work()), encoding="utf-8")
            status = 0
        finally:
            os._exit(status)

    def _unit_tests(self, tests: dict[tuple[str, int], list[pytest.Item]], mutant: Mutant) -> str:
        """Return the test that fails for this mutant, or an empty string."""
        lines = mutant.lines if mutant.function else {line for path, line in tests if path == mutant.path}
        chosen = dict.fromkeys(item for line in lines for item in tests.get((mutant.path, line), ()))
        become(mutant)
        likely_first = sorted(chosen, key=lambda item: -self._kills[item.nodeid])
        return next((item.nodeid for item in likely_first if _fails(item)), "")

    def _simulator(self, mutant: Mutant) -> str:
        from ftd.faults.sim.simulation_run import run_seed

        become(mutant)
        for seed in self.seeds:
            if violation := run_seed(seed).violation:
                return f"seed {seed}: {violation.splitlines()[0][:120]}"
        return ""

    def _stage(
        self, name: str, results: Sequence[MutantResult], test: Callable[[Mutant], str], cpu_s: int
    ) -> None:
        if name == "simulator":
            importlib.import_module("ftd.faults.sim.simulation_run")
        self._done = 0
        for number, result in enumerate(results):
            while len(self._running) >= self.jobs:
                self._collect(name, len(results))
            path = self._results / f"{number}.json"
            path.unlink(missing_ok=True)

            def work(mutant: Mutant = result.mutant) -> dict[str, Any]:
                return {"by": test(mutant)}

            self._running[self._fork(work, path, cpu_s)] = result, path
        while self._running:
            self._collect(name, len(results))
        print(file=sys.__stderr__)

    def _collect(self, name: str, count: int) -> None:
        pid, status = os.wait()
        result, path = self._running.pop(pid)
        if status == 0:
            by = json.loads(path.read_text(encoding="utf-8"))["by"]
        else:
            by = f"{name}: the run was ended (status {status})"
        result.status, result.by = ("killed" if by else "open"), by
        if by:
            self._kills[by] += 1
        self._done += 1
        if self._done % 20 == 0:
            self.write()
        print(f"\r{name}: {self._done} of {count}", end="", file=sys.__stderr__, flush=True)


# --- known mutants and the report ----------------------------------------------------------------


def explained() -> dict[tuple[str, str], str]:
    """Return the reasons of the mutants that are known to be equivalent, by function and change."""
    sections = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8"))["equivalent"]
    return {(one["function"], change): one["reason"] for one in sections for change in one["changes"]}


def modules(words: Sequence[str]) -> list[str]:
    """Return the paths of the modules to change whose path contains one of these words; without words all of them."""
    found: list[str] = []
    for pattern in SCOPE:
        matches = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))
        if not matches:
            raise SystemExit(f"{pattern} matches no module: change SCOPE in {Path(__file__).name}")
        found += [path for path in matches if not path.endswith("__init__.py")]
    return [path for path in dict.fromkeys(found) if not words or any(word in path for word in words)]


def report(results: Sequence[MutantResult]) -> None:
    """Print a table of the open mutants, and the number of each kind."""
    for result in results:
        mutant = result.mutant
        if result.status in ("open", "waiting"):
            print(f"{mutant.path}:{mutant.line} {mutant.function}\n  in  {mutant.statement}")
            print(f"  -   {mutant.before}\n  +   {mutant.after}")
    counts = Counter(result.status for result in results)
    print(f"{len(results)} mutants: " + ", ".join(f"{count} {kind}" for kind, count in counts.most_common()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutants; the module describes the options."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutants", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("modules", nargs="*", help="parts of the paths of modules; none: all modules")
    parser.add_argument(
        "--seeds", type=int, default=SEEDS, help=f"simulator seeds for each survivor ({SEEDS})"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (2)")
    parser.add_argument("--json", type=Path, help="write every mutant with its result to this file")
    parser.add_argument(
        "--again", type=Path, help="run only those that an earlier run left open or waiting in this file"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    chosen = parser.parse_args(arguments)
    results = [MutantResult(mutant=mutant) for path in modules(chosen.modules) for mutant in mutants_of(path)]
    reasons = explained()
    for result in results:
        if reason := reasons.get(result.mutant.key):
            result.status, result.by = "equivalent", reason
    if chosen.again:
        entries = json.loads(chosen.again.read_text(encoding="utf-8"))
        left = {(one["function"], one["change"]) for one in entries if one["status"] in ("open", "waiting")}
        results = [result for result in results if result.mutant.key in left]
    if chosen.list:
        report(results)
        return 0
    run = MutantRunner(results, range(chosen.seeds), chosen.jobs, chosen.json)
    options = ["-qq", "--no-header", "--assert=plain", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
    status = pytest.main([*options, f"--rootdir={ROOT}", *UNIT_TESTS], plugins=[run])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return int(status)
    run.write()
    report(results)
    stale = set() if chosen.modules or chosen.again else reasons.keys() - {one.mutant.key for one in results}
    for function, change in sorted(stale):
        print(f"{EQUIVALENT.name} explains a mutant that does not exist: {function}: {change}")
    return int(bool(stale) or any(result.status == "open" for result in results))


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())

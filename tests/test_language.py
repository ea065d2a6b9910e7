"""Words and openings that we do not use, so that the project keeps the language of its field (docs/glossary.md)."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("ftd", "planner", "runtime", "statemachine", "storage", "tests", "benchmarks", "examples", "tools")

INSTEAD = {
    r"anew": "write `again`",
    r"behind": "write `after` for time and order",
    r"beside": "write `next to`, `in parallel with` or `together with`",
    r"told(?! apart)": "write `published`, `reported` or `logged`",
    r"for ever": "write `forever`, or name the limit that is missing",
    r"spoil(s|ed)?": "write `corrupt`",
    r"mend(s|ed|ing)?": "write `repair` or `fix`",
    r"(throne|reign|hearsay|doorway|courier|lender|keeper)s?": "the glossary has the term of the field",
}
"""Patterns of whole words in comments, strings and pages → what to write. The changelog may name what was renamed."""

OPENING = re.compile(r"(Of|So|What|That|Who|Whom|Whose|How|When|Why|Which|Where)\b")
"""A docstring that begins with one of these is a fragment: begin a function's with a verb, any other with a noun."""
FUNCTION_OPENING = re.compile(rf"{OPENING.pattern}|Whether\b")
"""Openings that a function's docstring must not have; that of an attribute or a property may begin with ``Whether``."""

PLAIN = (".toml", ".yaml", ".sbatch", ".js", ".html")
"""Suffixes of examples, and of files of the dashboard, that are checked as a whole."""

FILES = sorted(
    path
    for path in (
        *(p for s in SOURCES for p in (ROOT / s).rglob("*.py")),
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(p for s in ("examples", "ftd") for p in (ROOT / s).rglob("*") if p.suffix in PLAIN),
    )
    if path != Path(__file__) and path.name != "CHANGELOG.md"
)
WORDS = re.compile(r"(?<![\w.-])(" + "|".join(INSTEAD) + r")(?![\w-])", re.IGNORECASE)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line numbers and texts: comments and strings of a module, a page without its code blocks, or all of
    another file.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        plain = re.sub(
            r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL
        )
        yield from enumerate(plain.splitlines(), 1)
        return
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from enumerate(token.string.splitlines(), token.start[0])


def fragments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line numbers and openings of a module's docstrings that are fragments, those of attributes
    included.
    """
    bodies: set[ast.AST] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if not any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
                    bodies.add(node.body[0])
            case ast.Expr(value=ast.Constant(value=str(text))):
                if found := (FUNCTION_OPENING if node in bodies else OPENING).match(text):
                    yield node.lineno, found[0]


def findings(path: Path) -> list[str]:
    """Return what to write otherwise in a file, with its place."""
    where = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    found = []
    has_words = WORDS.search(path.read_text(encoding="utf-8"))  # Tokenising takes most of the time.
    for line, text in prose(path) if has_words else ():
        for match in WORDS.finditer(text):
            why = next(
                why for pattern, why in INSTEAD.items() if re.fullmatch(pattern, match[0], re.IGNORECASE)
            )
            found.append(f"{where}:{line}: {match[0]!r}: {why}")
    if path.suffix == ".py":
        found += [
            f"{where}:{line}: a docstring begins with {opening!r}: begin with a verb or a noun"
            for line, opening in fragments(path)
        ]
    return found


def test_the_prose_uses_plain_words_and_standard_terms() -> None:
    assert [finding for path in FILES for finding in findings(path)] == []


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ('"""Of these bytes."""\n', "a docstring begins with 'Of'"),
        ('def f():\n    """Whether it is so."""\n', "a docstring begins with 'Whether'"),
        ("x = 1  # told later\n", "'told'"),
        ('raise ValueError("made anew")\n', "'anew'"),
    ],
)
def test_old_prose_is_found(text: str, finding: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(text)
    assert finding in findings(tmp_path / "module.py")[0]

"""Parts of all HTML pages: a self-contained document, light and dark, with tables that scroll."""

from collections.abc import Iterable, Sequence
from html import escape

from ftd.observe.view.plots.palette import FAINT, INK, PAPER, WAITING

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f27; --faint: #69707d; --waiting: #e7eaee; --paper: #fefefe;
  --line: #dfe3e8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --faint: #9aa3b0; --waiting: #2b313b;
  --paper: #14171c; --line: #2b313b; } }
body { margin: 2rem auto; padding: 0 1.25rem; max-width: 76rem; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0; } .faint { color: var(--faint); }
.figures { display: flex; flex-wrap: wrap; gap: .75rem 2.5rem; margin: 1.25rem 0; }
.figures b { display: block; font-size: 1.3rem; }
.scroll { overflow-x: auto; }
svg { width: 100%; min-width: 46rem; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { font-weight: 500; color: var(--faint); text-align: right; }
th, td { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
td { text-align: right; } .left { text-align: left; } .chosen td { font-weight: 600; }
@media print { :root { color-scheme: light; --ink: #1b1f27; --faint: #69707d; --waiting: #e7eaee;
  --paper: #fefefe; --line: #dfe3e8; } body { margin: 0; padding: 0; max-width: none; font-size: 11px; }
  .scroll { overflow: visible; } svg { min-width: 0; } h2 { break-after: avoid; }
  article, tr, svg { break-inside: avoid; } table { font-size: 9px; }
  th, td { padding: .2rem .5rem .2rem 0; white-space: normal; } }
"""


def render_page(title: str, parts: Iterable[str], *, style: str = "") -> str:
    """Return a whole document.

    :param title: plain text.
    :param parts: HTML fragments; empty ones are left out.
    :param style: CSS for this page only.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n"
        "<body>\n" + "\n".join(part for part in parts if part) + "\n</body>\n</html>\n"
    )


def apply_theme(svg: str) -> str:
    """Return the drawing without XML prolog, with its neutral colours replaced by the page's CSS variables."""
    drawing = svg[svg.index("<svg") :]
    for colour, variable in (
        (INK, "--ink"),
        (FAINT, "--faint"),
        (WAITING, "--waiting"),
        (PAPER, "--paper"),
    ):
        drawing = drawing.replace(colour, f"var({variable})")
    return drawing


def render_figures(shown: Iterable[tuple[str, str]]) -> str:
    """Return a row of large figures, given as pairs of label and value."""
    cells = (
        f'<div><b>{escape(value)}</b><span class="faint">{escape(label)}</span></div>'
        for label, value in shown
    )
    return f'<div class="figures">{"".join(cells)}</div>'


def render_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Iterable[int] = (),
    marked: Iterable[int] = (),
) -> str:
    """Return a table.
    :param left: columns aligned to the left.
    :param marked: highlighted rows.
    """
    aligned, bold = set(left), set(marked)

    def row_of(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=left' if index in aligned else ''}>{escape(cell)}</{tag}>"
            for index, cell in enumerate(cells)
        )

    lines = [
        f"<tr{' class=chosen' if index in bold else ''}>{row_of('td', cells)}</tr>"
        for index, cells in enumerate(rows)
    ]
    body = "\n".join(lines)
    return f'<div class="scroll"><table>\n<tr>{row_of("th", columns)}</tr>\n{body}\n</table></div>'

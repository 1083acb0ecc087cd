"""Two versions of a Python file side by side, in colour, as HTML."""

import difflib

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

CONTEXT = 3  # lines around a change
SIDES = ("old", "new")


def diff(old: str, new: str, titles: tuple[str, str]) -> str:
    """The lines that differ, with a few lines of context. A row has one cell per file; the style
    sheet puts them side by side, or one below the other on a narrow screen."""
    left, right = coloured(old), coloured(new)
    heads = "".join(
        f'<div class="{side}">{title}</div>' for side, title in zip(SIDES, titles, strict=True)
    )
    rows = [f'<div class="row head">{heads}</div>']
    matcher = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False)
    for i, group in enumerate(matcher.get_grouped_opcodes(CONTEXT)):
        if i:
            rows.append('<div class="row gap">⋯</div>')
        for kind, a, a_end, b, b_end in group:
            if kind == "equal":  # a row for each line, so that both sides stay level
                pairs = zip(range(a, a_end), range(b, b_end), strict=True)
                rows += [row(kind, left, [x], right, [y]) for x, y in pairs]
            else:
                rows.append(row(kind, left, range(a, a_end), right, range(b, b_end)))
    return '<div class="diff highlight" data-search-exclude>\n' + "\n".join(rows) + "\n</div>"


def coloured(source: str) -> list[str]:
    """The lines of a file as HTML. Pygments closes its spans at the end of each line."""
    return highlight(source, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).splitlines()


def row(kind: str, left: list[str], olds, right: list[str], news) -> str:
    cells = ""
    for side, lines, numbers in zip(SIDES, (left, right), (olds, news), strict=True):
        tag = "code" if kind == "equal" else "del" if side == "old" else "ins"
        drawn = [f'<{tag} data-line="{n + 1}">{lines[n] or " "}</{tag}>' for n in numbers]
        cells += f'<div class="{side}{"" if drawn else " none"}">{"".join(drawn)}</div>'
    return f'<div class="row {kind}">{cells}</div>'

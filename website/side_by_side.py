"""Two versions of some Python code side by side, in colour, as HTML."""

import difflib

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from report.diffs import Pair

CONTEXT = 3  # lines around a change


def diff(pair: Pair) -> str:
    """The lines that differ, with a few lines of context. A row has one cell per file; the style
    sheet puts them side by side, or one below the other on a narrow screen."""
    left = coloured(pair.old_lines)
    right = coloured(pair.new_lines)
    heads = f'<div class="old">{pair.old}</div><div class="new">{pair.new}</div>'
    rows = [f'<div class="row head">{heads}</div>']
    matcher = difflib.SequenceMatcher(None, pair.old_lines, pair.new_lines, autojunk=False)
    for i, group in enumerate(matcher.get_grouped_opcodes(CONTEXT)):
        if i:
            rows.append('<div class="row gap">⋯</div>')
        for kind, a, a_end, b, b_end in group:
            if kind == "equal":  # a row for each line, so that both sides stay level
                pairs = zip(left[a:a_end], right[b:b_end], strict=True)
                rows += [row(kind, [old], [new]) for old, new in pairs]
            else:
                rows.append(row(kind, left[a:a_end], right[b:b_end]))
    # A section: within a div, search would stop to leave lines out at the end of the first row.
    rows = ['<section class="diff highlight" data-search-exclude>', *rows, "</section>"]
    return "\n".join(rows)


def coloured(lines: list[str]) -> list[str]:
    """The lines as HTML. Pygments closes its spans at the end of each line."""
    source = "\n".join(lines) + "\n"
    return highlight(source, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).splitlines()


def row(kind: str, old: list[str], new: list[str]) -> str:
    before, after = ("code", "code") if kind == "equal" else ("del", "ins")
    return f'<div class="row {kind}">{cell("old", before, old)}{cell("new", after, new)}</div>'


def cell(side: str, tag: str, lines: list[str]) -> str:
    drawn = [f"<{tag}>{line or ' '}</{tag}>" for line in lines]
    css = side if drawn else f"{side} none"
    return f'<div class="{css}">{"".join(drawn)}</div>'

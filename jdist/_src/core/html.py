"""HTML fragments for notebooks: text is escaped, colors come from the notebook's theme."""

import html
import io
from collections.abc import Iterable
from typing import Any, TypeAlias

Row: TypeAlias = tuple[str, ...]

# The font is named because a theme may set one for `pre` in which box-drawing characters do not connect.
_FONT = "font-family:Menlo,'DejaVu Sans Mono',Consolas,'Courier New',monospace"
_PRE = f"{_FONT};white-space:pre;line-height:1.15;margin:.6em 0;background:transparent;color:inherit"
_CELL = "padding:.2em 1.2em .2em 0;color:inherit;border:0;border-bottom:1px solid rgba(128,128,128,.4)"


def block(*parts: str) -> str:
    """Returns the parts stacked vertically in a block that scrolls horizontally where they are too wide."""
    return f'<div style="overflow-x:auto">{"".join(parts)}</div>'


def heading(text: str) -> str:
    """Returns a line of bold text."""
    return f"<strong>{html.escape(text)}</strong>"


def paragraph(text: str) -> str:
    """Returns a paragraph."""
    return f"<p>{html.escape(text)}</p>"


def monospaced(text: str) -> str:
    """Returns lines of text in a monospaced font."""
    return f'<pre style="{_PRE}">{html.escape(text)}</pre>'


def table(rows: Iterable[Row], head: Row = (), foot: Row = (), *, right_from: int | None = None) -> str:
    """Returns a table of text.

    Args:
        rows: The rows, all of the same length.
        head: The column names.
        foot: The last row, such as a total.
        right_from: Index of the first column that is aligned right, as numbers are; None for no such column.
    """

    def table_row(row: Row, tag: str) -> str:
        sides = ["left" if right_from is None or i < right_from else "right" for i in range(len(row))]
        cells = [
            f'<{tag} style="text-align:{side};{_CELL}">{html.escape(x)}</{tag}>'
            for side, x in zip(sides, row, strict=True)
        ]
        return f'<tr style="background:transparent">{"".join(cells)}</tr>' if row else ""

    body = "".join(table_row(row, "td") for row in rows)
    parts = f"<thead>{table_row(head, 'th')}</thead><tbody>{body}</tbody><tfoot>{table_row(foot, 'th')}</tfoot>"
    return f'<table style="border-collapse:collapse;margin:.6em 0;color:inherit">{parts}</table>'


def html_of(renderable: Any, width: int) -> str:
    """Returns what rich prints in `width` columns as HTML. Lines that are too long for a page scroll horizontally."""
    from rich.console import Console  # not needed until something is shown

    console = Console(file=io.StringIO(), width=width, record=True, force_jupyter=False, force_terminal=True)
    console.print(renderable)
    return console.export_html(inline_styles=True, code_format=f'<pre style="{_PRE};overflow-x:auto">{{code}}</pre>')

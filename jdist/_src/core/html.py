"""Parts of HTML for notebooks, with the text escaped and the colours of the notebook's theme."""

import html
from collections.abc import Iterable
from typing import TypeAlias

Row: TypeAlias = tuple[str, ...]

# Named, since a theme may give `pre` a font of its own, in which the lines of a box do not meet.
_FONT = "font-family:Menlo,'DejaVu Sans Mono',Consolas,'Courier New',monospace"
_PRE = f"{_FONT};white-space:pre;line-height:1.15;margin:.6em 0;background:transparent;color:inherit"
_CELL = (
    "padding:.2em 1.2em .2em 0;color:inherit;border:0;border-bottom:1px solid rgba(128,128,128,.4)"  # on light and dark
)


def block(*parts: str) -> str:
    """The parts below each other. What is too wide scrolls."""
    return f'<div style="overflow-x:auto">{"".join(parts)}</div>'


def heading(text: str) -> str:
    """A line of bold text."""
    return f"<strong>{html.escape(text)}</strong>"


def paragraph(text: str) -> str:
    """A paragraph of text."""
    return f"<p>{html.escape(text)}</p>"


def monospaced(text: str) -> str:
    """Lines of text, every character as wide as every other."""
    return f'<pre style="{_PRE}">{html.escape(text)}</pre>'


def table(rows: Iterable[Row], head: Row = (), foot: Row = (), *, right_from: int | None = None) -> str:
    """A table of text.

    Args:
        rows: The rows, of as many cells each.
        head: The names of the columns.
        foot: The last row, such as a total.
        right_from: The first column that is aligned right, as numbers are; None for none.
    """

    def one(row: Row, tag: str) -> str:
        sides = ["left" if right_from is None or i < right_from else "right" for i in range(len(row))]
        cells = [
            f'<{tag} style="text-align:{side};{_CELL}">{html.escape(x)}</{tag}>'
            for side, x in zip(sides, row, strict=True)
        ]
        return f'<tr style="background:transparent">{"".join(cells)}</tr>' if row else ""

    body = "".join(one(row, "td") for row in rows)
    parts = f"<thead>{one(head, 'th')}</thead><tbody>{body}</tbody><tfoot>{one(foot, 'th')}</tfoot>"
    return f'<table style="border-collapse:collapse;margin:.6em 0;color:inherit">{parts}</table>'

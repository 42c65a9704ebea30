"""Objects of rich as text, and as HTML for notebooks."""

import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# The font is named because a theme may set one for `pre` in which box-drawing characters do not connect.
_PRE = (
    "font-family:Menlo,'DejaVu Sans Mono',Consolas,'Courier New',monospace;white-space:pre;overflow-x:auto;"
    "line-height:1.15;margin:.6em 0;background:transparent;color:inherit"
)


def text_of(renderable: Any, width: int) -> str:
    """Returns what rich prints in `width` columns as plain text, without spaces at the ends of lines."""
    console = _console(width)
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def html_of(renderable: Any, width: int = 160) -> str:
    """Returns what rich prints in `width` columns as an HTML element; it scrolls horizontally where a page is narrower."""
    console = _console(width, record=True)
    console.print(renderable, highlight=False)
    return console.export_html(inline_styles=True, code_format=f'<pre style="{_PRE}">{{code}}</pre>')


def facts_table(title: str, facts: Mapping[str, str]) -> Any:
    """Returns a table of names and texts, below a title if it is not empty, for rich. The texts are shown verbatim."""
    from rich.console import Group
    from rich.table import Column, Table
    from rich.text import Text  # a plain string would be read as markup

    table = Table.grid(Column(style="bold"), Column(overflow="fold"), padding=(0, 2))
    for name, fact in facts.items():
        table.add_row(Text(name), Text(fact))
    return Group(Text(title, style="bold"), table) if title else table


def facts_html(title: str, facts: Mapping[str, str]) -> str:
    """Returns `facts_table` as an HTML element, with names and texts on one line each, of at most 60 and 400 characters."""
    return html_of(facts_table(title, {printable(name): printable(fact, 400) for name, fact in facts.items()}))


def rows_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    footer: Sequence[str] = (),
    num_texts: int | None = None,
    max_widths: Sequence[int | None] = (),
    title: str = "",
) -> Any:
    """Returns a table for rich, narrow, because without lines. Texts are shown verbatim; long ones are folded, none is cut.

    Args:
        head: The name of each column.
        rows: The texts of each row.
        footer: The texts of a last row.
        num_texts: The number of the first columns that are aligned to the left, by default all.
        max_widths: The maximum width of each column, None for no limit.
        title: The title.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text  # a plain string would be read as markup

    table = Table(show_footer=bool(footer), box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.title, table.title_justify = title or None, "left"
    for name, last, width in itertools.zip_longest(head, footer, max_widths[: len(head)]):
        side = "left" if num_texts is None or len(table.columns) < num_texts else "right"
        table.add_column(name, Text(last or ""), justify=side, overflow="fold", max_width=width)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def printable(text: str, max_length: int = 60) -> str:
    r"""Returns `text` on one line, with unprintable characters escaped, shortened to `max_length`.

    Example:
        >>> printable("top\n5"), printable("a_very_long_name", max_length=8)
        ('top\\n5', 'a_very_…')
    """
    escaped = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    return escaped if len(escaped) <= max_length else escaped[: max_length - 1] + "…"


def _console(width: int, record: bool = False) -> Any:
    from rich.console import Console  # not needed until something is shown

    colors = "truecolor" if record else None
    return Console(file=io.StringIO(), width=width, record=record, color_system=colors, force_jupyter=False)

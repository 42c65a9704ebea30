"""Boxes, labels and arrows of the figures of the documentation, as SVG in one style."""

import math
from xml.sax.saxutils import escape

BLUE, ORANGE, GREEN, PURPLE = "#9ecae9", "#ffbf79", "#a1d99b", "#d4b5e3"
GREY, RED = "#e6e8eb", "#f2a6a0"
INK, MUTED, LINE, CARD = "#1f2933", "#4d5661", "#7b8794", "#f8f9fb"
SIZE = 15  # of the font; a figure of 640 units is scaled to 360 pixels on a phone
_MARGIN = 14


class Drawing:
    """The elements of a figure. Its size is that of the elements; the background is a light card, also on dark pages."""

    def __init__(self) -> None:
        """Creates a figure without elements."""
        self._parts: list[str] = []
        self._right = self._bottom = 0.0

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str = "",
        fill: str = GREY,
        *,
        detail: str = "",
        dashed: bool = False,
        bold: bool = False,
    ) -> None:
        """Draws a rectangle with lines of text in its center, the last ones muted; an error if the text is wider."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._add(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{LINE}"{dash}/>',
            x + width,
            y + height,
        )
        lines = [(line, INK) for line in text.split("\n") if line] + [
            (line, MUTED) for line in detail.split("\n") if line
        ]
        for number, (line, color) in enumerate(lines):
            if text_width(line) > width:
                raise ValueError(f"{line!r} is wider than its box of {width:g}.")
            middle = y + height / 2 + (number - (len(lines) - 1) / 2) * (SIZE + 3)
            self.text(
                x + width / 2, middle + SIZE * 0.35, line, anchor="middle", color=color, bold=bold and color == INK
            )

    def frame(self, x: float, y: float, width: float, height: float, title: str, *, dashed: bool = False) -> None:
        """Draws a rectangle without a fill, with a title in its upper left corner."""
        self.box(x, y, width, height, fill="none", dashed=dashed)
        self.text(x + 10, y + 21, title, bold=True)

    def text(
        self, x: float, y: float, text: str, *, anchor: str = "start", color: str = INK, bold: bool = False
    ) -> None:
        """Writes one line, with its baseline at `y`."""
        weight = ' font-weight="bold"' if bold else ""
        width = text_width(text, bold)
        right = x + width * {"start": 1, "middle": 0.5, "end": 0}[anchor]
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        line = f'<text x="{x:g}" y="{y:g}" fill="{color}"{place}{weight}>{escape(text)}</text>'
        self._add(line, right, y + 4)

    def note(self, x: float, y: float, text: str, *, anchor: str = "start") -> None:
        """Writes muted lines."""
        for number, line in enumerate(text.split("\n")):
            self.text(x, y + number * (SIZE + 4), line, anchor=anchor, color=MUTED)

    def arrow(
        self,
        x: float,
        y: float,
        to_x: float,
        to_y: float,
        *,
        color: str = MUTED,
        dashed: bool = False,
        both: bool = False,
    ) -> None:
        """Draws a straight arrow; with `both`, a head at each end."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._add(
            f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{color}" stroke-width="1.6" fill="none"{dash}/>',
            max(x, to_x),
            max(y, to_y),
        )
        self._head(x, y, to_x, to_y, color)
        if both:
            self._head(to_x, to_y, x, y, color)

    def line(self, x: float, y: float, to_x: float, to_y: float, *, color: str = LINE, dashed: bool = False) -> None:
        """Draws a straight line."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        path = f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{color}" stroke-width="1.6" fill="none"{dash}/>'
        self._add(path, max(x, to_x), max(y, to_y))

    def _head(self, x: float, y: float, to_x: float, to_y: float, color: str) -> None:
        angle = math.atan2(to_y - y, to_x - x)
        corners = [(to_x, to_y)] + [
            (to_x - 9 * math.cos(angle + turn), to_y - 9 * math.sin(angle + turn)) for turn in (0.42, -0.42)
        ]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
        self._add(f'<polygon points="{points}" fill="{color}"/>', to_x, to_y)

    def _add(self, part: str, right: float, bottom: float) -> None:
        self._parts.append(part)
        self._right, self._bottom = max(self._right, right), max(self._bottom, bottom)

    def svg(self) -> str:
        """Returns the figure."""
        return card(self._right + _MARGIN, self._bottom + _MARGIN, self._parts, SIZE)


def card(width: float, height: float, parts: list[str], size: int) -> str:
    """Returns an SVG with a light background, which is readable on light and on dark pages."""
    width, height = math.ceil(width), math.ceil(height)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="{size}">\n'
        f'<rect width="{width}" height="{height}" rx="8" fill="{CARD}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def text_width(text: str, bold: bool = False) -> float:
    """Returns about the width of a line in a sans-serif font."""
    ems = sum(
        0.3 if c in "iljtfrI.,:;'|!()[]/ " else 0.86 if c in "mwMW" else 0.6 if c.isupper() else 0.545 for c in text
    )
    return ems * SIZE * (1.06 if bold else 1)

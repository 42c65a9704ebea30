"""What is recorded of training: a row an epoch, and the loss of every step."""

import dataclasses
import html
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jdist._src.training.report import matplotlib_charts
from jdist._src.training.report.charts import panels, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_IN_TEXT, _ON_PAGE = 30, 200  # rows of a table at most


@dataclasses.dataclass(frozen=True, repr=False)
class History:
    """A record of training. A table when printed or shown in a notebook; `plot` draws it.

    Attributes:
        rows: One an epoch: `epoch`, `step`, `seconds`, `rows_per_second`, `stalled`, `loss` and the metrics, the same of the
            validation as `val_loss` and so on, and `learning_rate` where it is known.
        losses: The loss of each step, by its number.

    Example:
        >>> rows = [{"epoch": 0, "loss": 2.25}, {"epoch": 1, "loss": 0.125, "val_loss": 0.5}]
        >>> history = History(rows, {1: 3.0, 2: 1.5, 3: 0.15, 4: 0.1})
        >>> history["loss"], history["val_loss"]
        ([2.25, 0.125], [0.5])
        >>> print(history)
        epoch   loss  val_loss
            0   2.25
            1  0.125       0.5
    """

    rows: Sequence[Mapping[str, float]] = ()
    losses: Mapping[int, float] = dataclasses.field(default_factory=dict)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of what the rows have, in the order in which they first occur."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row))

    def __getitem__(self, column: str) -> list[float]:
        """A column: its value in each row that has it.

        Raises:
            KeyError: No row has it.
        """
        values = [row[column] for row in self.rows if column in row]
        if not values:
            names = ", ".join(map(repr, self.columns)) or "none: no epoch has ended"
            raise KeyError(f"There is no column {column!r}. The columns are {names}.")
        return values

    def __contains__(self, column: object) -> bool:
        return column in self.columns

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return (
            f"History({len(self.rows):,} rows of {', '.join(self.columns) or 'nothing'}; {len(self.losses):,} losses)"
        )

    def __str__(self) -> str:
        if not self.rows:
            return repr(self)
        lines = [[shown(name, 24) for name in self.columns], *self._cells(_IN_TEXT)]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        aligned = ("  ".join(map(str.rjust, cells, widths)).rstrip() for cells in lines)
        return "\n".join(aligned)

    def _repr_html_(self) -> str:
        head, *body = (
            "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
            for tag, cells in [("th", map(shown, self.columns)), *(("td", row) for row in self._cells(_ON_PAGE))]
        )
        rows = "".join(f"<tr>{row}</tr>" for row in body)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"

    def plot(self, path: str | os.PathLike[str] | None = None) -> "Figure":
        """Draws loss, metrics, learning rate and throughput.

        What validation gave has the colour of what it is the validation of, and is dashed. Of a long run the loss is drawn as
        what it was at least and at most within every so many steps. Values that are not finite are marked by a cross.

        Args:
            path: Where to save the figure as well, if anywhere: `.png`, `.svg`, `.pdf`.

        Returns:
            A figure of matplotlib, which pyplot does not know of: there is nothing to close.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.

        Example:
            >>> history = History([{"epoch": 0, "step": 2, "loss": 2.25}], {1: 3.0, 2: 1.5})
            >>> len(history.plot().axes)
            1
        """
        drawn = matplotlib_charts.figure(panels(self.rows, self.losses))
        if path is not None:
            drawn.savefig(path)
        return drawn

    def _cells(self, most: int) -> list[list[str]]:
        """The rows as text; of too many, the first and the last ones."""
        half = most // 2
        rows = list(self.rows) if len(self.rows) <= most else [*self.rows[:half], None, *self.rows[-half:]]
        left_out = f"… {len(self.rows) - 2 * half:,} more"
        blank = [""] * (len(self.columns) - 1)
        return [
            [left_out, *blank]
            if row is None
            else [format_value(row[name]) if name in row else "" for name in self.columns]
            for row in rows
        ]


def format_value(value: Any) -> str:
    """A value of a row as it is read: whole numbers in full, others to four digits.

    Example:
        >>> in_words(12345), in_words(0.123456), in_words(98765.4), in_words(float("nan"))
        ('12,345', '0.1235', '98,765', 'nan')
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return shown(str(value))
    if 1e3 <= abs(number) < 1e12 or (number.is_integer() and not isinstance(value, float)):
        return f"{number:,.0f}"
    return f"{number:.4g}"

"""The record of training: one row per epoch or validation, and the loss of every step."""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from jdist._src.core.migration_hints import explains_attributes
from jdist._src.core.rendering import html_of, printable, text_of
from jdist._src.training.report.charts import chart_panels, draw_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_TEXT_ROWS, _MAX_HTML_ROWS = 30, 200
_WIDTH = 10_000  # no column is folded


class _StepValues(dict[int, float]):
    """A number of each step by step number. As an array, `np.asarray(losses)` or `plt.plot(losses)`, the numbers in order."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array([self[step] for step in sorted(self)], dtype or np.float64)


@explains_attributes("history")
@dataclasses.dataclass(frozen=True, repr=False)
class History:
    """The record of training. A table when printed or shown in a notebook; `plot` draws it.

    Attributes:
        rows: One row per epoch, and per validation of `fit(validate_every=...)`: `epoch`, `step`, `seconds`,
            `examples_per_second`, `stalled_fraction` (the fraction of steps that waited for their batch), `loss` and the
            metrics since the previous row, the same of the validation data as `val_loss` and so on, or `val_NAME_loss` with
            several sets, and `learning_rate` if known. A row with such steps or examples has `skipped_steps`, the number of
            steps that changed nothing because their loss or a gradient was not finite, and `dropped_examples`, the number of
            examples with weight 0. Loss and metrics do not contain them, and are NaN if there are no others. With
            `Trainer(tokens=...)` there is `tokens_per_second`; on accelerators whose peak is known `mfu`, the model flops
            utilization; and with `fit(norms=True)` `gradient_norm`, `update_norm` and `parameter_norm`, the means of the steps.
        losses: The loss of each step, by step number; as an array, such as for `plt.plot`, the losses in order.
        norms: With `fit(norms=True)`, the norms of each step that was not skipped, by the name of the column and step number.

    Example:
        >>> rows = [{"epoch": 0, "loss": 2.25}, {"epoch": 1, "loss": 0.125, "val_loss": 0.5}]
        >>> history = History(rows, {1: 3.0, 2: 1.5, 3: 0.15, 4: 0.1})
        >>> history["loss"], history["val_loss"], history[-1]["epoch"], len(list(history))
        ([2.25, 0.125], [0.5], 1, 2)
        >>> print(history)
        epoch   loss  val_loss
            0   2.25
            1  0.125       0.5
    """

    rows: Sequence[Mapping[str, float]] = ()
    losses: Mapping[int, float] = dataclasses.field(default_factory=dict)
    norms: Mapping[str, Mapping[int, float]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if type(self.losses) is dict:
            object.__setattr__(self, "losses", _StepValues(self.losses))
        if type(self.norms) is dict:
            object.__setattr__(self, "norms", {name: _StepValues(values) for name, values in self.norms.items()})

    @property
    def columns(self) -> tuple[str, ...]:
        """The column names of all rows, in the order of their first occurrence."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row))

    @overload
    def __getitem__(self, column: str) -> list[float]: ...
    @overload
    def __getitem__(self, column: int) -> Mapping[str, float]: ...
    @overload
    def __getitem__(self, column: slice) -> Sequence[Mapping[str, float]]: ...
    def __getitem__(self, column: Any) -> Any:
        """Returns the values of a column, from the rows that have it; or a row, or several rows, as a list does.

        Raises:
            KeyError: No row has this column.
            IndexError: There is no such row.
        """
        if isinstance(column, slice):
            return list(self.rows)[column]
        if isinstance(column, (int, np.integer)):
            if not -len(self.rows) <= column < len(self.rows):
                raise IndexError(f"There is no row {column}: the history has {len(self.rows):,} rows.")
            return self.rows[int(column)]
        values = [row[column] for row in self.rows if column in row]
        if not values:
            names = ", ".join(map(repr, self.columns)) or "none: no epoch has ended"
            raise KeyError(f"There is no column {column!r}. The columns are {names}.")
        return values

    def __iter__(self) -> Iterator[Mapping[str, float]]:
        """Iterates over the rows."""
        return iter(self.rows)

    def __contains__(self, column: object) -> bool:
        return column in self.columns

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return (
            f"History({len(self.rows):,} rows of {', '.join(self.columns) or 'nothing'}; {len(self.losses):,} losses)"
        )

    def __str__(self) -> str:
        return text_of(self._table(_MAX_TEXT_ROWS), _WIDTH) if self.columns else repr(self)

    def _repr_html_(self) -> str:
        return html_of(self._table(_MAX_HTML_ROWS), _WIDTH)

    def plot(self, path: str | os.PathLike[str] | None = None) -> "Figure":
        """Draws loss, metrics, learning rate and throughput.

        Validation curves are dashed and have the color of their training curve. The loss of a long run is drawn as its range
        over groups of consecutive steps. Values that are not finite are marked by a cross.

        Args:
            path: A file to save the figure to: `.png`, `.svg`, `.pdf`.

        Returns:
            A matplotlib figure that is not registered with pyplot, so it need not be closed.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.

        Example:
            >>> history = History([{"epoch": 0, "step": 2, "loss": 2.25}], {1: 3.0, 2: 1.5})
            >>> len(history.plot().axes)
            1
        """
        figure = draw_figure(chart_panels(self.rows, self.losses))
        if path is not None:
            figure.savefig(path)
        return figure

    def _table(self, max_rows: int) -> Any:
        """Returns the rows as a table for rich; if there are more than `max_rows`, the first and the last ones."""
        from rich.table import Table
        from rich.text import Text  # a plain string would be read as markup

        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for name in self.columns:
            table.add_column(Text(printable(name)), justify="right")
        half = max_rows // 2
        rows = list(self.rows) if len(self.rows) <= max_rows else [*self.rows[:half], None, *self.rows[-half:]]
        for row in rows:
            if row is None:
                table.add_row(f"… {len(self.rows) - 2 * half:,} more")
            else:
                table.add_row(*(Text(format_value(row[name])) if name in row else "" for name in self.columns))
        return table


def row_name(history: History) -> str:
    """Returns the noun for a row of the history: "epoch", or "row" if there are several per epoch.

    Example:
        >>> (
        ...     row_name(History([{"epoch": 0}, {"epoch": 1}])),
        ...     row_name(History([{"epoch": 0}, {"epoch": 0}])),
        ... )
        ('epoch', 'row')
    """
    epochs = [row.get("epoch", number) for number, row in enumerate(history.rows)]
    return "epoch" if len(set(epochs)) == len(epochs) else "row"


def format_value(value: Any) -> str:
    """Returns a value of a row as text: integers and large numbers with all digits before the point, others with four digits.

    Example:
        >>> (
        ...     format_value(12345),
        ...     format_value(0.123456),
        ...     format_value(98765.4),
        ...     format_value(float("nan")),
        ... )
        ('12,345', '0.1235', '98,765', 'nan')
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return printable(str(value))
    if 1e3 <= abs(number) < 1e12 or (number.is_integer() and not isinstance(value, float)):
        return f"{number:,.0f}"
    return f"{number:.4g}"

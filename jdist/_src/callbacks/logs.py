"""Logs of training as CSV and JSON Lines files."""

import abc
import csv
import io
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, final

import numpy as np

from jdist._src.callbacks.rows import EVENT_COLUMNS, ExtraColumns, RowWriter, row_of
from jdist._src.core.atomic_files import replace_atomically
from jdist._src.core.path_arguments import path_argument
from jdist._src.core.paths import append_text, is_url
from jdist._src.training.events import Event

Row: TypeAlias = dict[str, Any]


class _Log(RowWriter):
    """A file of rows. Each row opens and closes the file, so it is complete on disk after each row."""

    def __init__(self, path: str | os.PathLike[str], *, every: int | None = None, also: Sequence[ExtraColumns] = ()):
        super().__init__(every, also)
        self.path = self.destination = path_argument("path", path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def _write(self, event: Event, columns: Mapping[str, Any]) -> None:
        row = {name: _to_python(value) for name, value in row_of(event, columns).items()}
        line = self._line(row)  # before the file is opened, because this may replace it
        append_text(self.path, line)

    @abc.abstractmethod
    def _rows(self, text: str) -> list[Row]:
        """Returns the complete rows of a file. Raises ValueError if the file is not such a log."""

    @abc.abstractmethod
    def _text(self, rows: Iterable[Row]) -> str:
        """Returns the contents of a file with these rows."""

    @abc.abstractmethod
    def _line(self, row: Row) -> str:
        """Returns the text that is appended for a row."""

    def _begin(self, step: int) -> None:
        try:
            if not is_url(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
            text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
            rows = self._rows(text)
            if rows and step == 0:
                self.path.rename(_unused_path(self.path))
            self._replace(row for row in rows if int(row["step"]) <= step and step > 0)
        except OSError as error:
            raise ValueError(f"The log {str(self.path)!r} cannot be written: {error}. Pass another path.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{str(self.path)!r} exists, and is not a log that {type(self).__name__} wrote. Pass another path."
            ) from error

    def _replace(self, rows: Iterable[Row]) -> None:
        with replace_atomically(self.path) as new:
            new.write_text(self._text(rows), encoding="utf-8", newline="")


@final
class CSVLog(_Log):
    """Writes a CSV table: a row after each epoch and each validation, and every `every` steps.

    The columns are `moment` (`step`, `validation`, `epoch`, or `end` for an incomplete epoch), `epoch`, `step`, `seconds` and
    `examples` since the start of this `fit`, `stalled_fraction`, and the metrics. A column that appears later, as with the
    first validation, is empty in the previous rows. A resumed run continues the file, without the rows after the step that
    it resumes from; a run from the beginning renames an existing log to `<path>.1`. Process 0 writes.

    Args:
        path: The file. Directories are created.
        every: The number of steps between additional rows; each of them reads the metrics from the devices.
        also: Additional columns: functions from an event to names and numbers, such as `jdist.callbacks.learning_rate()`.

    Raises:
        TypeError: `path` is not a path, `every` is not an integer, or `also` is not a list of functions.
        ValueError: `every` is less than 1. Raised before the first step: the file is not writable, or exists and is not such a
            log.

    Example:
        >>> log = jdist.callbacks.CSVLog("run/log.csv", every=100)
    """

    _columns: list[str]

    def _rows(self, text: str) -> list[Row]:
        table = csv.DictReader(io.StringIO(_complete_lines(text), newline=""))
        self._columns = list(table.fieldnames or EVENT_COLUMNS)
        if not set(EVENT_COLUMNS) <= set(self._columns):
            raise ValueError("The columns differ.")
        return [row for row in table if int(row["step"]) >= 0]

    def _text(self, rows: Iterable[Row]) -> str:
        file = io.StringIO(newline="")
        table = csv.DictWriter(file, self._columns, restval="", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        return file.getvalue()

    def _line(self, row: Row) -> str:
        new_columns = [name for name in row if name not in self._columns]
        if new_columns:
            rows = self._rows(self.path.read_text(encoding="utf-8"))
            self._columns += new_columns
            self._replace(rows)
        return self._text([row]).split("\n", 1)[1]


@final
class JSONLog(_Log):
    """Writes JSON Lines: an object after each epoch and each validation, and every `every` steps.

    Otherwise like `CSVLog`. Values that are not finite are the strings `"nan"`, `"inf"` and `"-inf"`, which `float` parses.

    Args:
        path: The file. Directories are created.
        every: The number of steps between additional lines.
        also: Additional columns: functions from an event to names and numbers.

    Raises:
        TypeError: `path` is not a path, `every` is not an integer, or `also` is not a list of functions.
        ValueError: `every` is less than 1. Raised before the first step: the file is not writable, or exists and is not such a
            log.

    Example:
        >>> log = jdist.callbacks.JSONLog(
        ...     "run/log.jsonl", also=[jdist.callbacks.learning_rate()]
        ... )
    """

    def _rows(self, text: str) -> list[Row]:
        rows = [json.loads(line) for line in _complete_lines(text).splitlines()]
        if not all(isinstance(row, dict) and set(EVENT_COLUMNS) <= set(row) for row in rows):
            raise ValueError("The lines differ.")
        return rows

    def _text(self, rows: Iterable[Row]) -> str:
        return "".join(map(self._line, rows))

    def _line(self, row: Row) -> str:
        return json.dumps({name: _without_non_finite(value) for name, value in row.items()}, allow_nan=False) + "\n"


def _complete_lines(text: str) -> str:
    """Returns `text` without an incomplete last line."""
    return text[: text.rfind("\n") + 1]


def _to_python(value: Any) -> Any:
    """Returns a number or an array as Python numbers and lists."""
    return value if isinstance(value, (str, int, float)) else np.asarray(value).tolist()


def _without_non_finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_non_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _unused_path(path: pathlib.Path) -> pathlib.Path:
    """Returns the first of `path.1`, `path.2`, ... that does not exist."""
    number = 1
    while (candidate := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return candidate

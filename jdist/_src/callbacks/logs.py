"""Logs of training as files: tables (CSV), and a JSON object a line."""

import abc
import csv
import io
import json
import math
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, final

import numpy as np

from jdist._src.callbacks.arguments import path_of
from jdist._src.callbacks.log_rows import FACTS, Also, RowWriter, row_of
from jdist._src.core.atomic_files import replace_atomically
from jdist._src.training.events import Event

Row: TypeAlias = dict[str, Any]


class _Log(RowWriter):
    """A file of rows. It is opened for each: what is written is there, and nothing is left to close."""

    def __init__(self, path: str | os.PathLike[str], *, every: int | None = None, also: Sequence[Also] = ()):
        super().__init__(every, also)
        self.path = path_of("path", path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    @property
    def destination(self) -> pathlib.Path:
        """The file."""
        return self.path

    def _write(self, event: Event) -> None:
        row = {name: _plain(value) for name, value in row_of(event, self._also).items()}
        line = self._line(row)  # first: it may replace the file
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(line)

    @abc.abstractmethod
    def _rows(self, text: str) -> list[Row]:
        """The rows of a file; of one that was cut off, those that are whole. ValueError if it is no log."""

    @abc.abstractmethod
    def _text(self, rows: Iterable[Row]) -> str:
        """The file of these rows."""

    @abc.abstractmethod
    def _line(self, row: Row) -> str:
        """What is appended for a row."""

    def _begin(self, step: int) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
            rows = self._rows(text)
            if rows and step == 0:
                self.path.rename(_free(self.path))
            self._replace(row for row in rows if int(row["step"]) <= step and step > 0)
        except OSError as error:
            raise ValueError(f"The log {str(self.path)!r} cannot be written: {error}. Give a path that can.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{str(self.path)!r} is there, and no log that {type(self).__name__} wrote. Give another path."
            ) from error

    def _replace(self, rows: Iterable[Row]) -> None:
        with replace_atomically(self.path) as new:
            new.write_text(self._text(rows), encoding="utf-8", newline="")


@final
class CSVLog(_Log):
    """Writes a table: a row after each epoch, and each `every` steps.

    The columns are `moment` (`step`, `epoch`, or `end` for what an epoch that was not finished came to), `epoch`, `step`,
    `seconds` since this `fit` began, `rows` it took, `stalled`, and the metrics. A column that comes later, as with the first
    validation, is empty in the rows before. A resumed run goes on in the file, without the rows beyond the step that it
    resumes from; a run from the start leaves the log of another beside it, as `<path>.1`. Process 0 writes.

    Args:
        path: Where to. Directories are made.
        every: Each how many steps there is a row besides; each of them reads the metrics from the devices.
        also: What to write besides, functions from an event to names and numbers, as `jdist.callbacks.learning_rate()`.

    Raises:
        ValueError: Said before the first step: it cannot be written there, or what is there is no such log.

    Example:
        >>> log = jdist.callbacks.CSVLog("run/log.csv", every=100)
    """

    _columns: list[str]

    def _rows(self, text: str) -> list[Row]:
        table = csv.DictReader(io.StringIO(_whole_lines(text), newline=""))
        self._columns = list(table.fieldnames or FACTS)
        if not set(FACTS) <= set(self._columns):
            raise ValueError("The columns are others.")
        return [row for row in table if int(row["step"]) >= 0]

    def _text(self, rows: Iterable[Row]) -> str:
        file = io.StringIO(newline="")
        table = csv.DictWriter(file, self._columns, restval="", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        return file.getvalue()

    def _line(self, row: Row) -> str:
        new = [name for name in row if name not in self._columns]
        if new:
            rows = self._rows(self.path.read_text(encoding="utf-8"))
            self._columns += new
            self._replace(rows)
        return self._text([row]).split("\n", 1)[1]


@final
class JSONLog(_Log):
    """Writes a JSON object a line: one after each epoch, and each `every` steps.

    As `CSVLog` otherwise. What is no number is a string: `"nan"`, `"inf"`, `"-inf"`, which `float` takes back.

    Args:
        path: Where to. Directories are made.
        every: Each how many steps there is a line besides.
        also: What to write besides, functions from an event to names and numbers.

    Raises:
        ValueError: Said before the first step: it cannot be written there, or what is there is no such log.

    Example:
        >>> log = jdist.callbacks.JSONLog("run/log.jsonl", also=[jdist.callbacks.learning_rate()])
    """

    def _rows(self, text: str) -> list[Row]:
        rows = [json.loads(line) for line in _whole_lines(text).splitlines()]
        if not all(isinstance(row, dict) and set(FACTS) <= set(row) for row in rows):
            raise ValueError("The lines are others.")
        return rows

    def _text(self, rows: Iterable[Row]) -> str:
        return "".join(map(self._line, rows))

    def _line(self, row: Row) -> str:
        return json.dumps({name: _spelled(value) for name, value in row.items()}, allow_nan=False) + "\n"


def _whole_lines(text: str) -> str:
    """`text` without a last line that was cut off."""
    return text[: text.rfind("\n") + 1]


def _plain(value: Any) -> Any:
    """A number, or an array of numbers, as Python has it."""
    return value if isinstance(value, (str, int, float)) else np.asarray(value).tolist()


def _spelled(value: Any) -> Any:
    if isinstance(value, list):
        return [_spelled(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _free(path: pathlib.Path) -> pathlib.Path:
    """The first of `path.1`, `path.2`, ... that is not there."""
    number = 1
    while (beside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return beside

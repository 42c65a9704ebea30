"""`CheckReport`: the verdicts on functions that a program maps over devices, as data, text, HTML and JSON."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jdist._src.core.rendering import facts_table, html_of, rows_table, text_of
from jdist._src.strategies.description import grouped, listed
from jdist._src.strategies.mesh_drawing import WIDTH

_MAX_ROWS = 20  # of the table of a function
_MAX_REASONS = 5  # that are explained below the table
_HEAD = ("result", "must be", "replicated", "equals one device")


@dataclasses.dataclass(frozen=True)
class CheckVerdict:
    """A verdict with its reasons.

    Attributes:
        text: For replication `"proved"`, `"checked by JAX"`, `"not proved"`, `"not claimed"` or `"unknown"`; for equivalence
            `"equivalent"`, `"not equivalent"` or `"unknown"`.
        reasons: Lines that explain it.
        fix: The change that removes the finding, or an empty string.
    """

    text: str
    reasons: tuple[str, ...] = ()
    fix: str = ""


@dataclasses.dataclass(frozen=True)
class ResultCheck:
    """The verdicts on one leaf of the results of a mapped function.

    Attributes:
        path: The name of the leaf: `output[0]['w']`.
        placement: How the devices' results form one value: `"replicated"`, `"split over data"`, or `"one per device"`.
        replication: Whether it is the same on the devices where it must be.
        equivalence: Whether the devices together compute the same value as one device with the global arrays.
    """

    path: str
    placement: str
    replication: CheckVerdict
    equivalence: CheckVerdict

    @property
    def is_finding(self) -> bool:
        """Whether it must be replicated and is not proved to be, or is not equivalent."""
        return self.replication.text == "not proved" or self.equivalence.text == "not equivalent"


@dataclasses.dataclass(frozen=True)
class FunctionCheck:
    """The verdicts on a mapped function.

    Attributes:
        kind: `"pmap"`, `"shard_map"`, or `"jit"` for a function in the global view.
        name: The name of the function.
        definition: Its file and line.
        line: The user's line that calls it.
        axes: The mesh axes that it is mapped over, with their sizes.
        results: The leaves of its results.
        note: Why there are no verdicts, or why there is no verdict on equivalence; else empty.
        problem: A finding about the function, not about a result: devices that would wait forever for the others; else empty.
    """

    kind: str
    name: str
    definition: str
    line: str
    axes: Mapping[str, int]
    results: tuple[ResultCheck, ...]
    note: str = ""
    problem: str = ""

    @property
    def num_findings(self) -> int:
        """The number of findings."""
        return sum(result.is_finding for result in self.results) + bool(self.problem)


@dataclasses.dataclass(frozen=True, repr=False)
class CheckReport:
    """The functions that a program maps over devices, with verdicts: the result of `jdist.check`.

    Text when printed, HTML in a notebook.

    Attributes:
        functions: The mapped functions.
    """

    functions: tuple[FunctionCheck, ...]

    @property
    def num_findings(self) -> int:
        """The number of findings in all functions."""
        return sum(function.num_findings for function in self.functions)

    def __bool__(self) -> bool:
        """Raises TypeError: a report is not a verdict."""
        findings = _count(self.num_findings, "finding")
        raise TypeError(f"A report has no truth value: it has {findings}. Write `assert not report.num_findings`.")

    def to_json(self) -> str:
        """Returns the report as JSON: `{"findings": 1, "functions": [...]}`."""
        functions = [{**dataclasses.asdict(function), "findings": function.num_findings} for function in self.functions]
        return json.dumps({"findings": self.num_findings, "functions": functions}, indent=2)

    def __repr__(self) -> str:
        return f"CheckReport({self._summary})"

    def __str__(self) -> str:
        return text_of(self, WIDTH)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text  # a plain string would be read as markup: paths contain brackets

        parts = [part for function in self.functions for part in (*_parts(function), Text())]
        return Group(*parts, Text(self._summary, style="bold"))

    def _repr_html_(self) -> str:
        return html_of(self)

    @property
    def _summary(self) -> str:
        if not self.functions:
            return "No function is mapped over devices by jax.pmap, jax.shard_map or shardings of jax.jit."
        findings, functions = _count(self.num_findings, "finding"), _count(len(self.functions), "function")
        unknown = sum(
            "unknown" in (result.replication.text, result.equivalence.text)
            for function in self.functions
            for result in function.results
        )
        return f"{findings} in {functions}" + (f", {_count(unknown, 'result')} with an unknown verdict" * (unknown > 0))


def _parts(function: FunctionCheck) -> list[Any]:
    from rich.text import Text

    parts: list[Any] = [Text(_title(function), style="bold")]
    if function.note:
        parts.append(Text(function.note))
    if function.problem:
        parts.append(facts_table("", {"finding": function.problem}))
    if function.results:
        rows = [_row(path, leaves) for path, leaves in grouped(function.results, _MAX_ROWS, separator="[")]
        parts.append(rows_table(_HEAD, rows))
    for title, verdicts in (
        ("Not proved to be replicated", [(one.path, one.replication) for one in function.results]),
        ("Not equivalent to one device", [(one.path, one.equivalence) for one in function.results]),
    ):
        paths: dict[CheckVerdict, list[str]] = {}
        for path, verdict in verdicts:
            if verdict.text in ("not proved", "not equivalent") or verdict.text == "unknown" and verdict.reasons:
                paths.setdefault(verdict, []).append(path)
        for verdict, names in itertools.islice(paths.items(), _MAX_REASONS):
            facts = {"why": "\n-> ".join(verdict.reasons), "fix": verdict.fix}
            name = "Unknown" if verdict.text == "unknown" else title
            parts += [Text(), facts_table(f"{name}: {listed(names, 4)}", {k: v for k, v in facts.items() if v})]
        if more := list(itertools.chain(*list(paths.values())[_MAX_REASONS:])):
            parts += [Text(), Text(f"The same verdict for other reasons: {listed(more, 10)}.")]
    return parts


def _title(function: FunctionCheck) -> str:
    axes = ", ".join(f"{axis}={size}" for axis, size in function.axes.items())
    places = [function.definition] + ([f"called at {function.line}"] if function.line else [])
    kind = f"{function.kind} over {axes}" if axes else function.kind
    return f"{function.name}, {kind}: {', '.join(place for place in places if place)}"


def _row(path: str, leaves: Sequence[ResultCheck]) -> tuple[str, ...]:
    columns = (
        [leaf.placement for leaf in leaves],
        [leaf.replication.text for leaf in leaves],
        [leaf.equivalence.text for leaf in leaves],
    )
    name = path if len(leaves) == 1 else f"{path} ({len(leaves):,} leaves)"
    return name, *(_counted(texts) for texts in columns)


def _counted(texts: Sequence[str]) -> str:
    different = dict.fromkeys(texts)
    return texts[0] if len(different) == 1 else ", ".join(f"{texts.count(text)} {text}" for text in different)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"

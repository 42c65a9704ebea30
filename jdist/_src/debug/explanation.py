"""`Explanation`: which results of a step are replicated, and why, as data, text, HTML and a picture."""

import dataclasses
import itertools
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from jdist._src.core.rendering import facts_table, html_of, rows_table, text_of
from jdist._src.debug.flow_drawing import Flow, draw_flow
from jdist._src.jaxpr.equivalence_verdict import Verdict
from jdist._src.strategies.description import grouped, listed
from jdist._src.strategies.mesh_drawing import WIDTH

_MAX_ROWS = 40  # of the table
_MAX_CAUSES = 5  # that are explained below the table
_HEAD = ("leaf", "verdict", "why")
_EQUIVALENCE = "on one device"  # the head of a further column, for several replicas


@dataclasses.dataclass(frozen=True)
class LeafExplanation:
    """The verdict of the replication analysis on a leaf of the new state or of the outputs, with its reasons.

    Attributes:
        path: The name of the leaf in messages: `state['params']['w']`, `output['loss']`.
        replicated: Whether it is proved to be the same on every replica.
        reasons: If it is replicated, the collectives with their lines or the inputs that it is computed from. If it may vary,
            the chain of operations with their lines, from the input that varies to the leaf.
        fix: The change that makes it replicated, if it must be replicated and is not proved to be; else empty.
        equivalence: Whether one device computes the same leaf from the global batch; None for one replica.
    """

    path: str
    replicated: bool
    reasons: tuple[str, ...]
    fix: str = ""
    equivalence: Verdict | None = None

    @property
    def verdict(self) -> str:
        """`"replicated"`, `"one per replica"`, or `"not proved"` if the step refuses it."""
        return "not proved" if self.fix else "replicated" if self.replicated else "one per replica"


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """The replication proof of a step, leaf by leaf: the result of `jdist.debug.explain`.

    Text when printed, a table and a picture in a notebook.

    Attributes:
        step: The name of the step.
        replicas: The number of replicas.
        leaves: The leaves of the new state and of the outputs, in order.
        flow: The inputs, collectives and results of the picture.
    """

    step: str
    replicas: int
    leaves: tuple[LeafExplanation, ...]
    flow: Flow = dataclasses.field(compare=False)

    @property
    def problems(self) -> tuple[LeafExplanation, ...]:
        """The leaves that must be replicated, and are not proved to be: the step raises `NotMirroredError`."""
        return tuple(leaf for leaf in self.leaves if leaf.fix)

    @property
    def svg(self) -> str:
        """The picture: inputs, collectives and results, from left to right, as an SVG document without references."""
        return draw_flow(self._title, self.flow)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture to an SVG file.

        Raises:
            ValueError: `path` does not end with `.svg`.
        """
        if not os.fspath(path).endswith(".svg"):
            raise ValueError(
                f"The picture is an SVG file. Write `save('{pathlib.Path(path).stem}.svg')`, got {path!r}."
            )
        pathlib.Path(path).write_text(self.svg, encoding="utf-8")

    def __repr__(self) -> str:
        return f"Explanation({self._title})"

    def __str__(self) -> str:
        return text_of(self, WIDTH)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text  # a plain string would be read as markup: paths contain brackets

        is_compared = any(leaf.equivalence for leaf in self.leaves)
        head = (*_HEAD[:2], _EQUIVALENCE, _HEAD[2]) if is_compared else _HEAD
        rows = [_row(path, leaves, is_compared) for path, leaves in grouped(self.leaves, _MAX_ROWS, separator="[")]
        parts: list[Any] = [Text(self._title, style="bold"), rows_table(head, rows)]
        paths_by_cause: dict[tuple[tuple[str, ...], str], list[str]] = {}
        for leaf in self.problems:
            paths_by_cause.setdefault((leaf.reasons, leaf.fix), []).append(leaf.path)
        for (reasons, fix), paths in itertools.islice(paths_by_cause.items(), _MAX_CAUSES):
            title = f"Not proved to be replicated: {listed(paths, 4)}"
            parts += [Text(), facts_table(title, {"why": "\n-> ".join(reasons), "fix": fix})]
        if more := list(itertools.chain(*list(paths_by_cause.values())[_MAX_CAUSES:])):
            parts += [Text(), Text(f"Not proved either: {listed(more, 10)}.")]
        wrong: dict[Verdict, list[str]] = {}
        for leaf in self.leaves:
            if leaf.equivalence and leaf.equivalence.name == "not equivalent":
                wrong.setdefault(leaf.equivalence, []).append(leaf.path)
        for verdict, paths in itertools.islice(wrong.items(), _MAX_CAUSES):
            title = f"Not what one device computes: {listed(paths, 4)}"
            facts = {"why": "\n-> ".join((verdict.reason, *verdict.lines)), "fix": verdict.fix}
            parts += [Text(), facts_table(title, {name: text for name, text in facts.items() if text})]
        return Group(*parts)

    def _repr_html_(self) -> str:
        return f"{self.svg}\n{html_of(self)}"

    @property
    def _title(self) -> str:
        count = sum(leaf.replicated for leaf in self.leaves)
        problems = f", {len(self.problems)} not proved" if self.problems else ""
        replicas = f"{self.replicas:,} {'replica' if self.replicas == 1 else 'replicas'}"
        return f"{self.step}, {replicas}: {count} of {len(self.leaves)} results are replicated{problems}"


def _row(path: str, leaves: Sequence[LeafExplanation], is_compared: bool) -> tuple[str, ...]:
    verdicts = [leaf.verdict for leaf in leaves]
    compared = [leaf.equivalence.name if leaf.equivalence else "" for leaf in leaves]
    reasons = dict.fromkeys(" -> ".join(leaf.reasons) for leaf in leaves)
    why = next(iter(reasons)) if len(leaves) == 1 else listed(list(reasons), 2, "; ")
    name = path if len(leaves) == 1 else f"{path} ({len(leaves):,} leaves)"
    return (name, _counts(verdicts), *([_counts(compared)] if is_compared else []), why)


def _counts(words: Sequence[str]) -> str:
    if len(words) == 1:
        return words[0]
    return ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))

"""The record that `Trainer.fit` returns, and its display as text and HTML.

No device is read to show it: the donated arrays of a state still have shapes.
"""

import copy
import dataclasses
import math
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.core.migration_hints import explains_attributes
from jdist._src.core.rendering import facts_html, printable
from jdist._src.core.tree import PyTree, is_named_tuple
from jdist._src.execution.traced import Proof
from jdist._src.strategies.description import Description
from jdist._src.training.history import History, format_value, row_name
from jdist._src.training.history_columns import NON_METRIC_COLUMNS
from jdist._src.training.report.page import write_report
from jdist._src.training.state import TrainState, params_of
from jdist._src.training.summary import Summary, summary
from jdist._src.values.array_checks import is_device_array
from jdist._src.values.array_copies import copy_arrays

_DONATED = "donated to a later step"
_LOST = "lost: an error ended the step that it was donated to"


@explains_attributes("fit")
@dataclasses.dataclass(frozen=True, repr=False)
class Fit:
    """The result of training. A short text when printed, tables in a notebook.

    It can be pickled: the state is loaded as numpy arrays, which `strategy.put` places, and `description` as None.

    Attributes:
        state: The training state after the last step, of the class that `fit(state=)` received. None, in the record of a
            `FitError`, if an error in a step lost the state.
        history: One row per epoch or validation, and the loss of every step.
        steps: The number of steps taken, including those before a resume. If a callback ended training with the state of an
            earlier step, such as the best one, `state.step` is the number of that step.
        stop_reason: The reason why training stopped, a sentence.
        description: The devices, and the placement of the state.
        proof: The result of the replication proof of the step; None if no step was taken.
        step_flops: The floating point operations of the matrix products and convolutions of a step, over all replicas, in the
            forward and the backward pass: the mean of the steps of this `fit`. None if they are unknown, or 0.

    Example:
        >>> trainer = jdist.Trainer(
        ...     (lambda key, x: jnp.zeros(3), lambda w, x: x @ w),
        ...     optax.sgd(0.1),
        ...     optax.squared_error,
        ...     strategy=jdist.OneDeviceStrategy("cpu:0"),
        ... )
        >>> x, y = np.ones((10, 3), np.float32), np.ones(10, np.float32)
        >>> fit = trainer.fit((x, y), batch_size=5, progress="off")
        >>> fit.steps, fit.stop_reason, fit.state.params.shape
        (2, 'All requested steps were taken.', (3,))
    """

    state: TrainState
    history: History
    steps: int
    stop_reason: str
    description: Description | None = None
    proof: Proof | None = None
    step_flops: float | None = None

    def __repr__(self) -> str:
        rows = len(self.history)
        metrics = [f"{name} {value}" for name, value in self._last_metrics().items()]
        parts = [
            f"{self.steps:,} steps",
            f"{rows:,} {row_name(self.history)}{'s' * (rows != 1)}",
            *metrics,
            repr(self.stop_reason),
        ]
        return f"Fit({', '.join(parts)}; state: {describe_state(self.state)})"

    def _repr_html_(self) -> str:
        facts = {"steps": f"{self.steps:,}", **self._last_metrics(), "stop reason": self.stop_reason}
        proof = {} if self.proof is None else {"proof": str(self.proof)}
        rows = {**facts, "state": describe_state(self.state), **proof}
        return facts_html("Fit", rows) + self.history._repr_html_()

    def _last_metrics(self) -> dict[str, str]:
        row = self.history.rows[-1] if self.history.rows else {}
        return {name: format_value(value) for name, value in row.items() if name not in NON_METRIC_COLUMNS}

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_not_donated("pickled")
        # Without the description, which contains devices of this process.
        fields = self.history, self.steps, self.stop_reason, None, self.proof, self.step_flops
        return Fit, (jax.tree.map(_on_host, self.state), *fields)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Fit":
        self._check_not_donated("copied")
        copied = lambda leaf: copy_arrays([leaf])[0] if is_device_array(leaf) else copy.deepcopy(leaf)
        history = copy.deepcopy(self.history, memo)
        return dataclasses.replace(self, state=jax.tree.map(copied, self.state), history=history)

    def summary(self) -> Summary | None:
        """Returns the layers of the model in the state, see `jdist.summary`; None if the state has no `params`."""
        return summary(self.state) if jax.tree.leaves(params_of(self.state)) else None

    def _check_not_donated(self, participle: str) -> None:
        if is_donated(self.state):
            raise ValueError(
                f"This `Fit` cannot be {participle}: its state was donated to a later step. Use the record that the later "
                "`fit` returned, or remove the state: `dataclasses.replace(fit, state=None)`."
            )

    def report(self, path: str | os.PathLike[str], *, title: str = "Training") -> pathlib.Path:
        """Writes an HTML page: results, charts, epochs, devices, proof, environment. The page is self-contained.

        Args:
            path: The file to write. With several processes, process 0 writes it.
            title: The heading of the page.

        Returns:
            The path.

        Raises:
            ModuleNotFoundError: matplotlib is missing; the message contains the command that installs it.
            OSError: The file cannot be written.

        Example:
            >>> import tempfile
            >>> history = History([{"epoch": 0, "step": 9, "loss": 0.5}], {1: 0.9, 9: 0.4})
            >>> fit = Fit(None, history, 9, "All requested steps were taken.")
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     fit.report(folder + "/run.html").name
            'run.html'
        """
        return write_report(self, path, title=title)


def describe_state(state: PyTree) -> str:
    """Returns the class and the size of a training state, and whether it was donated.

    Example:
        >>> describe_state({"w": np.zeros((2, 3), np.float32)})
        'dict, 6 numbers'
    """
    if state is None:
        return _LOST
    name = type(state).__name__
    if is_donated(state):
        return f"{name}, {_DONATED}"
    return f"{name}, {sum(math.prod(np.shape(leaf)) for leaf in jax.tree.leaves(state)):,} numbers"


def is_donated(state: PyTree) -> bool:
    """Returns whether the buffer of a leaf was donated to a step or deleted."""
    return any(is_device_array(leaf) and leaf.is_deleted() for leaf in jax.tree.leaves(state))


def name_of(value: Any) -> str:
    """Returns the name of a function, or of the class of an object.

    Example:
        >>> name_of(len), name_of(3)
        ('len', 'int')
    """
    if isinstance(value, (tuple, list)) and not is_named_tuple(value):
        return f"({', '.join(map(name_of, value))})"
    return printable(getattr(value, "__name__", None) or type(value).__name__, 60)


def _on_host(leaf: Any) -> Any:
    if not is_device_array(leaf):
        return leaf
    if not leaf.is_fully_addressable and not leaf.is_fully_replicated:
        raise ValueError(
            f"This `Fit` cannot be pickled: an array of its state ({leaf.dtype}, shape {list(leaf.shape)}) has shards on other "
            "processes. Save the state with a `jdist.Checkpointer`."
        )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        key_data = jnp.asarray(np.asarray(jax.random.key_data(leaf)))
        return jax.random.wrap_key_data(key_data, impl=jax.random.key_impl(leaf))
    return np.asarray(leaf)

"""`PreemptionCheckpointHandler`: a checkpoint when the platform announces that it will end the job."""

import functools
import logging
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from jdist._src.checkpoint.checkpointer import Checkpointer
from jdist._src.core.arguments import as_int
from jdist._src.core.exit_statuses import PREEMPTED
from jdist._src.core.tree import one_line
from jdist._src.faults.preemption_notice import PreemptionNotice

StateT = TypeVar("StateT")
InputsT = ParamSpec("InputsT")
OutputsT = TypeVar("OutputsT")
_LOG = logging.getLogger("jdist")


class PreemptionCheckpointHandler:
    """Runs the steps of a loop; after SIGTERM it saves a checkpoint and ends the program with exit status 42.

    SIGTERM on any process is a notice for all: they agree on a step, save a checkpoint of it together, wait until it is
    written, and raise `SystemExit(42)`. A program that starts again restores the checkpoint and continues with the same bits.
    `jdist.callbacks.Preemption` does the same in `Trainer.fit`.

    In a single process, the handler of SIGTERM is installed when the object is created, which must be in the main thread, and
    `close` restores the previous one, which is not called in between. Processes that have joined use JAX's preemption service,
    which has handled SIGTERM since they joined: a handler that the program installs later disables it.

    Use it in a `with` statement, or call `close`. Mutable: it counts the calls.

    Args:
        checkpointer: Saves the checkpoint. The program may also save others with it, by the number of `total_run_calls`.
        data: The position in the data that is saved: an iterator with `get_state`, such as one over batches, or a function
            without arguments that returns JSON.
        total_run_calls: The number of steps that led to the first state; by default the step of the newest checkpoint, or 0.
        watcher: A function without arguments that returns whether the platform has announced the end of this machine, for
            platforms that do so in another way than by SIGTERM. It is called every 5 seconds, in a thread.
        exit_fn: Called without arguments after the checkpoint is written, instead of raising `SystemExit(42)`. If it returns,
            `run` returns too. Processes that have joined receive one notice only.

    Raises:
        TypeError: `checkpointer` is not a `Checkpointer`, `data` has no `get_state` and is not a function, or `watcher` or
            `exit_fn` is not a function.
        ValueError: `total_run_calls` is negative.
        RuntimeError: JAX's preemption service is disabled.

    Example:
        >>> import tempfile
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> step = strategy.step(lambda w, x: (w + jdist.all_reduce("mean", x.mean()), None))
        >>> folder = tempfile.TemporaryDirectory()
        >>> batches = iter(
        ...     strategy.distribute_dataset(np.arange(6, dtype=np.float32), batch_size=2)
        ... )
        >>> with jdist.Checkpointer(folder.name) as checkpointer:
        ...     state = strategy.put(0.0)
        ...     if checkpointer.latest is not None:
        ...         restored = checkpointer.restore(strategy)
        ...         state = restored.state
        ...         batches.set_state(restored.data_position)
        ...     with PreemptionCheckpointHandler(checkpointer, data=batches) as handler:
        ...         for batch in batches:
        ...             state, _ = handler.run(step, state, batch)
        >>> float(state), handler.total_run_calls
        (7.5, 3)
        >>> folder.cleanup()
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        *,
        data: Any = None,
        total_run_calls: int | None = None,
        watcher: Callable[[], Any] | None = None,
        exit_fn: Callable[[], Any] | None = None,
    ):
        if not isinstance(checkpointer, Checkpointer):
            raise TypeError(
                f"`PreemptionCheckpointHandler` needs a `jdist.Checkpointer`, got {one_line(checkpointer)}. Write "
                "`PreemptionCheckpointHandler(jdist.Checkpointer(path))`."
            )
        if exit_fn is not None and not callable(exit_fn):
            raise TypeError(f"`exit_fn` must be a function without arguments, got {one_line(exit_fn)}.")
        self._checkpointer, self._exit_fn = checkpointer, exit_fn
        self._read_position = _position_function(data)
        if total_run_calls is None:
            total_run_calls = checkpointer.latest or 0
        self._total_run_calls = as_int("`total_run_calls`", total_run_calls, 0)
        self._notice = PreemptionNotice(watcher)
        self._notice.start()

    @property
    def total_run_calls(self) -> int:
        """The number of calls of `run`, including those before the program was started again."""
        return self._total_run_calls

    def run(
        self,
        step: Callable[Concatenate[StateT, InputsT], tuple[StateT, OutputsT]],
        state: StateT,
        /,
        *inputs: InputsT.args,
        **named: InputsT.kwargs,
    ) -> tuple[StateT, OutputsT]:
        """Returns `step(state, *inputs)`: the new state and the outputs. All processes call it equally often.

        Args:
            step: A step, or another function that returns a pair.
            state: The training state.
            inputs: The other arguments.
            named: The arguments by name, for a step of `jdist.step`.

        Raises:
            SystemExit: After a notice, when the checkpoint of the new state is written. The exit status is 42.
            CheckpointError: The checkpoint could not be written.
        """
        state, outputs = step(state, *inputs, **named)
        self._total_run_calls += 1
        if self._notice.is_agreed():
            checkpointer, position = self._checkpointer, self._read_position()
            checkpointer.save(self._total_run_calls, state, position, metrics={}, now=True, wait=True)
            self._notice.reset()
            (self._exit_fn or functools.partial(exit_preempted, checkpointer))()
        return state, outputs

    def close(self) -> None:
        """Restores the handler of SIGTERM that was installed before."""
        self._notice.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def exit_preempted(checkpointer: Checkpointer) -> None:
    """Raises SystemExit with the status of a preempted program, whose last checkpoint is written."""
    latest = checkpointer.latest
    newest = "no step was taken" if latest is None else f"the checkpoint of step {latest} is in {checkpointer.folder}"
    _LOG.warning("Preempted: %s. The program ends with exit status %d.", newest, PREEMPTED)
    sys.exit(PREEMPTED)


def _position_function(data: Any) -> Callable[[], Any]:
    """Returns a function that returns the position of `data`, the argument of the handler."""
    if data is None:
        return lambda: None
    if callable(getattr(data, "get_state", None)):
        return lambda: data.get_state()
    if callable(data):
        return data
    raise TypeError(
        f"`data` must be an iterator with `get_state`, such as `iter(strategy.distribute_dataset(...))`, or a function that "
        f"returns the position, got {type(data).__name__}."
    )

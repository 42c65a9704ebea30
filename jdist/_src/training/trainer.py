"""`Trainer`: fit, evaluate and predict, under any strategy, with the same results."""

import dataclasses
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jdist._src.checkpoint.checkpointer import Checkpointer
from jdist._src.core.arguments import as_int
from jdist._src.core.tree import PyTree
from jdist._src.data.dataset import DistributedDataset
from jdist._src.execution.replicate import Proof
from jdist._src.replica.precision import Precision
from jdist._src.strategies.automatic import auto_strategy
from jdist._src.strategies.base import Strategy
from jdist._src.strategies.current import get_strategy, has_strategy
from jdist._src.training.callback_state import memories_of, restore_memories
from jdist._src.training.datasets import check_end, distributed, one_pass
from jdist._src.training.events import Callback, Fit
from jdist._src.training.loop import Loop, Work, no_step_left
from jdist._src.training.loss_adapters import adapt_loss
from jdist._src.training.metric_adapters import adapt_metrics, epoch_names
from jdist._src.training.model_adapters import adapt_model
from jdist._src.training.resume import (
    StartPoint,
    callbacks_in_order,
    last_checkpoint,
    require,
    start_point,
    total_steps,
)
from jdist._src.training.state import TrainState, model_variables
from jdist._src.training.step_inputs import DrawnBatch, Turn, draws, turns
from jdist._src.training.steps import StepFunctions, StepOutcome, TrainCarry, explained, split_element, totals
from jdist._src.training.summary import name_of, table
from jdist._src.values.base import is_distributed


class Trainer:
    """A model, how it is trained, and where: what `fit`, `evaluate` and `predict` need to know.

    The data give `(inputs, targets)`, or `(inputs, targets, weights)` with weights `[batch]` of the examples, or anything
    else, which is both inputs and targets. The model is told, by name, those of `train`, `training`, `deterministic`,
    `weights` (of the examples, 0 for rows that only fill up) and (of functions) `key` that it takes.

    Losses and metrics are those of all examples, wherever they are computed; padding counts for nothing. An optimizer that
    says nothing to the other replicas is given gradients averaged over them; one with a policy of `jdist.sync` does it
    itself. Numbers that the model keeps besides its parameters, such as batch statistics, are averaged over the replicas.

    Immutable, but for the compiled functions that it remembers.

    Args:
        model: A module of flax (linen or nnx), a Keras model on JAX, or functions `init(key, inputs)`, which gives
            parameters, and `apply(params, inputs)`, which gives outputs.
        optimizer: A transformation of optax. Not needed to evaluate and to predict.
        loss: `loss(outputs, targets)`, outputs first, returns losses `[batch, ...]`, one or several per example. A Keras loss,
            or a function with parameters called `y_true, y_pred`, is called with the targets first. Not needed to predict.
        metrics: By name: a metric of `jdist.metrics`, which takes outputs and targets; a pair of a metric and a function from
            outputs and targets to a tuple of what it takes; or a function from them to values `[batch, ...]` to be averaged.
        strategy: Where it runs; by default the strategy in force, else `jdist.auto_strategy()`.
        precision: The dtypes to compute in.
        seed: Of the parameters, the order of the data, and what is drawn while training.
        non_finite: What becomes of a step whose loss or update is inf or nan. `"stop"`: training ends with the state before it.
            `"skip"`: it changes nothing, and training goes on. `"keep"`: it is taken as any other.

    Raises:
        TypeError: There is no such model, optimizer, loss or metric.

    Example:
        >>> import optax
        >>> x = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
        >>> trainer = jdist.Trainer(
        ...     (lambda key, x: jax.numpy.zeros(x.shape[-1]), lambda w, x: x @ w),
        ...     optax.sgd(0.1),
        ...     optax.squared_error,
        ...     strategy=jdist.MirroredStrategy(["cpu:0", "cpu:1"]),
        ... )
        >>> fit = trainer.fit((x, x @ np.float32([1, -2, 3])), batch_size=16, epochs=10, progress="off")
        >>> fit.state.params.round(1).tolist(), fit.steps, fit.stop
        ([1.0, -2.0, 3.0], 70, 'Every step was taken that was asked for.')
        >>> trainer.evaluate(fit.state, (x, x @ np.float32([1, -2, 3])), batch_size=16)["examples"]
        100
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        loss: Callable[[Any, Any], Any] | None = None,
        *,
        metrics: Mapping[str, Any] | None = None,
        strategy: Strategy | None = None,
        precision: Precision | None = None,
        seed: int = 0,
        non_finite: Literal["stop", "skip", "keep"] = "stop",
    ):
        if not isinstance(strategy, Strategy | None):
            raise TypeError(f"`strategy` is a strategy, such as `jdist.MirroredStrategy()`; got {strategy!r}.")
        self.strategy = strategy or (get_strategy() if has_strategy() else auto_strategy())
        self._seed = as_int("`seed`", seed, 0)
        self._names = {"model": name_of(model), "loss": name_of(loss)}
        self._recipe = StepFunctions(
            adapt_model(model),
            adapt_loss(loss),
            adapt_metrics(metrics or {}),
            precision,
            optimizer,
            non_finite=non_finite,
        )
        self._programs: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"Trainer({', '.join(f'{name}={fact}' for name, fact in self._facts().items())})"

    def _repr_html_(self) -> str:
        return table("Trainer", self._facts())

    def _facts(self) -> dict[str, str]:
        missing = {} if self._recipe.optimizer is not None else {"optimizer": "None"}
        metrics = ", ".join(self._recipe.measures) or "none"
        return {**self._names, "metrics": metrics, **missing, "strategy": repr(self.strategy), "seed": str(self._seed)}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Trainer":
        return self  # it is immutable, and what it has compiled would be compiled again

    def __reduce__(self) -> Any:
        raise TypeError(
            "A Trainer cannot be pickled: it has the functions of the model and of the optimizer, and programs compiled for "
            "devices. Make it anew in the other process, by a function such as `def make(): return jdist.Trainer(...)`. To "
            "move the trained state, save it with a `jdist.Checkpointer`, or pickle the `Fit`."
        )

    def init(self, inputs: PyTree) -> TrainState:
        """The state before the first step, made on the devices.

        Args:
            inputs: Like those of a batch: arrays, or their shapes, `[batch, ...]`. Of the batch only its kind matters.

        Example:
            >>> import optax
            >>> trainer = jdist.Trainer((lambda key, x: jax.numpy.zeros(x.shape[-1]), lambda w, x: x @ w), optax.adam(1e-3))
            >>> trainer.init(np.zeros((1, 3), np.float32)).params.shape
            (3,)
        """
        require("make a state", optimizer=self._recipe.optimizer)
        return self.strategy.init(self._maker(inputs), jax.random.key(self._seed))

    def fit(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        shuffle: bool | None = None,
        state: PyTree = None,
        validation_data: Any = None,
        callbacks: Sequence[Callback] = (),
        steps_per_call: int = 1,
        micro_batches: int = 1,
        progress: str = "auto",
        resume: "Checkpointer | str | os.PathLike[str] | None" = None,
    ) -> Fit:
        """Trains, and gives the state with a record of how it went.

        Ctrl-C ends it after the step that runs. An error of the data or of a callback comes as a `jdist.FitError`, which has
        the record with the state by then.

        Args:
            data: What `strategy.distribute_dataset` gives, or takes.
            batch_size: Examples in a batch of all replicas together, where `data` is what it takes. The last batch of an epoch
                is filled up, with rows that count for nothing.
            epochs: How often to go through the data; by default once, or with `steps` as often as that needs.
            steps: After how many steps to end; those that the state has gone through before count too.
            shuffle: As in `distribute_dataset`; by default where the examples are found by their numbers, as in arrays.
            state: What to begin with: a `TrainState`, or another dataclass with `step`, `params` and `opt_state` on the
                devices of the strategy. Training takes its memory over. By default it is made of `seed`.
            validation_data: What to evaluate on at the end of each epoch, like `data`.
            callbacks: Functions of events, see `jdist.callbacks`.
            steps_per_call: How many steps to run in one program, with one dispatch. Callbacks are told of all of them at once.
                Steps that are left at the end of an epoch run one by one, which takes a second program.
            micro_batches: In how many parts to take a batch, for activations to need less memory; the results are the same.
            progress: Where to show how far it is: "live" in a terminal, "notebook", in "lines", "off", or "auto".
            resume: A `Checkpointer`, or the path of its checkpoints. If there is one, training goes on from the newest, to the
                same bits as without the interruption.

        Raises:
            ValueError: There are no data, or an option does not fit; a checkpoint is of another model; or, while the step is
                traced, the loss or a metric is not one value an example.
            TypeError: There is no optimizer or loss, `state` is no state, or a number is no whole one.
            FitError: An error ended it after the first step.
        """
        require("fit", optimizer=self._recipe.optimizer, loss=self._recipe.loss)
        steps = None if steps is None else as_int("`steps`", steps, 0)
        dataset = distributed(self.strategy, "data", data, batch_size, shuffle, self._seed)
        if steps is None:
            check_end(dataset, epochs)
        if dataset is not data or epochs is not None or steps is not None:
            # Without an end there is one epoch for ever, and the number of steps ends it.
            repeats = 1 if epochs is None and steps is None else None if dataset.is_endless else epochs
            dataset = dataset.repeated(repeats)
        validate = None if validation_data is None else self._validation(validation_data, batch_size)
        callbacks = callbacks_in_order(callbacks, progress)
        step = self._training(steps_per_call, micro_batches)
        begin, given = self._begin(dataset, state, resume)
        memories = memories_of(callbacks)
        if "callbacks" in begin.kept:
            restore_memories(memories, begin.kept["callbacks"])
        work = Work(
            strategy=self.strategy,
            step=step,
            read=self._read,
            nothing_seen=lambda: self.strategy.init(self._recipe.nothing_seen),
            validate=validate,
            callbacks=callbacks,
            memories=memories,
            metric_names=epoch_names(self._recipe.measures, validate is not None),
            last_checkpoint=functools.partial(last_checkpoint, callbacks, resume),
            proof=lambda: self._proof(micro_batches, steps_per_call),
            total_steps=total_steps(dataset, begin, steps),
            asked_steps=steps,
            stops_at_failure=self._recipe.non_finite == "stop",
        )
        loop = Loop(work, begin, begin.position or iter(dataset).get_state())
        left = None if steps is None else max(0, steps - loop.step)
        if left == 0 and state is not None and begin.state is state and loop.step:
            warnings.warn(no_step_left(steps or 0, loop.step), stacklevel=2)
        return loop.run(turns(itertools.islice(given, left), steps_per_call))

    def evaluate(self, state: PyTree, data: Any, *, batch_size: int | None = None) -> dict[str, Any]:
        """The loss and the metrics of a model, exact over all examples.

        Args:
            state: A state of training.
            data: What `strategy.distribute_dataset` gives, or takes.
            batch_size: Examples in a batch of all replicas together, where `data` is what it takes.

        Returns:
            By name: `loss`, the metrics, as numbers or numpy arrays, and `examples`, how many there were.

        Raises:
            ValueError: There are no data; or the loss, or a metric, is not one value an example.
            TypeError: There is no loss, or `state` is no state.
        """
        require("evaluate", loss=self._recipe.loss)
        metrics, examples = self._evaluated(state, one_pass(self.strategy, "data", data, batch_size))
        return {**metrics, "examples": examples}

    def predict(self, state: PyTree, data: Any, *, batch_size: int | None = None) -> PyTree:
        """The outputs of a model, in the order of the data, for each example once.

        Args:
            state: A state of training.
            data: As for `evaluate`; inputs alone, or with what else there is, which is not used.
            batch_size: As for `evaluate`.

        Returns:
            A tree like the outputs: numpy arrays `[example, ...]`.

        Raises:
            ValueError: There are no data, or an output has not one row an example.
            TypeError: `state` is no state.
        """
        dataset, model, found = one_pass(self.strategy, "data", data, batch_size), model_variables(state), []
        for draw in draws(iter(dataset), dataset.has_weights):
            given = self.strategy.gather(self.strategy.run(self._recipe.predict, (model, *draw.inputs)), axis=0)
            outputs, weights = jax.device_get(given)
            found.append(jax.tree.map(lambda rows, real=weights > 0: rows[real], outputs))
        return jax.tree.map(lambda *parts: np.concatenate(parts), *found)

    def apply(self, state: PyTree, inputs: PyTree) -> PyTree:
        """The outputs of the model for inputs `[batch, ...]`, as it is used and not trained: a pure function, for `jax.jit`.

        Example:
            >>> import optax
            >>> trainer = jdist.Trainer((lambda key, x: jax.numpy.ones(3), lambda w, x: x @ w), optax.sgd(0.1))
            >>> trainer.apply(trainer.init(np.zeros((1, 3))), np.ones((2, 3))).tolist()
            [3.0, 3.0]
        """
        return self._recipe.outputs(model_variables(state), inputs)

    def _begin(
        self, dataset: DistributedDataset, state: PyTree, resume: "Checkpointer | str | os.PathLike[str] | None"
    ) -> tuple[StartPoint, Iterable[DrawnBatch]]:
        """Where training begins, and the batches from there on."""
        iterator = iter(dataset)
        given: Iterable[DrawnBatch] = draws(iterator, dataset.has_weights)
        make = None
        if state is None:
            first = next(iter(given))  # of no data the data set says so
            given = itertools.chain([first], given)
            row_of = lambda value: jax.ShapeDtypeStruct(value.tree.shape[1:], value.tree.dtype)
            shapes = jax.tree.map(row_of, first.inputs[0], is_leaf=is_distributed)
            make = explained(shapes)(functools.partial(self.init, split_element(shapes, None)[0]))
        begin = start_point(self.strategy, state, make, resume)
        if begin.position is not None:
            iterator.set_state(begin.position)
            given = draws(iterator, dataset.has_weights)
        return begin, given

    def _validation(self, data: Any, batch_size: int | None) -> Callable[[PyTree], Mapping[str, Any]]:
        dataset = one_pass(self.strategy, "validation_data", data, batch_size)
        return lambda state: self._evaluated(state, dataset)[0]

    def _evaluated(self, state: PyTree, dataset: DistributedDataset) -> tuple[dict[str, Any], int]:
        model, iterator = model_variables(state), iter(dataset)
        step = self._program("evaluate", lambda: self.strategy.step(self._recipe.evaluate))
        seen, examples = self.strategy.init(self._recipe.nothing_seen), 0
        for draw in draws(iterator, dataset.has_weights):
            seen, _ = step(seen, model, *draw.inputs)
            examples = draw.rows
        return self._read(seen), examples

    def _training(
        self, steps_per_call: int, micro_batches: int
    ) -> Callable[[TrainCarry, Turn], tuple[TrainCarry, StepOutcome]]:
        """What takes the batches of a call: one program for as many as a call has, another for one that is left over."""
        recipe = dataclasses.replace(self._recipe, micro_batches=micro_batches)
        make = functools.partial(self.strategy.step, recipe.train)
        one = self._program(("train", micro_batches, 1), make)
        if steps_per_call == 1:
            return lambda carry, turn: one(carry, *turn.draws[0].inputs)
        many = self._program(("train", micro_batches, steps_per_call), lambda: make(steps_per_call=steps_per_call))

        def take(carry: TrainCarry, turn: Turn) -> tuple[TrainCarry, StepOutcome]:
            if len(turn.draws) == 1:
                return one(carry, *turn.draws[0].inputs)
            return many(carry, *map(list, zip(*(draw.inputs for draw in turn.draws), strict=True)))

        return take

    def _proof(self, micro_batches: int, steps_per_call: int) -> Proof:
        try:
            return self._programs["train", micro_batches, steps_per_call].proof
        except RuntimeError:  # there were fewer steps than a call takes
            return self._programs["train", micro_batches, 1].proof

    def _program(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._programs:
            self._programs[key] = make()
        return self._programs[key]

    def _maker(self, inputs: PyTree) -> Callable[[jax.Array], TrainState]:
        """The function that makes a state for such inputs; always the same for the same kind."""
        leaves, treedef = jax.tree.flatten(jax.eval_shape(lambda x: x, inputs))
        one = treedef.unflatten([jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype) for leaf in leaves])
        kinds = tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)
        return self._program(("init", treedef, kinds), lambda: functools.partial(self._recipe.begin, one))

    def _read(self, seen: PyTree) -> dict[str, Any]:
        values = jax.device_get(self.strategy.run(totals, (seen,)))
        found = {name: values[name] for name in ("loss", *self._recipe.measures)}
        return {name: value.item() if np.ndim(value) == 0 else np.asarray(value) for name, value in found.items()}

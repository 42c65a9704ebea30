"""`Trainer`: fit, evaluate and predict, under any strategy, with the same results."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jdist._arguments import whole
from jdist._tree import PyTree
from jdist.callbacks.progress import Progress
from jdist.callbacks.progress import progress as display
from jdist.callbacks.saving import Checkpoint
from jdist.checkpoint.checkpointer import Checkpointer
from jdist.data.dataset import DistributedDataset
from jdist.precision import Precision
from jdist.replicate import Proof
from jdist.strategies.automatic import auto_strategy
from jdist.strategies.base import Strategy
from jdist.strategies.current import get_strategy, has_strategy
from jdist.training.begin import Beginning, beginning, hand_back, total_steps
from jdist.training.events import Callback, Fit
from jdist.training.feed import Draw, Turn, draws, turns
from jdist.training.loop import Loop, Work
from jdist.training.measures import measures_of
from jdist.training.models import model_of
from jdist.training.state import TrainState, parts_of
from jdist.training.steps import Carry, Outcome, Recipe, taken_apart, totals
from jdist.values.base import is_distributed


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
        loss: From outputs and targets to losses `[batch, ...]`, one an example or several. Not needed to predict.
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
        self._seed = whole("`seed`", seed, 0)
        self._recipe = Recipe(
            model_of(model), loss, measures_of(metrics or {}), precision, optimizer, non_finite=non_finite
        )
        self._programs: dict[Any, Any] = {}

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
        self._require("make a state", optimizer=self._recipe.optimizer)
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
        self._require("fit", optimizer=self._recipe.optimizer, loss=self._recipe.loss)
        steps = None if steps is None else whole("`steps`", steps, 0)
        dataset = self._data("data", data, batch_size, shuffle)
        if dataset is not data or epochs is not None or steps is not None:
            dataset = dataset.repeated(1 if epochs is None and steps is None else epochs)
        validate = None if validation_data is None else self._validation(validation_data, batch_size)
        callbacks = _in_order(callbacks, progress)
        step = self._training(steps_per_call, micro_batches)
        begin, given = self._begin(dataset, state, resume)
        hand_back(callbacks, begin.kept.get("callbacks", {}))
        work = Work(
            strategy=self.strategy,
            step=step,
            read=self._read,
            nothing_seen=lambda: self.strategy.init(self._recipe.nothing_seen),
            validate=validate,
            callbacks=callbacks,
            proof=lambda: self._proof(micro_batches, steps_per_call),
            total_steps=total_steps(dataset, begin, steps),
            asked_steps=steps,
            stops_at_failure=self._recipe.non_finite == "stop",
        )
        loop = Loop(work, begin, begin.position or iter(dataset).get_state())
        left = None if steps is None else max(0, steps - loop.step)
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
        self._require("evaluate", loss=self._recipe.loss)
        metrics, examples = self._evaluated(state, self._data("data", data, batch_size, False).repeated(1))
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
        dataset, model, found = self._data("data", data, batch_size, False).repeated(1), self._model(state), []
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
        return self._recipe.outputs(self._model(state), inputs)

    def _begin(
        self, dataset: DistributedDataset, state: PyTree, resume: "Checkpointer | str | os.PathLike[str] | None"
    ) -> tuple[Beginning, Iterable[Draw]]:
        """Where training begins, and the batches from there on."""
        iterator = iter(dataset)
        given: Iterable[Draw] = draws(iterator, dataset.has_weights)
        make = None
        if state is None:
            first = next(iter(given))  # of no data the data set says so
            given = itertools.chain([first], given)
            of_one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), first.inputs[0].tree)
            make = functools.partial(self.init, taken_apart(of_one, None)[0])
        begin = beginning(self.strategy, state, make, resume)
        if begin.position is not None:
            iterator.set_state(begin.position)
            given = draws(iterator, dataset.has_weights)
        return begin, given

    def _validation(self, data: Any, batch_size: int | None) -> Callable[[PyTree], Mapping[str, Any]]:
        dataset = self._data("validation_data", data, batch_size, False)
        return lambda state: self._evaluated(state, dataset.repeated(1))[0]

    def _evaluated(self, state: PyTree, dataset: DistributedDataset) -> tuple[dict[str, Any], int]:
        model, iterator = self._model(state), iter(dataset)
        step = self._program("evaluate", lambda: self.strategy.step(self._recipe.evaluate))
        seen, examples = self.strategy.init(self._recipe.nothing_seen), 0
        for draw in draws(iterator, dataset.has_weights):
            seen, _ = step(seen, model, *draw.inputs)
            examples = draw.rows
        return self._read(seen), examples

    def _training(self, steps_per_call: int, micro_batches: int) -> Callable[[Carry, Turn], tuple[Carry, Outcome]]:
        """What takes the batches of a call: one program for as many as a call has, another for one that is left over."""
        recipe = dataclasses.replace(self._recipe, micro_batches=micro_batches)
        make = functools.partial(self.strategy.step, recipe.train)
        one = self._program(("train", micro_batches, 1), make)
        if steps_per_call == 1:
            return lambda carry, turn: one(carry, *turn.draws[0].inputs)
        many = self._program(("train", micro_batches, steps_per_call), lambda: make(steps_per_call=steps_per_call))

        def take(carry: Carry, turn: Turn) -> tuple[Carry, Outcome]:
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

    def _data(self, name: str, data: Any, batch_size: int | None, shuffle: bool | None) -> DistributedDataset:
        if isinstance(data, DistributedDataset):
            if batch_size is not None:
                raise ValueError(f"`{name}` is distributed already, in batches of its own: leave `batch_size` out.")
            return data
        try:
            return self.strategy.distribute_dataset(data, batch_size, shuffle=shuffle, seed=self._seed, remainder="pad")
        except (TypeError, ValueError) as error:
            error.add_note(f"So it is with `{name}`.")
            raise

    def _model(self, state: PyTree) -> tuple[PyTree, PyTree]:
        """Parameters and what else a model keeps: the mean of what drifts apart; of what is split, each part where it lies."""
        parts = parts_of(state)
        of_one = lambda node: node.read() if is_distributed(node) else node
        return jax.tree.map(of_one, (parts.params, parts.model_state), is_leaf=is_distributed)

    def _require(self, word: str, **needed: Any) -> None:
        missing = [name for name, value in needed.items() if value is None]
        if missing:
            raise TypeError(
                f"To {word}, a trainer needs `{'`, `'.join(missing)}`: `jdist.Trainer(model, optimizer, loss)`, such as "
                "`jdist.Trainer(model, optax.adamw(1e-3), optax.softmax_cross_entropy_with_integer_labels)`."
            )


def _in_order(callbacks: Any, progress: str) -> list[Callback]:
    """`callbacks` in the order in which they are told."""
    if callable(callbacks) or not isinstance(callbacks, Sequence):
        raise TypeError(f"`callbacks` is a list of functions of an event, got {callbacks!r}.")
    for callback in callbacks:
        if not callable(callback) or isinstance(callback, type):
            what = f"the class {callback.__name__}: call it" if isinstance(callback, type) else repr(callback)
            raise TypeError(f"A callback is a function of an event, and among `callbacks` there is {what}.")
    # What other callbacks remember of an event is to be in the checkpoint of it.
    told: list[Callback] = sorted(callbacks, key=lambda callback: isinstance(callback, Checkpoint))
    displays = progress != "off" and not any(isinstance(callback, Progress) for callback in told)
    return [*told, display(progress)] if displays else told  # type: ignore[arg-type]

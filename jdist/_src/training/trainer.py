"""`Trainer`: fit, evaluate and predict, with the same results under every strategy."""

import contextlib
import dataclasses
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict, Unpack, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist._src.checkpoint.checkpointer import Checkpointer
from jdist._src.core.arguments import as_int
from jdist._src.core.call_errors import explains_arguments
from jdist._src.core.migration_hints import explains_attributes
from jdist._src.core.rendering import facts_html
from jdist._src.core.sharding_annotations import restrict_annotations
from jdist._src.core.source_lines import levels_to_user
from jdist._src.core.tree import PyTree, add_note_once, one_line
from jdist._src.data.config import Cache
from jdist._src.data.dataset import DistributedDataset, DistributedIterator
from jdist._src.execution.program import Program
from jdist._src.replica.finite import NonFinite
from jdist._src.replica.gradients import Remat
from jdist._src.replica.precision import Precision
from jdist._src.strategies.automatic import auto_strategy
from jdist._src.strategies.base import Strategy
from jdist._src.strategies.current import get_strategy, has_strategy
from jdist._src.training.arguments import (
    check_alternatives,
    check_eval_params,
    check_same_arguments,
    collective_callbacks,
)
from jdist._src.training.events import Callback, CallbackFunction, as_callbacks
from jdist._src.training.fit import Fit, name_of
from jdist._src.training.loop import Loop, no_step_message
from jdist._src.training.loss_adapters import adapt_loss
from jdist._src.training.metric_adapters import adapt_metrics
from jdist._src.training.model_adapters import adapt_model
from jdist._src.training.model_functions import NO_MODEL, TrainedModel
from jdist._src.training.objectives import Objective, explained_data_errors
from jdist._src.training.progress import Progress, ProgressKind
from jdist._src.training.resume import (
    StartPoint,
    check_is_state,
    start_point,
    total_steps,
)
from jdist._src.training.state import ModelVariables, TrainState, model_variables
from jdist._src.training.step_calls import CountedProgram, StepCalls
from jdist._src.training.step_calls import peak_flops as peak_flops_of
from jdist._src.training.step_inputs import (
    DrawnBatch,
    check_example_weights,
    check_validate_every,
    distribute_epochs,
    distribute_one_pass,
    drawn_batches,
    step_groups,
    validate_all,
    validation_metric_names,
    validation_name,
    validation_sets,
)
from jdist._src.training.steps import StepFunctions
from jdist._src.values.array_copies import to_device_memory
from jdist._src.values.base import is_distributed


class _Options(TypedDict, total=False):
    """The arguments of `Trainer` that do not depend on the others."""

    strategy: Strategy | None
    precision: Precision | None
    remat: Remat
    eval_params: Callable[[Any, Any], Any] | None
    seed: int
    non_finite: NonFinite
    tokens: Callable[[Any], Any] | None


@explains_attributes("trainer")
class Trainer:
    """Trains, evaluates and applies a model under a strategy.

    Each element of the data is a tuple `(inputs, targets)` or `(inputs, targets, weights)` with weights `[batch]` of the
    examples; anything else is both inputs and targets. The model receives the keyword arguments that it accepts out of `train`,
    `training`, `deterministic`, `weights` (0 for padding) and, if it is a function, `key`.

    Losses and metrics are computed over all examples of all replicas, without padding. Gradients are averaged over the
    replicas, unless the optimizer itself uses collectives, as the policies of `jdist.sync` do. The other variables of the
    model, such as batch statistics, are averaged over the replicas.

    Immutable, except for a cache of compiled functions.

    Args:
        model: A module of flax (linen or nnx), a Keras model on JAX, a transformed function of haiku, an equinox module, or a
            pair of functions: `init(key, inputs)`, which returns parameters, and `apply(params, inputs)`, which returns
            outputs.
        optimizer: An optax transformation. Its update receives the extra arguments that it accepts out of `value` and `grad`,
            the loss and its gradient, `value_fn` and `obj_fn`, the loss as a function of parameters (`jdist.global_loss`), and
            `weight`, the sum of the weights of the losses (`jdist.sync.every`). Not needed for `evaluate` and `predict`.
        loss: `loss(outputs, targets)` returns losses `[batch, ...]`, one or several per example. A Keras loss, or a function
            with parameters named `y_true, y_pred`, is called with the targets first. Not needed for `predict`. The losses that
            the model itself adds, such as regularizers of Keras, are added to it.
        objective: A function in place of `loss`: `fn(params, batch, key, apply)` returns losses `[batch, ...]`, or a pair of
            these and a dict of auxiliary values. `batch` is an element of the data; `key` differs between replicas and steps;
            `apply(params, inputs)` returns the outputs of the model. With a parameter `weights` it receives the weights of the
            examples, 0 for padding. For a mean over tokens it returns `(losses, weights)`, or `((losses, weights), aux)`: the
            weights are the first dimensions of the losses, as `[batch, time]`, and padding is excluded by the trainer. They
            also weight each metric whose values have these dimensions. Evaluation uses the function too.
        step: A function in place of `optimizer`: `fn(state, batch)` or `fn(state, batch, weights)` takes a training step of one
            replica, and returns the new state and the loss, or a dict with `loss` and other values. The state is any tree with
            an attribute or a key `step`, the number of steps; it is passed to `fit`.
        metrics: A dict from names to: a metric of `jdist.metrics`, flax.nnx, clu, metrax or Keras, whose arguments are outputs
            and targets; a pair of a metric and a function from outputs and targets to a tuple or a dict of its arguments; or a
            function from outputs and targets to values `[batch, ...]`, which are averaged. Or an `nnx.MultiMetric` or a clu
            `Collection`. With `objective` or `step`, its auxiliary values and the batch take the place of outputs and targets,
            the argument of a metric without a function is the auxiliary value of its name, and a list of names averages these
            values.
        strategy: The strategy; by default the current strategy, else `jdist.auto_strategy()`.
        precision: The dtypes of the computation.
        remat: See `jdist.value_and_grad`.
        eval_params: A function from the state of the optimizer and the parameters to the parameters for evaluation, prediction
            and `model`, such as `optax.contrib.schedule_free_eval_params`.
        seed: The seed of the parameters, of the order of the data, and of random numbers during training.
        non_finite: The treatment of a step whose loss or gradient is infinite or NaN. `"stop"`: training ends with the state
            before it. `"skip"`: the step changes only the step counter, and training continues. `"keep"`: no treatment.
            The learning rate counts like a gradient. The updates decide instead of the gradients if the optimizer reduces
            gradients (`jdist.sync`), tests numbers itself (`optax.apply_if_finite`, `optax.zero_nans`), or evaluates the loss
            (`optax.lbfgs`); with `step`, only the loss decides. An update that is not finite for another reason, such as an
            overflow of float16, is found at the next loss.
        tokens: A function from an element of the data to an array `[batch, ...]` whose non-zero numbers are its tokens, such as
            `lambda batch: batch["mask"]`. The history then contains the tokens per second, without tokens of padded examples.

    Raises:
        TypeError: The model, the optimizer, the loss or a metric is of an unknown type, or two arguments exclude each other.

    Example:
        >>> import optax
        >>> x = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
        >>> trainer = jdist.Trainer(
        ...     (lambda key, x: jax.numpy.zeros(x.shape[-1]), lambda w, x: x @ w),
        ...     optax.sgd(0.1),
        ...     optax.squared_error,
        ...     strategy=jdist.MirroredStrategy(["cpu:0", "cpu:1"]),
        ... )
        >>> y = x @ np.float32([1, -2, 3])
        >>> fit = trainer.fit((x, y), batch_size=16, epochs=10, progress="off")
        >>> fit.state.params.round(1).tolist(), fit.steps, fit.stop_reason
        ([1.0, -2.0, 3.0], 70, 'All requested steps were taken.')
        >>> trainer.evaluate(fit.state, (x, y), batch_size=16)["examples"]
        100
    """

    @overload
    def __init__(
        self,
        model: Any = None,
        optimizer: optax.GradientTransformation | None = None,
        loss: Callable[[Any, Any], Any] | None = None,
        *,
        metrics: Any = None,
        **options: Unpack[_Options],
    ) -> None: ...
    @overload
    def __init__(
        self,
        model: Any = None,
        optimizer: optax.GradientTransformation | None = None,
        *,
        objective: Callable[..., Any],
        metrics: Any = None,
        **options: Unpack[_Options],
    ) -> None: ...
    @overload
    def __init__(
        self,
        model: Any = None,
        *,
        loss: Callable[[Any, Any], Any] | None = None,
        objective: Callable[..., Any] | None = None,
        step: Callable[..., Any],
        metrics: Any = None,
        **options: Unpack[_Options],
    ) -> None: ...
    @explains_arguments("trainer")
    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        loss: Callable[[Any, Any], Any] | None = None,
        *,
        objective: Callable[..., Any] | None = None,
        step: Callable[..., Any] | None = None,
        metrics: Any = None,
        strategy: Strategy | None = None,
        precision: Precision | None = None,
        remat: Remat = False,
        eval_params: Callable[[Any, Any], Any] | None = None,
        seed: int = 0,
        non_finite: NonFinite = "stop",
        tokens: Callable[[Any], Any] | None = None,
    ):
        if not isinstance(strategy, Strategy | None):
            raise TypeError(
                f"`strategy` must be a strategy, such as `jdist.MirroredStrategy()`, got {one_line(strategy)}."
            )
        self.strategy = strategy or (get_strategy() if has_strategy() else auto_strategy())
        self._seed = as_int("`seed`", seed, 0)
        check_alternatives(optimizer, loss, objective, step)
        named = {"model": model, "loss": loss, "objective": objective, "step": step}
        self._names = {name: name_of(value) for name, value in named.items() if value is not None}
        self._functions = StepFunctions(
            Objective(
                NO_MODEL if model is None and step is not None else adapt_model(model),
                adapt_loss(loss),
                objective,
                adapt_metrics({} if metrics is None else metrics, is_of_outputs=objective is None and step is None),
                precision,
            ),
            optimizer,
            step,
            remat=remat,
            non_finite=non_finite,
            tokens=tokens,
        )
        check_eval_params(eval_params)
        self._eval_params = eval_params
        self._cache: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"Trainer({', '.join(f'{name}={fact}' for name, fact in self._facts().items())})"

    def _repr_html_(self) -> str:
        return facts_html("Trainer", self._facts())

    def _facts(self) -> dict[str, str]:
        has_update = self._functions.optimizer is not None or self._functions.custom_step is not None
        no_optimizer = {} if has_update else {"optimizer": "None"}
        metrics = ", ".join(self._functions.objective.metrics) or "none"
        strategy_and_seed = {"strategy": repr(self.strategy), "seed": str(self._seed)}
        return {**self._names, "metrics": metrics, **no_optimizer, **strategy_and_seed}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Trainer":
        return self  # immutable; a copy would compile its functions again

    def __reduce__(self) -> Any:
        raise TypeError(
            "A Trainer cannot be pickled: it contains functions, and programs compiled for devices. Create it in the other "
            "process, by a function such as `def make(): return jdist.Trainer(...)`. To transfer the trained state, save it "
            "with a `jdist.Checkpointer`, or pickle the `Fit`."
        )

    def init(self, inputs: PyTree) -> TrainState:
        """Returns the state before the first step, created on the devices. Without an optimizer, `opt_state` is None.

        Args:
            inputs: The inputs of a batch, or their shapes: arrays `[batch, ...]`. Values and batch size do not matter.

        Example:
            >>> import optax
            >>> trainer = jdist.Trainer(
            ...     (lambda key, x: jax.numpy.zeros(x.shape[-1]), lambda w, x: x @ w),
            ...     optax.adam(1e-3),
            ... )
            >>> trainer.init(np.zeros((1, 3), np.float32)).params.shape
            (3,)
        """
        return self._initial_state(self._functions.init_for_inputs, inputs)

    def _initial_state(self, init: Callable[[PyTree, jax.Array], TrainState], data: PyTree) -> TrainState:
        """Returns the result of `init`, a method of the step functions, for inputs or elements with these shapes."""
        # `strategy.init` caches its program by the function, so inputs of the same kind use the same function.
        leaves, treedef = jax.tree.flatten(jax.eval_shape(lambda x: x, data))
        example = treedef.unflatten([jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype) for leaf in leaves])
        key = (init.__name__, treedef, tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves))
        make = self._cached(key, lambda: functools.partial(init, example))
        return self.strategy.init(make, jax.random.key(self._seed))

    @explains_arguments("fit")
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
        validate_every: int | None = None,
        callbacks: Sequence[Callback | CallbackFunction] = (),
        steps_per_call: int = 1,
        micro_batches: int = 1,
        cache: Cache | None = None,
        norms: bool = False,
        peak_flops: float | None = None,
        progress: ProgressKind = "auto",
        resume: "Checkpointer | str | os.PathLike[str] | None" = None,
    ) -> Fit:
        """Trains, and returns the state with the history.

        The model that was passed to the trainer is not changed: `model` returns the trained one.

        Ctrl-C ends training after the current step. An error of the data or of a callback is raised as a `jdist.FitError`,
        which contains the state and the history so far.

        Args:
            data: A distributed data set, or a source for `strategy.distribute_dataset`.
            batch_size: The number of examples in the global batch, if `data` is a source. The last batch of an epoch is padded;
                padding does not count in the loss and the metrics.
            epochs: The number of passes over the data; by default 1, or with `steps` as many as needed.
            steps: The number of steps after which to stop, including those that `state` has already taken.
            shuffle: See `distribute_dataset`; by default, sources with random access, such as arrays, are shuffled.
            state: The state to start with: a `TrainState`, or another dataclass with `step`, `params` and `opt_state`. On the
                devices of the strategy, it is donated; on the host or on other devices, it is placed first. By default, `init`
                creates one. A trainer with `step=` needs one.
            validation_data: The data to evaluate at the end of each epoch, like `data`; or several sets by name, whose metrics
                are named `val_NAME_loss`. A mapping with an array as a value, or with the keys of `data`, is one source.
            validate_every: The number of steps between validations, instead of one per epoch. With it, validation also takes
                place after the last step of the data, and each validation adds a row to the history.
            callbacks: Callbacks, or functions of an event; see `jdist.callbacks`.
            steps_per_call: The number of steps per call of the compiled program. Callbacks receive one event per call. The
                remaining steps of an epoch, and a group of batches with a padded one, run one by one, by a second program.
            micro_batches: The number of parts that the batch of each replica is split into, to reduce the memory of
                activations, for any number of examples and replicas. The results are the same.
            cache: `"device"` stores the arrays of `data` on every device; see `distribute_dataset`.
            norms: Whether to record the L2 norms of gradient, update and new parameters as `gradient_norm`, `update_norm` and
                `parameter_norm`, computed in the step in float32. The gradient is the one that the optimizer receives, before
                clipping. If the optimizer reduces gradients itself (`jdist.sync`), they are means over the norms of the
                replicas, and the gradient is that of a replica.
            peak_flops: The peak floating point operations per second of one device, for the model flops utilization `mfu`; by
                default the published number of the accelerator in bfloat16, if it is known.
            progress: The progress display: "live" for a terminal, "notebook", "lines" of text, "off", or "auto"; see
                `jdist.callbacks.Progress`.
            resume: A `Checkpointer`, or the path of its folder. If it contains a checkpoint, training continues from the newest
                one, bitwise equal to training without the interruption.

        Raises:
            ValueError: The data are empty; an option does not fit; a checkpoint is of another model; or, while the step is
                traced, the loss or a metric is not one value per example.
            TypeError: The optimizer or the loss is missing, `state` is not a state, or a number is not an integer; or, while
                the step is traced, `state` is of another optimizer, or a part of it changes its leaves.
            FitError: An error ended training after the first step.
        """
        self._check_same_arguments(
            "Trainer.fit",
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            shuffle=shuffle,
            state=state,
            validation_data=validation_data,
            validate_every=validate_every,
            callbacks=collective_callbacks(callbacks),
            steps_per_call=steps_per_call,
            micro_batches=micro_batches,
            cache=cache,
            norms=norms,
            resume=resume,
        )
        check_is_state(state)
        options: dict[str, Any] = {"micro_batches": as_int("`micro_batches`", micro_batches, 1), "norms": norms}
        new_functions = dataclasses.replace(self._functions, **options)
        new_functions.check_fit(state)
        # One object for all calls with these options: its functions are compiled once.
        functions = self._cached(("functions", *options.values()), lambda: new_functions)
        total_peak_flops = peak_flops_of(self.strategy, peak_flops)
        steps = None if steps is None else as_int("`steps`", steps, 0)
        dataset = distribute_epochs(
            self.strategy,
            data,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=self._seed,
            epochs=epochs,
            steps=steps,
            remainder="pad" if self._functions.takes_weights else "error",
            cache=cache,
        )
        self._functions.check_weights(dataset.has_weights)
        dataset = dataset if self._functions.custom_step else self._with_checked_weights("data", dataset)
        if validation_data is not None:
            self._functions.check_evaluate("fit(validation_data=...)")
        passes = dataset.epochs if validate_every is None else None
        validation = {
            prefix: self._with_checked_weights(validation_name(prefix), one)
            for prefix, one in validation_sets(self.strategy, data, validation_data, batch_size, passes).items()
        }
        ordered_callbacks = _with_progress(as_callbacks(callbacks), progress)
        steps_per_call = as_int("`steps_per_call`", steps_per_call, 1)
        single = self._train_program(functions, 1)
        several = self._train_program(functions, steps_per_call) if steps_per_call > 1 else None
        # Closed here: a notebook stores the traceback of an error, whose frames would keep the prefetch thread alive.
        with contextlib.ExitStack() as displays, contextlib.closing(iter(dataset)) as iterator:
            for display in ordered_callbacks:
                if isinstance(display, Progress):
                    displays.callback(display.close)  # after an error before the first event
                    display.open()
            first_position = iterator.get_state()
            start, batches = self._start(iterator, dataset.has_weights, state, resume)
            validate_every = check_validate_every(validate_every, bool(validation))
            names = list(self._functions.metrics)
            training_names = ["loss", *names, *(name for name in functions.outcome_names if name != "tokens")]
            metric_names = [*training_names, *validation_metric_names(validation, names)]
            for name, evaluated in validation.items():
                self._check_evaluation(name, start.state, evaluated)
            loop = Loop(
                strategy=self.strategy,
                functions=functions,
                call_step=StepCalls(single, several),
                peak_flops=total_peak_flops,
                validate=validate_all(validation, lambda state, dataset: self._evaluate(state, dataset)[0]),
                validate_every=validate_every,
                callbacks=ordered_callbacks,
                metric_names=metric_names,
                resume=resume,
                total_steps=total_steps(dataset, start, steps),
                requested_steps=steps,
                start=start,
                first_position=start.position or first_position,
            )
            remaining_steps = None if steps is None else max(0, steps - loop.step)
            if remaining_steps == 0 and state is not None and start.state is state and loop.step:
                warnings.warn(no_step_message(steps or 0, loop.step), stacklevel=levels_to_user())
            return loop.run(step_groups(itertools.islice(batches, remaining_steps), steps_per_call))

    @explains_arguments("evaluate")
    def evaluate(self, state: PyTree, data: Any, *, batch_size: int | None = None) -> dict[str, Any]:
        """Returns the loss and the metrics of a model, exact over all examples.

        Args:
            state: A training state; or any object or dict with `params`, and `model_state` if the model has other variables.
            data: A distributed data set, or a source for `strategy.distribute_dataset`.
            batch_size: The number of examples in the global batch, if `data` is a source.

        Returns:
            A dict: `loss` and the metrics, as numbers or numpy arrays, and `examples`, the number of examples.

        Raises:
            ValueError: The data are empty, or the loss or a metric is not one value per example.
            TypeError: The loss is missing, or `state` is not a state.

        Example:
            >>> model = (lambda key, x: jnp.ones(3), lambda w, x: x @ w)
            >>> trainer = jdist.Trainer(
            ...     model, loss=optax.squared_error, strategy=jdist.OneDeviceStrategy("cpu:0")
            ... )
            >>> x, y = np.ones((5, 3), np.float32), np.float32([1, 2, 3, 3, 3])
            >>> trainer.evaluate(trainer.init(x), (x, y), batch_size=2)
            {'loss': 1.0, 'examples': 5}
        """
        self._check_same_arguments("Trainer.evaluate", batch_size=batch_size)
        self._functions.check_evaluate("evaluate")
        dataset = distribute_one_pass(self.strategy, "data", data, batch_size)
        metrics, examples = self._evaluate(state, self._with_checked_weights("data", dataset))
        return {**metrics, "examples": examples}

    @explains_arguments()
    def predict(self, state: PyTree, data: Any, *, batch_size: int | None = None) -> PyTree:
        """Returns the outputs of a model for all examples, in the order of the data.

        Args:
            state: See `evaluate`.
            data: See `evaluate`; inputs alone, or tuples whose other parts are not used.
            batch_size: See `evaluate`.

        Returns:
            A tree like the outputs: numpy arrays `[example, ...]`.

        Raises:
            ValueError: The data are empty, or an output is not one value per example.
            TypeError: `state` is not a state.

        Example:
            >>> model = (lambda key, x: jnp.ones(3), lambda w, x: x @ w)
            >>> trainer = jdist.Trainer(model, strategy=jdist.OneDeviceStrategy("cpu:0"))
            >>> x = np.ones((5, 3), np.float32)
            >>> trainer.predict(trainer.init(x), x, batch_size=2).tolist()
            [3.0, 3.0, 3.0, 3.0, 3.0]
        """
        self._check_same_arguments("Trainer.predict", batch_size=batch_size)
        dataset = distribute_one_pass(self.strategy, "data", data, batch_size)
        variables, parts = self._variables(state), []
        with contextlib.closing(iter(dataset)) as iterator:
            for batch in drawn_batches(iterator, dataset.has_weights):
                results = self.strategy.run(self._functions.predict, (variables, *batch.inputs))
                outputs, weights = jax.device_get(self.strategy.gather(results, axis=0))
                parts.append(jax.tree.map(lambda padded, is_example=weights > 0: padded[is_example], outputs))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

    def apply(self, state: PyTree, inputs: PyTree) -> PyTree:
        """Returns the outputs of the model for inputs `[batch, ...]`, in evaluation mode: a pure function, for `jax.jit`.

        Example:
            >>> import optax
            >>> trainer = jdist.Trainer(
            ...     (lambda key, x: jax.numpy.ones(3), lambda w, x: x @ w), optax.sgd(0.1)
            ... )
            >>> trainer.apply(trainer.init(np.zeros((1, 3))), np.ones((2, 3))).tolist()
            [3.0, 3.0]
        """
        on_devices = functools.partial(jax.tree.map, to_device_memory)
        eval_params = self._eval_params
        run = None if eval_params is None else lambda *args: eval_params(*on_devices(args))
        return self._outputs(on_devices(model_variables(state, run)), inputs)

    def model(self, state: PyTree) -> Any:
        """Returns the model with the values of a training state, on the default device, as a function of inputs `[batch, ...]`.

        It is in evaluation mode: batch normalization uses the averages, and dropout is off. The model that was passed to the
        trainer is not changed by training.

        Args:
            state: A training state. With `eval_params`, its results are the parameters.

        Returns:
            For a Keras model or an nnx module a new model; for an equinox module without a state the module, a function of one
            example. Otherwise a function of inputs whose attribute `variables` has the values, and which also has their items:
            for linen the variables; for haiku the parameters, as a pair with the state if there is one; for an equinox module
            with a state the pair; for a pair of functions the parameters.

        Raises:
            ValueError: The state was donated.
            TypeError: `state` is not a state, the trainer has no model, or Keras cannot copy the model.

        Example:
            >>> import optax
            >>> from flax import nnx
            >>> trainer = jdist.Trainer(
            ...     nnx.Linear(3, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), optax.squared_error
            ... )
            >>> fit = trainer.fit((np.ones((8, 3)), np.ones((8, 1))), batch_size=8, progress="off")
            >>> trainer.model(fit.state)(np.ones((2, 3))).shape
            (2, 1)
        """
        variables = ModelVariables(*jax.tree.map(jnp.asarray, jax.device_get(self._variables(state))))
        model = self._functions.objective.model.rebuild(*variables)
        return model if callable(model) else TrainedModel(model, functools.partial(self._outputs, variables))

    def _outputs(self, variables: ModelVariables, inputs: PyTree) -> PyTree:
        with restrict_annotations("outside"):  # the mesh of a strategy is not in the context here
            return self._functions.outputs(variables, inputs)

    def _planned_step(self, element: PyTree) -> tuple[Callable[..., Any], Callable[[], Any]]:
        """Returns the step of `fit`, and a function that creates its state, for elements `[batch, ...]`: for `jdist.plan`."""
        self._functions.check_fit(None)
        example = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype), element)
        return self._functions.step, lambda: self._functions.first_carry(example, jax.random.key(self._seed))

    def _check_same_arguments(self, call: str, **arguments: Any) -> None:
        functions = self._functions
        facts = {"metrics": list(functions.metrics), "non_finite": functions.non_finite, "seed": self._seed}
        check_same_arguments(call, self.strategy, {**arguments, **facts})

    def _variables(self, state: PyTree) -> ModelVariables:
        """Returns the variables for the evaluation of a state, on the devices."""
        eval_params = self._eval_params
        run = None if eval_params is None else lambda *args: self.strategy.run(eval_params, args)
        return model_variables(state, run)

    def _with_checked_weights(self, name: str, dataset: DistributedDataset) -> DistributedDataset:
        """Returns the data set with a check of the weights of its examples. An objective receives no weights of examples."""
        has_weights = self._functions.objective.fn is None
        return dataset.checked(functools.partial(check_example_weights, name)) if has_weights else dataset

    def _start(
        self,
        iterator: DistributedIterator,
        has_weights: bool,
        state: PyTree,
        resume: "Checkpointer | str | os.PathLike[str] | None",
    ) -> tuple[StartPoint, Iterable[DrawnBatch]]:
        """Returns the state and the position to start with, and the batches from there on."""
        draw = functools.partial(drawn_batches, iterator, has_weights, self._functions.needs_all_weights)
        batches: Iterable[DrawnBatch] = draw()
        make = None
        if state is None:
            first = next(iter(batches))  # an empty data set raises here
            batches = itertools.chain([first], batches)
            without_replicas = lambda value: jax.ShapeDtypeStruct(value.tree.shape[1:], value.tree.dtype)
            shapes = jax.tree.map(without_replicas, first.inputs[0], is_leaf=is_distributed)
            make = functools.partial(self._initial_state, self._functions.init, shapes)
            make = make if self._functions.objective.fn else explained_data_errors(shapes)(make)
        start = start_point(self.strategy, state, make, resume)
        if start.position is not None:
            iterator.set_state(start.position)
            batches = draw()
        return start, batches

    def _evaluate(self, state: PyTree, dataset: DistributedDataset) -> tuple[dict[str, Any], int]:
        variables = self._variables(state)
        step = self._cached("evaluate", lambda: self.strategy.step(self._functions.evaluate))
        metrics, examples = self.strategy.init(self._functions.empty_metrics), 0
        with contextlib.closing(iter(dataset)) as iterator:
            for batch in drawn_batches(iterator, dataset.has_weights):
                metrics, _ = step(metrics, variables, *batch.inputs)
                examples = batch.examples
        return self._functions.read_metrics(self.strategy, metrics), examples

    def _check_evaluation(self, prefix: str, state: PyTree, dataset: DistributedDataset) -> None:
        """Traces the evaluation of a validation set, so that `fit` raises its errors before the first step."""
        step = self._cached("evaluate", lambda: self.strategy.step(self._functions.evaluate))
        if dataset.is_one_shot or not isinstance(step, Program):  # an iterator can be read only once
            return
        try:
            element = dataset.element_spec
            inputs = element if dataset.has_weights else (element,)
            step.lower(self.strategy.init(self._functions.empty_metrics), self._variables(state), *inputs)
        except Exception as error:
            add_note_once(
                error, f"The error is in the evaluation of `{validation_name(prefix)}`, before the first step."
            )
            raise

    def _train_program(self, functions: StepFunctions, steps_per_call: int) -> CountedProgram:
        """Returns the program of one step, or of several steps per call, which is compiled once for all calls of `fit`."""
        key = "train", functions.micro_batches, functions.norms, steps_per_call
        options: dict[str, Any] = {} if steps_per_call == 1 else {"steps_per_call": steps_per_call}
        return self._cached(key, lambda: CountedProgram(self.strategy.step(functions.step, **options)))

    def _cached(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
        value = self._cache[key]
        program = value.program if isinstance(value, CountedProgram) else value
        if isinstance(program, Program):  # for another data set
            program.forget_arguments()
        return value


def _with_progress(callbacks: list[Callback], progress: ProgressKind) -> list[Callback]:
    """Returns `callbacks` with a progress display, unless there is one.

    Raises:
        TypeError: `progress` is not a string.
        ValueError: `progress` is not the name of a display.
    """
    if not isinstance(progress, str):
        kinds = ", ".join(f'"{kind}"' for kind in get_args(ProgressKind))
        hint = ": pass it as `callbacks=[jdist.callbacks.Progress(...)]`" if isinstance(progress, Progress) else ""
        off = ' Write `progress="off"`.' if progress is False or progress == 0 else ""
        raise TypeError(f"`progress` must be one of {kinds}, got a {type(progress).__name__}{hint}.{off}")
    if progress == "off" or any(isinstance(callback, Progress) for callback in callbacks):
        return callbacks
    return [*callbacks, Progress(progress)]

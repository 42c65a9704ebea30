"""Shared by the tests: tables of strategies and of kinds of state for which every law holds, and comparisons of bits."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src import dispatch
from jax.sharding import Mesh

import jdist
from jdist import testing

STRATEGIES = {
    "one_device": lambda: testing.strategy("one_device"),
    "mirrored_1": lambda: jdist.MirroredStrategy(["cpu:3"]),
    "mirrored_2": lambda: testing.strategy("mirrored_2"),
    "mirrored_3": lambda: jdist.MirroredStrategy(["cpu:5", "cpu:1", "cpu:2"]),
    "mirrored_8": lambda: jdist.MirroredStrategy(),
    "sharded_4": lambda: testing.strategy("sharded_4"),
    "central_2": lambda: testing.strategy("central_2"),
    "groups_2": lambda: jdist.MirroredStrategy(
        mesh=Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("replica", "model"))
    ),
}
# One strategy per backend: the laws of the fixture `strategy`. The other strategies have the backend of `mirrored_3`.
BACKENDS = ["mirrored_3", "sharded_4", "central_2", "groups_2"]


def traces_of_a_step(strategy):
    """Returns how often a step is traced per signature: once more, as the only replica, where there are several."""
    is_compared = strategy.num_replicas_in_sync > 1 and not isinstance(strategy, jdist.ParameterServerStrategy)
    return 2 if is_compared else 1


def fixture_of_all_backends():
    """Returns the fixture `strategy` for a module of laws of values: also with the backend that docs/extend.md shows."""
    strategies = {**{name: STRATEGIES[name] for name in BACKENDS}, "debug_2": lambda: testing.DebugStrategy(2)}

    @pytest.fixture(params=strategies)
    def strategy(request):
        return strategies[request.param]()

    return strategy


class StateKind(NamedTuple):
    """A state of the kind that people train, and a step that trains it.

    Attributes:
        make: Returns the state before the first step, for `strategy.init`.
        step: The replica function `(state, x) -> (state, loss)` for `x` float32 `[batch, 4]`.
    """

    make: Callable[[], Any]
    step: Callable[[Any, Any], tuple[Any, Any]]


def _params():
    return {"w": jnp.linspace(-1, 1, 12).reshape(4, 3), "b": jnp.zeros(3)}


def _loss_and_grads(params, x):
    return jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(x @ p["w"] + p["b"] + 1) ** 2))(params)


def _mean_loss_and_grads(params, x):
    return jdist.all_reduce("mean", _loss_and_grads(params, x))


def _dict():
    def step(state, x):
        loss, grads = _mean_loss_and_grads({"w": state["w"], "b": state["b"]}, x)
        new = {name: state[name] - 0.1 * grad for name, grad in grads.items()}
        return {**new, "steps": state["steps"] + 1}, loss

    return StateKind(lambda: {**_params(), "steps": jnp.int32(0)}, step)


def _optax(optimizer=None, reduce=_mean_loss_and_grads):
    optimizer = optimizer or optax.adam(0.1)

    def step(state, x):
        params, opt_state = state
        loss, grads = reduce(params, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), jdist.all_reduce("mean", loss)

    return StateKind(lambda: (params := _params(), optimizer.init(params)), step)


def _flax_train_state():
    from flax.training.train_state import TrainState

    def step(state, x):
        loss, grads = _mean_loss_and_grads(state.params, x)
        return state.apply_gradients(grads=grads), loss

    optimizer = optax.adam(0.1)
    return StateKind(lambda: TrainState.create(apply_fn=None, params=_params(), tx=optimizer), step)


def _jdist_train_state():
    optimizer = optax.adam(0.1)

    def step(state, x):
        loss, grads = _mean_loss_and_grads(state.params, x)
        updates, opt_state = optimizer.update(grads, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        return dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state), loss

    return StateKind(lambda: jdist.TrainState.create(_params(), optimizer), step)


def _nnx():
    from flax import nnx

    def make():
        model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    def step(state, x):
        model, optimizer = state
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(jnp.tanh(model(x) + 1) ** 2))(model)
        loss, grads = jdist.all_reduce("mean", (loss, grads))
        optimizer.update(model, grads)
        return (model, optimizer), loss

    return StateKind(make, step)


# Functions, so that flax is imported where a test uses it. The parameters of "policy" differ between replicas.
STATES = {
    "dict": _dict,
    "optax": _optax,
    "flax_train_state": _flax_train_state,
    "jdist_train_state": _jdist_train_state,
    "nnx": _nnx,
    "policy": lambda: _optax(jdist.sync.diloco(optax.adam(0.1), every=2), _loss_and_grads),
}


def among(names, *chosen):
    """Returns all names, with those that are not chosen marked as slow."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in names]


def each_row(names, rows, ids=None):
    """As `pytest.mark.parametrize`, in one test that reports every row that fails: for tables of short checks.

    The rows share the fixtures of the test.
    """
    names, rows = [name.strip() for name in names.split(",")], list(rows)
    ids = [str(row)[:80] for row in rows] if ids is None else list(ids)

    def decorate(test):
        arguments = inspect.signature(test).parameters
        fixtures = [argument for name, argument in arguments.items() if name not in names]
        if "subtests" not in arguments:
            fixtures.append(inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD))

        @functools.wraps(test)
        def run(subtests, **values):
            values |= {"subtests": subtests} if "subtests" in arguments else {}
            for row_id, row in zip(ids, rows, strict=True):
                with subtests.test(row_id):
                    test(**values, **dict(zip(names, [row] if len(names) == 1 else row, strict=True)))

        run.__signature__ = inspect.Signature(fixtures)
        return run

    return decorate


def each_value(pairs):
    """Returns a few of the pairs, in which each first value and each second value of the pairs occurs."""
    firsts, seconds = (list(dict.fromkeys(values)) for values in zip(*pairs, strict=True))
    fewer = min(len(firsts), len(seconds))
    chosen = [pair for pair in pairs if firsts.index(pair[0]) % fewer == seconds.index(pair[1]) % fewer]
    for pair in pairs:
        if not all(value in values for value, values in zip(pair, zip(*chosen, strict=True), strict=True)):
            chosen.append(pair)
    return chosen


def replica_devices(strategy):
    """Returns the devices of each replica, as a list of sets."""
    num_groups = strategy.num_replicas_in_sync if "replica" in strategy.mesh.axis_names else 1
    return list(map(set, strategy.mesh.devices.reshape(num_groups, -1)))


def rows(strategy, *shape, seed=0):
    """Returns random numbers, a `PerReplica` of float32 `[replica, *shape]`, which differ between the replicas."""
    values = np.random.default_rng(seed).normal(size=(strategy.num_replicas_in_sync, *shape)).astype(np.float32)
    return strategy.put(jdist.PerReplica(values))


def arrays(batch):
    """Returns the arrays `[replica, rows, ...]` of a batch, in its structure."""
    return jax.tree.map(lambda value: value.tree, batch, is_leaf=lambda node: isinstance(node, jdist.PerReplica))


def example_numbers(elements, has_weights=True):
    """Returns the numbers of the examples without padding, one list per batch: all leaves of example `i` consist of `i`.

    With `has_weights`, an element that is a tuple is a batch and its weights.
    """
    numbers = []
    for element in elements:
        batch, weights = element if has_weights and isinstance(element, tuple) else (element, None)
        leaves = [np.asarray(x).reshape(x.shape[0] * x.shape[1], -1) for x in jax.tree.leaves(batch)]
        for leaf in leaves:
            np.testing.assert_array_equal(leaf, np.broadcast_to(leaves[0][:, :1], leaf.shape))
        keep = slice(None) if weights is None else np.asarray(weights.tree).ravel() > 0
        numbers.append(leaves[0][keep, 0].tolist())
    return numbers


def resumed(dataset, state):
    """Returns an iterator of the data set that continues at a position, which is stored as JSON in between."""
    iterator = iter(dataset)
    iterator.set_state(json.loads(json.dumps(state)))
    return iterator


def assert_resumes_at_every_batch(make, strategy, others, limit=None):
    """Asserts that the data set `make(strategy)` continues on each of `others` after each of its batches.

    Returns the numbers of the examples, one list per batch, of the first `limit` batches.
    """
    iterator = iter(make(strategy))
    states, numbers = [iterator.get_state()], []
    for element in itertools.islice(iterator, limit):
        numbers += example_numbers([element])
        states.append(iterator.get_state())
    iterator.close()
    for other, (taken, state) in itertools.product(others, enumerate(states)):
        later = resumed(make(other), state)
        assert later.get_state() == state
        assert example_numbers(itertools.islice(later, limit and len(numbers) - taken)) == numbers[taken:]
        later.close()
    return numbers


def copies(array):
    """Returns the bytes of each device's copy of a replicated array."""
    return [np.asarray(shard.data).tobytes() for shard in array.addressable_shards]


def assert_in_step(tree):
    """Asserts that devices with the same part of a leaf, or all of it, hold the same bits, also of wrapped values."""
    testing.assert_replicated(jax.tree.leaves(tree))


def forget_failed_callbacks():
    """Clears JAX's record of callbacks that failed, which it would raise again at every later barrier."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.effects_barrier()
    dispatch.runtime_tokens.clear()


class Numbered:
    """A data set with `__len__` and `__getitem__` only."""

    def __init__(self, examples):
        self._examples = examples

    def __len__(self):
        return len(self._examples)

    def __getitem__(self, number):
        return self._examples[number]

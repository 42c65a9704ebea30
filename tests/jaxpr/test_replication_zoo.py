"""The replication analysis accepts ordinary training programs, and refuses each one without its gradient reduction."""

import functools

import jax
import numpy as np
import pytest

import jdist
from jdist._src.core.nn_modules import leaves_with_path

import zoo
from laws import among

# Each model, each optimizer and each kind of control flow; slow: control flow around a model with state of its own.
PROGRAMS = [zoo.program(model, "adamw") for model in zoo.MODELS]
PROGRAMS += [zoo.program("mlp", optimizer) for optimizer in zoo.OPTIMIZERS if optimizer != "adamw"]
PROGRAMS += [zoo.controlled(zoo.program("mlp", "adamw"), flow) for flow in zoo.FLOWS]
SLOW = [zoo.controlled(zoo.program("cnn_synchronised", "adamw"), flow) for flow in zoo.FLOWS]
every_program = pytest.mark.parametrize("program", among(PROGRAMS + SLOW, *PROGRAMS), ids=lambda program: program.name)
# "transformer" has the same blocks as "transformer_scanned".
RUNNING = [model for model in zoo.MODELS if model != "transformer"]


@functools.cache
def _strategy():
    return jdist.MirroredStrategy(["cpu:0", "cpu:1"])


@functools.cache
def _state_shapes(make_state):
    return jax.eval_shape(make_state, jax.random.key(0))


def _trace(step, program):
    """Traces and analyzes `step` on the shapes of the program's state and batch; nothing is compiled."""
    state = _state_shapes(program.make_state)
    batch = {name: jax.ShapeDtypeStruct((2, len(x) // 2, *x.shape[1:]), x.dtype) for name, x in program.batch.items()}
    jax.eval_shape(step, state, jdist.PerReplica(batch))
    return state


def _names(root, tree):
    return {root + jax.tree_util.keystr(path): leaf for path, leaf in leaves_with_path(tree)}


def _bits(x):
    """Returns the bytes of the shard of `x` on each device."""
    data = jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return [np.asarray(shard.data).tobytes() for shard in data.addressable_shards]


@every_program
def test_every_state_leaf_of_reduced_program_is_proved_replicated(program):
    step = _strategy().step(program.step)
    state = _trace(step, program)
    assert set(_names("state", state)) <= set(step.proof.replicated)
    assert step.proof.per_replica == ("output['own_loss']",)


@every_program
def test_error_of_unreduced_program_names_leaf_and_line(program):
    step = _strategy().step(functools.partial(program.step, reduce=False))
    with pytest.raises(jdist.NotMirroredError, match=r"state\['(params|opt_state)'\].*(?s:.*)\bzoo\.py:\d+"):
        _trace(step, program)


@pytest.mark.parametrize("model", among(RUNNING, "cnn_synchronised", "nnx"))
def test_leaf_proved_replicated_is_bitwise_equal_on_all_devices(model):
    program = zoo.program(model, "adamw")
    step = _strategy().step(program.step)
    state = _strategy().init(program.make_state, jax.random.key(0))
    for batch in _strategy().distribute_dataset(program.batch, zoo.EXAMPLES, epochs=2):
        state, outputs = step(state, batch)

    assert int(state["step"]) == 2
    assert np.isfinite(outputs["loss"])
    losses = [float(x) for x in outputs["own_loss"].values]
    assert losses[0] != losses[1]
    leaves = _names("state", state) | _names("output", outputs)
    for name in step.proof.replicated:
        first, second = _bits(leaves[name])
        assert first == second, name

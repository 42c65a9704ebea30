"""How the state of a model lies on a mesh: what is the optimizer's, which dim is split over which axis, what patterns say."""

import math
import re

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import Mesh, PartitionSpec

import jdist
from jdist import sync
from jdist._src.values.state_sharding import StateSharding, state_leaves

few = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)

PARAMS = {
    "one": {"kernel": jax.ShapeDtypeStruct((8, 16), jnp.float32), "bias": jax.ShapeDtypeStruct((16,), jnp.float32)},
    "two": {"kernel": jax.ShapeDtypeStruct((12, 20), jnp.float32), "bias": jax.ShapeDtypeStruct((3,), jnp.float32)},
}


def mesh(*shape, axes=("data",)):
    return Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), axes)


def layout(shard="optimizer", where=None, axis="data", **patterns):
    return StateSharding(where or mesh(4), axis, shard, patterns)


def splits(of, tree):
    """From the name of each leaf to how it is split."""
    return {leaf.name: tuple(found.spec) for leaf, found in zip(state_leaves(tree), of.shardings(tree), strict=True)}


# --- whose a leaf is


def _shapes(tx):
    return jax.eval_shape(tx.init, PARAMS)


BY_MODULE = {"one": True, "two": False}
LABELS = {"one": "adam", "two": "sgd"}
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(1e-3),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3), optax.ema(0.9)),
    "masked": optax.masked(optax.adam(1e-3), BY_MODULE),
    "multi_transform": optax.multi_transform({"adam": optax.adam(1e-3), "sgd": optax.sgd(0.1, momentum=0.9)}, LABELS),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "lbfgs": optax.lbfgs(),
    "muon": optax.contrib.muon(1e-3),
    "multi_steps": optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-3), 2),
    "int8": optax.chain(sync.int8(block_size=16), optax.adam(1e-3)),
    "top_k": optax.chain(sync.top_k(0.25), optax.adam(1e-3)),
    "power_sgd": optax.chain(sync.power_sgd(2), optax.adam(1e-3)),
    "every": sync.every(2, optax.chain(sync.mean(), optax.adam(1e-3))),
    "local_sgd": sync.local_sgd(optax.adam(1e-3), every=2),
    "diloco": sync.diloco(optax.adam(1e-3), every=2),
    "streaming_diloco": sync.streaming_diloco(optax.adam(1e-3), every=2, fragments=1, overlap=0),
}
HOMES = {
    "pair": lambda params, opt_state: (params, opt_state),
    "dict": lambda params, opt_state: {"anything": opt_state, "params": params},
    "nested": lambda params, opt_state: {"generator": {"weights": params, "tx": [opt_state]}, "step": jnp.int32(0)},
    "train_state": lambda params, opt_state: train_state.TrainState(
        jnp.int32(0), apply_fn=len, params=params, tx=OPTIMIZERS["sgd"], opt_state=opt_state
    ),
}


@pytest.mark.parametrize("home", HOMES.values(), ids=HOMES)
@pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer_state_is_known_wherever_it_lies(tx, home):
    of_optimizer = lambda state: sum(leaf.is_optimizer for leaf in state_leaves(state))
    opt_state = _shapes(tx)
    state = home(PARAMS, opt_state)
    assert of_optimizer(state) == len(jax.tree.leaves(opt_state))
    assert of_optimizer(home(PARAMS, ())) == 0
    assert [leaf.value for leaf in state_leaves(state)] == jax.tree.leaves(state)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def test_optimizer_state_of_nnx_is_known_and_follows_its_parameters():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    state = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
    expected = ["optimizer" in leaf.path for leaf in state_leaves(state)]
    assert [leaf.is_optimizer for leaf in state_leaves(state)] == expected
    assert sum(expected) == 10

    _, alone = nnx.split((model, optimizer))  # by no name of ours but nnx's own, `opt_state`
    assert sum(leaf.is_optimizer for leaf in state_leaves(alone)) == 9
    of = layout("all", mesh(2, 2, axes=("data", "model")), **{"dense/kernel": PartitionSpec(None, "model")})
    found = splits(of, state)
    kernels = [split for name, split in found.items() if "kernel" in name]
    assert kernels == [("data", "model")] * 3


@pytest.mark.parametrize("name", ["opt_state", "optimizer"])
def test_state_of_an_optimizer_written_by_hand_is_known_by_its_name(name):
    found = splits(layout(), {"params": PARAMS, name: {"m": PARAMS, "count": jnp.int32(0)}})
    assert {split for leaf, split in found.items() if "params" in leaf} == {()}
    assert found[f"state['{name}']['m']['one']['kernel']"] == (None, "data")
    assert found[f"state['{name}']['m']['one']['bias']"] == ("data",)
    assert found[f"state['{name}']['m']['two']['bias']"] == found[f"state['{name}']['count']"] == ()


def test_copies_that_the_user_keeps_are_no_optimizers():
    state = {"params": PARAMS, "ema": PARAMS, "opt_state": _shapes(optax.ema(0.9))}
    owners = {leaf.path[0] for leaf in state_leaves(state) if leaf.is_optimizer}
    assert owners == {"opt_state"}


# --- companions


@pytest.mark.parametrize("home", HOMES.values(), ids=HOMES)
@pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer_keeps_for_a_parameter_is_split_as_that_is(tx, home):
    of = layout("optimizer", mesh(2, 2, axes=("data", "model")), **{"one/kernel": PartitionSpec("model")})
    state = home(PARAMS, _shapes(tx))
    for leaf, sharding in zip(state_leaves(state), of.shardings(state), strict=True):
        if leaf.shape == (8, 16):  # no other parameter has it
            assert tuple(sharding.spec) == (("model", "data") if leaf.is_optimizer else ("model",)), leaf.name
        else:
            assert "model" not in sharding.spec, leaf.name


@pytest.mark.parametrize("copy", ["ema", "zzz"])  # before and after `params`
def test_companion_of_a_moment_is_the_parameter_and_not_a_copy_of_it(copy):
    of = layout("optimizer", mesh(2, 2, axes=("data", "model")), **{"params/one/kernel": PartitionSpec("model")})
    found = splits(of, {copy: PARAMS, "params": PARAMS, "opt_state": _shapes(optax.sgd(0.1, momentum=0.9))})
    assert found["state['opt_state'][0].trace['one']['kernel']"] == ("model", "data")
    assert found[f"state['{copy}']['one']['kernel']"] == ()


def test_companions_with_one_ending_are_told_apart_by_the_rest():
    params = {name: {"layer": {"kernel": jnp.zeros((8, 16))}} for name in ("encoder", "decoder")}
    of = layout("optimizer", mesh(2, 2, axes=("data", "model")), **{"encoder": PartitionSpec("model")})
    found = splits(of, (params, optax.sgd(0.1, momentum=0.9).init(params)))
    assert found["state[1][0].trace['encoder']['layer']['kernel']"] == ("model", "data")
    assert found["state[1][0].trace['decoder']['layer']['kernel']"] == (None, "data")


# --- which dim


SPLIT = {
    "largest": ((8, 16, 4), (None, "data", None)),
    "first_of_equals": ((8, 8), ("data", None)),
    "largest_that_divides": ((8, 18), ("data", None)),
    "no_dim_divides": ((3, 5), ()),
    "smaller_than_the_axis": ((2, 3), ()),
    "scalar": ((), ()),
    "empty": ((0,), ()),
    "empty_beside_another": ((0, 8), (None, "data")),
}


@pytest.mark.parametrize("shape, expected", SPLIT.values(), ids=SPLIT)
def test_leaf_is_split_along_its_largest_dim_that_divides(shape, expected):
    assert splits(layout("all"), jnp.zeros(shape)) == {"state": expected}


def test_random_keys_are_whole_but_what_looks_like_one_is_not():
    keys = jax.random.split(jax.random.key(0), 8)
    assert splits(layout("all"), [keys, jax.random.key_data(keys)]) == {"state[0]": (), "state[1]": ("data", None)}


@pytest.mark.parametrize("shard, parameter", [("optimizer", ()), ("gradients", ()), ("all", (None, "data"))])
def test_shard_says_whether_parameters_are_split(shard, parameter):
    found = splits(layout(shard), (PARAMS, _shapes(optax.adam(1e-3))))
    assert found["state[0]['one']['kernel']"] == parameter
    assert found["state[1][0].mu['one']['kernel']"] == found["state[1][0].nu['one']['kernel']"] == (None, "data")


def test_stacked_values_are_split_beside_their_replicas():
    value = jdist.SyncOnRead(np.zeros((1, 8, 16), np.float32), jdist.VariableAggregation.MEAN)
    assert splits(layout("all"), {"w": value, "n": jdist.Mirrored(np.zeros((8, 4)))}) == {
        "state['n']": ("data", None),
        "state['w']": (None, None, "data"),
    }


AXES = {"data": (0, 1), "data_model": (1, 2), "host_data": (2, 1), "host_data_model": (2, 2)}
shapes = st.lists(st.integers(0, 12), max_size=4).map(tuple)


@st.composite
def _wanted(draw, shape, parts):
    """A `PartitionSpec` over the model axis that fits `shape`, or one that splits nothing."""
    fits = [dim for dim, size in enumerate(shape) if size % parts == 0]
    if not fits or draw(st.booleans()):
        return PartitionSpec()
    return PartitionSpec(*[None] * draw(st.sampled_from(fits)), "model")


@few
@hypothesis.given(
    st.data(), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2]), st.sampled_from(["optimizer", "all"])
)
def test_every_layout_is_valid_and_no_device_holds_more_than_its_part(data, size, model, shard):
    where = mesh(size, model, axes=("data", "model"))
    params = {
        f"w{i}": jax.ShapeDtypeStruct(data.draw(shapes), jnp.float32) for i in range(data.draw(st.integers(1, 3)))
    }
    patterns = {rf"^0/{name}$": data.draw(_wanted(leaf.shape, model)) for name, leaf in params.items()}
    state = params, jax.eval_shape(optax.adam(1e-3).init, params)
    for leaf, sharding in zip(state_leaves(state), layout(shard, where, **patterns).shardings(state), strict=True):
        part = sharding.shard_shape(leaf.shape)  # raises where it does not fit
        parts = math.prod(where.shape[axis] for axis in sharding.spec if axis)
        assert math.prod(part) * parts == math.prod(leaf.shape)
        axes = [axis for axis in sharding.spec if axis]
        assert len(axes) == len(set(axes))
        wanted = patterns.get(rf"^0/{leaf.path[-1]}$", ())
        free = [n for dim, n in enumerate(leaf.shape) if n and n % size == 0 and (*wanted, *[None] * 4)[dim] is None]
        if shard == "all" or leaf.is_optimizer:
            assert ("data" in axes) == bool(free and size > 1)
            assert not free or size == 1 or leaf.shape[sharding.spec.index("data")] == max(free)
        else:
            assert "data" not in axes


@pytest.mark.parametrize("split", [("data",), (None, "data"), (("data", "model"),), (("model", "data"), None)])
def test_axis_that_a_pattern_names_is_not_taken_again(split):
    of = layout("all", mesh(2, 2, axes=("data", "model")), **{"^w$": PartitionSpec(*split)})
    assert splits(of, {"w": jnp.zeros((8, 16))}) == {"state['w']": split}


def test_pattern_may_leave_a_parameter_whole_and_be_over_two_axes():
    where = mesh(2, 2, 2, axes=("data", "model", "expert"))
    patterns = {"one/kernel": PartitionSpec(None, ("model", "expert")), "two": PartitionSpec()}
    found = splits(layout("optimizer", where, **patterns), PARAMS)
    assert found["state['one']['kernel']"] == (None, ("model", "expert"))
    assert found["state['two']['kernel']"] == ()


# --- what is wrong with patterns


WRONG = {
    "nothing": (
        {"three": PartitionSpec()},
        r"pattern 'three', which matches no parameter\. There are '0/one/bias', '0/one/",
    ),
    "only_optimizer": (
        {"trace": PartitionSpec()},
        r"pattern 'trace', which matches no parameter\. There are '0/one/bias'",
    ),
    "twice": (
        {"one": PartitionSpec(), "kernel": PartitionSpec()},
        r"state\[0\]\['one'\]\['kernel'\] \(0/one/kernel\) is matched by 2 patterns of `layout`, 'one', 'kernel'",
    ),
    "not_dividing": (
        {"two/kernel": PartitionSpec(None, ("data", "model"))},
        r"dim 1 of state\[0\]\['two'\]\['kernel'\], float32\[12,20\], over \('data', 'model'\), and 20 is no multiple of 8",
    ),
    "odd": (
        {"two/bias": PartitionSpec("model")},
        r"splits dim 0 of state\[0\]\['two'\]\['bias'\], float32\[3\], over 'model', and 3 is no multiple of 2",
    ),
    "too_many_dims": (
        {"one/bias": PartitionSpec(None, "model")},
        r"is P\w*\(None, 'model'\), for 2 dims, and state\[0\]\['one'\]\['bias'\] is float32\[16\]",
    ),
}


@pytest.mark.parametrize("patterns, says", WRONG.values(), ids=WRONG)
def test_pattern_that_does_not_fit_the_state_is_refused(patterns, says):
    state = PARAMS, _shapes(optax.sgd(0.1, momentum=0.9))
    of = layout("all", mesh(4, 2, axes=("data", "model")), **patterns)
    with pytest.raises(ValueError, match=says):
        of.shardings(state)


REFUSED = {
    "unknown_axis": (ValueError, {"w": PartitionSpec("tensor")}, r"layout\['w'\].*'tensor'.* mesh has data, model"),
    "unknown_among_two": (ValueError, {"w": PartitionSpec(("data", "x"))}, r"\['w'\].*'x'.* mesh has data, model"),
    "no_spec": (TypeError, {"w": ("data",)}, r"maps patterns, as text, to .*PartitionSpec`s, got 'w': \('data',\)"),
    "none": (TypeError, {"w": None}, r"maps patterns, as text, to `jax\.sharding\.PartitionSpec`s, got 'w': None"),
    "bad_regex": (
        ValueError,
        {"w(": PartitionSpec()},
        r"pattern 'w\(', no regular expression: missing \), unterminated",
    ),
    "axis_twice": (ValueError, {"w": PartitionSpec("model", "model")}, r"\['w'\]` is P.* names the axis 'model' twice"),
    "no_text": (TypeError, {3: PartitionSpec()}, r"maps patterns, as text, .* got 3: P"),
}


@pytest.mark.parametrize("error, patterns, says", REFUSED.values(), ids=REFUSED)
def test_pattern_that_fits_no_state_is_refused_at_once(error, patterns, says):
    with pytest.raises(error, match=says):
        StateSharding(mesh(4, 2, axes=("data", "model")), "data", "all", patterns)


@pytest.mark.parametrize("shard", ["params", 1, None, ["all"]])
def test_shard_that_is_not_known_is_refused(shard):
    with pytest.raises(ValueError, match=r'"optimizer", "gradients" or "all", got ' + re.escape(repr(shard))):
        layout(shard)


def test_patterns_found_in_what_is_put_need_not_be_in_a_batch():
    of = layout(
        "all", mesh(2, 2, axes=("data", "model")), **{"one/kernel": PartitionSpec("model"), "two": PartitionSpec()}
    )
    assert of.shardings({"images": jnp.zeros((4, 3))}, is_state=False)
    with pytest.raises(ValueError, match="pattern 'two', which matches no parameter"):
        of.shardings({"one": PARAMS["one"]}, is_state=False)
    with pytest.raises(ValueError, match="pattern 'one/kernel', which matches no parameter"):
        of.shardings({"images": jnp.zeros((4, 3))})


# --- gradients


@pytest.mark.parametrize(
    "shard, expected", [("optimizer", None), ("gradients", (None, "data")), ("all", (None, "data"))]
)
def test_gradients_are_reduced_to_where_their_moments_lie(shard, expected):
    params = {"dense": nn.Dense(16).init(jax.random.key(0), jnp.zeros((1, 8)))["params"]}
    reduced = layout(shard).reduced((params, optax.adam(1e-3).init(params)))
    assert (reduced is None) == (expected is None)
    if reduced:
        found = jax.jit(reduced)({"loss": jnp.zeros(8), "grads": params})
        assert found["grads"]["dense"]["kernel"].sharding.spec == PartitionSpec(*expected)
        np.testing.assert_array_equal(found["grads"]["dense"]["kernel"], params["dense"]["kernel"])

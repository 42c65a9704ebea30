"""`StateSharding`: which leaves belong to the optimizer, and which dim of each leaf is split over which mesh axis."""

import math
import re
from typing import Any, NamedTuple

import chex
import flax
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
from jax.sharding import PartitionSpec as P

import jdist
from jdist import sync
from jdist._src.values.state_sharding import StateSharding, layout_rules, state_leaves

from laws import each_row

few = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)

PARAMS = {
    "one": {"kernel": jax.ShapeDtypeStruct((8, 16), jnp.float32), "bias": jax.ShapeDtypeStruct((16,), jnp.float32)},
    "two": {"kernel": jax.ShapeDtypeStruct((12, 20), jnp.float32), "bias": jax.ShapeDtypeStruct((3,), jnp.float32)},
}


def mesh(*shape, axes=("data",)):
    return Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), axes)


def layout(shard="optimizer", device_mesh=None, axis="data", **patterns):
    return StateSharding(device_mesh or mesh(4), axis, shard, patterns)


def splits(rules, tree):
    """Maps the name of each leaf to its spec."""
    pairs = zip(state_leaves(tree), rules.shardings(tree), strict=True)
    return {leaf.name: tuple(sharding.spec) for leaf, sharding in pairs}


# --- leaves of optimizer states


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
    "every": sync.every(optax.chain(sync.mean(), optax.adam(1e-3)), 2),
    "local_sgd": sync.local_sgd(optax.adam(1e-3), every=2),
    "diloco": sync.diloco(optax.adam(1e-3), every=2),
    "streaming_diloco": sync.streaming_diloco(optax.adam(1e-3), every=2, fragments=1, overlap=0),
}
CONTAINERS = {
    "pair": lambda params, opt_state: (params, opt_state),
    "dict": lambda params, opt_state: {"anything": opt_state, "params": params},
    "nested": lambda params, opt_state: {"generator": {"weights": params, "tx": [opt_state]}, "step": jnp.int32(0)},
    "train_state": lambda params, opt_state: train_state.TrainState(
        jnp.int32(0), apply_fn=len, params=params, tx=OPTIMIZERS["sgd"], opt_state=opt_state
    ),
}


@each_row("container", CONTAINERS.values(), ids=CONTAINERS)
@each_row("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer_state_is_recognized_in_every_container_and_its_moments_are_split_like_the_parameter(tx, container):
    rules = layout("optimizer", mesh(2, 2, axes=("data", "model")), **{"one/kernel": PartitionSpec("model")})
    opt_state = _shapes(tx)
    state = container(PARAMS, opt_state)
    leaves = state_leaves(state)
    assert [leaf.value for leaf in leaves] == jax.tree.leaves(state)
    assert sum(leaf.is_optimizer for leaf in leaves) == len(jax.tree.leaves(opt_state))
    for leaf, sharding in zip(leaves, rules.shardings(state), strict=True):
        if leaf.shape == (8, 16):  # no other parameter has it
            assert tuple(sharding.spec) == (("model", "data") if leaf.is_optimizer else ("model",)), leaf.name
        else:
            assert "model" not in sharding.spec, leaf.name
    assert not any(leaf.is_optimizer for leaf in state_leaves(container(PARAMS, ())))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def test_optimizer_state_of_nnx_is_recognized_and_split_like_its_parameters():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    state = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
    expected = ["optimizer" in leaf.path for leaf in state_leaves(state)]
    assert [leaf.is_optimizer for leaf in state_leaves(state)] == expected
    assert sum(expected) == 10

    _, unnamed = nnx.split((model, optimizer))  # by the class of the variables
    assert sum(leaf.is_optimizer for leaf in state_leaves(unnamed)) == 10
    rules = layout("all", mesh(2, 2, axes=("data", "model")), **{"dense/kernel": PartitionSpec(None, "model")})
    specs = splits(rules, state)
    kernels = [split for name, split in specs.items() if "kernel" in name]
    assert kernels == [("data", "model")] * 3


@pytest.mark.parametrize("name", ["opt_state", "optimizer"])
def test_state_of_a_custom_optimizer_is_recognized_by_its_key(name):
    specs = splits(layout(), {"params": PARAMS, name: {"m": PARAMS, "count": jnp.int32(0)}})
    assert {split for leaf, split in specs.items() if "params" in leaf} == {()}
    assert specs[f"state['{name}']['m']['one']['kernel']"] == (None, "data")
    assert specs[f"state['{name}']['m']['one']['bias']"] == ("data",)
    assert specs[f"state['{name}']['m']['two']['bias']"] == specs[f"state['{name}']['count']"] == ()


def test_copies_of_parameters_are_not_optimizer_states():
    state = {"params": PARAMS, "ema": PARAMS, "opt_state": _shapes(optax.ema(0.9))}
    owners = {leaf.path[0] for leaf in state_leaves(state) if leaf.is_optimizer}
    assert owners == {"opt_state"}


class MyAdamState(NamedTuple):
    count: Any
    m: Any
    v: Any


class MyNetwork(NamedTuple):
    weights: Any


UNRECOGNIZED = {
    "beside_parameters": ({"params": PARAMS, "adam": MyAdamState(jnp.int32(0), PARAMS, PARAMS)}, r"state\['adam'\]"),
    "nested": (
        ({"net": {"params": PARAMS}, "extra": [MyAdamState(0, PARAMS["one"], {})]},),
        r"state\[0\]\['extra'\]\[0\]",
    ),
    "pair": ((PARAMS, MyAdamState(0, PARAMS, PARAMS)), r"state\[1\]"),
}


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
@pytest.mark.parametrize("state, name", UNRECOGNIZED.values(), ids=UNRECOGNIZED)
def test_state_that_looks_like_an_optimizer_state_is_named_by_a_warning(state, name, shard):
    message = rf"^{name} \(MyAdamState\) looks like the state of an optimizer: `m` has .*key `opt_state`"
    with pytest.warns(jdist.UnrecognizedOptimizerStateWarning, match=message) as warned:
        layout(shard).shardings(state)
    assert len(warned) == 1 and warned[0].filename == __file__


NOT_OPTIMIZERS = {
    "declared_by_key": {"params": PARAMS, "opt_state": MyAdamState(0, PARAMS, PARAMS)},
    "optax": (PARAMS, _shapes(optax.adam(1e-3))),
    "container": MyAdamState(0, PARAMS, PARAMS),
    "container_below_the_root": {"state": MyAdamState(0, PARAMS, {}), "metrics": jdist.metrics.Mean()},
    "target_network": {"online": MyNetwork(PARAMS), "target": MyNetwork(PARAMS)},
    "copy": {"params": PARAMS, "ema": PARAMS},
    "other_structure": {"params": PARAMS, "stats": MyAdamState(0, {"one": {"mean": jnp.zeros(16)}}, ())},
    "one_array": {"params": jnp.zeros(16), "stats": MyAdamState(0, jnp.zeros(16), ())},
}


@pytest.mark.parametrize("state", NOT_OPTIMIZERS.values(), ids=NOT_OPTIMIZERS)
def test_other_states_are_not_named_by_a_warning(state):  # a warning is an error here
    layout("optimizer").shardings(state)


def test_no_warning_where_the_split_does_not_depend_on_it():
    state, _ = UNRECOGNIZED["pair"]
    layout("all").shardings(state)
    layout("optimizer").shardings(state, is_state=False)


# --- partition metadata of flax


class Annotated(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.zeros
        x = nn.Dense(16, kernel_init=nn.with_partitioning(init, (None, "model")))(x)
        x = nn.Dense(8, kernel_init=nn.with_logical_partitioning(init, ("embed", "mlp")), name="logical")(x)
        rules = (("embed", "model"),)
        return nn.Dense(8, kernel_init=nn.with_logical_partitioning(init, ("embed", None), rules=rules), name="own")(x)


ANNOTATED = jax.eval_shape(Annotated().init, jax.random.key(0), jnp.zeros((1, 8)))["params"]


def test_partition_metadata_of_linen_splits_parameters_and_their_moments():
    rules = layout("optimizer", mesh(2, 2, axes=("data", "model")))
    state = {"params": ANNOTATED, "opt_state": jax.eval_shape(optax.adam(1e-3).init, ANNOTATED)}
    specs = splits(rules, state)
    assert specs["state['params']['Dense_0']['kernel']"] == (None, "model")
    assert specs["state['opt_state'][0].mu['Dense_0']['kernel']"] == ("data", "model")
    assert specs["state['params']['own']['kernel']"] == ("model", None)
    assert specs["state['opt_state'][0].nu['own']['kernel']"] == ("model", "data")
    assert specs["state['params']['logical']['kernel']"] == ()  # names without a rule
    with nn.logical_axis_rules((("mlp", "model"),)):
        assert splits(rules, state)["state['params']['logical']['kernel']"] == (None, "model")


def test_pattern_of_layout_overrides_partition_metadata():
    rules = layout("optimizer", mesh(2, 2, axes=("data", "model")), **{"Dense_0/kernel": PartitionSpec("model")})
    assert splits(rules, ANNOTATED)["state['Dense_0']['kernel']"] == ("model",)


def test_axes_of_partition_metadata_that_the_mesh_does_not_have_are_ignored():
    specs = splits(layout("all"), ANNOTATED)
    assert specs["state['Dense_0']['kernel']"] == (None, "data")


def test_partition_metadata_that_does_not_divide_the_shape_is_refused():
    box = flax.core.meta.Partitioned(jnp.zeros((4, 3)), names=(None, "model"))
    message = (
        r"its partition metadata splits dim 1 of state\['w'\], float32\[4,3\], over 'model', and 3 is not a multiple "
        r"of 2\. .*`layout=\{'w': PartitionSpec\(\)\}`"
    )
    with pytest.raises(ValueError, match=message):
        layout("all", mesh(2, 2, axes=("data", "model"))).shardings({"w": box})


def test_step_with_partition_metadata_computes_what_one_device_computes():
    net, tx = Annotated(), optax.sgd(0.1, momentum=0.9)
    init = lambda: (params := net.init(jax.random.key(0), jnp.zeros((1, 8)))["params"], tx.init(params))

    def step(state, x):
        params, opt_state = state
        grads = jax.grad(lambda params: jnp.mean((net.apply({"params": params}, x) - 1) ** 2))(params)
        updates, opt_state = tx.update(jdist.all_reduce("mean", grads), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    strategy = jdist.ShardedStrategy("optimizer", mesh=mesh(2, 2, axes=("data", "model")), model_axis="model")
    state, _ = strategy.step(step)(strategy.init(init), strategy.split(x))
    assert state[0]["Dense_0"]["kernel"].value.sharding.spec == PartitionSpec(None, "model")
    expected, _ = jax.jit(step)(init(), x)
    chex.assert_trees_all_close(jax.device_get(state), jax.device_get(expected), rtol=1e-5, atol=1e-6)


def test_sharding_metadata_of_nnx_splits_parameters_and_their_moments():
    init = nnx.with_metadata(nnx.initializers.zeros, out_sharding=(None, "model"), eager_sharding=False)
    model = nnx.Linear(8, 16, kernel_init=init, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    rules = layout("optimizer", mesh(2, 2, axes=("data", "model")))
    specs = splits(rules, {"model": nnx.state(model), "tx": nnx.state(optimizer)})
    kernels = {name: spec for name, spec in specs.items() if "kernel" in name}
    assert len(kernels) == 3 and kernels.pop("state['model']['kernel']") == (None, "model")
    assert set(kernels.values()) == {("data", "model")}


# --- split of the moments of a parameter


@pytest.mark.parametrize("copy", ["ema", "zzz"])  # before and after `params`
def test_moment_is_split_like_the_parameter_and_not_like_a_copy_of_it(copy):
    rules = layout("optimizer", mesh(2, 2, axes=("data", "model")), **{"params/one/kernel": PartitionSpec("model")})
    specs = splits(rules, {copy: PARAMS, "params": PARAMS, "opt_state": _shapes(optax.sgd(0.1, momentum=0.9))})
    assert specs["state['opt_state'][0].trace['one']['kernel']"] == ("model", "data")
    assert specs[f"state['{copy}']['one']['kernel']"] == ()


def test_parameters_with_the_same_end_of_path_are_distinguished_by_the_full_path():
    params = {name: {"layer": {"kernel": jnp.zeros((8, 16))}} for name in ("encoder", "decoder")}
    rules = layout("optimizer", mesh(2, 2, axes=("data", "model")), **{"encoder": PartitionSpec("model")})
    specs = splits(rules, (params, optax.sgd(0.1, momentum=0.9).init(params)))
    assert specs["state[1][0].trace['encoder']['layer']['kernel']"] == ("model", "data")
    assert specs["state[1][0].trace['decoder']['layer']['kernel']"] == (None, "data")


# --- dim


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


def test_random_keys_are_replicated_and_raw_key_data_is_split():
    keys = jax.random.split(jax.random.key(0), 8)
    assert splits(layout("all"), [keys, jax.random.key_data(keys)]) == {"state[0]": (), "state[1]": ("data", None)}


@pytest.mark.parametrize("shard, parameter", [("optimizer", ()), ("gradients", ()), ("all", (None, "data"))])
def test_shard_defines_whether_parameters_are_split(shard, parameter):
    specs = splits(layout(shard), (PARAMS, _shapes(optax.adam(1e-3))))
    assert specs["state[0]['one']['kernel']"] == parameter
    assert specs["state[1][0].mu['one']['kernel']"] == specs["state[1][0].nu['one']['kernel']"] == (None, "data")


def test_stacked_values_are_split_after_the_replica_dim():
    value = jdist.SyncOnRead(np.zeros((1, 8, 16), np.float32), jdist.VariableAggregation.MEAN)
    assert splits(layout("all"), {"w": value, "n": jdist.Mirrored(np.zeros((8, 4)))}) == {
        "state['n']": ("data", None),
        "state['w']": (None, None, "data"),
    }


AXES = {"data": (0, 1), "data_model": (1, 2), "host_data": (2, 1), "host_data_model": (2, 2)}
shapes = st.lists(st.integers(0, 12), max_size=4).map(tuple)


@st.composite
def _wanted(draw, shape, parts):
    """Draws a `PartitionSpec` over the model axis that fits `shape`, or an empty one."""
    fits = [dim for dim, size in enumerate(shape) if size % parts == 0]
    if not fits or draw(st.booleans()):
        return PartitionSpec()
    return PartitionSpec(*[None] * draw(st.sampled_from(fits)), "model")


@few
@hypothesis.given(
    st.data(), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2]), st.sampled_from(["optimizer", "all"])
)
def test_every_layout_is_valid_and_no_device_stores_more_than_its_shard(data, size, model, shard):
    device_mesh = mesh(size, model, axes=("data", "model"))
    params = {
        f"w{i}": jax.ShapeDtypeStruct(data.draw(shapes), jnp.float32) for i in range(data.draw(st.integers(1, 3)))
    }
    patterns = {rf"^0/{name}$": data.draw(_wanted(leaf.shape, model)) for name, leaf in params.items()}
    state = params, jax.eval_shape(optax.adam(1e-3).init, params)
    for leaf, sharding in zip(
        state_leaves(state), layout(shard, device_mesh, **patterns).shardings(state), strict=True
    ):
        part = sharding.shard_shape(leaf.shape)  # raises device_mesh it does not fit
        parts = math.prod(device_mesh.shape[axis] for axis in sharding.spec if axis)
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
def test_axis_that_a_pattern_names_is_not_used_again(split):
    rules = layout("all", mesh(2, 2, axes=("data", "model")), **{"^w$": PartitionSpec(*split)})
    assert splits(rules, {"w": jnp.zeros((8, 16))}) == {"state['w']": split}


def test_pattern_may_replicate_a_parameter_or_split_a_dim_over_two_axes():
    device_mesh = mesh(2, 2, 2, axes=("data", "model", "expert"))
    patterns = {"one/kernel": PartitionSpec(None, ("model", "expert")), "two": PartitionSpec()}
    specs = splits(layout("optimizer", device_mesh, **patterns), PARAMS)
    assert specs["state['one']['kernel']"] == (None, ("model", "expert"))
    assert specs["state['two']['kernel']"] == ()


# --- invalid patterns


WRONG = {
    "nothing": (
        {"three": PartitionSpec()},
        r"pattern 'three', which matches no parameter\. The parameters are '0/one/bias', '0/one/",
    ),
    "only_optimizer": (
        {"trace": PartitionSpec()},
        r"pattern 'trace', which matches no parameter\. The parameters are '0/one/bias'",
    ),
    "twice": (
        {"one": PartitionSpec(), "kernel": PartitionSpec()},
        r"state\[0\]\['one'\]\['kernel'\] \(0/one/kernel\) is matched by 2 patterns of `layout`, 'one', 'kernel'",
    ),
    "not_dividing": (
        {"two/kernel": PartitionSpec(None, ("data", "model"))},
        r"dim 1 of state\[0\]\['two'\]\['kernel'\], float32\[12,20\], over \('data', 'model'\), and 20 is not a multiple of 8",
    ),
    "odd": (
        {"two/bias": PartitionSpec("model")},
        r"splits dim 0 of state\[0\]\['two'\]\['bias'\], float32\[3\], over 'model', and 3 is not a multiple of 2",
    ),
    "too_many_dims": (
        {"one/bias": PartitionSpec(None, "model")},
        r"is P\w*\(None, 'model'\), for 2 dims, and state\[0\]\['one'\]\['bias'\] is float32\[16\]",
    ),
}


@each_row("patterns, message", WRONG.values(), ids=WRONG)
def test_pattern_that_does_not_fit_the_state_is_refused(patterns, message):
    state = PARAMS, _shapes(optax.sgd(0.1, momentum=0.9))
    rules = layout("all", mesh(4, 2, axes=("data", "model")), **patterns)
    with pytest.raises(ValueError, match=message):
        rules.shardings(state)


# --- rules, of which the first match applies


def rules_of(rules, *, shard="optimizer"):
    return StateSharding(mesh(2, 2, axes=("data", "model")), "data", shard, **layout_rules(rules))


def test_first_rule_that_matches_applies_and_optimizer_state_follows():
    state = {"params": PARAMS, "opt_state": _shapes(optax.adam(1e-3))}
    specs = splits(
        rules_of([("one/kernel", (None, "model")), ("kernel", ("model",)), ("two/no/such", None), (".*", P())]), state
    )
    assert specs["state['params']['one']['kernel']"] == (None, "model")
    assert specs["state['params']['two']['kernel']"] == ("model",)
    assert specs["state['params']['one']['bias']"] == ()
    assert specs["state['opt_state'][0].mu['one']['kernel']"] == ("data", "model")
    assert specs["state['opt_state'][0].mu['two']['kernel']"] == ("model", "data")


def test_first_of_equal_rules_applies():
    specs = splits(rules_of([("kernel", ("model",)), ("kernel", None)]), PARAMS)
    assert specs["state['one']['kernel']"] == ("model",)


SPECS = {"spec": P("model"), "tuple": ("model",), "list_of_axes": (("model", "data"),), "none": None, "empty": ()}


@each_row("spec", SPECS.values(), ids=SPECS)
def test_specs_of_rules_mean_partition_specs(spec):
    expected = tuple(P(*(spec or ())))
    assert splits(rules_of([("w", spec)]), {"w": jnp.zeros((8, 4))}) == {"state['w']": expected}


def test_rules_skip_leaves_of_one_element():
    state = {"step": jnp.int32(0), "scale": jnp.ones((1, 1)), "w": jnp.zeros((4, 4))}
    assert splits(rules_of([(".*", ("data", "model"))]), state) == {
        "state['scale']": (),
        "state['step']": (),
        "state['w']": ("data", "model"),
    }


def test_leaf_without_a_rule_has_its_metadata_or_is_replicated():
    import flax.linen as nn

    box = nn.Partitioned(jnp.zeros((4, 4)), ("model", None))
    specs = splits(rules_of([("other", ("data",))]), {"box": box, "plain": jnp.zeros(4)})
    assert {tuple(filter(None, spec)) for spec in specs.values()} == {("model",), ()}
    overridden = splits(rules_of([("box", None)]), {"box": box})
    assert list(overridden.values()) == [()]


def test_all_leaves_that_their_rule_does_not_fit_by_rank_are_named():
    rules = rules_of([("kernel", ("model",)), (".*", ("data", "model"))])
    with pytest.raises(ValueError, match="^2 leaves have fewer dims than the first rule of `layout`") as caught:
        rules.shardings(PARAMS)
    lines = str(caught.value).splitlines()
    assert [line.strip().split(" by ")[0] for line in lines[1:-1]] == [
        "one/bias, float32[16],",
        "two/bias, float32[3],",
    ]
    assert all("('.*', P" in line and "'data', 'model'" in line for line in lines[1:-1])
    assert "(path, PartitionSpec())" in lines[-1]


def test_rule_that_does_not_divide_a_leaf_is_named():
    message = r"^The rule 'bias' of `layout` splits dim 0 of state\['two'\]\['bias'\], float32\[3\], over 'model', and 3 is not"
    with pytest.raises(ValueError, match=message):
        rules_of([("bias", ("model",))]).shardings(PARAMS)


REFUSED = {
    "unknown_axis": (ValueError, {"w": PartitionSpec("tensor")}, r"layout\['w'\].*'tensor'.* mesh has data, model"),
    "unknown_among_two": (ValueError, {"w": PartitionSpec(("data", "x"))}, r"\['w'\].*'x'.* mesh has data, model"),
    "not_a_spec": (
        TypeError,
        {"w": ("data",)},
        r"must map patterns, which are strings, to .*PartitionSpec`s, got 'w': \('data',\)",
    ),
    "none": (
        TypeError,
        {"w": None},
        r"must map patterns, which are strings, to `jax\.sharding\.PartitionSpec`s, got 'w': None",
    ),
    "bad_regex": (
        ValueError,
        {"w(": PartitionSpec()},
        r"pattern 'w\(', which is not a regular expression: missing \), unterminated",
    ),
    "axis_twice": (ValueError, {"w": PartitionSpec("model", "model")}, r"\['w'\]` is P.* names the axis 'model' twice"),
    "not_a_string": (TypeError, {3: PartitionSpec()}, r"must map patterns, which are strings, .* got 3: P"),
}


@each_row("error, patterns, message", REFUSED.values(), ids=REFUSED)
def test_invalid_pattern_is_refused_immediately(error, patterns, message):
    with pytest.raises(error, match=message):
        StateSharding(mesh(4, 2, axes=("data", "model")), "data", "all", patterns)


@each_row("shard", ["params", 1, None, ["all"]])
def test_unknown_shard_is_refused(shard):
    with pytest.raises(ValueError, match=r'"optimizer", "gradients" or "all", got ' + re.escape(repr(shard))):
        layout(shard)


def test_patterns_need_not_match_a_batch():
    rules = layout(
        "all", mesh(2, 2, axes=("data", "model")), **{"one/kernel": PartitionSpec("model"), "two": PartitionSpec()}
    )
    assert rules.shardings({"images": jnp.zeros((4, 3))}, is_state=False)
    with pytest.raises(ValueError, match="pattern 'two', which matches no parameter"):
        rules.shardings({"one": PARAMS["one"]}, is_state=False)
    with pytest.raises(ValueError, match="pattern 'one/kernel', which matches no parameter"):
        rules.shardings({"images": jnp.zeros((4, 3))})


# --- gradients


@pytest.mark.parametrize(
    "shard, expected", [("optimizer", None), ("gradients", (None, "data")), ("all", (None, "data"))]
)
def test_gradients_are_constrained_to_the_sharding_of_their_moments(shard, expected):
    params = {"dense": nn.Dense(16).init(jax.random.key(0), jnp.zeros((1, 8)))["params"]}
    reduced = layout(shard).gradient_constraint((params, optax.adam(1e-3).init(params)))
    assert (reduced is None) == (expected is None)
    if reduced:
        specs = jax.jit(reduced)({"loss": jnp.zeros(8), "grads": params})
        assert specs["grads"]["dense"]["kernel"].sharding.spec == PartitionSpec(*expected)
        np.testing.assert_array_equal(specs["grads"]["dense"]["kernel"], params["dense"]["kernel"])

"""`variable` and `trainable`: the wrapper of each choice, and the mask of trainable leaves."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import VariableAggregation, VariableSynchronization

from laws import assert_in_step, each_row

AGGREGATIONS = ("none", "sum", "mean", "only_first_replica")
VALUE = {"w": np.float32([1, 2]), "n": (np.float32(3), None)}


def _expected():
    """Maps each valid (synchronization, aggregation, trainable) to the wrapper class and its fields; None for a plain array."""
    table = {}
    for aggregation, trainable in itertools.product(AGGREGATIONS, (None, False, True)):
        name = VariableAggregation[aggregation.upper()]
        mirrored = (jdist.Mirrored, name, trainable is not False)
        table["on_write", aggregation, trainable] = mirrored
        plain = aggregation == "none" and trainable is not False
        table["auto", aggregation, trainable] = None if plain else mirrored
        if aggregation != "none":
            table["on_read", aggregation, trainable] = (jdist.SyncOnRead, name, trainable is True)
        elif not trainable:
            table["none", aggregation, trainable] = (jdist.PerReplica,)
    return table


EXPECTED = _expected()
every_choice = each_row(
    "choice, kind", EXPECTED.items(), ids=[f"{sync}-{how}-{trainable}" for sync, how, trainable in EXPECTED]
)


def options(choice):
    """Returns a choice as keyword arguments of `variable`."""
    return dict(zip(("synchronization", "aggregation", "trainable"), choice, strict=False))


def _fields(value):
    """Returns the class of a variable and its fields beside the tree; None for a plain array."""
    if not isinstance(value, jdist.DistributedValues):
        return None
    return (type(value), *(getattr(value, name) for name in ("aggregation", "trainable") if hasattr(value, name)))


@every_choice
def test_variable_in_scope_has_the_wrapper_of_its_choice(choice, kind, two):
    synchronization, aggregation, trainable = choice
    with two.scope():
        made = jdist.variable(VALUE, synchronization=synchronization, aggregation=aggregation, trainable=trainable)
    assert _fields(made) == kind
    for value, device in zip(two.local_results(made), two.mesh.devices.flat, strict=True):
        chex.assert_trees_all_equal(value, VALUE)
        assert {device} == set().union(*(leaf.devices() for leaf in jax.tree.leaves(value)))


@every_choice
def test_variable_in_init_equals_the_variable_in_scope(choice, kind, two):
    synchronization, aggregation, trainable = choice
    make = lambda: jdist.variable(VALUE, synchronization=synchronization, aggregation=aggregation, trainable=trainable)
    state = two.init(lambda: {"v": make()})
    with two.scope():
        expected = make()
    assert jax.tree.structure(state["v"]) == jax.tree.structure(expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(state["v"], expected)
    chex.assert_trees_all_equal(two.local_results(state["v"]), two.local_results(expected))
    for a, b in zip(jax.tree.leaves(state["v"]), jax.tree.leaves(expected), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


SYNCHRONIZATIONS = {
    "auto": ("none", type(None)),
    "on_write": ("none", jdist.Mirrored),
    "on_read": ("none", jdist.SyncOnRead),
    "none": ("none", jdist.PerReplica),
}


@pytest.mark.parametrize("name", SYNCHRONIZATIONS)
def test_variable_takes_names_in_any_case_and_members(name, strategy):
    aggregation, kind = SYNCHRONIZATIONS[name]
    member = VariableSynchronization[name.upper()]
    for synchronization in (name, name.upper(), name.title(), member):
        for aggregation_name in (aggregation, aggregation.upper(), VariableAggregation[aggregation.upper()]):
            with strategy.scope():
                made = jdist.variable(1.0, synchronization=synchronization, aggregation=aggregation_name)
            assert type(made) is kind or kind is type(None) and isinstance(made, jax.Array)


def test_variable_by_default_is_a_plain_array_on_every_replica(strategy):
    with strategy.scope():
        made = jdist.variable(VALUE)
    chex.assert_trees_all_equal(made, VALUE)
    assert_in_step(made)
    assert made["w"].sharding.device_set == set(strategy.mesh.devices.flat)


def test_variable_outside_any_strategy_is_on_the_default_device():
    made = jdist.variable(1.0, synchronization="on_read", aggregation="sum")
    assert made.tree.devices() == {jax.local_devices()[0]}
    assert float(made.read()) == 1


def test_variable_that_is_read_as_a_sum_starts_with_the_value_on_each_replica(strategy):
    with strategy.scope():
        seen = jdist.variable(np.int32(2), synchronization="on_read", aggregation="sum")
    assert int(seen.read()) == 2 * strategy.num_replicas_in_sync


def test_only_per_replica_and_on_read_variables_may_vary_initially(strategy):
    def make():
        index = jdist.replica_id()
        return {
            "own": jdist.variable(index, synchronization="none"),
            "part": jdist.variable(index, synchronization="on_read", aggregation="sum"),
        }

    n = strategy.num_replicas_in_sync
    state = strategy.init(make)
    np.testing.assert_array_equal(state["own"].tree, np.arange(n))
    assert int(state["part"].read()) == n * (n - 1) // 2
    with pytest.raises(jdist.NotMirroredError, match=r"state is not proved to be replicated"):
        strategy.init(lambda: jdist.variable(jdist.replica_id(), synchronization="on_write", aggregation="sum"))


LEAVES = {
    "key": jax.random.key(3),
    "bool": np.True_,
    "bfloat16": jnp.bfloat16(1.5),
    "complex": np.complex64(1j),
    "empty": np.zeros((0, 2), np.float32),
    "number": 3,
    "nothing": None,
    "tree_of_nothing": {},
}


@each_row("leaf", LEAVES.values(), ids=LEAVES)
@each_row("choice", [("auto", "none"), ("on_write", "only_first_replica"), ("on_read", "sum"), ("none", "none")])
def test_variable_may_hold_any_leaf(leaf, choice, two):
    with two.scope():
        made = jdist.variable({"x": leaf}, **options(choice))
    tree = made.tree if isinstance(made, jdist.DistributedValues) else made
    assert jax.tree.structure(tree) == jax.tree.structure({"x": leaf})
    assert [x.dtype for x in jax.tree.leaves(tree)] == [jnp.asarray(x).dtype for x in jax.tree.leaves(leaf)]


BAD = {
    "synchronization": (
        ("sometimes",),
        r"Invalid variable synchronization mode: 'sometimes'; take one of 'AUTO', 'NONE', 'ON_WRITE', 'ON_READ'\.",
    ),
    "synchronization_number": ((3,), r"Invalid variable synchronization mode: 3; take one of"),
    "synchronization_of_other_kind": ((VariableAggregation.NONE,), r"Invalid variable synchronization mode: <Variable"),
    "aggregation": (
        ("auto", "max"),
        r"Invalid variable aggregation mode: 'max'; take one of 'NONE', 'SUM', 'MEAN', 'ONLY_FIRST_REPLICA'\.",
    ),
    "aggregation_nothing": (("auto", None), r"Invalid variable aggregation mode: None; take one of"),
    "trainable_per_replica": (
        ("none", "none", True),
        r"with synchronization NONE cannot be trainable\..*`synchronization=\"on_read\", trainable=True`",
    ),
}


@each_row("choice, message", BAD.values(), ids=BAD)
def test_invalid_choice_raises_everywhere(choice, message, two):
    with pytest.raises(ValueError, match=message):
        jdist.variable(1.0, **options(choice))
    with pytest.raises(ValueError, match=message), two.scope():
        jdist.variable(1.0, **options(choice))
    with pytest.raises(ValueError, match=message):
        two.init(lambda: jdist.variable(1.0, **options(choice)))


@each_row("synchronization", ["auto", "on_write", "on_read"])
def test_variable_of_integers_with_a_mean_raises(synchronization, two):
    message = (
        r"value\['n'\] is int32\[2\], and the mean of integers is a float, which it cannot hold\. Make it a float, or"
    )
    make = lambda: jdist.variable({"n": np.zeros(2, np.int32)}, synchronization=synchronization, aggregation="mean")
    with pytest.raises(TypeError, match=message):
        make()
    with pytest.raises(TypeError, match=message), two.scope():
        make()
    with pytest.raises(TypeError, match=message):
        two.init(make)


def test_mirrored_integers_with_a_mean_raise_when_they_are_placed(two):
    value = {"n": jdist.Mirrored([1], "mean")}
    for place, name in ((two.put, "value"), (lambda value: two.init(lambda: value), "state")):
        with pytest.raises(
            TypeError, match=rf"{name}\['n'\]\[0\] is (1|int32\[\]), and the mean of integers is a float"
        ):
            place(value)
    state = two.put(jdist.Mirrored({"count": np.int32(1), "mean": np.float32(1)}, "mean"))
    state, _ = two.step(lambda state: (state | {"mean": state["mean"] + jdist.replica_id()}, None))(state)
    assert {name: float(x) for name, x in state.read().items()} == {"count": 1.0, "mean": 1.5}


def test_variables_in_a_step_are_aggregated_as_declared(strategy):
    n = strategy.num_replicas_in_sync
    ids = np.arange(n)

    def make():
        return {
            "sum": jdist.variable(0.0, synchronization="on_write", aggregation="sum"),
            "auto_mean": jdist.variable(0.0, aggregation="mean"),
            "read": jdist.variable(0.0, synchronization="on_read", aggregation="sum"),
            "own": jdist.variable(0.0, synchronization="none"),
        }

    state, _ = strategy.step(lambda state: (jax.tree.map(lambda x: x + jdist.replica_id(), state), None))(
        strategy.init(make)
    )
    assert float(state["sum"].read()) == ids.sum()
    assert float(state["auto_mean"].read()) == ids.mean()
    assert float(state["read"].read()) == ids.sum()
    np.testing.assert_array_equal(state["own"].read(), ids)


def _state():
    return {
        "plain": np.float32([1, 1]),
        "mirrored": jdist.Mirrored({"a": np.float32(1), "b": None}),
        "frozen": jdist.Mirrored(np.float32(1), trainable=False),
        "split": jdist.Sharded(np.ones(2, np.float32)),
        "read": jdist.SyncOnRead({"a": np.ones(2, np.float32)}, "sum"),
        "drifting": jdist.SyncOnRead(np.ones(2, np.float32), "mean", trainable=True),
        "own": jdist.PerReplica([np.ones(2, np.float32)]),
        "none": None,
    }


MASK = {
    "plain": True,
    "mirrored": {"a": True, "b": None},
    "frozen": False,
    "split": True,
    "read": {"a": False},
    "drifting": True,
    "own": [False],
    "none": None,
}


def test_trainable_is_a_tree_of_booleans_like_the_state_of_one_replica(two):
    assert jdist.trainable(_state()) == MASK
    assert jdist.trainable(two.put(_state())) == MASK
    assert jdist.trainable(()) == ()


def test_trainable_masks_the_leaves_that_an_optimizer_changes(two):
    placed = two.put(_state())
    optimizer = optax.masked(optax.sgd(1.0), jdist.trainable(placed))
    frozen = optax.masked(optax.set_to_zero(), jax.tree.map(lambda flag: not flag, jdist.trainable(placed)))
    both = optax.chain(optimizer, frozen)

    def train(state):
        updates, _ = both.update(jax.tree.map(jnp.ones_like, state), both.init(state), state)
        return optax.apply_updates(state, updates), None

    new, _ = two.step(train)(placed)
    moved = jax.tree.map(lambda x: bool((np.asarray(x) == 0).all()), {k: getattr(v, "tree", v) for k, v in new.items()})
    assert moved == MASK

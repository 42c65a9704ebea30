"""Laws that hold for every policy of the table, under every strategy and inside every container."""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax

import jdist
from jdist import sync
from jdist._src.core import jax_compat
from jdist._src.jaxpr import replication

from laws import among, arrays, assert_in_step, each_row, each_value
from policies import (
    FEEDBACK,
    LOCAL_UPDATES,
    POLICIES,
    POLICY_STRATEGIES,
    REDUCING,
    State,
    assert_synchronized,
    batches,
    cases,
    first_params,
    loss,
    read,
    start,
    train,
)

# A mesh of one axis and a mesh of two. The other strategies take the same paths.
CASES = cases(POLICIES, ("mirrored_3", "groups_of_2"))
# The policies that are not a composition of two others, nor another of them with another dtype.
SINGLE = [
    *("mean", "in_dtype", "int8", "int8_stochastic", "top_k", "power_sgd", "every", "skip_nonfinite"),
    *("local_sgd", "diloco", "streaming_diloco"),
]


def sgd():
    return optax.sgd(0.1, momentum=0.9)


def assert_same(tree, other, tolerance=0.0):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), tree, other)


# --- all replicas agree, and the proof shows it


@functools.cache
def trained(name, strategy_name):
    """Returns the state after four steps, and their proof."""
    state, step = train(POLICY_STRATEGIES[strategy_name](), POLICIES[name](sgd()), 4)
    return state, step.proof


@each_row("name", [name for name in POLICIES if name != "hierarchical"])
def test_policy_between_partitioned_replicas_equals_it_between_devices(name):
    (state, proof), (expected, expected_proof) = trained(name, "partitioned"), trained(name, "mirrored_2")
    assert proof == expected_proof
    w = getattr(state.params["in"]["w"], "tree", state.params["in"]["w"])
    assert w.sharding.spec[-1] == "model"
    # A stochastic rounding of a value that differs in its last bit may differ by one step of int8.
    assert_same(read(state.params), read(expected.params), 1e-3 if "stochastic" in name else 2e-5)


@pytest.mark.parametrize("case", among(CASES, *each_value(CASES)[::3]), ids="-".join)
def test_replicas_are_bitwise_equal_after_a_synchronization_step(case):
    """Parameters are proved replicated, or trained separately and read as their mean."""
    name, strategy_name = case
    state, proof = trained(name, strategy_name)
    assert_synchronized(state.params)
    moved = jax.tree.map(lambda now, first: not np.array_equal(now, first), read(state.params), first_params())
    assert all(jax.tree.leaves(moved))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(read(state.params)))
    replicated = [leaf for leaf in proof.replicated if leaf.startswith("state.params")]
    if name in LOCAL_UPDATES:
        assert not replicated
        for leaf in jax.tree.leaves(state.params, is_leaf=lambda x: isinstance(x, jdist.SyncOnRead)):
            assert (leaf.aggregation, leaf.trainable) == (jdist.VariableAggregation.MEAN, True)
    else:
        assert len(replicated) == len(jax.tree.leaves(state.params)) == 4


def first_cond(strategy, tx):
    """Returns the variations of the first `cond` of `tx`: of the synchronizing branch, of the other, and of the operands."""
    axes = strategy.mesh.axis_names
    params = first_params()
    count = len(jax.tree.leaves(params))
    opt_state = jax.eval_shape(tx.init, params)
    program = []

    def update(params, grads, opt_state):
        return jdist.all_reduce("mean", jax.tree.leaves(tx.update(grads, opt_state, params)))

    def traced(*args):
        program.append(jax.make_jaxpr(update)(*args).jaxpr)
        return ()

    strategy.run(traced, (params, params, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), opt_state)))
    (body,) = program
    number = next(i for i, equation in enumerate(body.eqns) if equation.primitive.name == "cond")
    cond = body.eqns[number]
    local = [replication.Input("local", axes if i < 2 * count else ()) for i in range(len(body.invars))]
    operands = [v for v in cond.invars[1:] if not isinstance(v, jax_compat.Literal)]
    assert len(operands) == len(cond.invars) - 1
    variations = replication.prove(body.replace(eqns=body.eqns[:number], outvars=operands), local, axes)
    inputs = [replication.Input("operand", tuple(one)) for one in variations]
    without, synchronized = [
        replication.prove(jax_compat.open_jaxpr(one), inputs, axes) for one in cond.params["branches"]
    ]
    return (
        [bool(one) for one in synchronized[:count]],
        [bool(one) for one in without[:count]],
        [bool(one) for one in variations],
    )


@pytest.mark.parametrize("strategy_name", ["mirrored_2", "groups_of_2"])
@pytest.mark.parametrize("name", LOCAL_UPDATES)
def test_parameters_are_proved_replicated_in_the_branch_that_synchronizes(name, strategy_name):
    # Without optimizer state, only the parameters and their gradients vary.
    synchronized, local, operands = first_cond(POLICY_STRATEGIES[strategy_name](), LOCAL_UPDATES[name](optax.sgd(0.1)))
    assert not any(synchronized)
    assert any(operands)  # otherwise there is nothing to prove
    if name == "local_sgd":  # the others return the parameters after the last outer step
        assert all(local)


# --- policies that equal another one


class Law(NamedTuple):
    """Two equal policies.

    Attributes:
        one: A transformation.
        other: Another.
        tolerance: The tolerance; 0 for bitwise equality.
    """

    one: Any
    other: Any
    tolerance: float = 0.0


def plain():
    return optax.sgd(0.1)


def mean_then(optimizer):
    return optax.chain(sync.mean(), optimizer)


LAWS = {
    "every_1_is_mean": Law(lambda: sync.every(mean_then(sgd()), 1), lambda: mean_then(sgd())),
    "every_1_is_int8": Law(lambda: sync.every(REDUCING["int8"](sgd()), 1), lambda: REDUCING["int8"](sgd())),
    "every_1_is_adamw": Law(lambda: sync.every(mean_then(optax.adamw(1e-2)), 1), lambda: mean_then(optax.adamw(1e-2))),
    "skip_nonfinite_of_finite_equals_the_optimizer": Law(
        lambda: sync.skip_nonfinite(mean_then(sgd())), lambda: mean_then(sgd()), 1e-6
    ),
    "local_sgd_1_is_mean": Law(lambda: sync.local_sgd(plain(), every=1), lambda: mean_then(plain()), 1e-6),
    "diloco_1_with_sgd_1_is_mean": Law(
        lambda: sync.diloco(plain(), optax.sgd(1.0), every=1), lambda: mean_then(plain()), 1e-6
    ),
    "streaming_1_with_sgd_1_is_mean": Law(
        lambda: sync.streaming_diloco(plain(), optax.sgd(1.0), every=1, fragments=2, overlap=0, blend=0.0),
        lambda: mean_then(plain()),
        1e-6,
    ),
    "streaming_in_one_part_that_waits_is_diloco": Law(
        lambda: sync.streaming_diloco(sgd(), every=2, fragments=1, overlap=0, blend=0.0),
        lambda: sync.diloco(sgd(), every=2),
        1e-6,
    ),
    "diloco_with_sgd_1_is_local_sgd": Law(
        lambda: sync.diloco(sgd(), optax.sgd(1.0), every=2), lambda: sync.local_sgd(sgd(), every=2), 1e-6
    ),
    "in_float32_is_mean": Law(lambda: optax.chain(sync.in_dtype(jnp.float32), sgd()), lambda: mean_then(sgd())),
    "top_1_is_mean": Law(lambda: optax.chain(sync.top_k(1.0), sgd()), lambda: mean_then(sgd())),
    "int8_in_blocks_larger_than_all_leaves_is_mean": Law(
        lambda: optax.chain(sync.int8(block_size=1000), sgd()), lambda: mean_then(sgd())
    ),
    "low_rank_of_no_smaller_leaf_is_mean": Law(
        lambda: optax.chain(sync.power_sgd(5), sgd()), lambda: mean_then(sgd()), 0.0
    ),
    "sum_of_a_share_is_mean": Law(
        lambda: optax.chain(
            optax.stateless(lambda g, _: jax.tree.map(lambda x: x / jdist.num_replicas(), g)), sync.sum(), sgd()
        ),
        lambda: mean_then(sgd()),
        1e-5,
    ),
}


@pytest.mark.parametrize("strategy_name", among(["one_device", "mirrored_3"], "mirrored_3"))
@pytest.mark.parametrize("law", LAWS)
def test_policy_equals_another_one(law, strategy_name):
    one, other, tolerance = LAWS[law]
    strategy = POLICY_STRATEGIES[strategy_name]()
    (left, _), (right, _) = (train(strategy, make(), 4) for make in (one, other))
    assert_same(read(left.params), read(right.params), tolerance)


# --- a single replica


@pytest.mark.parametrize("name", ["mean", "sum", "hierarchical"])
def test_policy_outside_any_strategy_returns_the_gradients(name):
    tx = POLICIES[name](optax.identity())
    grads = first_params()
    updates, _ = tx.update(grads, tx.init(grads), grads)
    assert_same(updates, grads)


@pytest.mark.slow
@pytest.mark.parametrize("name", SINGLE)
def test_policy_outside_any_strategy_trains_as_on_one_device(name):
    tx, params = POLICIES[name](sgd()), first_params()
    strategy = POLICY_STRATEGIES["one_device"]()
    opt_state = tx.init(params)
    for batch in batches(strategy, 4):
        (own,) = strategy.local_results(batch)
        updates, opt_state = tx.update(jax.grad(loss)(params, *own), opt_state, params)
        params = optax.apply_updates(params, updates)
    # A compiled sum may be rounded differently, so an entry may be sent one step later.
    assert_same(params, read(trained(name, "one_device")[0].params), 1e-4 if name not in FEEDBACK else 1e-2)


# --- inside other transformations of optax

MASK = {"in": {"w": True, "b": True}, "out": False, "scale": True}
LABELS = {"in": "trained", "out": "frozen", "scale": "trained"}
WRAPPED = {
    "chain": (lambda policy: optax.chain(policy(sgd()), optax.identity()), ()),
    "multi_transform": (
        lambda policy: optax.multi_transform({"trained": policy(sgd()), "frozen": optax.set_to_zero()}, LABELS),
        ("out",),
    ),
    "masked": (
        lambda policy: optax.chain(
            optax.masked(policy(sgd()), MASK),
            optax.masked(optax.set_to_zero(), jax.tree.map(lambda x: not x, MASK)),
        ),
        ("out",),
    ),
    "inject_hyperparams": (
        lambda policy: policy(optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.1, 0.05, 4))),
        (),
    ),
    "named_chain": (lambda policy: optax.named_chain(("policy", policy(sgd())), ("nothing", optax.identity())), ()),
}


# Two policies in each transformation, and each policy in one.
INSIDE = [(name, wrapper) for name in ("power_sgd", "every") for wrapper in WRAPPED]
OTHERS = each_value([(name, wrapper) for name in SINGLE if name not in LOCAL_UPDATES for wrapper in WRAPPED])


@pytest.mark.parametrize("case", among(dict.fromkeys([*INSIDE, *OTHERS]), *INSIDE), ids="-".join)
def test_replicas_agree_with_a_policy_inside_a_transformation_of_optax(case, two):
    name, wrapper = case
    wrap, frozen = WRAPPED[wrapper]
    state, _ = train(two, wrap(POLICIES[name]), 4)
    assert_synchronized(state.params)
    first = first_params()
    for part, leaf in read(state.params).items():
        same = jax.tree.map(np.array_equal, leaf, first[part])
        assert all(jax.tree.leaves(same)) if part in frozen else not any(jax.tree.leaves(same))


def test_policy_that_one_replica_may_skip_is_refused(two):
    with pytest.raises(jdist.DivergentCollectiveError, match="waits for every replica"):
        train(two, optax.apply_if_finite(POLICIES["mean"](sgd()), 3), 1)


@pytest.mark.parametrize("name", LOCAL_UPDATES)
def test_local_updates_of_some_parameters_do_not_change_frozen_ones(name, two):
    tx = optax.multi_transform({"trained": POLICIES[name](sgd()), "frozen": optax.set_to_zero()}, LABELS)
    state, _ = train(two, tx, 4)
    assert_synchronized(state.params)
    np.testing.assert_array_equal(read(state.params)["out"], first_params()["out"])


@pytest.mark.parametrize("name", ["mean", "int8", "top_k", "power_sgd"])
def test_policy_within_multi_steps_updates_every_second_step(name, two):
    # `MultiSteps` sums each replica's gradients, so its sums are local to each replica.
    reducing_first = optax.chain(sync.mean(), optax.MultiSteps(sgd(), 2).gradient_transformation())
    state, _ = train(two, reducing_first, 4)
    assert_synchronized(state.params)
    with pytest.raises(jdist.NotMirroredError, match=r"acc_grads"):
        train(two, optax.MultiSteps(POLICIES[name](sgd()), 2).gradient_transformation(), 4)


# --- in a loop, in other containers, of other trees


@pytest.mark.parametrize("name", among(SINGLE, "int8", "every", "diloco"))
def test_policy_in_a_scan_within_the_step_gives_the_same_result(name, two):
    tx = POLICIES[name](sgd())

    @two.step
    def all_at_once(state, stacked):
        def turn(carry, batch):
            params, opt_state = carry
            updates, opt_state = tx.update(jax.grad(loss)(params, *batch), opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), None

        carry, _ = lax.scan(turn, (state.params, state.opt_state), stacked)
        return State(*carry), None

    each = [jax.tree.map(np.asarray, arrays(batch)) for batch in batches(two, 4)]
    stacked = two.put(jdist.PerReplica(tuple(np.stack(part, axis=1) for part in zip(*each, strict=True))))
    state, _ = all_at_once(start(two, tx), stacked)
    assert_same(read(state.params), read(trained(name, "mirrored_2")[0].params), 1e-2 if name in FEEDBACK else 1e-4)
    if name not in LOCAL_UPDATES:
        assert_in_step(state.params)


class NnxNet(nnx.Module):
    """A network with one hidden layer."""

    def __init__(self, rngs):
        self.into, self.out = nnx.Linear(6, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.into(x)))


class LinenNet(nn.Module):
    """A network with one hidden layer."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(jnp.tanh(nn.Dense(16)(x)))


def assert_trains(strategy, make, step, params_of):
    """Asserts that four steps on one batch reduce the loss and leave equal parameters on all replicas; returns the state."""
    state, losses = strategy.init(make), []
    batch = next(iter(batches(strategy, 1)))
    for _ in range(4):
        state, value = step(state, batch)
        losses.append(float(strategy.reduce("mean", value, axis=None)))
    assert_synchronized(params_of(state))
    assert losses[-1] < losses[0]
    return state


@pytest.mark.parametrize("name", ["int8_stochastic", "diloco"])
def test_policy_in_an_nnx_optimizer_trains_and_synchronizes(name, two):
    def make():
        model = NnxNet(nnx.Rngs(0))
        return nnx.state((model, nnx.Optimizer(model, POLICIES[name](sgd()), wrt=nnx.Param)))

    abstract = nnx.eval_shape(
        lambda: (m := NnxNet(nnx.Rngs(0)), nnx.Optimizer(m, POLICIES[name](sgd()), wrt=nnx.Param))
    )
    graph = nnx.graphdef(abstract)

    @two.step
    def step(state, batch):
        x, y = batch
        model, optimizer = nnx.merge(graph, state)
        value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    assert_trains(two, make, step, lambda state: state[0])


@pytest.mark.parametrize("name", ["power_sgd", "local_sgd"])
def test_policy_in_a_flax_train_state_trains_and_synchronizes(name, two):
    net, tx = LinenNet(), POLICIES[name](sgd())

    def make():
        params = net.init(jax.random.key(0), jnp.zeros((1, 6)))
        return TrainState.create(apply_fn=net.apply, params=params, tx=tx)

    @two.step
    def step(state, batch):
        x, y = batch
        value, grads = jax.value_and_grad(lambda p: jnp.mean((state.apply_fn(p, x) - y) ** 2))(state.params)
        return state.apply_gradients(grads=grads), value

    assert int(assert_trains(two, make, step, lambda state: state.params).step) == 4


TREES = {
    "empty": lambda: {},
    "a_number": lambda: jnp.float32(2),
    "an_array": lambda: jnp.ones((8, 8)),
    "none_leaves": lambda: {"w": jnp.ones((8, 8)), "b": None},
    "no_elements": lambda: {"w": jnp.ones((8, 8)), "gone": jnp.zeros((0, 3)), "also": jnp.zeros((4, 0))},
    "only_no_elements": lambda: {"gone": jnp.zeros((0, 3))},
    "nested": lambda: [{"w": jnp.ones((8, 8))}, (jnp.ones(20), [jnp.ones(()), {}])],
    "higher_rank": lambda: {"kernel": jnp.ones((3, 3, 8, 8)), "one": jnp.ones((1, 1, 1))},
    "odd_sizes": lambda: {"w": jnp.ones((7, 13)), "b": jnp.ones(17)},
    "bfloat16": lambda: {"w": jnp.ones((8, 8), jnp.bfloat16), "b": jnp.ones(17, jnp.bfloat16)},
    "float16": lambda: {"w": jnp.ones((8, 8), jnp.float16), "b": jnp.ones(17, jnp.float16)},
    "of_two_kinds": lambda: {"w": jnp.ones((8, 8), jnp.bfloat16), "v": jnp.ones((8, 8))},
}
ROOTS = ["empty", "a_number", "only_no_elements"]  # cannot be a part of another tree
TREES["all_others"] = lambda: [make() for name, make in TREES.items() if name not in (*ROOTS, "all_others")]
# `streaming_diloco` needs an array per fragment.
ANY_TREE = [(name, tree) for name in ("int8", "power_sgd") for tree in TREES if tree != "all_others"]
ANY_TREE += [
    pytest.param(name, tree, marks=pytest.mark.slow)
    for name in SINGLE
    if name not in ("int8", "power_sgd", "streaming_diloco")
    for tree in (*ROOTS, "all_others")
]


@pytest.mark.parametrize("name, tree", ANY_TREE)
def test_policy_keeps_structure_shapes_and_dtypes_of_any_tree(name, tree, two):
    tx, make = POLICIES[name](optax.sgd(0.5)), TREES[tree]

    @two.step
    def step(state, own):
        grads = jax.tree.map(lambda x: (x * own).astype(x.dtype), make())
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), None

    state = start(two, tx, make)
    own = two.put(jdist.PerReplica(np.float32([0.5, 1.5])))
    for _ in range(2):
        state, _ = step(state, own)
    after = read(state.params)
    assert jax.tree.structure(after) == jax.tree.structure(make())
    kinds = [[(x.shape, x.dtype) for x in jax.tree.leaves(one)] for one in (after, make())]
    assert kinds[0] == kinds[1]
    assert_synchronized(state.params)
    if name in ("mean", "in_dtype", "int8", "skip_nonfinite", "local_sgd"):
        assert_same(after, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), make()), 2e-2)


# --- errors of every policy

MAKERS = {
    "in_dtype": lambda value: sync.in_dtype(jnp.bfloat16, reduction=value),
    "int8": lambda value: sync.int8(fallback=value),
    "top_k": lambda value: sync.top_k(0.5, fallback=value),
    "power_sgd": lambda value: sync.power_sgd(1, fallback=value),
    "every": lambda value: sync.every(value, 2),
    "skip_nonfinite": lambda value: sync.skip_nonfinite(value),
    "local_sgd": lambda value: sync.local_sgd(value, every=2),
    "diloco": lambda value: sync.diloco(value, every=2),
    "diloco, outer": lambda value: sync.diloco(sgd(), value, every=2),
    "diloco, reduction": lambda value: sync.diloco(sgd(), every=2, reduction=value),
    "streaming_diloco": lambda value: sync.streaming_diloco(value, every=2, fragments=1),
}


@pytest.mark.parametrize("value, says", [(sync.mean, r"got <function mean>\. Call it\."), ("mean", r"got 'mean'\.$")])
@pytest.mark.parametrize("name", MAKERS)
def test_argument_that_is_not_a_transformation_is_refused(name, value, says):
    with pytest.raises(
        TypeError, match=rf"of `jdist\.sync\.{name.split(',')[0]}` must be an optax gradient transformation.*{says}"
    ):
        MAKERS[name](value)


@pytest.mark.parametrize("name", POLICIES)
def test_policy_applied_on_the_host_within_a_scope_is_refused(name, two):
    tx, params = POLICIES[name](sgd()), first_params()
    opt_state = tx.init(params)
    with (
        two.scope(),
        pytest.raises(RuntimeError, match=r"`jdist\.sync\.\w+` can only be called inside a function run by"),
    ):
        tx.update(params, opt_state, params)

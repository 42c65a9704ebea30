"""`record_mapped_functions`: the functions that a program maps over devices, for one device and for a single device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils
from jax import P, lax

from jdist._src.core import jax_compat
from jdist._src.jaxpr.mapped_functions import Operand, record_mapped_functions

AUTO = jax.sharding.AxisType.Auto
BATCH = {0: ("data",)}


def mesh(**sizes):
    count = int(np.prod(list(sizes.values())))
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AUTO,) * len(sizes), devices=jax.devices()[:count]
    )


def record(fn, *args):
    """Returns the functions that a trace of `fn` maps."""
    with record_mapped_functions() as functions:
        jax.make_jaxpr(fn)(*args)
    return functions


def one(fn, *args):
    (function,) = record(fn, *args)
    return function


def shapes(program):
    return [aval.shape for aval in program.in_avals]


def primitives(program):
    return [equation.primitive.name for equation in jax_compat.open_jaxpr(program).eqns]


def loss(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def step(params, x, axis="data"):
    value, grads = jax.value_and_grad(loss)(params, x)
    grads = lax.pmean(grads, axis)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), lax.pmean(value, axis)


PARAMS, X = {"w": jnp.ones(3)}, jnp.ones((8, 3))


def mapped_step(**options):
    return jax.shard_map(
        step, mesh=mesh(data=4), in_specs=(P(), P("data")), out_specs=(P(), P()), check_vma=False, **options
    )


def test_shard_map():
    function = one(mapped_step(), PARAMS, X)
    assert (function.kind, function.name, dict(function.axes)) == ("shard_map", "step", {"data": 4})
    assert function.operands == (Operand("params['w']"), Operand("x", BATCH))
    assert [result.name for result in function.results] == ["output[0]['w']", "output[1]"]
    assert all(result.replicated_over == ("data",) for result in function.results)
    assert shapes(function.local) == [(3,), (2, 3)] and shapes(function.single) == [(3,), (8, 3)]
    assert primitives(function.local) == primitives(function.single)
    assert not function.reason and not function.checked_by_jax
    assert __file__.endswith(function.definition.rpartition(":")[0])


def test_line_of_the_call():
    def train(params, x):
        return mapped_step()(params, x)

    function = one(train, PARAMS, X)
    assert function.line.function == "train" and function.line.file == __file__


def test_function_under_jit_that_was_traced_before():
    jitted = jax.jit(mapped_step())
    jitted(PARAMS, X)
    assert one(jitted, PARAMS, X).name == "step"
    nested = jax.jit(lambda params, x: jitted(params, x))
    nested(PARAMS, X)
    assert one(nested, PARAMS, X).name == "step"


def test_eager_calls_are_recorded_once_and_compute_the_same():
    expected = mapped_step()(PARAMS, X)
    with record_mapped_functions() as functions:
        mapped = mapped_step()
        results = [mapped(PARAMS, X) for _ in range(2)]
    assert len(functions) == 1
    for result in results:
        jax.tree.map(np.testing.assert_array_equal, result, expected)


def test_new_function_objects_of_the_same_program_are_recorded_once():
    def train(params, xs):
        for _ in range(3):
            params = jax.shard_map(lambda p, x: step(p, x)[0], mesh=mesh(data=4), in_specs=(P(), P("data")), out_specs=P(), check_vma=False)(params, xs)  # fmt: skip
        return params

    assert len(record(train, PARAMS, X)) == 1


def test_scan():
    mapped = mapped_step()
    function = one(lambda params, xs: lax.scan(mapped, params, xs), PARAMS, jnp.ones((5, 8, 3)))
    assert shapes(function.single) == [(3,), (8, 3)]


def test_two_axes():
    def layer(x, a, b):
        return lax.psum(jax.nn.relu(x @ a) @ b, "model")

    specs = (P("data"), P(None, "model"), P("model"))
    mapped = jax.shard_map(layer, mesh=mesh(data=2, model=2), in_specs=specs, out_specs=P("data"))
    function = one(mapped, jnp.ones((8, 4)), jnp.ones((4, 6)), jnp.ones((6, 4)))
    assert [dict(operand.splits) for operand in function.operands] == [BATCH, {1: ("model",)}, {0: ("model",)}]
    assert function.results[0].replicated_over == ("model",) and dict(function.results[0].splits) == BATCH
    assert function.checked_by_jax
    assert shapes(function.local) == [(4, 4), (4, 3), (3, 4)] and shapes(function.single) == [(8, 4), (4, 6), (6, 4)]


def test_dimension_that_is_split_over_two_axes():
    mapped = jax.shard_map(lambda x: x * 2, mesh=mesh(a=2, b=2), in_specs=P(("a", "b")), out_specs=P(("a", "b")))
    assert one(mapped, X).operands == (Operand("x", {0: ("a", "b")}),)


def test_captured_values_are_the_first_operands_of_both():
    weights = jnp.ones(3)

    def outer(x):
        mapped = jax.shard_map(
            lambda y: y * x.sum() + weights.sum(), mesh=mesh(data=4), in_specs=P("data"), out_specs=P("data")
        )
        return mapped(x)

    function = one(outer, jnp.ones(8))
    assert [operand.name for operand in function.operands] == ["captured value 0", "captured value 1", "y"]
    assert shapes(function.local) == [(8,), (3,), (2,)] and shapes(function.single) == [(8,), (3,), (8,)]


def test_axis_size_and_number_of_devices_are_one_for_a_single_device():
    def normalized(x):
        return x / (lax.axis_size("data") * jax.device_count() * jax.local_device_count())

    mapped = jax.shard_map(normalized, mesh=mesh(data=4), in_specs=P("data"), out_specs=P("data"))
    function = one(mapped, X)
    assert "256" in str(function.local) and "256" not in str(function.single)
    assert jax.device_count() == 8


def test_nested_shard_maps():
    def inner(y):
        return lax.psum(y, "model")

    def outer(x):
        return jax.shard_map(inner, in_specs=P(None, "model"), out_specs=P(), axis_names={"model"}, check_vma=False)(x)

    mapped = jax.shard_map(
        outer, mesh=mesh(data=2, model=2), in_specs=P("data"), out_specs=P("data"), axis_names={"data"}, check_vma=False
    )
    functions = record(mapped, jnp.ones((8, 4)))
    assert [(function.name, dict(function.axes)) for function in functions] == [
        ("outer", {"data": 2}),
        ("inner", {"model": 2}),
    ]
    assert [shapes(function.single) for function in functions] == [[(8, 4)], [(4, 4)]]


def test_function_with_a_fixed_batch_size():
    mapped = jax.shard_map(lambda x: x.reshape(2, 3).sum(), mesh=mesh(data=4), in_specs=P("data"), out_specs=P(), check_vma=False)  # fmt: skip
    function = one(mapped, X)
    assert function.single is None and function.local is not None
    assert "cannot be traced for the global shapes: TypeError: cannot reshape" in function.reason


def test_function_that_returns_another_structure():
    mapped = jax.shard_map(
        lambda x: [x] * (x.shape[0] // 2), mesh=mesh(data=4), in_specs=P("data"), out_specs=P("data")
    )
    assert "another structure" in one(mapped, X).reason


def test_error_of_the_function_is_raised_as_without_the_recorder():
    def wrong(x):
        raise KeyError("missing")

    mapped = jax.shard_map(wrong, mesh=mesh(data=4), in_specs=P("data"), out_specs=P("data"))
    with record_mapped_functions() as functions, pytest.raises(KeyError, match="missing"):
        mapped(X)
    assert functions[0].reason == "cannot be traced: KeyError: 'missing'"
    assert mapped_step()(PARAMS, X)


def test_the_trace_of_the_program_is_the_last_one():
    calls = []

    def noting(x):
        calls.append(x.shape)
        return x

    one(jax.shard_map(noting, mesh=mesh(data=4), in_specs=P("data"), out_specs=P("data")), X)
    assert calls == [(2, 3), (8, 3), (2, 3)]


def test_methods_and_partial_functions():
    class Model:
        def apply(self, x, scale):
            return x * scale

    fn = functools.partial(Model().apply, scale=2.0)
    function = one(jax.shard_map(fn, mesh=mesh(data=4), in_specs=P("data"), out_specs=P("data")), X)
    assert function.name == "apply"


def test_gradient_of_a_shard_map():
    mapped = jax.shard_map(lambda x: lax.psum((x**2).sum(), "data"), mesh=mesh(data=4), in_specs=P("data"), out_specs=P())  # fmt: skip
    assert one(jax.grad(mapped), jnp.ones(8)).operands == (Operand("x", BATCH),)


def test_mesh_in_the_context():
    with jax.set_mesh(mesh(data=4)):
        mapped = jax.shard_map(lambda x: x * lax.axis_size("data"), in_specs=P("data"), out_specs=P("data"))
        function = one(mapped, X)
    assert shapes(function.single) == [(8, 3)], function.reason


def test_explicit_mesh():
    explicit = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(explicit):
        x = jax.device_put(X, P("data"))
        function = one(jax.jit(jax.shard_map(lambda x: x * 2, out_specs=P("data"))), x)
    assert function.operands == (Operand("x", BATCH),)
    assert function.single is None or shapes(function.single) == [(8, 3)]


# --- pmap


OPTIMIZER = optax.adam(0.1)


def make_state(count=4):
    return jax_utils.replicate({"params": PARAMS, "opt": OPTIMIZER.init(PARAMS)}, devices=jax.devices()[:count])


def train_step(state, batch):
    value, grads = jax.value_and_grad(loss)(state["params"], batch["x"])
    updates, opt = OPTIMIZER.update(lax.pmean(grads, "batch"), state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": lax.pmean(value, "batch")}


def test_pmap_of_a_train_step():
    batch = {"x": jnp.ones((4, 2, 3))}
    function = one(jax.pmap(train_step, axis_name="batch"), make_state(), batch)
    assert (function.kind, function.name, dict(function.axes)) == ("pmap", "train_step", {"batch": 4})
    by_name = {operand.name: operand for operand in function.operands}
    assert by_name["state['params']['w']"].axes == ()
    assert by_name["batch['x']"] == Operand("batch['x']", {0: ("batch",)})
    assert [result.replicated_over for result in function.results] == [("batch",)] * 4 + [()]
    assert shapes(function.local)[-1] == (2, 3) and shapes(function.single)[-1] == (8, 3)


def test_pmap_that_was_called_before():
    mapped = jax.pmap(train_step, axis_name="batch")
    batch = {"x": jnp.ones((4, 2, 3))}
    expected = mapped(make_state(), batch)
    with record_mapped_functions() as functions:
        result = mapped(make_state(), batch)
    assert [function.name for function in functions] == ["train_step"]
    jax.tree.map(np.testing.assert_array_equal, result, expected)


def test_pmap_with_keys_and_numbers_per_device():
    def noisy(params, key, raw, scale, shared, x):
        noise = jax.random.normal(key) + jax.random.normal(raw)
        return jax.tree.map(lambda p: p + noise * scale * shared * x.mean(), params)

    keys = jax.random.split(jax.random.key(0), 4), jax.random.split(jax.random.PRNGKey(0), 4)
    mapped = jax.pmap(noisy, in_axes=(0, 0, 0, 0, None, 0))
    function = one(mapped, jax_utils.replicate(PARAMS, jax.devices()[:4]), *keys, jnp.ones(4), 2.0, jnp.ones((4, 2, 3)))
    (axis,) = function.axes
    kinds = {
        operand.name: "per device" if operand.per_device else dict(operand.splits) for operand in function.operands
    }
    assert kinds == {
        "params['w']": {},
        "key": "per device",
        "raw": "per device",
        "scale": "per device",
        "shared": {},
        "x": {0: (axis,)},
    }


def test_pmap_with_separate_states():
    def update(params, opt, x):
        grads = lax.pmean(jax.grad(loss)(params, x), "batch")
        updates, opt = OPTIMIZER.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, x @ params["w"]

    state = make_state()
    function = one(jax.pmap(update, axis_name="batch"), state["params"], state["opt"], jnp.ones((4, 2, 3)))
    assert [bool(operand.splits) for operand in function.operands] == [False] * 4 + [True]
    assert [bool(result.replicated_over) for result in function.results] == [True] * 4 + [False]


def test_pmap_from_an_array_to_an_array_maps_a_batch():
    function = one(jax.pmap(lambda x: 2 * x), jnp.ones((4, 2)))
    assert list(function.operands[0].splits) == [0] and function.results[0].replicated_over == ()


def test_pmap_with_static_and_donated_arguments():
    def update(scale, params, x):
        return jax.tree.map(lambda p: p * scale + lax.pmean(x.mean(), "batch"), params)

    mapped = jax.pmap(update, axis_name="batch", static_broadcasted_argnums=0, donate_argnums=1)
    function = one(functools.partial(mapped, 2), jax_utils.replicate(PARAMS, jax.devices()[:4]), jnp.ones((4, 2, 3)))
    assert [(operand.name, operand.axes) for operand in function.operands] == [("params['w']", ()), ("x", ("batch",))]


def test_pmap_with_another_mapped_dimension():
    function = one(jax.pmap(lambda x: x.sum(), in_axes=1), jnp.ones((2, 4, 3)))
    assert shapes(function.local) == [(2, 3)] and shapes(function.single) == [(8, 3)]


# --- jit


def test_jit_with_shardings_is_a_global_view():
    sharding = jax.NamedSharding(mesh(data=4), P("data"))

    def total(x):
        return jax.jit(lambda x: x * 2)(x).sum()

    with record_mapped_functions() as functions:
        jax.jit(total)(jax.device_put(X, sharding))
    assert [(function.kind, function.name) for function in functions] == [("jit", "total")]
    assert one(jax.jit(lambda x: lax.with_sharding_constraint(x, sharding)), X).kind == "jit"


def test_jit_on_one_device_is_not_recorded():
    with record_mapped_functions() as functions:
        jax.jit(lambda x: x * 2)(X)
    assert functions == []


def test_hooks_are_removed():
    with record_mapped_functions():
        pass
    with record_mapped_functions() as functions:
        pass
    mapped_step()(PARAMS, X)
    assert functions == []

"""`Precision`: the dtypes of a step, casts, and errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import sync

BFLOAT16 = jdist.Precision(compute_dtype=jnp.bfloat16)
FLOAT16 = jdist.Precision(compute_dtype=jnp.float16)


def x_of(*rows):
    return jdist.PerReplica(np.float32(rows))


def stepped(strategy, loss_fn, *batch, precision=BFLOAT16, params=None, **options):
    """Returns the parameters' dtypes, value (with aux) and gradients of one step, on replica 0."""
    params = {"w": np.float32(1.001)} if params is None else params

    @strategy.step(precision=precision)
    def step(params, *batch):
        return params, jdist.value_and_grad(loss_fn, **options)(params, *batch)

    _, result = step(strategy.put(params), *map(strategy.put, batch))
    return strategy.local_results(result)[0]


def seen_by(strategy, *batch, precision=BFLOAT16, params=None):
    """Returns the dtypes of the parameters and data that a loss function receives."""
    seen = []

    def losses(params, *batch):
        seen[:] = [jax.tree.map(lambda x: str(x.dtype), (params, batch))]
        return params["w"] * batch[0]

    stepped(strategy, losses, *batch, precision=precision, params=params)
    return seen[0]


# --- casts


@pytest.mark.parametrize("compute", [jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn])
def test_loss_function_receives_floats_in_compute_dtype_and_other_leaves_unchanged(two, compute):
    batch = {
        "x": np.ones((2, 3), np.float32),
        "half": np.ones((2, 3), np.float16),
        "label": np.ones((2, 3), np.int32),
        "mask": np.ones((2, 3), bool),
        "key": jax.random.split(jax.random.key(0), 2),
    }
    params = {"w": np.float32(1), "frozen": np.float32([1, 2])}
    x = np.ones((2, 3), np.float32)
    seen, (_, rest) = seen_by(
        two,
        jdist.PerReplica(x),
        jdist.PerReplica(batch),
        precision=jdist.Precision(compute_dtype=compute),
        params=params,
    )
    name = str(np.dtype(compute))
    assert seen == {"w": name, "frozen": name}
    assert rest == {"x": name, "half": name, "label": "int32", "mask": "bool", "key": "key<fry>"}


def test_value_and_aux_have_output_dtype_and_gradients_the_dtypes_of_the_parameters(two):
    def losses(params, x):
        return params["w"] * x, {"seen": x, "count": jnp.int32(3), "text": None}

    dtypes = jdist.Precision(param_dtype=jnp.float32, compute_dtype=jnp.bfloat16, output_dtype=jnp.float16)
    (value, aux), grads = stepped(two, losses, x_of([1.5, 2.5], [1, 2]), precision=dtypes, has_aux=True)
    assert (value.dtype, grads["w"].dtype) == (jnp.float32, jnp.float32)
    assert (aux["seen"].dtype, aux["count"].dtype, aux["text"]) == (jnp.float16, jnp.int32, None)
    assert float(grads["w"]) == 2.0


@pytest.mark.parametrize("parts", [1, 2])
def test_compute_dtype_rounds_results_and_not_parameters(two, parts):
    """1.001 is 1 in bfloat16; the parameter itself is not rounded."""
    x = x_of([1.5, 2.5], [1.5, 2.5])
    value, grads = stepped(two, lambda p, x: (p["w"] * x) ** 2, x, micro_batches=parts)
    assert float(value) == (1.5**2 + 2.5**2) / 2
    assert float(grads["w"]) == 1.5**2 + 2.5**2

    @two.step(precision=BFLOAT16)
    def step(w, x):
        _, grad = jdist.value_and_grad(lambda w, x: 0 * w * x)(w, x)
        return w - jdist.all_reduce("mean", grad), None

    w, _ = step(two.put(np.float32(1.001)), two.put(x_of([1], [2])))
    assert w == np.float32(1.001)


def test_weights_are_not_cast(two):
    """In bfloat16, 257 would be 256."""
    fn = lambda p, x: p["w"] * x

    @two.step(precision=BFLOAT16)
    def step(params, x, weights):
        return params, jdist.value_and_grad(fn, weights=weights)(params, x)[0]

    _, value = step(two.put({"w": np.float32(1)}), two.put(x_of([1, 0], [1, 0])), two.put(x_of([257, 1], [257, 1])))
    np.testing.assert_allclose([float(v) for v in value.values], 257 / 258, rtol=1e-6)


def test_precision_applies_to_its_step_only(two):
    seen = []

    def step(params, x):
        def losses(params, x):
            seen.append(str(x.dtype))
            return params["w"] * x

        return params, jdist.value_and_grad(losses)(params, x)[0]

    other = lambda params, x: step(params, x)
    for fn, dtypes in ((step, BFLOAT16), (other, None)):
        two.step(fn, precision=dtypes)(two.put({"w": np.float32(1)}), two.put(x_of([1], [1])))
    assert list(dict.fromkeys(seen)) == ["bfloat16", "float32"]
    seen.clear()
    jdist.value_and_grad(lambda w, x: seen.append(str(x.dtype)) or w * x)(jnp.float32(1), jnp.ones(2))
    assert set(seen) == {"float32"}


def test_precision_is_reset_after_a_step_that_fails(two):
    @two.step(precision=BFLOAT16)
    def fails(w, x):
        raise KeyError("no")

    with pytest.raises(KeyError):
        fails(two.put(np.float32(1)), two.put(x_of([1], [1])))
    seen = []
    jdist.value_and_grad(lambda w, x: seen.append(str(x.dtype)) or w * x)(jnp.float32(1), jnp.ones(2))
    assert set(seen) == {"float32"}


def test_step_with_arguments_and_without_is_the_same(two):
    def descend(w, x):
        value, grad = jdist.value_and_grad(lambda w, x: (w * x) ** 2)(w, x)
        return w - 0.1 * jdist.all_reduce("mean", grad), value

    forms = [two.step(descend, precision=BFLOAT16), two.step(precision=BFLOAT16)(descend), two.step(descend)]
    result = [float(form(two.put(np.float32(1.001)), two.put(x_of([1.5], [2.5])))[0]) for form in forms]
    assert result[0] == result[1] != result[2]
    assert forms[1].__wrapped__ is descend


def test_precision_of_a_step_may_be_none(two):
    """For programs in which the precision is a setting."""

    @two.step(precision=None)
    def step(w, x):
        return w, jdist.value_and_grad(lambda w, x: w * x)(w, x)[0]

    _, value = step(two.put(np.float32(1.001)), two.put(x_of([1], [1])))
    assert value.values[0] == np.float32(1.001)


def test_bfloat16_needs_no_scale_and_trains(two):
    tx = optax.chain(sync.mean(), optax.adam(0.05))
    state = two.init(lambda: (params := {"w": jnp.zeros(3)}, tx.init(params)))
    rng = np.random.default_rng(0)

    @two.step(precision=BFLOAT16)
    def step(state, batch):
        params, opt_state = state
        value, grads = jdist.value_and_grad(lambda p, x, y: (x @ p["w"] - y) ** 2)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    for _ in range(200):
        x = rng.normal(size=(2, 8, 3))
        state, _ = step(state, two.put(jdist.PerReplica((np.float32(x), np.float32(x @ [1, -2, 0.5])))))
    assert state[0]["w"].dtype == jnp.float32
    np.testing.assert_allclose(state[0]["w"], [1, -2, 0.5], atol=0.03)


def test_cast_methods_of_precision():
    tree = {"x": np.ones(2, np.float64), "n": np.int8(1), "key": jax.random.key(0), "plain": 1.5, "none": None}
    dtypes = jdist.Precision(param_dtype=jnp.float32, compute_dtype=jnp.float16, output_dtype=jnp.bfloat16)
    for cast, name in (
        (dtypes.cast_params, "float32"),
        (dtypes.cast_compute, "float16"),
        (dtypes.cast_output, "bfloat16"),
    ):
        result = cast(tree)
        assert {k: str(getattr(v, "dtype", v)) for k, v in result.items()} == {
            "x": name,
            "n": "int8",
            "key": "key<fry>",
            "plain": "1.5",
            "none": "None",
        }


def test_precision_is_a_value():
    assert jdist.Precision(compute_dtype="bfloat16") == BFLOAT16
    assert hash(jdist.Precision(compute_dtype="bfloat16")) == hash(BFLOAT16)
    assert BFLOAT16.param_dtype == np.float32


# --- errors


@pytest.mark.parametrize("field", ["param_dtype", "compute_dtype", "output_dtype"])
@pytest.mark.parametrize("dtype", [jnp.int32, bool, None, "bfloat17", 16, jnp.complex64])
def test_dtype_that_is_not_floating_point_is_refused_by_name(field, dtype):
    with pytest.raises(
        TypeError, match=rf"`{field}` of `Precision` is a floating-point dtype.*{re.escape(repr(dtype))}"
    ):
        jdist.Precision(**{field: dtype})


def test_parameters_in_another_dtype_are_refused_by_name(two):
    params = {"ok": np.float32(1), "w": np.zeros(3, np.float16), "n": np.int32(1)}
    with pytest.raises(
        ValueError, match=r"params\['w'\] is float16\[3\], and the `param_dtype` of the precision is float32"
    ):
        stepped(two, lambda p, x: x, x_of([1], [1]), params=params)


def test_integers_among_the_parameters_are_accepted(two):
    tree = {"w": jnp.float32(1), "n": jnp.int32(1), "key": jax.random.key(0)}
    BFLOAT16.check_params(tree)


def test_step_that_does_not_use_its_precision_is_refused(two):
    step = two.step(lambda w, x: (w, jax.grad(lambda w: w * x.sum())(w)), precision=BFLOAT16)
    with pytest.raises(ValueError, match=r"compute_dtype=dtype\(bfloat16\).*does not use it.*`jdist\.value_and_grad`"):
        step(two.put(np.float32(1)), two.put(x_of([1], [1])))


@pytest.mark.parametrize("precision", ["bfloat16", jnp.bfloat16, True, {}])
def test_precision_of_another_class_is_refused(two, precision):
    with pytest.raises(TypeError, match=r"[Pp]recision"):
        two.step(lambda w: (w, None), precision=precision)


def test_float16_without_a_scale_is_refused(two):
    with pytest.raises(
        ValueError,
        match=r"underflow in float16, so the loss needs a scale.*`tx = jdist\.sync\.dynamic_loss_scale\(tx\)`",
    ):
        stepped(two, lambda p, x: p["w"] * x, x_of([1], [1]), precision=FLOAT16)


def test_several_scales_in_one_state_are_refused_with_their_number(two):
    tx = sync.dynamic_loss_scale(optax.sgd(0.1))
    state = two.init(lambda: [w := jnp.float32(0), tx.init(w), tx.init(w)])
    step = two.step(lambda state, x: (state, jdist.value_and_grad(lambda w, x: w * x)(state[0], x)), precision=FLOAT16)
    with pytest.raises(ValueError, match="state has 2 loss scales"):
        step(state, two.put(x_of([1], [1])))


def test_jitted_helper_computes_in_the_precision_of_each_step(two):
    helper = jax.jit(lambda w, x: jdist.value_and_grad(lambda w, x: w * x)(w, x))
    x, products = x_of(1.0, 1.0), []
    for precision in (None, BFLOAT16, BFLOAT16, None):
        step = two.step(lambda w, x: (w, jdist.all_reduce("mean", helper(w, x)[0])), precision=precision)
        products.append(float(step(two.put(np.float32(1.001)), two.put(x))[1]))
    assert products == [float(np.float32(1.001)), 1.0, 1.0, float(np.float32(1.001))]

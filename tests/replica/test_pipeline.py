"""Pipelines: values and gradients equal the model without stages, under every strategy, schedule and number of devices."""

import contextlib
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdist

WIDTH, WORDS, BATCH = 4, 7, 8
SCHEDULES = "gpipe", "1f1b"
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
every_size = pytest.mark.parametrize("stages, devices", [(3, 1), (2, 2), (4, 2), (4, 4)])


def mesh_of(axes, devices=None):
    devices = jax.devices() if devices is None else devices
    sizes = tuple(axes.values())
    return Mesh(
        np.array(devices[: np.prod(sizes)]).reshape(sizes), tuple(axes), axis_types=(AxisType.Auto,) * len(axes)
    )


def on_devices(devices):
    return jax.set_mesh(mesh_of({"stage": devices})) if devices > 1 else contextlib.nullcontext()


def stage(params, h):
    return h + jnp.tanh(h @ params["w"] + params["b"])


def embed(table, x):
    return table[x]


def head(w, h, y):
    log_probs = jax.nn.log_softmax((h @ w).astype(jnp.float32))
    return -jnp.take_along_axis(log_probs, y[..., None], -1).mean((1, 2))


def language_model(stages, dtype=jnp.float32):
    """Returns parameters and a batch: an embedding, stages, and a head, which are uneven."""
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "stages": {
            "w": jax.random.normal(keys[0], (stages, WIDTH, WIDTH), dtype),
            "b": jnp.zeros((stages, WIDTH), dtype),
        },
        "first": jax.random.normal(keys[1], (WORDS, WIDTH), dtype),
        "last": jax.random.normal(keys[2], (WIDTH, WORDS), dtype),
    }
    return params, *(jax.random.randint(key, (BATCH, 3), 0, WORDS) for key in keys[3:])


def apply_stages(params, h, fn=stage):
    for number in range(jax.tree.leaves(params)[0].shape[0]):
        h = fn(jax.tree.map(lambda leaf, number=number: leaf[number], params), h)
    return h


def unpipelined_loss(params, x, y):
    return head(params["last"], apply_stages(params["stages"], embed(params["first"], x)), y).mean()


def pipelined_loss(schedule, micro_batches, head=head):
    def loss(params, x, y):
        return jdist.pipeline(
            stage,
            params["stages"],
            x,
            num_micro_batches=micro_batches,
            first=(embed, params["first"]),
            last=(head, params["last"], y),
            schedule=schedule,
        )

    return loss


def assert_close(actual, expected, **tolerance):
    chex.assert_trees_all_close(
        jax.device_get(actual), jax.device_get(expected), **{"rtol": 2e-5, "atol": 1e-6} | tolerance
    )


@every_size
@every_schedule
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_loss_and_gradients_equal_the_model_without_a_pipeline(stages, devices, schedule, micro_batches):
    arguments = language_model(stages)
    with on_devices(devices):
        results = jax.jit(jax.value_and_grad(pipelined_loss(schedule, micro_batches)))(*arguments)
        loss = jax.jit(pipelined_loss(schedule, micro_batches))(*arguments)  # without a gradient
    expected = jax.value_and_grad(unpipelined_loss)(*arguments)
    assert_close(results, expected)
    assert_close(loss, expected[0])
    chex.assert_trees_all_equal_shapes_and_dtypes(results, expected)


STRATEGIES = {
    "one device": lambda: jdist.OneDeviceStrategy(),
    "no axis of stages": lambda: jdist.MirroredStrategy(["cpu:0", "cpu:1"]),
    "2 replicas of 2 devices": lambda: jdist.MirroredStrategy(mesh=mesh_of({"replica": 2, "stage": 2})),
    "stages stored on their devices": lambda: jdist.MirroredStrategy(
        mesh=mesh_of({"replica": 2, "stage": 2}), layout={"stages": P("stage")}
    ),
    "2 replicas of 4 devices": lambda: jdist.MirroredStrategy(mesh=mesh_of({"replica": 2, "stage": 4})),
    "1 replica of 4 devices": lambda: jdist.MirroredStrategy(mesh=mesh_of({"replica": 1, "stage": 4})),
    "global view": lambda: jdist.ShardedStrategy(mesh=mesh_of({"data": 2, "stage": 2}), model_axis="stage"),
}


def updated_by_a_step(strategy, schedule, head=head):
    """Returns the parameters after a step, its loss, and the text of its program."""

    @strategy.step
    def step(params, x, y):
        loss, grads = jdist.value_and_grad(pipelined_loss(schedule, 2, head))(params, x, y)
        grads = jdist.all_reduce("mean", grads)
        return jax.tree.map(lambda p, g: p - g, params, grads), jdist.all_reduce("mean", loss)

    params, x, y = language_model(4)
    (batch,) = strategy.distribute_dataset((np.asarray(x), np.asarray(y)), batch_size=BATCH)
    state = strategy.put(jax.tree.map(jnp.copy, params))
    text = strategy.compile(step, state, *batch).as_text()
    return *step(state, *batch), text


def assert_updated_as_without_a_pipeline(state, loss):
    params, x, y = language_model(4)
    expected, grads = jax.value_and_grad(unpipelined_loss)(params, x, y)
    assert_close((state, loss), (jax.tree.map(lambda p, g: p - g, params, grads), expected))


@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
@every_schedule
def test_step_of_a_pipeline_equals_one_device_under_every_strategy(make, schedule):
    strategy = make()
    state, loss, text = updated_by_a_step(strategy, schedule)
    assert_updated_as_without_a_pipeline(state, loss)
    assert ("collective-permute" in text) == ("stage" in strategy.mesh.shape)


@every_schedule
def test_head_may_use_collectives_over_the_replicas(schedule):
    strategy = jdist.MirroredStrategy(mesh=mesh_of({"replica": 2, "stage": 2}))
    state, loss, _ = updated_by_a_step(strategy, schedule, lambda w, h, y: jdist.global_mean(head(w, h, y)))
    assert_updated_as_without_a_pipeline(state, loss)


@every_schedule
def test_collective_over_the_stages_in_the_head_is_an_error_and_does_not_wait_forever(schedule):
    strategy = jdist.MirroredStrategy(mesh=mesh_of({"replica": 2, "stage": 2}))
    with pytest.raises(jdist.DivergentCollectiveError, match="some devices along 'stage' may not reach it"):
        updated_by_a_step(strategy, schedule, lambda w, h, y: jax.lax.pmean(head(w, h, y), "stage"))


def regression(devices):
    """Returns a loss of floats in every argument: parameters, inputs and targets."""
    keys = jax.random.split(jax.random.key(1), 3)
    arguments = tuple(
        jax.random.normal(key, shape) for key, shape in zip(keys, [(4, 3, 3), (6, 3), (6, 3)], strict=True)
    )
    loss = lambda schedule: (
        lambda w, x, y: jdist.pipeline(
            lambda w, h: jnp.tanh(h @ w),
            w,
            x,
            num_micro_batches=3,
            last=(lambda scale, h, y: scale * (h - y) ** 2, jnp.float32(2), y),
            schedule=schedule,
        )
    )
    expected = lambda w, x, y: 2 * ((apply_stages(w, x, lambda w, h: jnp.tanh(h @ w)) - y) ** 2).mean()
    return arguments, loss, expected


@pytest.mark.parametrize("devices", [1, 2, 4])
@every_schedule
def test_inputs_and_targets_have_gradients(devices, schedule):
    arguments, loss, expected = regression(devices)
    with on_devices(devices):
        results = jax.jit(jax.grad(lambda *args: 3 * loss(schedule)(*args), (0, 1, 2)))(*arguments)
    assert_close(results, jax.grad(lambda *args: 3 * expected(*args), (0, 1, 2))(*arguments))


@pytest.mark.parametrize("devices", [1, 2])
def test_gpipe_has_second_derivatives_and_tangents(devices):
    (w, x, y), loss, expected = regression(devices)
    curvature = lambda fn: lambda w: jax.jvp(jax.grad(lambda w: fn(w, x, y)), (w,), (jnp.ones_like(w),))[1]
    with on_devices(devices):
        assert_close(jax.jit(curvature(loss("gpipe")))(w), curvature(expected)(w), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_without_last_the_result_of_the_last_stage_is_returned_in_the_order_of_the_batch(devices):
    (w, x, _), *_ = regression(devices)
    outputs = lambda w, x: jdist.pipeline(lambda w, h: jnp.tanh(h @ w), w, {"h": x}["h"], num_micro_batches=3)
    expected = lambda w, x: apply_stages(w, x, lambda w, h: jnp.tanh(h @ w))
    with on_devices(devices):
        result = jax.jit(outputs)(w, x)
        grads = jax.jit(jax.grad(lambda w, x: (outputs(w, x) ** 3).sum(), (0, 1)))(w, x)
    assert_close(result, expected(w, x))
    assert_close(grads, jax.grad(lambda w, x: (expected(w, x) ** 3).sum(), (0, 1))(w, x))


@every_schedule
def test_keys_depend_on_the_micro_batch_and_the_stage_and_not_on_the_number_of_devices(schedule):
    def noisy(h, key):
        return h * jax.random.bernoulli(key, 0.7, h.shape)

    def loss(params, x, y, key):
        return jdist.pipeline(
            lambda p, h, key: noisy(stage(p, h), key),
            params["stages"],
            x,
            num_micro_batches=2,
            first=(lambda e, x, key: noisy(e[x], key), params["first"]),
            last=(lambda w, h, y, key: head(w, noisy(h, key), y), params["last"], y),
            schedule=schedule,
            key=key,
        )

    arguments = *language_model(4), jax.random.key(3)
    results = []
    for devices in (1, 2, 4):
        with on_devices(devices):
            results.append(jax.jit(jax.value_and_grad(loss))(*arguments))
    assert_close(results[1], results[0])
    assert_close(results[2], results[0])
    assert float(results[0][0]) != pytest.approx(float(loss(*arguments[:3], jax.random.key(4))))


def scaled_loss(schedule):
    """Returns a loss whose functions close over the argument `scale`."""

    def loss(params, scale, x, y):
        return jdist.pipeline(
            lambda p, h: scale * stage(p, h),
            params["stages"],
            x,
            num_micro_batches=2,
            first=(lambda e, x: scale * embed(e, x), params["first"]),
            last=(lambda w, h, y: head(w, scale * h, y), params["last"], y),
            schedule=schedule,
        )

    return loss


TRANSFORMS = {
    "jit of grad": lambda fn: jax.jit(jax.value_and_grad(fn)),
    "grad of jit": lambda fn: jax.value_and_grad(jax.jit(fn)),
    "grad of checkpoint": lambda fn: jax.jit(jax.value_and_grad(jax.checkpoint(fn))),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("devices", [1, 2])
@every_schedule
def test_functions_may_close_over_values(transform, devices, schedule):
    params, x, y = language_model(2)
    expected = jax.value_and_grad(
        lambda p: head(
            p["last"],
            1.5 * apply_stages(p["stages"], 1.5 * embed(p["first"], x), lambda q, h: 1.5 * stage(q, h)),
            y,
        ).mean()
    )(params)
    with on_devices(devices):
        assert_close(transform(scaled_loss(schedule))(params, jnp.float32(1.5), x, y), expected, atol=1e-5)


@pytest.mark.parametrize("devices", [1, 2])
def test_gradient_of_a_captured_value_is_computed_by_gpipe_and_refused_by_1f1b(devices):
    params, x, y = language_model(2)
    arguments = params, jnp.float32(1.5), x, y
    with on_devices(devices):
        value = lambda scale: float(jax.jit(scaled_loss("gpipe"))(params, jnp.float32(scale), x, y))
        slope = float(jax.jit(jax.grad(scaled_loss("gpipe"), 1))(*arguments))
        assert slope == pytest.approx((value(1.51) - value(1.49)) / 0.02, rel=0.01)
        for gradient in (jax.jit(jax.grad(scaled_loss("1f1b"), 1)), jax.grad(jax.jit(scaled_loss("1f1b")), 1)):
            with pytest.raises(
                ValueError, match="closes over a value that is differentiated, and its gradient is not computed"
            ):
                gradient(*arguments)


@every_schedule
def test_stages_pass_trees_with_integers(schedule):
    """A mask travels with its micro-batch."""

    def loss(w, h, mask):
        return jdist.pipeline(
            lambda w, x: {"h": jnp.tanh(x["h"] @ w) * x["mask"][:, None], "mask": x["mask"]},
            w,
            {"h": h, "mask": mask},
            num_micro_batches=3,
            last=(lambda scale, x: (scale * x["h"].sum(1), x["mask"])[0], jnp.float32(2)),
            schedule=schedule,
        )

    (w, h, _), *_ = regression(2)
    mask = jnp.array([0, 1, 1, 0, 1, 1])
    expected = jax.value_and_grad(
        lambda w: 2 * apply_stages(w, h, lambda w, h: jnp.tanh(h @ w) * mask[:, None]).sum(1).mean()
    )(w)
    for devices in (1, 2):
        with on_devices(devices):
            assert_close(jax.jit(jax.value_and_grad(loss))(w, h, mask), expected)


@every_schedule
def test_bfloat16_activations_and_parameters(schedule):
    arguments = language_model(2, jnp.bfloat16)
    expected = jax.value_and_grad(unpipelined_loss)(
        *jax.tree.map(lambda p: p.astype(jnp.float32), arguments[0:1]), *arguments[1:]
    )
    with on_devices(2):
        loss, grads = jax.jit(jax.value_and_grad(pipelined_loss(schedule, 4)))(*arguments)
    assert loss.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(jnp.bfloat16)}
    as_float32 = lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
    assert_close(as_float32((loss, grads)), expected, rtol=0.1, atol=0.02)


@every_schedule
def test_bfloat16_inputs_have_gradients(schedule):
    (w, x, y), loss, _ = regression(2)
    as_bfloat16 = [leaf.astype(jnp.bfloat16) for leaf in (w, x, y)]
    with on_devices(2):
        grads = jax.jit(jax.grad(loss(schedule), (0, 1, 2)))(*as_bfloat16)
    assert [grad.dtype for grad in grads] == [jnp.bfloat16] * 3


@every_schedule
def test_ticks_without_a_micro_batch_do_not_make_gradients_nan(schedule):
    normalized = lambda w, h: (
        w * h / jnp.linalg.norm(h, axis=-1, keepdims=True)
    )  # NaN, and an infinite derivative, at 0
    x = jax.random.normal(jax.random.key(0), (4, 3)) + 1

    def loss(w):
        return jdist.pipeline(
            normalized,
            w,
            x,
            num_micro_batches=2,
            first=(lambda _, x: x + 1, ()),
            last=(lambda _, h: h.sum(1), ()),
            schedule=schedule,
        )

    w = jnp.ones((4, 3)) * 2
    expected = jax.value_and_grad(lambda w: apply_stages(w, x + 1, normalized).sum(1).mean())(w)
    with on_devices(4):
        assert_close(jax.jit(jax.value_and_grad(loss))(w), expected)


@every_schedule
def test_compiler_partitions_stages_over_a_further_axis(schedule):
    arguments = language_model(2)
    mesh = mesh_of({"stage": 2, "model": 2})
    place = lambda leaf, *spec: jax.device_put(leaf, NamedSharding(mesh, P(*spec)))
    params = {
        "stages": {"w": place(arguments[0]["stages"]["w"], "stage", None, "model"), "b": arguments[0]["stages"]["b"]},
        "first": place(arguments[0]["first"], None, "model"),
        "last": place(arguments[0]["last"], "model"),
    }
    with jax.set_mesh(mesh):
        results = jax.jit(jax.value_and_grad(pipelined_loss(schedule, 4)))(params, *arguments[1:])
    assert_close(results, jax.value_and_grad(unpipelined_loss)(*arguments))


def scan_lengths(jaxpr):
    """Returns the lengths of the loops of a jaxpr that contain a `ppermute`."""
    from jdist._src.core import jax_compat
    from jdist._src.jaxpr.interpreter import all_equations

    return [
        equation.params["length"]
        for equation in all_equations(jaxpr)
        if equation.primitive.name == "scan"
        and any(
            one.primitive.name == "ppermute"
            for inner in jax_compat.contents(equation).jaxprs
            for one in all_equations(inner)
        )
    ]


@pytest.mark.parametrize("devices, micro_batches", [(2, 4), (4, 4), (4, 8)])
def test_bubble_is_the_predicted_fraction_of_the_ticks(devices, micro_batches):
    """Each tick has a forward pass, a backward pass, or both."""
    lengths = {}
    with on_devices(devices):
        for schedule in SCHEDULES:
            loss = jax.value_and_grad(pipelined_loss(schedule, micro_batches))
            lengths[schedule] = scan_lengths(jax.make_jaxpr(loss)(*language_model(devices)).jaxpr)
    forward, backward = lengths["gpipe"]
    fill, steady, drain = lengths["1f1b"]
    assert forward == backward == fill + steady == steady + drain
    assert (forward - micro_batches) / forward == (devices - 1) / (micro_batches + devices - 1)


@pytest.mark.parametrize("devices", [2, 4])
def test_memory_of_a_tpu_grows_with_the_micro_batches_under_gpipe_only(devices):
    """Each further micro-batch adds the input of one stage to GPipe, and nothing to 1F1B."""
    strategy = jdist.TPUStrategy(
        topology="v5e:2x2", mesh={"replica": -1, "stage": devices}, layout={"stages": P("stage")}
    )
    width, time = 512, 1024  # buffers that do not fit into the fast memory of a core
    params = {
        "stages": {"w": jax.ShapeDtypeStruct((devices, width, width), jnp.bfloat16)},
        "last": jax.ShapeDtypeStruct((width, WORDS), jnp.bfloat16),
    }

    def peak(schedule, micro_batches):
        @strategy.step
        def step(params, x, y):
            grads = jax.grad(
                lambda params: jdist.pipeline(
                    lambda p, h: jnp.tanh(h @ p["w"]),
                    params["stages"],
                    x,
                    num_micro_batches=micro_batches,
                    first=(lambda _, x: jnp.broadcast_to(x[..., None], (*x.shape, width)).astype(jnp.bfloat16), ()),
                    last=(head, params["last"], y),
                    schedule=schedule,
                )
            )(params)
            return jax.tree.map(lambda p, g: p - g, params, jdist.all_reduce("mean", grads)), ()

        batch = jdist.PerReplica(jax.ShapeDtypeStruct((4 // devices, micro_batches, time), jnp.int32))
        return strategy.compile(step, params, batch, batch).memory_analysis().peak_memory_in_bytes

    stage_input = time * width * 2
    growth = {schedule: (peak(schedule, 512) - peak(schedule, 256)) / 256 / stage_input for schedule in SCHEDULES}
    assert growth["gpipe"] == pytest.approx(1, abs=0.1)
    assert growth["1f1b"] < 0.1


LABELS = jnp.zeros((BATCH, 3), jnp.int32)
ERRORS = {
    "micro-batches": (
        {"num_micro_batches": 3},
        "x is int32[8,3], with 8 examples, and cannot be split into 3 micro-batches. Use a divisor of the number of examples",
    ),
    "labels": (
        {"last": (head, None, LABELS[:6])},
        "inputs of `last`[0] is int32[6,3], with 6 examples, and cannot be split into 4 micro-batches.",
    ),
    "number": ({"num_micro_batches": 0}, "`num_micro_batches` must be an integer >= 1, got 0."),
    "schedule": ({"schedule": "zigzag"}, "`schedule` must be 'gpipe' or '1f1b', got 'zigzag'."),
    "no loss": (
        {"schedule": "1f1b", "last": None},
        '`schedule="1f1b"` computes gradients before the last micro-batch has entered, so the loss must be inside: pass',
    ),
    "stages": (
        {"stage_params": {"w": jnp.zeros((3, WIDTH, WIDTH))}},
        "3 stages (stage_params['w'] is float32[3,4,4]) cannot be divided over 2 devices, the size of the mesh axis 'stage'.",
    ),
    "uneven leaves": (
        {"stage_params": {"b": jnp.zeros((4, WIDTH)), "w": jnp.zeros((2, WIDTH, WIDTH))}},
        "must be the number of stages, but stage_params['w'] is float32[2,4,4], and another leaf has 4 stages.",
    ),
    "scalar leaves": (
        {"stage_params": {"b": jnp.zeros(()), "w": jnp.zeros((2, WIDTH, WIDTH))}},
        "must be the number of stages, but stage_params['b'] is float32[], and another leaf has 2 stages.",
    ),
    "no leaves": ({"stage_params": {}}, "`stage_params` has no arrays, whose first dimension is the number of stages."),
    "shapes": (
        {"stage_fn": lambda params, h: h[..., :2]},
        "`<lambda>` returned float32[2,3,2] for float32[2,3,4]. The next stage receives the result",
    ),
    "dtypes": (
        {"stage_fn": lambda params, h: h.astype(jnp.bfloat16)},
        "`<lambda>` returned bfloat16[2,3,4] for float32[2,3,4].",
    ),
    "first": ({"first": embed}, "`first` must be `(fn, params)`, got "),
    "input in first": (
        {"first": (embed, jnp.zeros((WORDS, WIDTH)), LABELS)},
        "`first` must be `(fn, params)`, got 3 values. Pass the input as `x`.",
    ),
    "last": ({"last": (jnp.zeros(3), head)}, "`last` must be `(fn, params, *inputs)`, got "),
    "distributed": ({"x": jdist.PerReplica(LABELS)}, "is a distributed value"),
}


@pytest.mark.parametrize("changes, message", ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument_and_what_to_do(changes, message):
    params, x, y = language_model(4)
    arguments = {
        "stage_fn": stage,
        "stage_params": params["stages"],
        "x": x,
        "num_micro_batches": 4,
        "first": (embed, params["first"]),
        "last": (head, params["last"], y),
    } | changes
    stage_fn, stage_params, x = (arguments.pop(name) for name in ("stage_fn", "stage_params", "x"))
    with on_devices(2), pytest.raises((ValueError, TypeError), match=re.escape(message)):
        jax.jit(lambda: jdist.pipeline(stage_fn, stage_params, x, **arguments))()


def test_axis_of_the_replicas_is_refused():
    strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(ValueError, match="The axis 'replica' of `jdist.pipeline` is an axis of the replicas"):
        strategy.run(
            lambda: jdist.pipeline(lambda w, h: h, jnp.ones(2), jnp.ones(2), num_micro_batches=1, axis="replica")
        )

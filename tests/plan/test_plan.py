"""`jdist.plan`: verdicts, bytes and times of steps for devices that are attached and for TPUs that are not."""

import functools
import importlib.util
import json
import pathlib
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jdist
from jdist._src.plan.sizes import with_num_devices

from planned_steps import all_reduce_bytes, batch_of, make_step, mesh_of, shape

MEAN_SGD = optax.chain(jdist.sync.mean(), optax.sgd(0.1))
LAYERS, WIDTH = 3, 256
PARAMETER_BYTES = LAYERS * WIDTH * WIDTH * 4


def sent_by_kind_and_axes(size):
    sent = {}
    for each in size.collectives:
        key = (each.kind, each.axes)
        sent[key] = sent.get(key, 0) + each.bytes_sent * each.executions
    return sent


@pytest.fixture(scope="module")
def data_parallel():
    """The plan of a data-parallel step on 8 to 8,192 cores of TPU v4."""
    strategy = jdist.TPUStrategy(topology="v4:2x2x1")
    step, make_state = make_step(MEAN_SGD)
    return jdist.plan(strategy, step, make_state, batch_of(strategy), over=[8, 64, 512, 8192])


def test_data_parallel_step_sends_twice_its_gradients_at_every_size(data_parallel):
    for size, devices in zip(data_parallel.sizes, [8, 64, 512, 8192], strict=True):
        assert (size.devices, size.replicas, size.fits) == (devices, devices, True)
        loss = 4
        assert size.collective_bytes == pytest.approx(all_reduce_bytes(PARAMETER_BYTES + loss, devices), rel=1e-3)
        assert {each.axes for each in size.collectives} == {("replica",)}
        assert any("planned_steps.py" in each.line for each in size.collectives if each.line)


def test_memory_and_flops_per_device_do_not_depend_on_the_number_of_devices(data_parallel):
    first = data_parallel.sizes[0]
    flops = 2 * 8 * WIDTH * WIDTH * (3 * LAYERS - 1)  # the input of the first layer has no gradient
    for size in data_parallel.sizes:
        assert size.memory.parameters == PARAMETER_BYTES
        assert size.memory.inputs == 8 * WIDTH * 4
        assert size.memory.total == pytest.approx(first.memory.total, rel=0.2)
        assert size.flops == flops
        assert size.time.compute == pytest.approx(flops / (275e12 / 2))
        assert size.time.total >= max(size.time.compute, size.time.memory)


STRATEGIES = {
    "Mirrored": (lambda devices: jdist.MirroredStrategy(devices), MEAN_SGD, False),
    "virtual": (lambda devices: jdist.MirroredStrategy(devices, virtual_replicas=16), MEAN_SGD, False),
    "OneDevice": (lambda devices: jdist.OneDeviceStrategy(devices[0]), MEAN_SGD, False),
    "Sharded": (lambda devices: jdist.ShardedStrategy("all", mesh=mesh_of(devices)), optax.adam(1e-3), True),
    "CentralStorage": (lambda devices: jdist.CentralStorageStrategy(devices), MEAN_SGD, False),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_on_attached_devices_has_a_plan(name):
    make, optimizer, reduce = STRATEGIES[name]
    strategy = make(jax.devices()[:4])
    step, make_state = make_step(optimizer, reduce=reduce)
    (size,) = jdist.plan(strategy, step, make_state, batch_of(strategy)).sizes
    parts = size.memory
    assert size.fits
    assert parts.parameters + parts.host > 0
    assert parts.total >= parts.parameters + parts.optimizer + parts.inputs
    assert size.strategy == type(strategy).__name__
    assert size.time is None  # no rates of CPUs are published
    assert size.flops > 0


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_int8_policy_sends_a_quarter(devices):
    strategy = jdist.MirroredStrategy(jax.devices()[:8])
    step, make_state = make_step(optax.chain(jdist.sync.int8(), optax.sgd(0.1)))
    (size,) = jdist.plan(strategy, step, make_state, batch_of(strategy), over=[devices]).sizes
    assert size.collective_bytes == pytest.approx(all_reduce_bytes(PARAMETER_BYTES, devices) / 4, rel=0.05)


def test_hierarchical_policy_sends_a_part_over_the_outer_axis():
    strategy = jdist.MirroredStrategy(jax.devices()[:8], cross_device_ops=jdist.HierarchicalAllReduce(4))
    step, make_state = make_step(optax.chain(jdist.sync.hierarchical("replica", "group"), optax.sgd(0.1)))
    (size,) = jdist.plan(strategy, step, make_state, batch_of(strategy)).sizes
    assert sent_by_kind_and_axes(size) == {
        ("reduce-scatter", ("replica",)): pytest.approx(PARAMETER_BYTES * 3 / 4, rel=0.01),
        ("all-reduce", ("group",)): pytest.approx(PARAMETER_BYTES / 4, rel=0.01),
        ("all-gather", ("replica",)): pytest.approx(PARAMETER_BYTES * 3 / 4, rel=0.01),
    }


def zero_plan(shard, devices, over, width=1024):
    strategy = jdist.ShardedStrategy(shard, mesh=mesh_of(devices))
    step, make_state = make_step(optax.adam(1e-3), width=width, layers=2, reduce=True)
    return jdist.plan(strategy, step, make_state, batch_of(strategy, rows=1024, width=width), over=over)


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "all"])
def test_zero_on_cpu_reduces_the_gradients_and_gathers_the_parameters(shard):
    num_bytes = 2 * 1024 * 1024 * 4
    for size in zero_plan(shard, jax.devices(), [2, 4, 8]).sizes:
        # XLA has no reduce-scatter here: it reduces, and each device uses its part.
        share = (size.devices - 1) / size.devices
        assert size.collective_bytes == pytest.approx(3 * share * num_bytes, rel=1e-3)
        split = size.memory.parameters if shard == "all" else size.memory.optimizer / 2
        assert split == pytest.approx(num_bytes / size.devices, rel=1e-3)


IS_OLD = jax.__version_info__ < (0, 11)  # its jaxlib cannot read all programs of the newest libtpu


@pytest.mark.skipif(not IS_OLD, reason="jaxlib and libtpu are of one time")
def test_program_that_jaxlib_cannot_read_is_an_error_with_the_command():
    with pytest.raises(
        RuntimeError, match=r'JAX 0.10.* cannot read the compiled program .*`pip install "jax\[tpu\]==0.10'
    ):
        zero_plan("optimizer", jdist.topology_devices("tpu7x:2x2x1"), [8])


@pytest.mark.skipif(IS_OLD, reason="NOT TESTED: ZeRO on tpu7x with jax 0.10, which cannot read its programs")
@pytest.mark.parametrize("shard, gathered", [("optimizer", 1), ("gradients", 1), ("all", 0.5)])
def test_zero_on_tpu_scatters_the_gradients_and_gathers_the_parameters(shard, gathered):
    """Products are computed in bfloat16, so with sharded parameters half of their bytes are gathered."""
    (size,) = zero_plan(shard, jdist.topology_devices("tpu7x:2x2x1"), [8]).sizes
    assert size.collective_bytes == pytest.approx(7 / 8 * (1 + gathered) * 2 * 1024 * 1024 * 4, rel=1e-3)
    sent = sent_by_kind_and_axes(size)
    assert sent["reduce-scatter", ("data",)] == pytest.approx(7 / 8 * 2 * 1024 * 1024 * 4)


def test_zero_on_thousands_of_devices_is_an_all_reduce_in_place_of_each():
    """The TPU compiler replaces both collectives where the parts are small."""
    (size,) = zero_plan("gradients", jdist.topology_devices("v4:2x2x1"), [8192], width=8192).sizes
    assert size.memory.optimizer == pytest.approx(2 * 2 * 8192 * 8192 * 4 / 8192, rel=1e-3)
    assert size.collective_bytes == pytest.approx(2 * all_reduce_bytes(2 * 8192 * 8192 * 4, 8192), rel=1e-3)


def test_outer_step_of_diloco_is_conditional():
    strategy = jdist.MirroredStrategy(jax.devices()[:4])
    optimizer = jdist.sync.diloco(optax.sgd(0.1), every=10)
    step, make_state = make_step(optimizer)
    (size,) = jdist.plan(strategy, step, make_state, batch_of(strategy)).sizes
    outer = [each for each in size.collectives if each.conditional]
    assert sum(each.bytes_sent for each in outer) == pytest.approx(all_reduce_bytes(PARAMETER_BYTES, 4), rel=0.01)
    assert sum(each.bytes_sent for each in size.collectives if not each.conditional) < 100


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_tensor_parallel_layers_reduce_activations_over_the_model_axis_and_gradients_over_the_other(platform):
    devices = jax.devices()[:8] if platform == "cpu" else jdist.topology_devices("v5e:2x4")
    mesh = mesh_of(devices, 2, 4, names=("data", "model"))
    layout = {"params/0": PartitionSpec(None, "model"), "params/1": PartitionSpec("model", None)}
    strategy = jdist.ShardedStrategy("optimizer", mesh=mesh, model_axis="model", layout=layout)
    step, make_state = make_step(optax.sgd(0.1), layers=2, reduce=True)
    batch = batch_of(strategy, rows=64)
    for size in jdist.plan(strategy, step, make_state, batch, over=[8, 4] if platform == "cpu" else [8, 64]).sizes:
        rows, parameters = 4 * 64, 2 * WIDTH * WIDTH * 4 / 4  # of one device
        assert size.memory.parameters == parameters
        expected = {
            ("all-reduce", ("model",)): all_reduce_bytes(rows * WIDTH * 4, 4),
            ("all-reduce", ("data",)): all_reduce_bytes(parameters, size.devices // 4),
        }
        assert sent_by_kind_and_axes(size) == {
            key: pytest.approx(num_bytes, rel=1e-3) for key, num_bytes in expected.items() if num_bytes
        }


# A step whose memory is known: a state of `rows` x 4096 numbers with Adam, and no large temporaries but the gradient.
def sized_step(rows):
    optimizer = optax.chain(jdist.sync.mean(), optax.adam(1e-3))

    def make_state():
        params = jnp.zeros((rows, 4096))
        return {"params": params, "opt_state": optimizer.init(params)}

    def train(state, x):
        value, grads = jax.value_and_grad(lambda w: ((x @ w.T) ** 2).mean())(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, jdist.all_reduce(
            "mean", value
        )

    return train, make_state


@pytest.mark.parametrize("count", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_verdicts_are_those_of_the_tpu_compiler_for_sizes_around_the_limit(count):
    strategy = jdist.TPUStrategy(topology="v5e:2x2")
    batch = jdist.PerReplica(shape(4, 8, 4096))
    verdicts = []
    for rows in np.linspace(0.8, 1.2, count) * (15.75 * 2**30 / (4 * 4 * 4096)):
        train, make_state = sized_step(int(rows) // 8 * 8)
        (size,) = jdist.plan(strategy, train, make_state, batch, remedies=False).sizes
        try:
            strategy.compile(train, jax.eval_shape(lambda make=make_state: strategy.init(make)), batch)
            compiles = True
        except jax.errors.JaxRuntimeError as error:
            assert "exceeds available" in str(error)
            compiles = False
        assert size.fits == compiles
        assert (size.memory.total <= size.memory.limit) == compiles
        assert size.memory.optimizer == pytest.approx(2 * size.memory.parameters, rel=1e-6)
        verdicts.append(compiles)
    assert count / 8 < sum(verdicts) < count * 7 / 8


def test_a_memory_of_the_user_decides():
    strategy = jdist.MirroredStrategy(jax.devices()[:2])
    step, make_state = make_step(MEAN_SGD)
    total = jdist.plan(strategy, step, make_state, batch_of(strategy)).sizes[0].memory.total
    for memory in (total // 2, total - 1, total, total + 1, 2 * total):
        plan = jdist.plan(strategy, step, make_state, batch_of(strategy), device_memory=memory, remedies=False)
        assert plan.fits == plan.sizes[0].fits == (total <= memory)
        assert plan.sizes[0].memory.limit == memory


def test_step_that_does_not_fit_has_compiled_remedies():
    strategy = jdist.TPUStrategy(topology="v5e:2x2")
    optimizer = optax.chain(jdist.sync.mean(), optax.adam(1e-3))
    step, make_state = make_step(optimizer, width=8192, layers=8, gradient=jdist.value_and_grad)
    batch = jdist.PerReplica(shape(4, 65536, 8192))
    plan = jdist.plan(strategy, step, make_state, batch)
    (size,) = plan.sizes
    assert not plan.fits
    assert size.memory.total > size.memory.limit
    assert size.time is None
    assert any(
        buffer.line and "planned_steps.py" in buffer.line for buffer in size.largest
    )  # compiled for a larger TPU
    remedies = {remedy.name: remedy for remedy in size.remedies}
    fitting = [remedy for remedy in remedies.values() if remedy.fits]
    assert "micro_batches=4" in {remedy.name for remedy in fitting}
    assert all(remedy.total <= size.memory.limit and remedy.step_seconds > 0 for remedy in fitting)
    assert {'ShardedStrategy("all")', 'ShardedStrategy("all", offload="optimizer")'} <= set(remedies)
    assert "It does not fit" in str(plan)


def test_step_that_takes_its_gradient_with_jax_is_compiled_with_a_smaller_batch():
    strategy = jdist.MirroredStrategy(jax.devices()[:2])
    step, make_state = make_step(MEAN_SGD)
    batch = batch_of(strategy, rows=4096)
    total = jdist.plan(strategy, step, make_state, batch).sizes[0].memory.total
    (size,) = jdist.plan(strategy, step, make_state, batch, device_memory=int(total * 0.6)).sizes
    (fits,) = (remedy for remedy in size.remedies if "batch" in remedy.name and remedy.fits)
    assert fits.total < 0.6 * total
    assert "jdist.value_and_grad" in fits.note


def test_variant_that_cannot_be_compiled_says_why():
    strategy = jdist.MirroredStrategy(jax.devices()[:2])
    train, make_state = make_step(MEAN_SGD)

    def step(state, x):
        if jdist.num_replicas() != 2:
            raise ValueError("This step is for two replicas.")
        return train(state, x)

    (size,) = jdist.plan(strategy, step, make_state, batch_of(strategy), device_memory=1).sizes
    sharded = {remedy.name: remedy for remedy in size.remedies}['ShardedStrategy("all")']
    assert (sharded.fits, sharded.note) == (None, "This step is for two replicas.")
    assert "not compiled" in str(jdist.plan(strategy, step, make_state, batch_of(strategy), device_memory=1))


FORMS = {
    "function": lambda strategy, step: step,
    "strategy.step": lambda strategy, step: strategy.step(step),
    "jdist.step": lambda strategy, step: jdist.step(step),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_step_and_of_a_state_have_one_plan(form):
    strategy = jdist.MirroredStrategy(jax.devices()[:4])
    step, make_state = make_step(MEAN_SGD)
    states = [make_state, strategy.init(make_state), jax.eval_shape(lambda: strategy.init(make_state))]
    plans = [jdist.plan(strategy, FORMS[form](strategy, step), state, batch_of(strategy)) for state in states]
    assert plans[0] == plans[1] == plans[2]


def test_options_of_a_step_are_kept():
    strategy = jdist.MirroredStrategy(jax.devices()[:2])
    step, make_state = make_step(MEAN_SGD)
    kept = jdist.plan(strategy, strategy.step(step, donate=False), make_state, batch_of(strategy)).sizes[0]
    donated = jdist.plan(strategy, step, make_state, batch_of(strategy)).sizes[0]
    assert kept.memory.outputs >= PARAMETER_BYTES > donated.memory.outputs


def test_state_of_an_nnx_module():
    strategy = jdist.MirroredStrategy(jax.devices()[:2])

    def step(model, x):
        loss, grads = jdist.value_and_grad(lambda model, x: (model(x) ** 2).mean(-1))(model, x)
        grads = jdist.all_reduce("mean", grads)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
        return model, jdist.all_reduce("mean", loss)

    (size,) = jdist.plan(strategy, step, nnx.Linear(16, 8, rngs=nnx.Rngs(0)), jdist.PerReplica(shape(2, 4, 16))).sizes
    assert size.memory.parameters == (16 * 8 + 8) * 4
    assert size.collectives[0].kind == "all-reduce"


def test_state_per_replica_has_the_number_of_replicas_of_each_size():
    strategy = jdist.MirroredStrategy(jax.devices()[:2])
    step, make_state = make_step(optax.chain(jdist.sync.top_k(0.1), optax.sgd(0.1)))
    shapes = jax.eval_shape(lambda: strategy.init(make_state))
    from_shapes = jdist.plan(strategy, step, shapes, batch_of(strategy), over=[2, 8])
    from_function = jdist.plan(strategy, step, make_state, batch_of(strategy), over=[2, 8])
    assert [size.memory for size in from_shapes.sizes] == [size.memory for size in from_function.sizes]


def test_model_of_the_time_is_calibrated_by_a_measurement():
    strategy = jdist.MirroredStrategy(jax.devices()[:2])
    step, make_state = make_step(MEAN_SGD)
    plan = jdist.plan(strategy, step, make_state, batch_of(strategy), over=[2, 4], calibrate=strategy)
    calibration = plan.calibration
    assert calibration.measured > 0 and calibration.predicted > 0 and calibration.steps >= 5
    assert calibration.error == pytest.approx(calibration.predicted / calibration.measured - 1)
    first, second = plan.sizes
    assert first.time.total == pytest.approx(calibration.measured)  # the measured step itself
    assert second.time.calibration == calibration.factor
    assert re.search(
        r"Calibrated on 2 devices of kind cpu: .* measured \(median of \d+ steps\).* error [+-]\d+%", str(plan)
    )


def test_json_and_page_contain_the_plan(data_parallel, tmp_path):
    data = json.loads(data_parallel.to_json())
    assert [size["devices"] for size in data["sizes"]] == [8, 64, 512, 8192]
    assert data["sizes"][0]["collectives"][0]["kind"] == "all-reduce"
    assert data["sizes"][0]["memory"]["total"] == data_parallel.sizes[0].memory.total
    page = data_parallel.save(tmp_path / "plan.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "http-equiv" in page
    assert not re.findall(r"(?:src|href)=", page)  # it loads nothing
    for text in ("Plan of train", "8,192 devices", "all-reduce", "<svg", "parameters"):
        assert text in page
    assert "<pre" in data_parallel._repr_html_()
    assert "Times are a model" in str(data_parallel)


def of_one_device():
    strategy = jdist.MirroredStrategy(jax.devices()[:2])
    return strategy, *make_step(MEAN_SGD), batch_of(strategy)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"over": 8}, TypeError, r"`over` must be a list of numbers of devices, such as \[8, 64\], got 8"),
        ({"over": []}, TypeError, "`over` must be a list of numbers"),
        ({"over": [0]}, ValueError, "A number in `over`"),
        ({"over": [2.5]}, TypeError, "A number in `over`"),
        ({"over": [64]}, ValueError, r"There are 8 cpu devices, and `over` contains 64. `jdist.use_cpu_devices\(64\)`"),
        ({"device_memory": 0}, ValueError, "`device_memory`"),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        jdist.plan(*of_one_device(), **arguments)


def test_what_is_not_a_strategy_is_named():
    with pytest.raises(TypeError, match="`strategy` must be a strategy, got"):
        jdist.plan("v5e:4x4", *of_one_device()[1:])


def test_size_that_no_topology_has_lists_the_nearest():
    strategy = jdist.TPUStrategy(topology="v5e:2x2")
    with pytest.raises(ValueError, match=r"no topology like 'v5e:2x2' with 48 devices. Near it are 16, 32, 64, 128"):
        jdist.plan(strategy, *make_step(MEAN_SGD), batch_of(strategy), over=[48])


def test_mesh_whose_other_axes_do_not_divide_a_size_is_named():
    mesh = mesh_of(jax.devices()[:8], 2, 4, names=("data", "model"))
    strategy = jdist.ShardedStrategy(mesh=mesh, model_axis="model")
    with pytest.raises(
        ValueError, match=r"6 devices cannot form a mesh like 'data' 2 x 'model' 4: use a multiple of 4"
    ):
        with_num_devices(strategy, 6)


def test_strategy_that_has_one_size_is_named():
    with pytest.raises(ValueError, match=r"devices of a OneDeviceStrategy \(1\) cannot be chosen. Pass strategies"):
        with_num_devices(jdist.OneDeviceStrategy(), 2)


def test_step_that_cannot_be_traced_from_shapes_names_its_line():
    strategy, _, make_state, batch = of_one_device()

    def step(state, x):
        return state, float(x.sum())  # this needs the values

    with pytest.raises(Exception, match="(?s)concrete|Abstract tracer|`float") as raised:
        jdist.plan(strategy, step, make_state, batch)
    notes = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert "test_plan.py" in notes


needs_plugin = pytest.mark.skipif(
    not (importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda13")),
    reason="NOT TESTED: plans for GPUs. `pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt` in JAX's version",
)


@needs_plugin
def test_plan_for_gpus():
    target = pathlib.Path(__file__).parent.parent / "kit/h100_target_config.txtpb"
    strategy = jdist.MirroredStrategy(jdist.topology_devices("1x1x8", gpu_target_config=target))
    step, make_state = make_step(MEAN_SGD)
    plan = jdist.plan(strategy, step, make_state, batch_of(strategy), over=[8, 4, 32])
    for size, devices in zip(plan.sizes, [8, 4, 32], strict=True):
        assert (size.devices, size.fits, size.time.hardware) == (devices, True, "H100")
        assert 50e9 < size.memory.limit < 70e9  # three quarters of the memory
        assert size.collective_bytes == pytest.approx(all_reduce_bytes(PARAMETER_BYTES, devices), rel=1e-3)
    inside, _, across = (size.time.communication for size in plan.sizes)
    assert across > 5 * inside  # over the network of the hosts


def a_trainer(strategy):
    init = lambda key, x: [jnp.zeros((WIDTH, WIDTH))] * LAYERS
    apply = lambda params, x: functools.reduce(lambda h, w: jnp.tanh(h @ w), params, x)
    return jdist.Trainer((init, apply), optax.adam(1e-3), optax.squared_error, strategy=strategy)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_step_of_a_trainer(platform):
    cpus = lambda: jdist.MirroredStrategy(jax.devices()[:4])
    strategy = cpus() if platform == "cpu" else jdist.TPUStrategy(topology="v5e:2x2")
    rows = jdist.PerReplica(shape(4, 512, WIDTH))
    plan = jdist.plan(strategy, a_trainer(strategy), None, (rows, rows), over=[4, 8])
    for size in plan.sizes:
        assert size.memory.optimizer == pytest.approx(2 * PARAMETER_BYTES, rel=1e-3)
        assert size.memory.parameters == pytest.approx(PARAMETER_BYTES, rel=1e-3)
        assert size.collective_bytes == pytest.approx(all_reduce_bytes(PARAMETER_BYTES, size.devices), rel=1e-2)
        assert size.flops == 2 * 512 * WIDTH * WIDTH * (3 * LAYERS - 1)
    (small,) = jdist.plan(strategy, a_trainer(strategy), None, (rows, rows), device_memory=1).sizes
    assert {"micro_batches=2", "micro_batches=4"} <= {remedy.name for remedy in small.remedies}
    assert all(remedy.total > 0 for remedy in small.remedies)


def test_trainer_with_a_state_or_without_a_batch_of_replicas_is_an_error():
    strategy = jdist.MirroredStrategy(jax.devices()[:2])
    for arguments in [(None,), (lambda: 0, jdist.PerReplica(shape(2, 4, WIDTH))), (None, shape(8, WIDTH))]:
        with pytest.raises(TypeError, match=r"write `jdist.plan\(strategy, trainer, None, batch\)`"):
            jdist.plan(strategy, a_trainer(strategy), *arguments)


def test_lines_are_those_of_this_source_if_another_one_has_compiled_the_same_program():
    source = "import jdist\ndef step(w, x):\n    return w - jdist.all_reduce('mean', x.sum()), None"
    strategy = jdist.MirroredStrategy(jax.devices()[:2])
    for file in ("first.py", "second.py"):
        names = {}
        exec(compile(source, file, "exec"), names)
        plan = jdist.plan(strategy, names["step"], lambda: jnp.float32(0), jdist.PerReplica(shape(2, 4)))
        assert [each.line for each in plan.sizes[0].collectives] == [f"{file}:3"]


def test_state_of_an_equinox_module_which_is_callable():
    strategy = jdist.MirroredStrategy(jax.devices()[:2])

    def step(model, x):
        loss, grads = eqx.filter_value_and_grad(lambda model: (jax.vmap(model)(x) ** 2).mean())(model)
        grads = jdist.all_reduce("mean", grads)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), jdist.all_reduce("mean", loss)

    model = eqx.nn.Linear(16, 8, key=jax.random.key(0))
    (size,) = jdist.plan(strategy, step, model, jdist.PerReplica(shape(2, 4, 16))).sizes
    assert size.memory.parameters == (16 * 8 + 8) * 4

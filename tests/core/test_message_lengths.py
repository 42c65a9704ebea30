"""A wrong argument is one line of a message, whatever its size: an array, a module, a tree of arrays, a long list or text."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jdist
from jdist import callbacks, cluster, coordinator, data, hlo, metrics, sync, testing

from laws import each_row

X = np.ones((8, 3), np.float32)
MODEL = (lambda key, x: jnp.zeros(3)), (lambda w, x: x @ w)
SGD = optax.sgd(0.1)
TREE = {f"layer{i}": np.zeros((100, 100), np.float32) for i in range(40)}
# In a call each value takes the place of an argument of another kind.
VALUES = {
    "array": lambda: np.zeros((1000, 1000), np.float32),
    "array on a device": lambda: jnp.zeros((4, 100_000)),
    "nnx module": lambda: nnx.Sequential(*(nnx.Linear(3, 3, rngs=nnx.Rngs(0)) for _ in range(12))),
    "linen module": lambda: linen.Sequential([linen.Dense(3)] * 50),
    "tree": lambda: TREE,
    "wrapper": lambda: jdist.PerReplica({name: np.zeros((2, 3)) for name in TREE}),
    "list": lambda: list(range(300)),
    "text": lambda: "x" * 5000,
    "lines": lambda: "x\n" * 300,
}


def two():
    return testing.strategy("mirrored_2")


def with_argument(fn, names, **others):
    """Returns a call of `fn` for each of some arguments, by the name of the argument."""
    call = lambda name: lambda value: fn(**{**others, name: value})
    return {f"{fn.__name__}({name}=)": call(name) for name in names.split()}


def loader(**options):
    return iter(two().distribute_dataset(**{"source": X, "batch_size": 4, **options}))


def fit(**options):
    return jdist.Trainer(MODEL, SGD, optax.squared_error, strategy=two()).fit((X, X[:, 0]), progress="off", **options)


def simple_step(**options):
    return two().step(lambda state: (state, None), **options)


def in_replica(fn):
    return lambda value: two().run(lambda x: fn(x, value), (X,))


CALLS = {
    **with_argument(jdist.Trainer, "optimizer loss objective strategy precision", model=MODEL),
    **with_argument(jdist.Trainer, "metrics eval_params seed non_finite remat", model=MODEL, optimizer=SGD),
    **with_argument(jdist.Trainer, "model step"),
    **with_argument(fit, "batch_size epochs steps callbacks", batch_size=4),
    **with_argument(fit, "steps_per_call micro_batches state cache", batch_size=4),
    **with_argument(loader, "batch_size seed epochs remainder auto_shard prefetch cache buckets shuffle"),
    **with_argument(simple_step, "precision steps_per_call donate compiler_options"),
    **with_argument(
        jdist.MirroredStrategy, "devices axis_name cross_device_ops communication_options virtual_replicas"
    ),
    **with_argument(jdist.ShardedStrategy, "shard mesh model_axis layout offload axis_name"),
    **with_argument(jdist.CentralStorageStrategy, "compute_devices parameter_device offload"),
    **with_argument(jdist.ParameterServerStrategy, "servers max_staleness engine non_finite snapshots", workers=1),
    **with_argument(jdist.Precision, "param_dtype compute_dtype output_dtype"),
    **with_argument(data.Buckets, "widths leaves fill", widths=(4,)),
    **with_argument(data.Files, "paths read", paths=["a"], read=len),
    **with_argument(callbacks.EarlyStopping, "metric patience min_delta mode", metric="loss"),
    "OneDeviceStrategy": jdist.OneDeviceStrategy,
    "MultiWorkerMirroredStrategy": jdist.MultiWorkerMirroredStrategy,
    "TPUStrategy": jdist.TPUStrategy,
    "CommunicationOptions": jdist.CommunicationOptions,
    "set_strategy": jdist.set_strategy,
    "run(fn)": lambda value: two().run(value),
    "run(args=)": lambda value: two().run(lambda: 1, value),
    "run(kwargs=)": lambda value: two().run(lambda: 1, (), value),
    "init": lambda value: two().init(value),
    "put": lambda value: two().put((value, object())),
    "split": lambda value: two().split((value, X[:7])),
    "reduce(op)": lambda value: two().reduce(value, two().split(X), axis=None),
    "reduce(axis=)": lambda value: two().reduce("sum", two().split(X), axis=value),
    "gather(axis=)": lambda value: two().gather(two().split(X), axis=value),
    "all_reduce(op)": in_replica(lambda x, value: jdist.all_reduce(value, x)),
    "all_reduce(options=)": in_replica(lambda x, value: jdist.all_reduce("sum", x, options=value)),
    "global_mean(weights=)": in_replica(lambda x, value: jdist.global_mean(x, value)),
    "value_and_grad": lambda value: jdist.value_and_grad(value),
    "value_and_grad(remat=)": lambda value: jdist.value_and_grad(lambda params: params, remat=value),
    "parameters": in_replica(lambda x, value: jdist.value_and_grad(lambda params: x)((value, np.int32(1)))),
    "losses": in_replica(lambda x, value: jdist.value_and_grad(lambda params: (value, 1, 2))(x)),
    "train_step(loss_fn)": lambda value: jdist.train_step(value, SGD),
    "train_step(optimizer)": lambda value: jdist.train_step(lambda w, x: x, value),
    "eval_step": jdist.eval_step,
    "over(batches)": lambda value: jdist.eval_step(lambda w, x: x.sum()).over(0.0, value),
    "step(static_argnames=)": lambda value: jdist.step(lambda s, x: (s, x), static_argnames=value),
    "step.on": lambda value: jdist.step(lambda s, x: (s, x)).on(value),
    "TrainState": lambda value: jdist.TrainState.create((value, object()), SGD),
    "assign": lambda value: two().put(jdist.Mirrored(jnp.zeros(3))).assign(value),
    "Mirrored": lambda value: jdist.Mirrored(X, value),
    "wrapper +": lambda value: VALUES["wrapper"]() + value,
    "CallbackResult": lambda value: callbacks.CallbackResult(stop_reason=value),
    "TimeLimit": callbacks.TimeLimit,
    "EMA": callbacks.EMA,
    "Checkpoint": callbacks.Checkpoint,
    "set_state": lambda value: loader().set_state(value),
    "stats": data.stats,
    "collectives": hlo.collectives,
    "assert_collectives": lambda value: testing.assert_collectives(simple_step(), value, X),
    "testing.strategy": testing.strategy,
    "inject_fault": lambda value: testing.inject_fault(0, 1, value),
    "sync.every(optimizer)": lambda value: sync.every(value, 2),
    "sync.every(k)": lambda value: sync.every(SGD, value),
    "sync.int8(rounding=)": lambda value: sync.int8(rounding=value),
    "sync.top_k": sync.top_k,
    "sync.in_dtype": sync.in_dtype,
    "sync.local_sgd": lambda value: sync.local_sgd(value, every=2),
    "sync.streaming_diloco(blend=)": lambda value: sync.streaming_diloco(SGD, every=2, fragments=1, blend=value),
    "SimpleClusterResolver": cluster.SimpleClusterResolver,
    "addresses": lambda value: cluster.SimpleClusterResolver({"worker": value}),
    "address": lambda value: cluster.SimpleClusterResolver({"worker": [value, "b:1"]}),
    "UnionResolver": cluster.UnionResolver,
    "ClusterCoordinator": coordinator.ClusterCoordinator,
    "lookup(table)": lambda value: jdist.lookup(value, jnp.array([0])),
    "lookup(ids)": lambda value: jdist.lookup(X, value),
    "xla_flags": jdist.xla_flags,
    "Mean.update": lambda value: metrics.Mean().update(value),
    "Accuracy.update": lambda value: metrics.Accuracy().update(value, value),
}


@pytest.fixture(scope="module")
def values():
    return {kind: make() for kind, make in VALUES.items()}


@each_row("call", CALLS)
def test_wrong_argument_is_one_line(call, values):
    with jax.transfer_guard("allow"):
        for kind, value in values.items():
            try:
                CALLS[call](value)
            except Exception as error:
                own_notes = [note for note in getattr(error, "__notes__", ()) if "JAX has removed" not in note]
                for text in (str(error), *own_notes):
                    assert len(text) < 700 and "\n" not in text, (kind, text[:2000])

"""Training steps of one process on 2, 4 and 8 devices, against TensorFlow, Keras on JAX and hand-written JAX.

    python benchmarks/devices.py [--quick] [--json] [--devices 2 4 8] [--case mlp]

Cases: `mlp`, `cnn` and `transformer` (4 blocks of width 256) of `benchmarks/models.py`, in float32 with AdamW. The global batch
is the same for each number of devices. Peers of a step: `shard_map` (hand-written, all gradients in one all-reduce) and
`TensorFlow`: its `MirroredStrategy` over logical CPU devices, without and with XLA. `fit` is `Trainer.fit` on a Keras model,
with its defaults, against `model.fit` of the same Keras model on the JAX backend with `keras.distribution.DataParallel`: one
epoch on arrays in memory, not shuffled. The losses of the JAX candidates, and of both `fit`, are checked to be equal.

Torch has no data parallelism over CPU devices of one process: `multi_process.py` has its rows. A process has one backend of
Keras and one number of TensorFlow's devices, and the collectives of TensorFlow fail in a process with several models, so each
of these and each case has its own process, interleaved with jdist.
"""

import argparse
import functools
import itertools
import os
import subprocess
import sys

import sidebyside

BACKENDS = ("tensorflow", "jax")
EPOCH = {"mlp": 200, "cnn": 20, "transformer": 5}  # steps of an epoch of `fit`
options = sidebyside.parser("Training steps on several devices against TensorFlow and Keras on JAX.")
options.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8], help="numbers of CPU devices")
options.add_argument("--case", choices=list(EPOCH), help="run only this case")
# Set for a process of one case and one number of devices.
options.add_argument("--backend", choices=BACKENDS, help=argparse.SUPPRESS)
args = options.parse_args()

if args.backend is None:
    for backend, count, case in itertools.product(BACKENDS, args.devices, [args.case] if args.case else EPOCH):
        words = ["--backend", backend, "--devices", str(count), "--case", case]
        subprocess.run([sys.executable, *sys.argv, *words], check=True)
    sys.exit()

(COUNT,), os.environ["KERAS_BACKEND"] = args.devices, args.backend

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", COUNT)

import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from models import CASES, packed_mean, train_step

import jdist

ROUNDS = args.rounds or (3 if args.quick else 21)


class Loop:
    """Runs steps sequentially; the state continues from call to call."""

    def __init__(self, step, state, batch):
        self.step, self.state, self.batch = step, state, batch

    def losses(self, steps):
        losses = []
        for _ in range(steps):
            self.state, loss = self.step(self.state, self.batch)
            losses.append(loss.block_until_ready())
        jax.block_until_ready(self.state)
        return losses


def steps_of(model, optimizer, batch):
    """Returns the loops of jdist and of hand-written JAX."""
    strategy, mesh = jdist.MirroredStrategy(), sidebyside.mesh_of(jax.devices())
    params = model.init(jax.random.key(0), batch[0][:1])
    state = (params, optimizer.init(params))
    rows, whole = PartitionSpec("replica"), PartitionSpec()
    make = lambda mean: functools.partial(train_step, model, optimizer, mean)
    over_mesh = jax.shard_map(make(packed_mean), mesh=mesh, in_specs=(whole, rows), out_specs=whole, check_vma=False)
    ours = strategy.step(make(lambda tree: jdist.all_reduce("mean", tree)))
    placed = jax.device_put(jax.tree.map(jnp.copy, state), NamedSharding(mesh, whole))
    loops = {
        "jdist": Loop(ours, strategy.put(state), strategy.split(batch)),
        "shard_map": Loop(
            jax.jit(over_mesh, donate_argnums=0), placed, jax.device_put(batch, NamedSharding(mesh, rows))
        ),
    }
    np.testing.assert_allclose(*(np.hstack(loop.losses(5)) for loop in loops.values()), rtol=1e-3)
    return loops


def with_tensorflow(name, steps, model, optimizer, batch):
    import tensorflow as tf
    import tensorflow_models

    loops = steps_of(model, optimizer, batch)
    with tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(COUNT)]).scope():
        for peer, compiles in (("TensorFlow", False), ("TensorFlow, XLA", True)):
            loops[peer] = tensorflow_models.StrategyLoop(model, batch, compiles)
    return name, {peer: functools.partial(one.losses, steps) for peer, one in loops.items()}, steps


def with_keras(name, _, model, optimizer, batch):
    from keras_models import Fit, keras_model

    steps = EPOCH[name]
    data, batch_size = tuple(np.concatenate([part] * steps) for part in batch), len(batch[1])
    weights = keras_model(model, batch[0].shape).get_weights()
    theirs = Fit(model, data, batch_size, jax.devices(), weights)
    net = keras_model(model, batch[0].shape)
    net.set_weights(weights)
    strategy = jdist.MirroredStrategy()
    trainer = jdist.Trainer(net, optimizer, optax.softmax_cross_entropy_with_integer_labels, strategy=strategy)
    states = [trainer.init(batch[0])]

    def fit():
        fitted = trainer.fit(data, batch_size=batch_size, state=states.pop(), shuffle=False, progress="off")
        states.append(fitted.state)
        return [np.mean(list(fitted.history.losses.values())[-steps:])]

    np.testing.assert_allclose(fit(), theirs.losses(), rtol=1e-2)
    return f"fit, {name}", {"jdist": fit, "Keras on JAX": theirs.losses}, steps


def main():
    sidebyside.versions(args.json)
    if args.backend == "tensorflow":
        if not sidebyside.has("tensorflow", args.json):
            return
        import tensorflow_models

        tensorflow_models.logical_devices(COUNT)
    make = with_tensorflow if args.backend == "tensorflow" else with_keras
    case, works, steps = make(args.case, *CASES[args.case])
    timed = {peer: functools.partial(sidebyside.seconds, work) for peer, work in works.items()}
    sidebyside.report(f"{case}, {COUNT} devices", sidebyside.rounds(timed, ROUNDS), args.json, steps)


if __name__ == "__main__":
    main()

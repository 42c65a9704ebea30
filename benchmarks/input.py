"""Batches placed on the devices by jdist, against hand-written code and other libraries.

    python benchmarks/input.py [--quick] [--json] [--devices 4] [--case arrays|tiny|cached|grain|step]

The data are 60,000 images of 28 x 28 bytes and their labels, in batches of 256. Cases: `arrays` (shuffled arrays in memory;
hand-written: numpy indexing and one `device_put`; if installed, tf.data with `experimental_distribute_dataset`, and torch's
`DataLoader` with a `device_put`); `grain` (a `grain` pipeline passed to jdist, against the same pipeline iterated and placed by
hand); `step` (arrays, and a step on each batch); `tiny` (padded batches of 64 examples of 32 floats and a label, against one
`device_put` of the same batch); `cached` (a small MLP, ten steps per call, on data that are stored on the devices, against
the same steps on one batch that is on the devices already). A measurement ends when the last batch is on the devices.
"""

import functools
import importlib.util
import itertools
import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow logs to standard error when it is imported

import jax

import sidebyside

options = sidebyside.parser("Input of jdist against hand-written input and other libraries.")
options.add_argument("--devices", type=int, default=0, help="default: all accelerators, or 4 CPU devices")
options.add_argument("--case", choices=["arrays", "tiny", "cached", "grain", "step"], help="run only this case")
args = options.parse_args()
jax.config.update("jax_num_cpu_devices", args.devices or 4)

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jdist

DEVICES = jax.devices()[: args.devices or None]
ROWS = NamedSharding(sidebyside.mesh_of(DEVICES), PartitionSpec("replica"))
BATCH = 256
IMAGES = np.random.default_rng(0).integers(0, 256, (60_000, 28, 28)).astype(np.uint8)
LABELS = np.arange(60_000, dtype=np.int32) % 10
STEPS = len(IMAGES) // BATCH
ROW_BATCH, ROW_STEPS = 64, 640
strategy = jdist.MirroredStrategy(DEVICES)


def arrived(batches):
    """Iterates over all batches, and waits for the last."""
    *_, (count, last) = enumerate(batches, 1)
    jax.block_until_ready(last)
    assert count == STEPS, count


def by_hand():
    order = np.random.default_rng(1).permutation(len(IMAGES))
    for start in range(0, STEPS * BATCH, BATCH):
        numbers = order[start : start + BATCH]
        yield jax.device_put((IMAGES[numbers], LABELS[numbers]), ROWS)


def with_torch(loader):
    for images, labels in loader:
        yield jax.device_put((images.numpy(), labels.numpy()), ROWS)


def with_tensorflow(tf, count):
    """Returns a TensorFlow strategy with the same number of CPU devices, and its distributed data set."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    theirs = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(count)])
    source = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).shuffle(len(IMAGES)).batch(BATCH, drop_remainder=True)
    return theirs.experimental_distribute_dataset(source.prefetch(tf.data.AUTOTUNE))


def installed(case, name):
    found = importlib.util.find_spec(name) is not None
    if not found:
        line = f"{case}: {name} is not installed, its row is skipped"
        print(json.dumps({"skipped": line}) if args.json else line, flush=True)
    return found


def arrays():
    ours = strategy.distribute_dataset((IMAGES, LABELS), BATCH, shuffle=True)
    work = {"jdist": lambda: arrived(ours), "numpy, device_put": lambda: arrived(by_hand())}
    if installed("arrays", "torch"):
        import torch

        data = torch.utils.data.TensorDataset(torch.from_numpy(IMAGES), torch.from_numpy(LABELS))
        loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True, drop_last=True)
        work["torch DataLoader"] = lambda: arrived(with_torch(loader))
    if installed("arrays", "tensorflow"):
        import tensorflow as tf

        theirs = with_tensorflow(tf, len(DEVICES))
        work["tf.distribute"] = lambda: arrived_in_tensorflow(theirs)
    return work


def arrived_in_tensorflow(batches):
    *_, (count, last) = enumerate(batches, 1)
    [part.numpy() for part in last[1].values]
    assert count == STEPS, count


def grain():
    import grain

    pipeline = grain.MapDataset.source(list(zip(IMAGES, LABELS, strict=True))).shuffle(seed=1)
    pipeline = pipeline.batch(BATCH, drop_remainder=True).to_iter_dataset(grain.ReadOptions(num_threads=0))
    placed = lambda: (jax.device_put(batch, ROWS) for batch in pipeline)
    ours = strategy.distribute_dataset(pipeline, None)
    return {"jdist": lambda: arrived(ours), "grain, device_put": lambda: arrived(placed())}


def step():
    weights = jax.device_put(jnp.ones((784, 64)), NamedSharding(ROWS.mesh, PartitionSpec()))
    hidden = lambda images, weights: jnp.tanh(images.reshape(-1, 784) / 255 @ weights).sum()
    inside, outside = (jax.jit(jax.vmap(hidden, (0, None))), jax.jit(hidden))
    ours = strategy.distribute_dataset((IMAGES, LABELS), BATCH, shuffle=True)
    return {
        "jdist": lambda: arrived(inside(batch[0].tree, weights).block_until_ready() for batch in ours),
        "numpy, device_put": lambda: arrived(outside(batch[0], weights).block_until_ready() for batch in by_hand()),
    }


def rows():
    """Returns examples of 32 floats and a label, for `ROW_STEPS` batches."""
    generator = np.random.default_rng(0)
    features = generator.normal(size=(ROW_STEPS * ROW_BATCH, 32)).astype(np.float32)
    return features, generator.integers(0, 10, len(features)).astype(np.int32)


def tiny():
    data = rows()
    ours = strategy.distribute_dataset(data, ROW_BATCH, remainder="pad")

    def put():
        for start in range(0, ROW_STEPS * ROW_BATCH, ROW_BATCH):
            batch = tuple(array[start : start + ROW_BATCH] for array in data)
            placed = jax.device_put(batch, (ROWS, ROWS))
        jax.block_until_ready(placed)

    def feed():
        for (batch, _), _ in zip(ours, range(ROW_STEPS), strict=True):
            placed = batch
        jax.block_until_ready(placed)

    return {"jdist": feed, "one device_put": put}


def cached():
    sizes, per_call = (32, 64, 64, 10), 10

    def make(key):
        keys = jax.random.split(key, 3)
        return [
            jax.random.normal(k, shape) * 0.1
            for k, shape in zip(keys, zip(sizes, sizes[1:], strict=False), strict=True)
        ]

    def loss(params, features, labels):
        for w in params[:-1]:
            features = jnp.tanh(features @ w)
        scores = jax.nn.log_softmax(features @ params[-1])
        return -jnp.take_along_axis(scores, labels[:, None], 1).mean()

    def train(params, batch):
        value, grads = jdist.all_reduce("mean", jax.value_and_grad(loss)(params, *batch))
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    take = strategy.step(train, steps_per_call=per_call)
    data = rows()
    ours = strategy.distribute_dataset(data, ROW_BATCH, shuffle=True, cache="device")
    one = next(iter(strategy.distribute_dataset(data, ROW_BATCH)))

    def run(batches):
        params = strategy.init(make, jax.random.key(0))
        for _ in range(ROW_STEPS // per_call):
            params, losses = take(params, [next(batches) for _ in range(per_call)])
        jax.block_until_ready(losses)

    return {"jdist": lambda: run(iter(ours)), "not fed": lambda: run(itertools.repeat(one))}


def main():
    sidebyside.versions(args.json)
    for case in (arrays, tiny, cached, grain, step):
        if args.case in (None, case.__name__):
            timed = {peer: functools.partial(sidebyside.seconds, work) for peer, work in case().items()}
            taken = sidebyside.rounds(timed, args.rounds or (2 if args.quick else 9 if case is grain else 21))
            steps = ROW_STEPS if case in (tiny, cached) else STEPS
            sidebyside.report(f"{case.__name__}, {len(DEVICES)} devices", taken, args.json, steps)


if __name__ == "__main__":
    main()

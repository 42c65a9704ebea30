"""Trains a small CNN on real data with a custom training loop: data parallelism, padding, evaluation, proof.

    python examples/digits.py                 # all accelerators, or 8 CPU devices
    python examples/digits.py --replicas 4 --epochs 5
    jdist run -n 2 examples/digits.py         # two processes, with one CPU device each, or with half of the GPUs

The data are the 1,797 handwritten digits of scikit-learn: 8 x 8 pixels, 10 classes. 1,797 is not divisible by 2, 4 or 8, so
the last batch of an epoch is padded. After training on several replicas, the script trains with the same seed on one device and
compares the weights.
"""

import argparse
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from rich.console import Console

import jdist

try:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
except ModuleNotFoundError:
    raise SystemExit('The digits come with scikit-learn: python -m pip install -e ".[examples]"') from None


class CNN(nn.Module):
    """Two convolutions and two dense layers: `[batch, 8, 8, 1]` to `[batch, 10]`."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the logits of each class."""
        x = nn.relu(nn.Conv(32, (3, 3))(images))
        x = nn.max_pool(nn.relu(nn.Conv(64, (3, 3))(x)), (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(128)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


model = CNN()


def make_optimizer(steps):
    return optax.adamw(optax.cosine_decay_schedule(3e-3, steps), weight_decay=0.1)


def make_state(key, steps):
    params = model.init(key, jnp.zeros((1, 8, 8, 1)))["params"]
    return {"params": params, "opt_state": make_optimizer(steps).init(params)}


@jdist.step(static_argnames="steps")
def train_step(state, batch, weights, *, steps):
    """The training step of one replica. Padded examples have weight 0."""
    images, labels = batch
    num_examples = jdist.all_reduce("sum", weights.sum())

    def loss_fn(params):
        logits = model.apply({"params": params}, images)
        return jnp.sum(weights * optax.softmax_cross_entropy_with_integer_labels(logits, labels)) / num_examples

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    loss, grads = jdist.all_reduce("sum", (loss, grads))
    updates, opt_state = make_optimizer(steps).update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


@jdist.eval_step
def evaluate(params, batch, weights):
    """Returns the accuracy and the number of examples. Padded examples have weight 0."""
    images, labels = batch
    logits = model.apply({"params": params}, images)
    accuracy = jdist.metrics.Accuracy().update(logits, labels, weights=weights)
    return {"accuracy": accuracy, "examples": jdist.metrics.Sum().update(weights)}


def train(strategy, train_data, test_data, args, console):
    """Returns the trained state and the proof of the step."""
    batches = strategy.distribute_dataset(
        train_data, args.batch_size, shuffle=True, seed=args.seed, epochs=args.epochs, remainder="pad"
    )
    test_batches = strategy.distribute_dataset(test_data, batch_size=256, remainder="pad")
    steps = len(batches)
    start = time.perf_counter()
    with strategy.scope():
        state = jdist.init(lambda key: make_state(key, steps), jax.random.key(args.seed))
        for step, (batch, weights) in enumerate(batches, start=1):
            state, loss = train_step(state, batch, weights, steps=steps)
            if step % (steps // args.epochs) == 0:
                results = evaluate.over(state["params"], test_batches)
                console.print(
                    f"  epoch {step * args.epochs // steps:3}/{args.epochs}   loss {float(loss):.4f}   "
                    f"test accuracy {results['accuracy']:6.2%} of {results['examples']:.0f}   "
                    f"{time.perf_counter() - start:5.1f} s"
                )
        return state, train_step.proof


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, help="number of devices (default: all accelerators, or 8 CPU devices)")
    parser.add_argument("--epochs", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=128, help="global batch size (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and shuffling (default: %(default)s)")
    args = parser.parse_args()
    if "JDIST_NUM_PROCESSES" not in os.environ:  # `jdist run` chooses the number of devices per process
        jdist.use_cpu_devices(args.replicas or 8)  # before JAX starts; no effect on accelerators
    strategy = jdist.auto_strategy()
    if args.replicas:
        strategy = jdist.MirroredStrategy(jax.devices()[: args.replicas])
    replicas = strategy.num_replicas_in_sync

    console = Console(highlight=False, soft_wrap=True, quiet=jax.process_index() > 0)
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[..., None]
    arrays = train_test_split(
        images, digits.target.astype(np.int32), test_size=0.2, random_state=0, stratify=digits.target
    )
    train_data, test_data = (arrays[0], arrays[2]), (arrays[1], arrays[3])

    console.print(
        f"{len(images)} digits, {len(train_data[0])} for training; {replicas} replicas on {jax.devices()[0].device_kind}"
    )
    state, proof = train(strategy, train_data, test_data, args, console)

    console.print("The same seed on one device")
    single_state, _ = train(jdist.OneDeviceStrategy(jax.local_devices()[0]), train_data, test_data, args, console)
    pairs = zip(jax.tree.leaves(state["params"]), jax.tree.leaves(single_state["params"]), strict=True)
    difference = max(np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in pairs)
    console.print(f"Largest difference between the two models' weights: {difference:.1e}")

    proved = sum(name.startswith("state") for name in proof.replicated)
    console.print(
        f"Proved while tracing: {proved} of {len(jax.tree.leaves(state))} state leaves are replicated on all "
        f"{replicas} replicas after every step, for any data."
    )


if __name__ == "__main__":
    main()

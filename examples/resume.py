"""Training that is killed repeatedly and resumed, and ends with bitwise the same parameters as uninterrupted training.

    python examples/resume.py
    python examples/resume.py --kills 5 --replicas 4

A process trains a small CNN on the digits of scikit-learn, saves checkpoints, and kills itself with SIGKILL after a random
step. The next process resumes from the newest checkpoint. After the last one, the script trains once without interruption and
compares.
"""

import argparse
import multiprocessing
import os
import random
import signal
import tempfile

import jax
import numpy as np
import optax
from flax import linen as nn
from rich.console import Console
from rich.table import Table

import jdist

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    raise SystemExit('The digits come with scikit-learn: python -m pip install -e ".[examples]"') from None

BATCH_SIZE, STEPS_PER_EPOCH = 120, 15  # the last batch of an epoch is padded
CHECKPOINT_EVERY = 7  # steps: most checkpoints are in the middle of an epoch


class CNN(nn.Module):
    """A convolution and two dense layers, with dropout: `[batch, 8, 8, 1]` to `[batch, 10]`."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Returns the logits of each class."""
        x = nn.max_pool(nn.relu(nn.Conv(32, (3, 3))(images)), (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10)(nn.Dropout(0.2, deterministic=not train)(x))


def use_cpu(replicas: int) -> None:
    """Uses CPU devices, since the processes of this script cannot share an accelerator. Called before JAX starts."""
    jax.config.update("jax_platforms", "cpu")
    jdist.use_cpu_devices(replicas)


def train(folder: str, args: argparse.Namespace, kill_after: int | None = None) -> jdist.Fit:
    """Trains from the newest checkpoint in `folder`, or from the beginning; kills the process after step `kill_after`."""

    def kill(event):
        if event.step == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    digits = load_digits()
    images, labels = (digits.images / 16).astype(np.float32)[..., None], digits.target.astype(np.int32)
    trainer = jdist.Trainer(
        CNN(),
        optax.adamw(2e-3),
        optax.softmax_cross_entropy_with_integer_labels,
        metrics={"accuracy": jdist.metrics.Accuracy()},
        strategy=jdist.MirroredStrategy(),
        seed=args.seed,
    )
    with jdist.Checkpointer(folder, every=CHECKPOINT_EVERY) as checkpointer:
        return trainer.fit(
            (images, labels),
            batch_size=BATCH_SIZE,
            epochs=args.epochs,
            callbacks=[jdist.callbacks.Checkpoint(checkpointer), kill],
            resume=checkpointer,
            progress="off",
        )


def train_in_process(folder: str, args: argparse.Namespace, kill_after: int) -> None:
    """The main function of a process that is killed."""
    use_cpu(args.replicas)
    train(folder, args, kill_after)


def newest_step(folder: str) -> int:
    """Returns the step of the newest checkpoint, 0 if there is none."""
    with jdist.Checkpointer(folder) as checkpointer:
        return checkpointer.latest or 0


def train_with_kills(folder: str, args: argparse.Namespace, console: Console) -> jdist.Fit:
    """Trains in several processes that are killed, one after the other, and completes the training in this process."""
    table = Table("process", "resumed after step", "killed after step")
    kills = random.Random(args.seed).sample(range(1, args.epochs * STEPS_PER_EPOCH), args.kills)
    for number, kill_after in enumerate(sorted(kills), start=1):
        start = newest_step(folder)
        with console.status(f"Process {number} trains from step {start}"):
            process = multiprocessing.get_context("spawn").Process(
                target=train_in_process, args=(folder, args, kill_after)
            )
            process.start()
            process.join()
        if process.exitcode != -signal.SIGKILL:
            raise SystemExit(
                f"Expected process {number} to be killed after step {kill_after}: exit {process.exitcode}."
            )
        console.print(f"Process {number} trained from step {start} and was killed after step {kill_after}")
        table.add_row(str(number), str(start), str(kill_after))
    start = newest_step(folder)
    with console.status(f"This process trains from step {start}"):
        fit = train(folder, args)
    table.add_row("this", str(start), f"none: complete after {fit.steps}")
    console.print(table)
    return fit


def count_differences(a, b) -> tuple[int, int]:
    """Returns the number of elements of two pytrees that are not bitwise equal, and the number of elements."""
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]
    return sum(int((x.view(np.uint32) != y.view(np.uint32)).sum()) for x, y in pairs), sum(x.size for x, _ in pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2, help="CPU devices (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=6, help=f"of {STEPS_PER_EPOCH} steps (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=3, help="processes to kill (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of training and kills (default: %(default)s)")
    args = parser.parse_args()
    use_cpu(args.replicas)
    steps = args.epochs * STEPS_PER_EPOCH
    if not 0 <= args.kills < steps:
        parser.error(f"--kills must be less than the {steps} training steps, got {args.kills}")

    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{steps} steps on {args.replicas} replicas, a checkpoint every {CHECKPOINT_EVERY} steps")
    with tempfile.TemporaryDirectory() as folder:
        resumed = train_with_kills(os.path.join(folder, "resumed"), args, console)
        with console.status("Training without interruption"):
            uninterrupted = train(os.path.join(folder, "uninterrupted"), args)
    for name, fit in {"Killed and resumed": resumed, "Uninterrupted": uninterrupted}.items():
        console.print(f"{name:18}   loss {fit.history['loss'][-1]:.6f}   accuracy {fit.history['accuracy'][-1]:.2%}")
    for part in ("params", "opt_state"):
        differences, total = count_differences(getattr(resumed.state, part), getattr(uninterrupted.state, part))
        console.print(f"{part:9}   {differences} of {total:,} numbers differ in a bit")
        if differences:
            raise SystemExit("The resumed training is not bitwise equal.")


if __name__ == "__main__":
    main()

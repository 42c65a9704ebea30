"""Training that is killed again and again, and ends with the same bits as training that is not.

    python examples/resume.py
    python examples/resume.py --kills 5 --replicas 4

A process trains a small CNN on the digits that come with scikit-learn, saves checkpoints on its way, and after a random step
kills itself with SIGKILL, which leaves it no time for anything. Another one goes on from the newest checkpoint, and so forth.
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

BATCH_SIZE, STEPS = 120, 15  # of each epoch, whose last batch is not full
EVERY = 7  # steps from one checkpoint to the next: most of them lie within an epoch


class CNN(nn.Module):
    """A convolution and two dense layers, with dropout: `[batch, 8, 8, 1]` to `[batch, 10]`."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """The logits of each class."""
        x = nn.max_pool(nn.relu(nn.Conv(32, (3, 3))(images)), (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10)(nn.Dropout(0.2, deterministic=not train)(x))


def train(folder: str, args: argparse.Namespace, kill_after: int | None = None) -> jdist.Fit:
    """Trains, from the newest checkpoint in `folder` if there is one."""

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
    with jdist.Checkpointer(folder, every=EVERY) as checkpointer:
        return trainer.fit(
            (images, labels),
            batch_size=BATCH_SIZE,
            epochs=args.epochs,
            callbacks=[jdist.callbacks.Checkpoint(checkpointer), kill],
            resume=checkpointer,
            progress="off",
        )


def train_and_die(folder: str, args: argparse.Namespace, kill_after: int) -> None:
    """What a process that will be killed does."""
    use_cpu(args.replicas)
    train(folder, args, kill_after)


def use_cpu(replicas: int) -> None:
    """Before the first use of JAX. Several processes would have to share an accelerator, and get in each other's way."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", replicas)


def newest(folder: str) -> int:
    """The step of the newest checkpoint, 0 if there is none."""
    with jdist.Checkpointer(folder) as checkpointer:
        return checkpointer.latest or 0


def train_with_kills(folder: str, args: argparse.Namespace, console: Console) -> jdist.Fit:
    """Trains in one process after the other, of which the last, this one, is not killed; prints what became of each."""
    table = Table("process", "began after step", "was killed after step")
    kills = random.Random(args.seed).sample(range(1, args.epochs * STEPS), args.kills)
    for number, kill_after in enumerate(sorted(kills), start=1):
        began = newest(folder)
        with console.status(f"Process {number} trains from step {began}"):
            process = multiprocessing.get_context("spawn").Process(
                target=train_and_die, args=(folder, args, kill_after)
            )
            process.start()
            process.join()
        if process.exitcode != -signal.SIGKILL:
            raise SystemExit(
                f"Process {number} was to be killed after step {kill_after}, and ended with {process.exitcode}."
            )
        console.print(f"Process {number} trained from step {began} and was killed after step {kill_after}")
        table.add_row(str(number), str(began), str(kill_after))
    began = newest(folder)
    with console.status(f"This process trains from step {began}"):
        fit = train(folder, args)
    table.add_row("this", str(began), f"none: it ended after {fit.steps}")
    console.print(table)
    return fit


def count_different(one, other) -> tuple[int, int]:
    """How many numbers of two trees differ in a bit, and how many there are."""
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)]
    return sum(int((a.view(np.uint32) != b.view(np.uint32)).sum()) for a, b in pairs), sum(a.size for a, _ in pairs)


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Kill training at random steps, resume it, and compare with training that was left alone.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--replicas", type=int, default=2, help="CPU devices to use")
    parser.add_argument("--epochs", type=int, default=6, help=f"times to go through the images, of {STEPS} steps each")
    parser.add_argument("--kills", type=int, default=3, help="processes to kill")
    parser.add_argument("--seed", type=int, default=0, help="of the training, and of the steps to kill it after")
    args = parser.parse_args()
    for name, least in {"replicas": 1, "epochs": 1, "kills": 0, "seed": 0}.items():
        if getattr(args, name) < least:
            parser.error(f"--{name} is at least {least}, got {getattr(args, name)}")
    if args.kills >= args.epochs * STEPS:
        parser.error(f"--kills is less than the {args.epochs * STEPS} steps of all epochs, got {args.kills}")
    if BATCH_SIZE % args.replicas:
        parser.error(f"--replicas divides the {BATCH_SIZE} images of a batch, got {args.replicas}")
    return args


def main():
    args = parse_arguments()
    use_cpu(args.replicas)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{args.epochs * STEPS} steps on {args.replicas} replicas, with a checkpoint every {EVERY} steps")
    with tempfile.TemporaryDirectory() as folder:
        killed = train_with_kills(os.path.join(folder, "killed"), args, console)
        with console.status("And once without being killed"):
            straight = train(os.path.join(folder, "straight"), args)
    for word, fit in {"Killed and resumed": killed, "Left alone": straight}.items():
        console.print(f"{word:18}   loss {fit.history['loss'][-1]:.6f}   accuracy {fit.history['accuracy'][-1]:.2%}")
    for part in ("params", "opt_state"):
        different, numbers = count_different(getattr(killed.state, part), getattr(straight.state, part))
        console.print(f"{part:9}   {different} of {numbers:,} numbers differ in a bit")
        if different:
            raise SystemExit("Resuming is not exact.")


if __name__ == "__main__":
    main()

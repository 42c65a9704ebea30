"""Trains a small transformer on text, character by character, and lets it write some.

    python examples/text_lm.py                        # a minute or two on 2 CPU cores
    python examples/text_lm.py --steps 2000 --replicas 4 --temperature 0.6

The text is the standard library's own reference, `pydoc_data.topics`; every tenth of its pages is held out. A batch is taken
in micro-batches, whose gradients are added up, and what is big is computed in bfloat16, with parameters kept in float32.
"""

import argparse
import functools
import math
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax
from rich.console import Console
from rich.text import Text

import jdist

WINDOW = 64  # characters that the model sees
MICRO_BATCHES = 2
STEPS_PER_CALL = 5


class Transformer(nn.Module):
    """A decoder: codes `[batch, time]` to logits `[batch, time, characters]`."""

    characters: int
    layers: int = 2
    width: int = 128

    @nn.compact
    def __call__(self, codes: jax.Array) -> jax.Array:
        """The logits of each next character."""
        x = nn.Dense(self.width)(with_past(nn.Embed(self.characters, self.width)(codes)))
        mask = nn.make_causal_mask(codes)
        for _ in range(self.layers):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=4, force_fp32_for_softmax=True)(y, mask=mask)
            y = nn.Dense(4 * self.width)(nn.LayerNorm()(x))
            x = x + nn.Dense(self.width)(nn.gelu(y))
        return nn.Dense(self.characters)(nn.LayerNorm()(x))


def with_past(x: jax.Array) -> jax.Array:
    """`[batch, time, n]` to `[batch, time, 4 n]`: each character with three before it, which tells attention the order."""
    padded = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
    return jnp.concatenate([padded[:, i : i + x.shape[1]] for i in range(4)], axis=-1)


def make_data():
    """Windows to train on and windows held out, each with the same one character later; and the characters."""
    pages = ["\n" + topics[name] for name in sorted(topics)]
    characters = sorted(set("".join(pages)))
    code_of = {character: code for code, character in enumerate(characters)}

    def windows(pages):
        codes = np.array([code_of[character] for character in "".join(pages)], np.int32)
        cut = np.stack([codes[start : start + WINDOW + 1] for start in range(0, len(codes) - WINDOW, WINDOW)])
        return cut[:, :-1], cut[:, 1:]

    return windows([page for number, page in enumerate(pages) if number % 10]), windows(pages[::10]), characters


def bits(logits, codes):
    """What each character would take to write down, `[batch, time]`."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, codes) / math.log(2)


@functools.partial(jax.jit, static_argnums=(0, 3))
def write(model, params, window, length, temperature, key):
    """`length` characters that go on behind `window`, `[WINDOW]`: one after the other, by a program of one shape."""

    def next_character(window, key):
        logits = model.apply({"params": params}, window[None])[0, -1]
        code = jax.random.categorical(key, logits / temperature).astype(window.dtype)
        return jnp.append(window[1:], code), code

    return lax.scan(next_character, window, jax.random.split(key, length))[1]


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Train a small transformer on the standard library's reference, and let it write some.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--replicas", type=int, default=2, help="devices to use, CPU devices where there are no others")
    parser.add_argument("--steps", type=int, default=420, help="training steps")
    parser.add_argument("--batch-size", type=int, default=32, help="windows of text in a step of all replicas together")
    parser.add_argument("--length", type=int, default=600, help="characters to write at the end")
    parser.add_argument("--temperature", type=float, default=0.7, help="above 0; the lower, the less is left to chance")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the order of the windows, and the writing")
    args = parser.parse_args()
    for name, least in {"replicas": 1, "steps": 1, "batch_size": 1, "length": 1, "seed": 0}.items():
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} is at least {least}, got {getattr(args, name)}")
    if not 0 < args.temperature < math.inf:
        parser.error(f"--temperature is a number above 0, got {args.temperature}")
    # Before the first use of JAX, and without effect where there are accelerators.
    jax.config.update("jax_num_cpu_devices", args.replicas)
    if args.replicas > len(jax.devices()):
        parser.error(f"--replicas is at most the number of devices, {len(jax.devices())}, got {args.replicas}")
    if args.batch_size % (args.replicas * MICRO_BATCHES):
        parser.error(
            f"--batch-size is a multiple of {args.replicas * MICRO_BATCHES}, for {args.replicas} replicas that take theirs in "
            f"{MICRO_BATCHES} parts, got {args.batch_size}"
        )
    return args


def main():
    args = parse_arguments()
    console = Console(highlight=False, markup=False, soft_wrap=True)
    train, held_out, characters = make_data()
    # So that each epoch is a whole number of calls: what is left over would need a second program.
    rows = len(train[0]) // (args.batch_size * STEPS_PER_CALL) * args.batch_size * STEPS_PER_CALL
    if not rows:
        raise SystemExit(
            f"--batch-size is at most {len(train[0]) // STEPS_PER_CALL} for this text, got {args.batch_size}"
        )
    train = tuple(x[:rows] for x in train)
    console.print(
        f"{len(train[0]):,} windows of {WINDOW} characters to train, {len(held_out[0]):,} held out; "
        f"{args.steps} steps on {args.replicas} replicas on {jax.devices()[0].device_kind}"
    )
    model = Transformer(len(characters))
    rate = optax.warmup_cosine_decay_schedule(0.0, 5e-3, args.steps // 20, args.steps)
    trainer = jdist.Trainer(
        model,
        optax.chain(optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adamw)(rate, weight_decay=0.1)),
        bits,
        strategy=jdist.MirroredStrategy(jax.devices()[: args.replicas]),
        precision=jdist.Precision(compute=jnp.bfloat16),
        seed=args.seed,
    )
    fit = trainer.fit(
        train,
        batch_size=args.batch_size,
        steps=args.steps,
        validation_data=held_out,
        micro_batches=MICRO_BATCHES,
        steps_per_call=STEPS_PER_CALL,
    )
    console.print(f"{fit.stop}\n{fit.history}")
    found = trainer.evaluate(fit.state, held_out, batch_size=args.batch_size)
    console.print(f"Held out: {found['loss']:.3f} bits a character, of {found['examples']} windows")

    window, params = held_out[0][0], jdist.read_values(fit.state.params)
    codes = write(model, params, window, args.length, args.temperature, jax.random.key(args.seed))
    seen, written = ("".join(characters[code] for code in part) for part in (window, np.asarray(codes)))
    console.print(
        "\nAfter the first window held out, which is dim, it writes:\n", Text(seen, "dim") + Text(written), sep="\n"
    )


if __name__ == "__main__":
    main()

"""Trains a small nnx transformer on text, character by character, and generates text with it.

    python examples/text_lm.py                        # one to two minutes on 2 CPU cores
    python examples/text_lm.py --steps 2000 --replicas 4 --temperature 0.6
    python examples/text_lm.py --pipeline 2           # each replica is two devices, with half of the blocks each

The text is the reference documentation in Python's standard library, `pydoc_data.topics`; every tenth page is held out. The
example shows micro-batches, several steps per call, pipelines, and mixed precision: bfloat16 computation with float32
parameters.
"""

import argparse
import functools
import math
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from rich.console import Console
from rich.text import Text

import jdist

WINDOW = 64  # context length in characters
MICRO_BATCHES = 2
PIPELINE_MICRO_BATCHES = 8  # several times more than devices, which otherwise wait for each other
STEPS_PER_CALL = 5


class Block(nnx.Module):
    """Causal self-attention and a feed-forward network: `[batch, time, width]` to the same shape."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=4, in_features=width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the activations of the next block."""
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """A decoder: codes `[batch, time]` to logits `[batch, time, characters]`.

    The arrays of the blocks are stacked, `[layer, ...]`. With `is_pipeline`, each device along a mesh axis `"stage"` computes a
    part of the blocks.
    """

    def __init__(
        self, characters: int, layers: int = 2, width: int = 128, is_pipeline: bool = False, *, rngs: nnx.Rngs
    ):
        self.embed = nnx.Embed(characters, width, rngs=rngs)
        self.inputs = nnx.Linear(4 * width, width, rngs=rngs)
        self.blocks = nnx.split_rngs(splits=layers)(nnx.vmap(lambda rngs: Block(width, rngs)))(rngs)
        self.is_pipeline = is_pipeline
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.out = nnx.Linear(width, characters, rngs=rngs)

    def __call__(self, codes: jax.Array) -> jax.Array:
        """Returns the logits of each next character."""
        x = self.inputs(with_previous(self.embed(codes)))
        graphdef, blocks = nnx.split(self.blocks)
        block = lambda block, x: nnx.merge(graphdef, block)(x)
        if self.is_pipeline:
            x = jdist.pipeline(block, blocks, x, num_micro_batches=math.gcd(len(x), PIPELINE_MICRO_BATCHES))
        else:
            x, _ = lax.scan(lambda x, params: (block(params, x), None), x, blocks)
        return self.out(self.norm(x))


def with_previous(x: jax.Array) -> jax.Array:
    """Concatenates each position with the three before it, which encodes the order: `[batch, time, n]` to `[..., 4 n]`."""
    padded = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
    return jnp.concatenate([padded[:, i : i + x.shape[1]] for i in range(4)], axis=-1)


def load_data():
    """Returns training windows and held-out windows, each with the window one character later, and the characters."""
    pages = ["\n" + topics[name] for name in sorted(topics)]
    characters = sorted(set("".join(pages)))
    code_of = {character: code for code, character in enumerate(characters)}

    def windows(pages):
        codes = np.array([code_of[character] for character in "".join(pages)], np.int32)
        rows = np.stack([codes[start : start + WINDOW + 1] for start in range(0, len(codes) - WINDOW, WINDOW)])
        return rows[:, :-1], rows[:, 1:]

    return windows([page for number, page in enumerate(pages) if number % 10]), windows(pages[::10]), characters


def bits(logits, codes):
    """Returns the cross-entropy of each character in bits, `[batch, time]`."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, codes) / math.log(2)


@functools.partial(jax.jit, static_argnums=(0, 3))
def generate(graphdef, params, window, length, temperature, key):
    """Returns `length` characters that continue `window`, `[WINDOW]`."""
    model = nnx.merge(graphdef, params)

    def next_character(window, key):
        logits = model(window[None])[0, -1] / jnp.maximum(temperature, 1e-6)  # 0 takes the most likely character
        code = jax.random.categorical(key, logits).astype(window.dtype)
        return jnp.append(window[1:], code), code

    return lax.scan(next_character, window, jax.random.split(key, length))[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2, help="number of replicas (default: %(default)s)")
    parser.add_argument("--pipeline", type=int, default=1, help="devices per replica (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=420, help="training steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="global batch size (default: %(default)s)")
    parser.add_argument("--length", type=int, default=600, help="characters to generate (default: %(default)s)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        help="of sampling; 0 takes the most likely character (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, shuffling, sampling (default: %(default)s)")
    args = parser.parse_args()
    jdist.use_cpu_devices(args.replicas * args.pipeline)  # before JAX starts; no effect on accelerators

    console = Console(highlight=False, markup=False, soft_wrap=True)
    train, held_out, characters = load_data()
    # A multiple of the examples of a call: a remainder would compile a second program.
    examples = len(train[0]) // (args.batch_size * STEPS_PER_CALL) * args.batch_size * STEPS_PER_CALL
    train = tuple(x[:examples] for x in train)
    console.print(
        f"{len(train[0]):,} windows of {WINDOW} characters for training, {len(held_out[0]):,} held out; "
        f"{args.steps} steps on {args.replicas} replicas on {jax.devices()[0].device_kind}"
    )
    layers = max(2, args.pipeline)
    model = Transformer(len(characters), layers, is_pipeline=args.pipeline > 1, rngs=nnx.Rngs(args.seed))
    devices = np.array(jax.devices()[: args.replicas * args.pipeline]).reshape(args.replicas, args.pipeline)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, args.steps // 20, args.steps)
    trainer = jdist.Trainer(
        model,
        optax.chain(optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adamw)(schedule, weight_decay=0.1)),
        bits,
        strategy=jdist.MirroredStrategy(
            mesh=Mesh(devices, ("replica", "stage")), layout={"blocks": PartitionSpec("stage")}
        ),
        precision=jdist.Precision(compute_dtype=jnp.bfloat16),
        seed=args.seed,
    )
    fit = trainer.fit(
        train,
        batch_size=args.batch_size,
        steps=args.steps,
        validation_data=held_out,
        micro_batches=1 if args.pipeline > 1 else MICRO_BATCHES,
        steps_per_call=STEPS_PER_CALL,
    )
    console.print(f"{fit.stop_reason}\n{fit.history}")
    result = trainer.evaluate(fit.state, held_out, batch_size=args.batch_size)
    console.print(f"Held out: {result['loss']:.3f} bits per character, {result['examples']} windows")

    window, params = held_out[0][0], jdist.read_values(fit.state.params)
    key = jax.random.key(args.seed)
    codes = generate(nnx.graphdef(model), params, window, args.length, args.temperature, key)
    prompt, text = ("".join(characters[code] for code in part) for part in (window, np.asarray(codes)))
    console.print(
        "\nThe first held-out window (dim) and the generated text:\n", Text(prompt, "dim") + Text(text), sep="\n"
    )


if __name__ == "__main__":
    main()

"""Trains one annotated transformer on differently arranged devices, with the same losses.

    python examples/parallelism.py                       # 4 CPU devices
    python examples/parallelism.py --steps 20 --width 64

The model names the dimensions of its weights and activations ("embed", "heads", "mlp"), and rules map these names to the axes
of a mesh. Under strategies without these axes the names have no effect, so the same step runs on one device. The model predicts
the next character of the reference documentation in the standard library, `pydoc_data.topics`.
"""

import argparse
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh

import jdist

RULES = [("batch", "data"), ("heads", "model"), ("mlp", "model"), ("embed", None)]
HEADS = 4
WINDOW = 32  # characters per example


def _dense(features: int, *names: str | None) -> nn.Dense:
    return nn.Dense(
        features, use_bias=False, kernel_init=nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
    )


class Transformer(nn.Module):
    """A causal language model of one block: characters `[batch, time]` to logits `[batch, time, character]`."""

    characters: int
    width: int

    @nn.compact
    def __call__(self, codes: jax.Array) -> jax.Array:
        """Returns the logits of each next character."""
        x = nn.Embed(self.characters, self.width)(codes)
        x = x + nn.Embed(WINDOW, self.width)(jnp.arange(codes.shape[1]))
        x = x + self.attention(nn.LayerNorm()(x))
        hidden = nn.gelu(_dense(4 * self.width, "embed", "mlp")(nn.LayerNorm()(x)))
        hidden = nn.with_logical_constraint(hidden, ("batch", None, "mlp"))
        x = x + _dense(self.width, "mlp", "embed")(hidden)
        return _dense(self.characters, "embed", None)(nn.LayerNorm()(x))

    def attention(self, x: jax.Array) -> jax.Array:
        """Returns causal self-attention, `[batch, time, width]`."""
        projections = [_dense(self.width, "embed", "heads")(x) for _ in range(3)]
        q, k, v = (y.reshape(*y.shape[:2], HEADS, -1) for y in projections)
        q, k, v = (nn.with_logical_constraint(y, ("batch", None, "heads", None)) for y in (q, k, v))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return _dense(self.width, "heads", "embed")(mixed.reshape(x.shape))


def mesh_of(data_axis: str, num_groups: int, num_parts: int) -> Mesh:
    """Returns a mesh of the first devices, `[num_groups, num_parts]`."""
    devices = jax.devices()[: num_groups * num_parts]
    return Mesh(np.array(devices).reshape(num_groups, num_parts), (data_axis, "model"))


# The devices of all of them train one model on the same global batches.
STRATEGIES: dict[str, Callable[[], jdist.Strategy]] = {
    "one device": lambda: jdist.OneDeviceStrategy(),
    "4 replicas": lambda: jdist.MirroredStrategy(jax.devices()[:4]),
    "4 replicas, state in host memory": lambda: jdist.CentralStorageStrategy(jax.devices()[:4]),
    "2 replicas of 2 tensor-parallel devices": lambda: jdist.MirroredStrategy(mesh=mesh_of("replica", 2, 2)),
    "FSDP x tensor, 2 x 2": lambda: jdist.ShardedStrategy("all", mesh=mesh_of("data", 2, 2), model_axis="model"),
    "FSDP x tensor, 4 x 1": lambda: jdist.ShardedStrategy("all", mesh=mesh_of("data", 4, 1), model_axis="model"),
}


def examples() -> tuple[np.ndarray, int]:
    """Returns windows of characters, `[example, time + 1]`, and the number of different characters."""
    text = "\n".join(topics.values())
    characters, codes = np.unique(np.array(list(text)), return_inverse=True)
    count = len(codes) // (WINDOW + 1)
    return codes[: count * (WINDOW + 1)].reshape(count, WINDOW + 1).astype(np.int32), len(characters)


def train(strategy: jdist.Strategy, optimizer: optax.GradientTransformation, steps: int, width: int) -> list[float]:
    """Returns the loss of each step."""
    windows, characters = examples()
    model = Transformer(characters, width)

    def make(key: jax.Array) -> Any:
        params = model.init(key, jnp.zeros((1, WINDOW), jnp.int32))
        return params, optimizer.init(params)

    @strategy.step
    def step(state: Any, window: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state

        def loss_fn(params: Any) -> jax.Array:
            logits = model.apply(params, window[:, :-1])
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:]))

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), jdist.all_reduce("mean", loss)

    with nn.logical_axis_rules(RULES):
        state, losses = strategy.init(make, jax.random.key(0)), []
        for window in strategy.distribute_dataset(windows[: 8 * steps], batch_size=8):
            state, loss = step(state, window)
            losses.append(loss)
    return [float(loss) for loss in losses]


def main() -> None:
    """Prints the first and the last loss under each strategy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=32)
    arguments = parser.parse_args()
    jdist.use_cpu_devices(4)
    optimizer = optax.chain(jdist.sync.mean(), optax.adam(1e-2))
    for name, make in STRATEGIES.items():
        losses = train(make(), optimizer, arguments.steps, arguments.width)
        print(f"{name:40} loss {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()

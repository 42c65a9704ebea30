"""Memory per device of a transformer of 100M parameters (3M with `--quick`) under each strategy.

    python benchmarks/memory.py [--quick] [--json] [--topology v5e:2x4]

For each strategy and number of devices, from the memory analysis of the compiled programs, which are not run: memory per device
between steps (`state`), additional memory of a step (`step`: temporary buffers and results that no donated argument provides),
the peak of creating the state (`init`), and host memory (`host`). By default for CPU devices, where host memory is device
memory; with `--topology` (`pip install "jdist[plan]"`) with the compiler for TPUs.
"""

import argparse
import json

import jax

parser = argparse.ArgumentParser(
    description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
)
parser.add_argument("--quick", action="store_true", help="3M parameters, on 2 devices")
parser.add_argument("--json", action="store_true", help="print one JSON object per row")
parser.add_argument("--topology", help="a TPU slice to compile for, such as v5e:2x4")
args = parser.parse_args()
if not args.topology:
    jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

import jdist

LAYERS, WIDTH, VOCABULARY, LENGTH, ROWS = (1, 256, 4096, 64, 8) if args.quick else (12, 768, 20480, 128, 8)
COUNTS = (2,) if args.quick else (1, 2, 4, 8)
DEVICES = jdist.topology_devices(args.topology) if args.topology else jax.devices()


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        for _ in range(LAYERS):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=WIDTH // 64)(y, y, mask=nn.make_causal_mask(tokens))
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


model, tx = Transformer(), optax.chain(jdist.sync.mean(), optax.adamw(1e-4))


def make(key):
    params = model.init(key, jnp.zeros((1, LENGTH), jnp.int32))
    return {"params": params, "opt_state": tx.init(params)}


def train(state, tokens):
    def loss(params):
        logits = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state}, jdist.all_reduce("mean", value)


def sharded(shard):
    return lambda devices: jdist.ShardedStrategy(shard, mesh=Mesh(np.array(devices), ("data",)))


STRATEGIES = {
    "mirrored": jdist.MirroredStrategy,
    'sharded "optimizer"': sharded("optimizer"),
    'sharded "gradients"': sharded("gradients"),
    'sharded "all"': sharded("all"),
    'central "optimizer"': lambda devices: jdist.CentralStorageStrategy(devices, offload="optimizer"),
    'central "all"': jdist.CentralStorageStrategy,
}


def taken(strategy):
    """Returns bytes per device: between steps, additionally in a step, at the peak of `init`, and in host memory."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = jax.eval_shape(lambda key: strategy.init(make, key), key)
    batch = (strategy.num_replicas_in_sync, ROWS * strategy.mesh.size // strategy.num_replicas_in_sync, LENGTH + 1)
    step = strategy.compile(train, shapes, jdist.PerReplica(jax.ShapeDtypeStruct(batch, jnp.int32)))
    memory = step.memory_analysis()
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    init = jax.jit(lambda key: strategy.init(make, key)).lower(jax.ShapeDtypeStruct(key.shape, key.dtype)).compile()
    first = init.memory_analysis()
    return {
        "state": memory.argument_size_in_bytes,
        "step": memory.temp_size_in_bytes + new,
        "init": first.output_size_in_bytes + first.temp_size_in_bytes,
        "host": memory.host_argument_size_in_bytes,
    }


table = Table("strategy", "devices", *("state", "step", "init", "host"), title="MB a device")
parameters = sum(x.size for x in jax.tree.leaves(jax.eval_shape(make, jax.random.key(0))["params"]))
for name, strategy in STRATEGIES.items():
    for count in COUNTS:
        found = taken(strategy(DEVICES[:count]))
        table.add_row(name, str(count), *(f"{value / 1e6:.1f}" for value in found.values()))
        if args.json:
            print(json.dumps({"strategy": name, "devices": count, **found}), flush=True)
if not args.json:
    Console().print(table)
    print(f"{parameters / 1e6:.0f}M parameters, float32, AdamW; {DEVICES[0].device_kind}; jax {jax.__version__}")

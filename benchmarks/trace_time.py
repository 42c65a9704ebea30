"""Time to trace a step with jdist, including the replication analysis, against tracing the hand-written step.

    python benchmarks/trace_time.py [--quick] [--json]

The step trains a transformer of 12 layers, or of one with `--quick`, with dropout and AdamW. Peers: `shard_map`
(`jax.jit(jax.shard_map(...))` of the same step), `no proof` (jdist without the analysis of the traced program), and
`comparison` (with the comparison with one device, which otherwise is made when the step is compiled). The time is CPU time.
Each measurement uses another depth of Python's stack: CPython's calls become slower by a third where the stack crosses the
end of a memory block, and at a single depth this would affect only one of the candidates.
"""

import gc
import random
import time
from unittest import mock

import jax

import sidebyside

jax.config.update("jax_num_cpu_devices", 4)

import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import PartitionSpec

import jdist
from jdist._src.replica.context import ReplicaContext, enter_context

args = sidebyside.parser("Tracing a step with the proof, and without.").parse_args()
LAYERS = 1 if args.quick else 12


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(LAYERS):
            y = nn.LayerNorm()(x)
            x = x + nn.Dropout(0.1, deterministic=False)(nn.MultiHeadDotProductAttention(num_heads=4)(y, y))
            y = nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))))
            x = x + nn.Dropout(0.1, deterministic=False)(y)
        return nn.Dense(10)(x.mean(axis=1))


MODEL, OPTIMIZER = Transformer(), optax.adamw(1e-3)
BATCH = (jax.ShapeDtypeStruct((4, 8, 16, 32), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.int32))


def make_state(key):
    params = MODEL.init({"params": key, "dropout": key}, jnp.zeros((2, 16, 32)))["params"]
    return {"params": params, "opt_state": OPTIMIZER.init(params), "key": key, "step": jnp.int32(0)}


def train_step(state, batch):
    images, labels = batch
    key = jdist.replica_key(jax.random.fold_in(state["key"], state["step"]))

    def loss_fn(params):
        logits = MODEL.apply({"params": params}, images, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jdist.all_reduce("mean", jax.value_and_grad(loss_fn)(state["params"]))
    updates, opt_state = OPTIMIZER.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "key": state["key"], "step": state["step"] + 1}, loss


def main():
    sidebyside.versions(args.json)
    strategy = jdist.MirroredStrategy()
    state = jax.eval_shape(make_state, jax.random.key(0))

    def by_hand(state, batch):
        with enter_context(ReplicaContext(("replica",), 4)):
            return train_step(state, jax.tree.map(lambda x: x[0], batch))

    rows, whole = PartitionSpec("replica"), PartitionSpec()
    body = jax.shard_map(by_hand, mesh=strategy.mesh, in_specs=(whole, rows), out_specs=whole, check_vma=False)
    nothing_differs = lambda program, inputs, axes: [{} for _ in program.outvars]

    def traced(program, batch):
        jax.clear_caches()
        gc.collect()
        start = time.process_time()
        _at_depth(random.randrange(150), lambda: jax.eval_shape(program, state, batch))
        return time.process_time() - start

    def without_proof():
        with mock.patch("jdist._src.jaxpr.replication.prove", nothing_differs):
            return traced(strategy.step(train_step), jdist.PerReplica(BATCH))

    candidates = {
        "jdist": lambda: traced(strategy.step(train_step), jdist.PerReplica(BATCH)),
        "comparison": lambda: traced(strategy.step(train_step, equivalence="error"), jdist.PerReplica(BATCH)),
        "no proof": without_proof,
        "shard_map": lambda: traced(jax.jit(body), BATCH),
    }
    taken = sidebyside.rounds(candidates, args.rounds or (2 if args.quick else 61))
    sidebyside.report(f"trace, {LAYERS}-layer transformer", taken, args.json)


def _at_depth(depth, fn):
    return fn() if depth == 0 else _at_depth(depth - 1, fn)


if __name__ == "__main__":
    main()

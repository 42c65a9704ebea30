"""What the tests share: the table of strategies that every law holds for, and how bits are compared."""

import contextlib

import jax
import numpy as np
import pytest
from jax._src import dispatch

import jdist
from jdist import testing

STRATEGIES = {
    "one_device": lambda: testing.strategy("one_device"),
    "mirrored_1": lambda: jdist.MirroredStrategy(["cpu:3"]),
    "mirrored_2": lambda: testing.strategy("mirrored_2"),
    "mirrored_3": lambda: jdist.MirroredStrategy(["cpu:5", "cpu:1", "cpu:2"]),
    "mirrored_8": lambda: jdist.MirroredStrategy(),
    "sharded_4": lambda: testing.strategy("sharded_4"),
    "central_2": lambda: testing.strategy("central_2"),
}


def among(names, *chosen):
    """All of them, with those that are not chosen marked as slow."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in names]


def each_value(pairs):
    """Few of the pairs, such that each first and each second value that occurs in one occurs in one of these."""
    firsts, seconds = (list(dict.fromkeys(values)) for values in zip(*pairs, strict=True))
    fewer = min(len(firsts), len(seconds))
    chosen = [pair for pair in pairs if firsts.index(pair[0]) % fewer == seconds.index(pair[1]) % fewer]
    for pair in pairs:
        if not all(value in values for value, values in zip(pair, zip(*chosen, strict=True), strict=True)):
            chosen.append(pair)
    return chosen


def homes(strategy):
    """For each replica, the devices that hold what is its own."""
    devices = strategy.mesh.devices.flat
    return [{device} for device in devices] if "replica" in strategy.mesh.axis_names else [set(devices)]


def rows(strategy, *shape, seed=0):
    """Random numbers, `PerReplica` of float32 `[replica, *shape]`, another row on each replica."""
    values = np.random.default_rng(seed).normal(size=(strategy.num_replicas_in_sync, *shape)).astype(np.float32)
    return strategy.put(jdist.PerReplica(values))


def arrays(batch):
    """The arrays `[replica, rows, ...]` of a batch, in its structure."""
    return jax.tree.map(lambda value: value.tree, batch, is_leaf=lambda node: isinstance(node, jdist.PerReplica))


def copies(array):
    """The bytes of each device's copy of a mirrored array."""
    return [np.asarray(shard.data).tobytes() for shard in array.addressable_shards]


def assert_in_step(tree):
    """Devices that hold the same part of a leaf, or all of it, hold the same bits. Wrapped values are compared as arrays."""
    testing.assert_replicated(jax.tree.leaves(tree))


def forget_failed_callbacks():
    """Clears JAX's record of callbacks that failed, which it would raise again at every later barrier."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.effects_barrier()
    dispatch.runtime_tokens.clear()


class Numbered:
    """Examples found by their numbers, and nothing else."""

    def __init__(self, examples):
        self._examples = examples

    def __len__(self):
        return len(self._examples)

    def __getitem__(self, number):
        return self._examples[number]

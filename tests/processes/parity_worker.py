"""The cases that were run with tf.distribute, on one process of several."""

import jax
import jax.numpy as jnp
import numpy as np

import jdist


def refusal(kind, call):
    try:
        call()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def local_copies(array):
    """Returns the copies of a replicated array on the devices of this process, stacked."""
    return np.stack([np.asarray(shard.data) for shard in array.addressable_shards])


def results_by_case():
    """Returns the result or the error of each case."""
    count, number = jax.process_count(), jax.process_index()
    every = jdist.MultiWorkerMirroredStrategy()
    firsts = [next(d for d in jax.devices() if d.process_index == process) for process in range(count)]
    strategy = jdist.MirroredStrategy(firsts)

    uneven = strategy.distribute_values_from_function(lambda _: np.float32([[1, 2, 3], [4]][number]))
    wide = strategy.distribute_values_from_function(lambda _: np.ones((1, number + 1), np.float32))
    initial = strategy.distribute_values_from_function(lambda _: np.float32([5, 15][number]))
    one = strategy.put(1.0)
    results = {
        "sum_of_placed": local_copies(strategy.reduce("sum", one, axis=None)),
        "sum_of_list": np.stack([local_copies(x) for x in strategy.reduce("sum", [one, one], axis=None)]),
        "sum_of_host": refusal(ValueError, lambda: strategy.reduce("sum", 1.0, axis=None)),
        "uneven": repr(uneven),
        "mean_of_uneven": local_copies(strategy.reduce("mean", uneven, axis=0)),
        "sum_of_uneven": local_copies(strategy.reduce("sum", uneven, axis=0)),
        "uneven_by_element": refusal(ValueError, lambda: strategy.reduce("sum", uneven, axis=None)),
        "gathered": local_copies(strategy.gather(uneven, axis=0)),
        "mismatch": refusal(ValueError, lambda: strategy.gather(wide, axis=0)),
        "after_mismatch": local_copies(strategy.run(lambda: jdist.all_reduce("sum", jdist.replica_id() + 1))),
        "new_after_mismatch": local_copies(
            jdist.MirroredStrategy(firsts).run(lambda: jdist.all_reduce("sum", jdist.replica_id() + 1))
        ),
        "wide_gathered": local_copies(strategy.gather(wide, axis=1)),
        "init_own": refusal(jdist.NotMirroredError, lambda: strategy.init(lambda: 5.0 + 10 * jdist.replica_id())),
        "init_broadcast": local_copies(strategy.init(lambda: jdist.broadcast(5.0 + 10 * jdist.replica_id()))),
        "init_broadcast_value": local_copies(strategy.init(jdist.broadcast, initial)),
        "put_own": refusal(ValueError, lambda: strategy.put({"a": 1.0, "b": 5.0 + 10 * number * np.ones(2)})),
        "init_with_own": refusal(ValueError, lambda: strategy.init(lambda x: x, np.float32(number))),
        "put_of_another_kind": refusal(ValueError, lambda: strategy.put([np.float32(1), np.int32(1)][number])),
        "values_of_another_dtype": refusal(
            ValueError, lambda: strategy.distribute_values_from_function(lambda _: [np.float32(1), np.int32(1)][number])
        ),
        "values_of_another_rank": refusal(
            ValueError, lambda: strategy.distribute_values_from_function(lambda _: np.ones([1] * number))
        ),
        "values_of_another_structure": refusal(
            ValueError, lambda: strategy.distribute_values_from_function(lambda _: {"ab"[number]: 1.0})
        ),
        # Only the second process has invalid values; the first must get the error too.
        "values_wrong_on_one": refusal(
            ValueError,
            lambda: every.distribute_values_from_function(lambda c: [0, 0, 0, 0.5][c.replica_id_in_sync_group]),
        ),
        "put_key": local_copies(jax.random.key_data(strategy.put(jax.random.key(3)))),
        "after_refusals": local_copies(strategy.put(np.arange(2))),
    }

    write = lambda state: ((jdist.replica_id() + 1).astype(state.dtype), None)
    for name, where in {"firsts": strategy, "every": every}.items():
        state, _ = where.step(write)(where.init(lambda: jdist.Mirrored(jnp.float32(0), "only_first_replica")))
        results[f"first_replica_{name}"] = local_copies(state.read())

    lengths = every.distribute_values_from_function(lambda c: np.arange(c.replica_id_in_sync_group, dtype=np.float32))
    results["mean_of_four"] = local_copies(every.reduce("mean", lengths, axis=0))
    results["gathered_of_four"] = local_copies(every.gather(lengths, axis=0))

    split = every.split({"x": np.arange(8, dtype=np.float32).reshape(8, 1)})["x"]
    results["split_here"] = np.stack([np.asarray(part) for part in split.values])
    results["split_sum"] = local_copies(every.run(lambda x: jdist.all_reduce("sum", x.sum()), (split,)))
    results["split_other_size"] = refusal(ValueError, lambda: every.split(np.zeros([8, 7][number])))
    results["split_other_values"] = refusal(ValueError, lambda: every.split(np.full(8, number, np.float32)))
    results["split_rest"] = refusal(ValueError, lambda: every.split(np.zeros(6)))

    groups = jdist.MirroredStrategy(jax.devices(), cross_device_ops=jdist.HierarchicalAllReduce())
    results["groups"] = dict(groups.mesh.shape)
    numbers = lambda shape: (1 + jnp.arange(np.prod(shape, dtype=int)).reshape(shape)) * (jdist.replica_id() + 1)
    for kind, where in {"all_reduce": every, "hierarchical": groups}.items():
        reduced = where.run(
            lambda: jdist.all_reduce("sum", {"odd": numbers((5, 1)), "none": numbers((0, 2)), "one": numbers(())})
        )
        for leaf, total in reduced.items():
            results[f"{kind}_{leaf}"] = local_copies(total)
    return results

"""Streaming DiLoCo: its results after each step, and the steps in which each fragment is synchronized."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_local_updates import (
    OPTIMIZERS,
    START,
    Nesterov,
    Workers,
    batches,
    collectives_of,
    each,
    kinds,
    make_state,
    make_step,
    mirrored,
    trained,
    tree_of,
)

import jdist
from jdist import sync

# The fragment of each of the 6 numbers, for leaves of 3, 2 and 1 numbers in fragments of similar size.
PARTS = {1: [[0, 1, 2, 3, 4, 5]], 2: [[0, 1, 2], [3, 4, 5]], 3: [[0, 1, 2], [3, 4], [5]]}


def streaming_by_numpy(workers, data, every, fragments, overlap, blend):
    """Fragment p is sent after step p * every / fragments, and every `every` steps; its result is applied `overlap` later."""
    anchor, outers = np.float64(START), [Nesterov() for _ in range(fragments)]
    history = [workers.w.copy()]
    for number, batch in enumerate(data, 1):
        workers.step(*batch)
        for index, part in enumerate(PARTS[fragments]):
            sent = number - overlap
            if sent > 0 and (sent - index * every // fragments) % every == 0:
                then = workers.w if overlap == 0 else history[sent]
                anchor[part] = outers[index](anchor[part], then[:, part])
                workers.w[:, part] = blend * workers.w[:, part] + (1 - blend) * anchor[part]
        history.append(workers.w.copy())
    return np.stack(history[1:])


@pytest.mark.parametrize(
    "replicas, every, fragments, overlap, blend, name",
    [
        (1, 2, 1, 1, 0.5, "adamw"),
        (2, 1, 1, 0, 0.0, "sgd"),
        (2, 1, 3, 0, 0.5, "momentum"),
        (2, 3, 3, 0, 0.0, "adamw"),
        (2, 4, 2, 3, 0.25, "sgd"),
        (3, 3, 2, 1, 0.5, "momentum"),
        (3, 5, 3, 2, 0.0, "adamw"),
        (4, 4, 3, 1, 0.75, "adamw"),
    ],
)
def test_streaming_diloco_equals_numpy(replicas, every, fragments, overlap, blend, name):
    make, rule = OPTIMIZERS[name]
    data = list(batches(14, replicas))
    tx = sync.streaming_diloco(make(), every=every, fragments=fragments, overlap=overlap, blend=blend)
    _, history = trained(mirrored(replicas), tx, data)
    expected = streaming_by_numpy(Workers(rule, replicas), data, every, fragments, overlap, blend)
    np.testing.assert_allclose(history, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("overlap", [0, 1])
def test_only_the_synchronized_fragment_is_bitwise_equal_on_all_replicas(dtype, overlap):
    strategy = mirrored(3)
    tx = sync.streaming_diloco(optax.adam(0.1), every=4, fragments=2, overlap=overlap, blend=0.0)
    state, step, results = make_state(strategy, tx, dtype), make_step(strategy, tx), []
    for batch in batches(12, 3):
        state, _ = step(state, strategy.put(jdist.PerReplica(batch)))
        history = each(state[0], 3)
        results.append([len(np.unique(history[:, part], axis=0)) == 1 for part in PARTS[2]])
    due = lambda start: [number - overlap > 0 and (number - overlap - start) % 4 == 0 for number in range(1, 13)]
    assert [list(column) for column in zip(*results, strict=True)] == [due(0), due(2)]


def test_blended_replicas_differ_less(two):
    tx = sync.streaming_diloco(optax.sgd(0.1), every=4, fragments=1, overlap=0, blend=0.5)
    _, blended = trained(two, tx, batches(4, 2))
    _, alone = trained(two, optax.sgd(0.1), batches(4, 2), state=_apart(two, optax.sgd(0.1)))
    spread = lambda history: np.abs(history[-1][0] - history[-1][1])
    np.testing.assert_allclose(spread(blended), 0.5 * spread(alone), rtol=1e-3, atol=1e-6)


def _apart(strategy, tx):
    drifting = lambda params: jax.tree.map(lambda p: jdist.SyncOnRead(p, "mean"), params)
    return strategy.init(lambda: (drifting(params := tree_of(START)), tx.init(params)))


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": 2, "blend": 0.5},
        {"overlap": 2, "blend": 0.5, "reduction": sync.int8(block_size=2)},
        pytest.param({"overlap": 0, "blend": 0.0}, marks=pytest.mark.slow),
    ],
    ids=["overlap", "int8", "no_overlap"],
)
def test_step_between_outer_steps_executes_no_collective(two, options):
    tx = sync.streaming_diloco(optax.adam(0.1), every=4, fragments=2, **options)
    in_every_call, at_meetings = collectives_of(two, tx)
    assert in_every_call == 0
    assert at_meetings >= 2


def test_init_makes_parameters_and_moments_local_and_fragments_replicated(two):
    tx = sync.streaming_diloco(optax.adam(0.1), every=4, fragments=2, reduction=sync.int8(block_size=2))
    params, opt_state = make_state(two, tx)
    assert kinds(params) == [("MEAN", True)] * 3
    assert kinds(opt_state.opt_state[0].mu) == kinds(opt_state.opt_state[0].nu) == [("MEAN", False)] * 3
    assert kinds(opt_state.opt_state[0].count) == kinds(opt_state.steps) == [None]
    for fragment in opt_state.fragments:
        assert set(kinds((fragment.params, fragment.outer_state))) == {None}
        assert set(kinds(fragment.reduction_state.residual)) == {("SUM", False)}


def test_policy_with_every_1_has_replicated_parameters_unless_it_blends(two):
    make = lambda **options: sync.streaming_diloco(optax.sgd(0.1), every=1, fragments=2, overlap=0, **options)
    assert kinds(make_state(two, make(blend=0.0))[0]) == [None] * 3
    assert kinds(make_state(two, make(blend=0.5))[0]) == [("MEAN", True)] * 3


def test_fragments_split_a_model_of_many_leaves_evenly(two):
    sizes = [100, 1, 1, 60, 40, 30, 70, 1]
    params = {f"leaf_{i}": jnp.ones(size) for i, size in enumerate(sizes)}
    tx = sync.streaming_diloco(optax.sgd(0.1), every=4, fragments=3)
    state = two.init(lambda: (own := jax.tree.map(jnp.copy, params), tx.init(own)))
    counts = [[leaf.size for leaf in fragment.params] for fragment in state[1].fragments]
    assert sorted(sum(counts, [])) == sorted(sizes)
    assert max(map(sum, counts)) - min(map(sum, counts)) <= 10


def test_parameters_of_several_dtypes_keep_their_dtype(two):
    tx = sync.streaming_diloco(optax.adam(0.1), every=2, fragments=1, blend=0.5)
    make = lambda: {"x": jnp.ones(3), "y": jnp.ones(2, jnp.bfloat16)}
    state = two.init(lambda: (params := make(), tx.init(params)))

    @two.step
    def step(state, goal):
        params, opt_state = state
        grads = jax.tree.map(lambda p: (p - goal).astype(p.dtype), params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    for _ in range(6):
        state, _ = step(state, two.put(jdist.PerReplica(np.float32([2, 3]))))
    assert {name: str(value.tree.dtype) for name, value in state[0].items()} == {"x": "float32", "y": "bfloat16"}
    assert all(np.isfinite(np.float32(value.tree)).all() for value in state[0].values())


def test_another_number_of_replicas_resumes_between_fragments():
    two, three = mirrored(2), mirrored(3)
    tx = sync.streaming_diloco(optax.sgd(0.05), every=4, fragments=2, overlap=0, blend=0.0)
    state, before = trained(two, tx, batches(5, 2))
    _, history = trained(three, tx, batches(3, 3, seed=1), state=three.put(state))
    assert np.isfinite(history).all()
    assert (
        len(np.unique(history[0][:, :3], axis=0)) == 3
    )  # step 6: the second fragment is synchronized, the first is not
    assert len(np.unique(history[0][:, 3:], axis=0)) == 1
    assert len(np.unique(history[2][:, :3], axis=0)) == 1


# --- errors


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(fragments=0), ValueError, r"`fragments` .* integer >= 1, got 0"),
        (dict(fragments=1.0), TypeError, r"`fragments` .* integer >= 1, got 1\.0"),
        (dict(fragments=1, overlap=4), ValueError, r"`overlap` .* less than `every`, got overlap=4 and every=4"),
        (dict(fragments=1, every=1), ValueError, r"`overlap` .* less than `every`, got overlap=1 and every=1"),
        (dict(fragments=1, overlap=-1), ValueError, r"`overlap` .* >= 0, got -1"),
        (dict(fragments=1, overlap=0.5), TypeError, r"`overlap` .* integer >= 0, got 0\.5"),
        (dict(fragments=1, blend=1.0), ValueError, r"`blend` .* at least 0 and less than 1, got 1\.0"),
        (dict(fragments=1, blend=-0.1), ValueError, r"`blend` .* at least 0 and less than 1, got -0\.1"),
        (dict(fragments=1, blend=float("nan")), ValueError, r"`blend` .* at least 0 and less than 1, got nan"),
        (dict(fragments=1, blend="half"), TypeError, r"`blend` .*'half'"),
        (dict(fragments=1, blend=None), TypeError, r"`blend` .*None"),
    ],
)
def test_number_out_of_range_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        sync.streaming_diloco(optax.sgd(0.1), **{"every": 4, **options})


def test_more_fragments_than_leaves_are_refused_with_both_numbers(two):
    tx = sync.streaming_diloco(optax.sgd(0.1), every=8, fragments=4)
    with pytest.raises(ValueError, match=r"`fragments` .* is 4, but there are only 3 arrays.*at most 3"):
        make_state(two, tx)

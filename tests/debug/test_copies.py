"""`debug.check_replicated`: every difference between copies is found, none is invented, and the wrong device is named."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax._src import sharding_impls, test_util
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdist
from jdist._src.debug.checksums import checksum
from jdist.debug import CopiesDifferError, check_replicated

from corruption import bits_per_element, corrupt, corrupt_leaf, flip
from laws import STATES, STRATEGIES

DTYPES = [
    "bool", "int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32",
    "uint32", "int64", "uint64", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bfloat16", "float16", "float32",
    "float64", "complex64", "complex128",
]  # fmt: skip


def mesh_of(*shape):
    return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("a", "b")[: len(shape)])


def differences(tree):
    with pytest.raises(CopiesDifferError) as caught:
        check_replicated(tree)
    return caught.value.differences


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_flipped_bit_of_each_dtype_is_found(dtype):
    with jax.enable_x64(True):
        dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
        rng = np.random.default_rng(0)
        x = jax.device_put(rng.integers(0, 2, (2, 3)).astype(dtype), NamedSharding(mesh_of(3), P()))
        check_replicated(x)
        for bit in range(bits_per_element(dtype)):
            device, element = jax.devices()[rng.integers(3)], int(rng.integers(6))
            ((leaf, devices, processes, has_majority),) = differences({"w": corrupt(x, device, flip(element, bit))})
            assert (leaf, devices, processes, has_majority) == ("['w']", (device,), (0,), True)


def _set(**words):
    def change(block):
        for index, word in words.items():
            block.view(np.uint32).reshape(-1)[int(index[1:])] = word

    return change


def _swap(block):
    block.reshape(-1)[[1, 2]] = block.reshape(-1)[[2, 1]]


def _flip_two_signs(block):
    flip(1, 31)(block)
    flip(6, 31)(block)


CHANGES = {
    "two sign bits": (np.float32(range(8)), _flip_two_signs),
    "two sign bits of zeros": (np.zeros(8, np.float32), _flip_two_signs),
    "a payload of NaN": (np.full(4, np.nan, np.float32), _set(_2=0x7FC00001)),
    "a signaling NaN": (np.full(4, np.nan, np.float32), _set(_2=0x7FA00000)),
    "the sign of zero": (np.zeros(4, np.float32), _set(_1=0x80000000)),
    "swapped elements": (np.float32(range(8)), _swap),
    "swapped words": (np.uint32([0, 1, 2, 3]), _swap),
    "a scalar": (np.float32(1), flip()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_that_weighted_sums_or_comparisons_of_floats_miss_are_found(name):
    value, change = CHANGES[name]
    x = jax.device_put(value, NamedSharding(mesh_of(4), P()))
    check_replicated(x)
    ((_, devices, _, _),) = differences(corrupt(x, jax.devices()[2], change))
    assert devices == (jax.devices()[2],)


def test_checksums_of_different_words_differ():
    words = jnp.arange(2**16, dtype=jnp.uint32)
    assert len(np.unique(jax.vmap(lambda word: checksum(word[None]))(words))) == 2**16
    one_bit = [1 << bit for bit in range(32)]
    positions = np.stack([np.eye(32, dtype=np.uint32) * word for word in one_bit]).reshape(-1, 32)
    assert len(np.unique(jax.vmap(checksum)(jnp.asarray(positions)))) == len(positions)


# The spec, the number of copies of each part, and the devices whose copies belong to the part of device 5, on a mesh of 4 x 2.
SPECS = {
    "replicated": (P(), 8),
    "sharded over one axis of two": (P("b"), 4),
    "sharded over the other axis": (P(None, "a"), 2),
    "sharded over both": (P("a", "b"), 1),
}


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
@pytest.mark.parametrize("name", SPECS)
def test_copies_of_the_same_part_are_compared(name, memory):
    spec, count = SPECS[name]
    x = jax.device_put(np.float32(range(64)).reshape(8, 8), NamedSharding(mesh_of(4, 2), spec, memory_kind=memory))
    device = jax.devices()[5]
    check_replicated({"x": x})
    wrong = {"x": corrupt(x, device, flip(1, 3)), "y": x}
    if count == 1:
        check_replicated(wrong)
        return
    ((leaf, devices, _, has_majority),) = differences(wrong)
    assert leaf == "['x']" and device in devices
    assert (len(devices), has_majority) == ((1, True) if count > 2 else (2, False))
    assert devices_of_part(x, device) >= set(devices)


def devices_of_part(x, device):
    indices = x.sharding.devices_indices_map(x.shape)
    return {other for other, index in indices.items() if index == indices[device]}


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("name", ["mirrored_3", "sharded_4", "central_2"])
def test_states_of_all_kinds_are_equal_and_a_flipped_bit_is_found(name, kind):
    strategy, state_kind = STRATEGIES[name](), STATES[kind]()
    state = strategy.init(state_kind.make)
    step = strategy.step(state_kind.step)
    batch = strategy.put(jdist.PerReplica(np.ones((strategy.num_replicas_in_sync, 4, 4), np.float32)))
    for _ in range(2):
        state, _ = step(state, batch)
        check_replicated(state)
    leaves = jax.tree.leaves(state)
    kinds = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, jdist.DistributedValues))
    per_replica = {id(x) for node in kinds if isinstance(node, jdist.SyncOnRead) for x in jax.tree.leaves(node)}
    compared = 0
    for number, leaf in enumerate(leaves):
        device = strategy.devices[-1]
        is_copied = len(devices_of_part(leaf, device)) > 1 and leaf.size
        bad = corrupt_leaf(state, number, device)
        if id(leaf) in per_replica or not is_copied:
            check_replicated(bad)
            continue
        compared += 1
        (difference,) = differences(bad)
        assert device in difference.devices
    assert compared


def test_wrappers_are_compared_by_their_meaning():
    strategy = jdist.MirroredStrategy()
    rows = np.ones((8, 3), np.float32)
    mirrored = strategy.put(jdist.Mirrored({"w": rows}, "mean"))
    check_replicated(
        [mirrored, strategy.put(jdist.PerReplica(np.float32(range(8)))), strategy.put(jdist.Sharded(rows))]
    )
    check_replicated(jdist.SyncOnRead(strategy.put(jdist.PerReplica(np.float32(range(8)))).tree, "mean"))
    bad = corrupt_leaf(mirrored, 0, strategy.devices[3])
    (difference,) = differences({"a": bad})
    assert difference.leaf == "['a']['w']"


def test_modules_of_equinox_are_compared():
    eqx = pytest.importorskip("equinox")
    strategy = jdist.MirroredStrategy()
    model = strategy.init(lambda key: eqx.nn.MLP(2, 2, 4, 1, key=key), jax.random.key(0))
    check_replicated(model)
    layer = eqx.tree_at(lambda m: m.layers[0].weight, model, corrupt(model.layers[0].weight, jax.devices()[2], flip()))
    (difference,) = differences(layer)
    assert difference.leaf == ".layers[0].weight"


def test_two_copies_have_no_majority():
    x = corrupt(jax.device_put(np.ones(3), NamedSharding(mesh_of(2), P())), jax.devices()[0], flip(2))
    with pytest.raises(
        CopiesDifferError, match=r"the value float32\[3\] differ: no majority of cpu:0 \(device 0 .* is equal"
    ):
        check_replicated(x)


def test_message_names_leaf_device_and_process_and_counts_the_others():
    sharding = NamedSharding(mesh_of(4), P())
    tree = {name: corrupt(jax.device_put(np.ones(2), sharding), jax.devices()[1], flip()) for name in "abcdef"}
    with pytest.raises(CopiesDifferError) as caught:
        check_replicated(tree)
    text = str(caught.value)
    assert "['a'] float32[2] differ: cpu:1 (device 1 of the mesh, process 0) differs from the other 3 copies" in text
    assert "; and of 2 more. They have to be equal in every bit." in text
    assert [difference.leaf for difference in caught.value.differences] == [f"['{name}']" for name in "abcdef"]
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy)) == (jdist.debug.CopiesDifferError, text)


def test_majority_names_all_wrong_devices():
    x = jax.device_put(np.ones(2), NamedSharding(mesh_of(5), P()))
    for device in jax.devices()[1:3]:
        x = corrupt(x, device, flip())
    (difference,) = differences(x)
    assert difference.devices == tuple(jax.devices()[1:3])
    x = corrupt(corrupt(x, jax.devices()[1], flip(1)), jax.devices()[4], flip(1))
    (difference,) = differences(x)  # four different copies of five
    assert not difference.has_majority and len(difference.devices) == 5


NOTHING_TO_COMPARE = {
    "no leaves": {"a": (), "b": None},
    "empty arrays": np.zeros((0, 3)),
    "host values": {"a": 1, "b": 2.5, "c": np.ones(3), "d": True, "e": 10**30},
    "an array on one device": jnp.ones(3),
}


@pytest.mark.parametrize("name", NOTHING_TO_COMPARE)
def test_values_without_copies_are_equal(name):
    check_replicated(NOTHING_TO_COMPARE[name])


def test_random_keys_and_empty_replicated_arrays():
    sharding = NamedSharding(mesh_of(3), P())
    keys = jax.device_put(jax.random.split(jax.random.key(0), 4), sharding)
    check_replicated([keys, jax.device_put(np.zeros((0, 2)), sharding)])
    assert differences([corrupt(keys, jax.devices()[1], flip(3, 17))])[0].devices == (jax.devices()[1],)


def test_array_without_a_mesh():
    blocks = [jax.device_put(np.ones(2, np.float32), device) for device in jax.devices()[:3]]
    sharding = sharding_impls.GSPMDSharding.get_replicated(jax.devices()[:3])
    blocks[2] = blocks[2].at[0].set(2)
    x = jax.make_array_from_single_device_arrays((2,), sharding, blocks)
    assert differences(x)[0].devices == (jax.devices()[2],)


def test_later_calls_trace_nothing_and_copy_only_the_checksums(two):
    state = two.put({"w": np.ones((64, 64), np.float32), "b": np.ones(3, np.float32)})
    check_replicated(state)
    with test_util.count_jit_tracing_cache_miss() as num_traces, two.scope():
        check_replicated(two.put({"w": np.zeros((64, 64), np.float32), "b": np.ones(3, np.float32)}))
    assert num_traces() == 0
    with jax.transfer_guard("disallow"):
        check_replicated(state)


def test_works_in_other_contexts(two):
    state = two.put({"w": np.ones(3, np.float32)})
    with jax.set_mesh(mesh_of(4)):
        check_replicated(state)
    with jax.disable_jit():
        check_replicated(state)
    with jax.debug_nans(True):
        check_replicated(two.put({"w": np.full(3, np.nan, np.float32)}))


def test_bad_leaves_are_errors_that_name_them(two):
    with pytest.raises(TypeError, match=r"\['s'\] is str: devices hold numbers"):
        check_replicated({"s": "text"})
    state = two.put({"w": np.ones(3, np.float32)})
    state["w"].delete()
    with pytest.raises(ValueError, match=r"\['w'\] \(float32\[3\]\) was deleted"):
        check_replicated(state)
    with pytest.raises(RuntimeError, match="Call `jdist.debug.check_replicated` outside `jax.jit`"):
        jax.jit(check_replicated)(jnp.ones(3))
    leaked = []
    jax.jit(lambda x: leaked.append(x))(jnp.ones(3))
    with pytest.raises(RuntimeError, match="the value is a traced value, which has left the function"):
        check_replicated(leaked[0])


def test_arrays_on_servers_are_not_compared():
    strategy = jdist.ParameterServerStrategy(workers=["cpu:0", "cpu:1"])
    state = strategy.init(lambda: {"w": jnp.ones(3)})
    step = strategy.step(lambda state, x: ({"w": state["w"] - jdist.all_reduce("mean", x)}, 0.0))
    state, _ = step(state, np.ones(3, np.float32))
    check_replicated(state)


def _trainer(strategy, **options):
    model = (lambda key, x: {"w": jnp.zeros(4), "b": jnp.zeros(())}), (lambda p, x: x @ p["w"] + p["b"])
    return jdist.Trainer(model, optax.adam(0.1), lambda y, t: (y - t) ** 2, strategy=strategy, **options)


DATA = np.random.default_rng(0).normal(size=(240, 4)).astype(np.float32), np.ones(240, np.float32)


class FlipBit(jdist.callbacks.Callback):
    """Flips a bit of a parameter on a device after a step: a high one, as the rounding of an update may remove a low one."""

    is_collective = True

    def __init__(self, step, device):
        self.step, self.device, self.identity = step, device, "FlipBit"

    def __call__(self, event):
        if event.moment == "step" and event.step >= self.step and self.step:
            self.step = 0
            params = corrupt_leaf(event.state.params, 1, self.device, flip(2, 21))
            return jdist.callbacks.CallbackResult(state=dataclasses.replace(event.state, params=params))


@pytest.mark.parametrize("steps_per_call", [1, 3])
@pytest.mark.parametrize("name", ["mirrored_3", "mirrored_8"])
def test_fit_stops_at_a_flipped_bit(name, steps_per_call):
    strategy = STRATEGIES[name]()
    callbacks = [FlipBit(7, strategy.devices[1]), jdist.callbacks.CheckReplicated(every=4)]
    with pytest.raises(
        jdist.FitError, match=r"cpu:1 \(device 1 of the mesh, process 0\) differs.* after step \d+\. "
    ) as caught:
        _trainer(strategy).fit(
            DATA, batch_size=24, epochs=5, callbacks=callbacks, progress="off", steps_per_call=steps_per_call
        )
    error = caught.value.__cause__
    assert isinstance(error, CopiesDifferError)
    assert {difference.devices for difference in error.differences} == {(strategy.devices[1],)}
    assert any(difference.leaf == "state.params['w']" for difference in error.differences)
    assert caught.value.fit.steps < 30 and caught.value.fit.state is not None


@pytest.mark.parametrize("name", ["one_device", "mirrored_2", "sharded_4", "central_2", "parameter_server"])
def test_fit_of_equal_copies_is_not_changed(name):
    make = lambda: (
        jdist.ParameterServerStrategy(workers=["cpu:0", "cpu:1"]) if name == "parameter_server" else STRATEGIES[name]()
    )
    options = dict(batch_size=24, epochs=2, progress="off")
    checked = _trainer(make()).fit(DATA, callbacks=[jdist.callbacks.CheckReplicated(every=3)], **options)
    assert checked.steps == 20
    if name != "parameter_server":  # its updates depend on the order of the workers
        jdist.testing.assert_bitwise_equal(checked.state.params, _trainer(make()).fit(DATA, **options).state.params)


def test_last_and_first_states_are_compared(two):
    device = two.devices[0]
    with pytest.raises(jdist.FitError, match="after step 10. "):
        callbacks = [FlipBit(10, device), jdist.callbacks.CheckReplicated(every=1000)]
        _trainer(two).fit(DATA, batch_size=24, epochs=1, callbacks=callbacks, progress="off")
    trainer = _trainer(two)
    state = trainer.fit(DATA, batch_size=24, epochs=1, progress="off").state
    state = dataclasses.replace(state, params=corrupt_leaf(state.params, 0, device))
    with pytest.raises(CopiesDifferError, match=r"state.params\['b'\] float32\[\] differ"):
        trainer.fit(DATA, state=state, batch_size=24, epochs=2, callbacks=[jdist.callbacks.CheckReplicated()])


def test_interval_is_checked():
    with pytest.raises(ValueError, match="`every`"):
        jdist.callbacks.CheckReplicated(every=0)
    with pytest.raises(TypeError, match="`every`"):
        jdist.callbacks.CheckReplicated(every=1.5)
    assert repr(jdist.callbacks.CheckReplicated()) == "CheckReplicated(every=100)"

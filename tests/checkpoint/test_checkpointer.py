"""Saves and restores under one strategy: which steps are saved and kept, the restored values, and the errors."""

import dataclasses
import json
import os
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jdist
from jdist._src.checkpoint.checkpointer import Checkpointer

from laws import STRATEGIES

STATE = {"w": np.float32([[1, 2], [3, 4]]), "step": np.int32(5)}


@pytest.fixture
def checkpointer(tmp_path):
    with Checkpointer(tmp_path / "run") as checkpointer:
        yield checkpointer


@pytest.fixture
def one():
    return STRATEGIES["one_device"]()


def test_checkpoints_are_due_at_multiples_of_every_and_now_saves_any_step(tmp_path, one):
    state = one.put(STATE)
    with Checkpointer(tmp_path, keep=None, every=10) as checkpointer:
        assert checkpointer.latest is None and checkpointer.steps() == ()
        saved = [step for step in (0, 5, 10, 11, 20) if checkpointer.save(step, state)]
        assert saved == [0, 10, 20]
        assert checkpointer.save(23, state, now=True)
        checkpointer.wait()
        assert checkpointer.steps() == (0, 10, 20, 23) and checkpointer.latest == 23


def test_newest_checkpoints_are_kept(tmp_path, one):
    state = one.put(STATE)
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in range(5):
            checkpointer.save(step, state)
        checkpointer.wait()
        assert checkpointer.steps() == (3, 4)
    assert sorted(child.name for child in tmp_path.iterdir()) == ["3", "4", "jdist.json"]


def test_saved_step_is_not_saved_again_and_an_earlier_step_is_refused(checkpointer, one):
    state = one.put(STATE)
    assert checkpointer.save(7, state, {"batch": 1})
    assert not checkpointer.save(7, state, {"batch": 2})
    assert checkpointer.restore(one).data_position == {"batch": 1}
    with pytest.raises(ValueError, match="has a checkpoint of step 7, so a checkpoint of step 6 .* Delete the later"):
        checkpointer.save(6, state)
    assert checkpointer.save(8, state)


def test_state_position_seed_and_extra_are_restored(checkpointer, two):
    extra = {
        "best": np.arange(3),
        "names": ["a", {"b": 1.5, "c": True, "d": None}],
        "ema": jnp.float32([1, 2]),
        "wide": np.float64(1 / 3),
        "key": jax.random.key(3, impl="rbg"),
        "big": {3: (2**40, np.int64(2**40), np.zeros((0, 2)))},
    }
    checkpointer.save(4, two.put(STATE), {"epoch": 1, "none": None}, seed=17, extra=extra)
    extra["best"][:] = -1  # a copy is written
    restored = checkpointer.restore(two)
    assert restored.step == 4 and restored.data_position == {"epoch": 1, "none": None}
    assert restored.manifest["seed"] == 17 and restored.manifest["jdist"] == jdist.__version__
    assert restored.state["w"].tolist() == [[1, 2], [3, 4]] and restored.state["step"].dtype == jnp.int32
    extra_back = restored.extra
    assert isinstance(extra_back["best"], np.ndarray) and extra_back["best"].tolist() == [0, 1, 2]
    assert extra_back["names"] == ["a", {"b": 1.5, "c": True, "d": None}]
    assert isinstance(extra_back["ema"], np.ndarray) and extra_back["ema"].tolist() == [1, 2]
    assert extra_back["wide"].dtype == np.float64 and extra_back["wide"] == 1 / 3
    assert extra_back["key"] == extra["key"] and jax.random.key_impl(extra_back["key"]) == "rbg"
    assert (
        extra_back["big"][3][0] == 2**40
        and extra_back["big"][3][1] == 2**40
        and extra_back["big"][3][2].shape == (0, 2)
    )


def test_data_position_and_extra_are_optional(checkpointer, two):
    checkpointer.save(0, two.put(np.float32(3)))
    restored = checkpointer.restore(two)
    assert restored.state.item() == 3.0 and restored.data_position is None and restored.extra is None
    checkpointer.save(1, {"none": None, "empty": [], "zero": np.zeros((0, 2), np.float32)})
    restored = checkpointer.restore(two).state
    assert restored["none"] is None and restored["empty"] == [] and restored["zero"].shape == (0, 2)


DTYPES = [
    "bool",
    "int2",
    "int4",
    "int8",
    "uint16",
    "int32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float32",
    "complex64",
]
DTYPES += ["uint2", "uint4", "float8_e4m3"]  # TensorStore does not have them


def test_every_dtype_and_host_value_is_restored_bit_for_bit(checkpointer, two):
    numbers = np.random.default_rng(0).normal(size=(4, 3)) * 3
    state = {name: numbers.astype(np.dtype(name)) for name in DTYPES}
    state = two.put({**state, "nan": np.uint32([0x7FC00001, 0xFF800000, 0x80000000]).view(np.float32)})
    checkpointer.save(0, {**state, "host": np.float32([1, 2]), "int": 7, "float": 1.5, "yes": True, "np": np.int16(3)})
    restored = checkpointer.restore(two).state
    for name, x in state.items():
        assert restored[name].dtype == x.dtype and np.asarray(restored[name]).tobytes() == np.asarray(x).tobytes(), name
    plain = {"host": jnp.float32, "int": jnp.int32, "float": jnp.float32, "yes": jnp.bool_, "np": jnp.int16}
    assert {name: restored[name].dtype for name in plain} == plain
    assert all(restored[name].sharding == two.put(0).sharding for name in plain)
    assert restored["int"] == 7 and restored["float"] == 1.5 and restored["yes"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CustomState:
    params: dict
    moments: tuple
    key: jax.Array


def test_restored_state_has_the_containers_of_like(checkpointer, two):
    model, tx = nn.Dense(3), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def make(key):
        params = model.init(key, jnp.zeros((1, 2)))["params"]
        train = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
        return {
            "train": train,
            "custom": CustomState(params, (jdist.SyncOnRead(jnp.zeros(2), "mean"),), key),
            "none": None,
        }

    state = two.init(make, jax.random.key(0))
    like = jax.eval_shape(lambda key: two.init(make, key), jax.random.key(1))
    checkpointer.save(0, state)
    restored = checkpointer.restore(two, like=like).state
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert restored["train"].tx is tx and isinstance(restored["custom"], CustomState)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        assert x.dtype == y.dtype and (x == y).all() and x.sharding == y.sharding
    # A state that was restored into dicts is saved, and restored into the classes again.
    checkpointer.save(1, checkpointer.restore(two).state)
    again = checkpointer.restore(two, like=like).state
    assert jax.tree.structure(again) == jax.tree.structure(state)


@pytest.mark.parametrize("name", ["one_device", "mirrored_2", *[
    pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES if name not in ("one_device", "mirrored_2")
]])  # fmt: skip
def test_step_after_a_save_does_not_change_the_saved_state(name, tmp_path):
    strategy = STRATEGIES[name]()
    count = strategy.step(lambda state: (jax.tree.map(lambda x: x + 1, state), None))
    state = strategy.put({"w": np.zeros((400, 1000), np.float32), "n": np.float32(0)})
    with Checkpointer(tmp_path / name, keep=None) as checkpointer:
        for step in range(5):
            checkpointer.save(step, state)
            for _ in range(2):
                state, _ = count(state)  # while the checkpoint is written
        for step in range(5):
            restored = checkpointer.restore(strategy, like=state, step=step).state
            assert float(restored["n"]) == 2 * step
            assert (np.asarray(jdist.read_values(restored["w"])) == 2 * step).all()


def test_save_and_restore_run_under_a_transfer_guard(checkpointer, two):
    state = two.put(STATE)
    with jax.transfer_guard("disallow"):
        checkpointer.save(0, state, extra={"a": np.arange(3)})
        assert checkpointer.restore(two, like=state).state["step"].item() == 5


def test_manifest_is_text_with_one_line_per_leaf(checkpointer, two, tmp_path):
    checkpointer.save(12, two.put({"layers": [STATE], "seen": jdist.SyncOnRead(np.float32([1, 2]), "sum")}), seed=3)
    checkpointer.wait()
    text = (tmp_path / "run/12/manifest/manifest.json").read_text()
    lines = [line for line in text.splitlines() if '"path"' in line]
    assert len(lines) == 3
    assert (
        '"path": "state/layers/0/w", "shape": [2, 2], "dtype": "float32", "placement": "plain on replica 2"' in lines[1]
    )
    assert '"placement": "SyncOnRead SUM, their sum on replica 2"' in lines[2]
    manifest = json.loads(text)
    assert manifest["step"] == 12 and manifest["seed"] == 3 and manifest["bytes"] == 4 * 4 + 4 + 4
    assert manifest == checkpointer.restore(two).manifest


def test_path_may_be_relative_or_in_the_home_folder(tmp_path, monkeypatch, one):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for path in ("here/run", "~/run"):
        with Checkpointer(path) as checkpointer:
            checkpointer.save(0, one.put(STATE))
    assert (tmp_path / "here/run/0").is_dir() and (tmp_path / "home/run/0").is_dir()


def test_folder_with_other_files_is_refused_and_unchanged(tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(
        ValueError, match=r"contains other files \(thesis\.tex\) and no jdist\.json.*Pass a new or an empty"
    ):
        Checkpointer(tmp_path)
    with pytest.raises(ValueError, match=r"`path` is the file .*thesis\.tex\. Pass a folder"):
        Checkpointer(tmp_path / "thesis.tex")
    assert [child.name for child in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("options, error, message", [
    ({"keep": 0}, ValueError, "`keep` must be an integer >= 1, got 0"),
    ({"keep": True}, TypeError, "`keep` must be an integer >= 1, got True"),
    ({"every": 0}, ValueError, "`every` must be an integer >= 1, got 0"),
    ({"every": 1.5}, TypeError, r"`every` must be an integer >= 1, got 1\.5"),
    ({"every": None}, TypeError, "`every` must be an integer >= 1, got None"),
])  # fmt: skip
def test_invalid_numbers_are_refused(options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        Checkpointer(tmp_path, **options)


def test_missing_checkpoints_and_wrong_arguments_of_restore_are_errors(checkpointer, one):
    with pytest.raises(FileNotFoundError, match="Found no complete checkpoint in .*run"):
        checkpointer.restore(one)
    checkpointer.save(3, one.put(STATE))
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint of step 4 in .*run\. Complete steps: 3\."):
        checkpointer.restore(one, step=4)
    with pytest.raises(ValueError, match="`step` must be an integer >= 0, got -1"):
        checkpointer.restore(one, step=-1)
    with pytest.raises(TypeError, match="must be the strategy of the restored state, got dict"):
        checkpointer.restore(STATE)


BAD = {
    "text": (lambda x: {"a": "text"}, {}, TypeError, r"state/a is str: devices hold numbers"),
    "donated": (lambda x: {"a": [deleted(x)]}, {}, ValueError, r"state/a/0 was donated to a step"),
    "wide": (lambda x: {"n": 2**40}, {}, TypeError, r"state/n is int64\[\] with numbers that do not fit into int32"),
    "twice": (lambda x: Same(x, x), {}, ValueError, r"Two leaves of the state have the path a, and a checkpoint identifies"),
    "sum": (lambda x: jdist.SyncOnRead(np.array([True]), "sum"), {}, TypeError, "state/.*bool"),
    "position": (lambda x: x, {"data_position": {"a": len}}, TypeError, "`data_position` .* JSON, which cannot represent"),
    "pair": (lambda x: x, {"data_position": (1, 2)}, TypeError, r"JSON, which returns \[1, 2\] for \(1, 2\)\. Pass \[1, 2\]"),
    "seed": (lambda x: x, {"seed": object()}, TypeError, "`seed` is saved as JSON, which cannot represent"),
    "extra": (lambda x: x, {"extra": {"f": len}}, TypeError, "extra/f is builtin_function_or_method, a function: devices hold"),
    "wrapped": (
        lambda x: x, {"extra": {"f": jdist.Mirrored(np.zeros(1))}}, TypeError,
        "extra/f is in a Mirrored, and `extra` takes plain values only",
    ),
}  # fmt: skip


class Same:
    def __init__(self, one, other):
        self.one, self.other = one, other


jax.tree_util.register_pytree_with_keys(
    Same, lambda x: ([(jax.tree_util.GetAttrKey("a"), x.one), (jax.tree_util.GetAttrKey("a"), x.other)], None), Same
)


def deleted(x):
    x.delete()
    return x


@pytest.mark.parametrize("make, options, error, message", BAD.values(), ids=BAD)
def test_invalid_value_is_refused_by_name_and_the_next_save_succeeds(make, options, error, message, checkpointer, one):
    with pytest.raises(error, match=message):
        checkpointer.save(0, make(one.put(np.zeros(2))), **options)
    assert checkpointer.save(0, one.put(STATE))
    assert checkpointer.restore(one).state["step"] == 5


def test_per_replica_values_of_different_shapes_are_refused(checkpointer, two):
    uneven = two.distribute_values_from_function(lambda c: np.zeros(1 + c.replica_id_in_sync_group))
    with pytest.raises(ValueError, match="state/a is PerReplica.*different shapes"):
        checkpointer.save(0, {"a": uneven})


def test_save_in_a_replica_function_or_under_jit_is_refused(checkpointer, two):
    with pytest.raises(RuntimeError, match="`save` cannot be called in a replica function"):
        two.run(lambda: checkpointer.save(0, {}))
    with pytest.raises(TypeError, match="state/w is a tracer"):
        jax.jit(lambda w: checkpointer.save(0, {"w": w}))(1.0)


def test_state_of_another_structure_is_refused_with_the_different_leaves(checkpointer, two):
    saved = {"a": np.float32([1, 2]), "b": np.int32(1), "c": np.zeros(2), "key": jax.random.key(0), "old": np.zeros(3)}
    checkpointer.save(2, two.put(saved))

    def make_like():
        return like

    like = {
        "a": np.zeros(3, np.float32),
        "b": np.float32(1),
        "c": np.zeros(2),
        "key": np.zeros(2, np.uint32),
        "new": np.zeros(4),
    }
    with pytest.raises(TypeError, match=r"`like` is the function `make_like`\. .*`like=strategy.init\(make_state\)`"):
        checkpointer.restore(two, like=make_like)
    with pytest.raises(ValueError) as error:
        checkpointer.restore(two, like=like)
    text = str(error.value)
    assert (
        "step 2" in text
        and "Only in `like`: new float32[4]." in text
        and "Only in the checkpoint: old float32[3]." in text
    )
    assert (
        "Different shape or dtype: a is float32[2] in the checkpoint and float32[3] in `like`, "
        "b is int32[] in the checkpoint and float32[] in `like`" in text
    )
    assert (
        "key is key<fry>[] in the checkpoint and uint32[2] in `like`." in text
        and " c " not in text
        and "restore without `like`" in text
    )
    with pytest.raises(
        ValueError, match=r"Only in `like`: x/0 float32\[\], .* x/3 float32\[\] and 6 more\. Only in the checkpoint"
    ):
        checkpointer.restore(two, like={"x": [0.0] * 10})


def test_error_in_the_with_statement_is_raised_and_the_save_is_completed(tmp_path, one):
    with pytest.raises(ZeroDivisionError), Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, one.put(STATE))
        1 / 0  # noqa: B018
    assert Checkpointer(tmp_path).steps() == (0,)


def test_closed_checkpointer_can_save_again(tmp_path, one):
    checkpointer = Checkpointer(tmp_path)
    for step in range(3):
        checkpointer.save(step, one.put(STATE))
        checkpointer.close()
    checkpointer.close()
    assert checkpointer.steps() == (0, 1, 2)
    assert repr(checkpointer) == f"Checkpointer({str(tmp_path)!r}, keep=3, every=1)"


@pytest.mark.slow
def test_orbax_is_not_imported_before_it_is_needed_and_prints_nothing(tmp_path):
    code = f"""
import sys, numpy as np, jdist
from jdist._src.checkpoint.checkpointer import Checkpointer
checkpointer = Checkpointer({str(tmp_path)!r})
assert "orbax" not in sys.modules
strategy = jdist.OneDeviceStrategy("cpu:0")
for step in range(5):
    checkpointer.save(step, strategy.put(np.zeros(3)))
checkpointer.restore(strategy)
checkpointer.close()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    completed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, "", "")

"""Exports: functions without their code, called directly and under every strategy; and functions that cannot be exported."""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jdist
from jdist import weights
from jdist._src.export import weights as weight_files
from jdist._src.export.export import export
from jdist._src.export.load import load

from laws import STRATEGIES, among, each_row

ROOT = pathlib.Path(__file__).parent.parent.parent
RUNS_ON = {**STRATEGIES, "virtual_8": lambda: jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=8)}


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3))(x))
        x = nn.BatchNorm(use_running_average=True)(x)
        x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(3)(x.reshape(x.shape[0], -1))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens, mask):
        x = nn.Embed(11, 8)(tokens)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x), mask=mask[:, None, None, :])
        return {"logits": nn.Dense(11)(x), "pooled": (x.mean(1), None)}


class Perceptron(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 5, rngs=rngs), nnx.Linear(5, 2, rngs=rngs)])

    def __call__(self, x):
        return self.layers[1](nnx.gelu(self.layers[0](x)))


class Affine(NamedTuple):
    kernel: jax.Array
    bias: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Both:
    mean: jax.Array
    spread: jax.Array


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def convolutions():
    model = Convolutions()
    state = model.init(jax.random.key(0), jnp.zeros((1, 6, 6, 1)))
    return model.apply, state, lambda n: (random(n, n, 6, 6, 1),)


def transformer():
    model = Transformer()
    inputs = lambda n: (np.random.default_rng(n).integers(0, 11, (n, 5), np.int32), random(n, n, 5) > -1)
    return model.apply, model.init(jax.random.key(0), *inputs(1)), inputs


def perceptron():
    graph, state = nnx.split(Perceptron(nnx.Rngs(0)))
    return lambda state, x: nnx.merge(graph, state)(x), state, lambda n: (random(n, n, 4),)


def pair():
    state = FrozenDict({"layers": [Affine(random(0, 4, 3), random(1, 3)), Affine(random(2, 3, 2), random(3, 2))]})

    def apply(state, x):
        for affine in state["layers"]:
            x = jnp.tanh(x["in"] if isinstance(x, dict) else x) @ affine.kernel + affine.bias
        return Both(x, x - jdist.all_reduce("mean", x)), [x, None]

    return apply, state, lambda n: ({"in": random(n, n, 4)},)


MODELS = {fn.__name__: fn for fn in (convolutions, transformer, perceptron, pair)}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Returns a model and its export, which is written once."""
    exports = {}

    def get(name):
        if name not in exports:
            apply, state, inputs = MODELS[name]()
            path = tmp_path_factory.mktemp("exports") / name
            export(path, apply, state, inputs(2))
            exports[name] = path, apply, state, inputs
        return exports[name]

    return get


def assert_same(result, expected):
    """Checks that the leaves, in any containers, are equal up to the rounding of sums in another order."""
    result, expected = weight_files.leaves_by_name(result), weight_files.leaves_by_name(expected)
    assert result.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_allclose(result[name], leaf, rtol=2e-5, atol=2e-6, err_msg=name)
        assert result[name].dtype == leaf.dtype


def by_replica(strategy, tree, n):
    rows = strategy.num_replicas_in_sync
    split = lambda x: x.reshape(rows, n, *x.shape[1:])
    return strategy.put(jdist.PerReplica(jax.tree.map(split, tree)))


def cases(models, values):
    """The product of models and values; the cases of the larger models are slow."""
    slow = lambda model: [pytest.mark.slow] if model in ("convolutions", "transformer") else []
    return [pytest.param(model, value, marks=slow(model)) for model in models for value in values]


BACKENDS = ["mirrored_3", "sharded_4", "central_2", "virtual_8"]
ON_STRATEGIES = [*cases(["perceptron"], RUNS_ON), *cases(["convolutions", "transformer"], BACKENDS)]


@pytest.mark.parametrize("model, size", cases(MODELS, (1, 7)))
def test_loaded_function_equals_apply_for_any_batch(model, size, exported):
    path, apply, state, inputs = exported(model)
    loaded = load(path)
    expected = jax.jit(apply)(state, *inputs(size))
    assert_same(loaded(*inputs(size)), expected)
    assert_same(jax.jit(loaded.apply)(loaded.state, *inputs(size)), expected)
    assert_same(loaded.apply(state, *inputs(size)), expected)  # with the containers before the export


@pytest.mark.parametrize("model, name", ON_STRATEGIES)
def test_loaded_function_equals_apply_under_every_strategy(model, name, exported):
    path, apply, state, inputs = exported(model)
    strategy, loaded, size = RUNS_ON[name](), load(path), 7
    replicas = strategy.num_replicas_in_sync
    batch = inputs(replicas * size)
    expected = jax.jit(lambda *inputs: jax.vmap(lambda *one: apply(state, *one))(*inputs))(
        *jax.tree.map(lambda x: x.reshape(replicas, size, *x.shape[1:]), batch)
    )
    split = [by_replica(strategy, tree, size) for tree in batch]
    result = jdist.read_values(strategy.run(loaded.apply, (strategy.put(loaded.state), *split)))
    assert_same(jax.tree.map(lambda x: x.reshape(replicas, size, *x.shape[2:]), result), expected)
    assert_same(jdist.read_values(strategy.run(loaded, split)), result)


def test_result_of_a_loaded_function_of_replicated_values_is_proved_replicated(two, exported):
    path, _, _, inputs = exported("perceptron")
    loaded = load(path)
    shared = two.run(loaded.apply, (two.put(loaded.state), *two.put(inputs(3))))
    assert isinstance(shared, jax.Array) and shared.shape == (3, 2)


@pytest.mark.parametrize("name", among(["mirrored_2", *BACKENDS], "mirrored_2", "sharded_4", "central_2", "virtual_8"))
def test_loaded_function_is_trained_under_every_strategy(name, exported):
    path, apply, state, inputs = exported("perceptron")
    strategy, loaded = RUNS_ON[name](), load(path)
    assert loaded.manifest["gradient"]
    (x,) = inputs(16)

    def step_of(apply):
        def step(state, x):
            loss = lambda state: jdist.global_mean(jnp.square(apply(state, x)))
            value, gradient = jdist.value_and_grad(loss)(state)
            gradient = jdist.all_reduce("mean", gradient)
            return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradient), jdist.all_reduce("mean", value)

        return step

    x = x[: 15 if name == "mirrored_3" else 16]
    batch = by_replica(strategy, x, len(x) // strategy.num_replicas_in_sync)
    trained, _ = strategy.step(step_of(loaded.apply))(strategy.put(loaded.state), batch)
    expected, _ = jdist.OneDeviceStrategy("cpu:0").step(step_of(apply))(
        jax.tree.map(np.asarray, state), jdist.PerReplica(x[None])
    )
    assert_same(jdist.read_values(trained), jdist.read_values(expected))


@pytest.mark.parametrize("name", RUNS_ON)
def test_sv8_state_is_exported_as_read_under_every_strategy(name, tmp_path):
    strategy = RUNS_ON[name]()
    n = strategy.num_replicas_in_sync
    state = strategy.put(
        {
            "w": jdist.Sharded(random(0, 24, 2)),
            "drift": jdist.SyncOnRead(np.arange(n, dtype=np.float32), "mean"),
            "b": jdist.Mirrored(random(1, 2), "mean"),
            "scale": np.float32(2),
        }
    )
    apply = lambda state, x: (x @ state["w"] + state["b"]) * state["scale"] + state["drift"]
    export(tmp_path / "x", apply, state, (np.zeros((1, 24), np.float32),))
    plain = {"w": random(0, 24, 2), "drift": np.float32((n - 1) / 2), "b": random(1, 2), "scale": np.float32(2)}
    x = random(2, 5, 24)
    np.testing.assert_allclose(load(tmp_path / "x")(x), apply(plain, x), rtol=1e-5, atol=1e-5)


WITHOUT_CODE = """
import sys
import numpy as np, jax
from jdist._src.export.load import load
loaded = load(sys.argv[1])
np.savez(sys.argv[3], *jax.tree.leaves(loaded(*np.load(sys.argv[2]).values())))
print([name for name in ("flax", "test_export") if name in sys.modules])
"""


def test_loaded_function_runs_without_its_code(exported, tmp_path):
    path, apply, state, inputs = exported("perceptron")
    np.savez(tmp_path / "in.npz", *inputs(3))
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(path, elsewhere)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    completed = subprocess.run(
        [sys.executable, "-c", WITHOUT_CODE, elsewhere, tmp_path / "in.npz", tmp_path / "out.npz"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert completed.stdout == "[]\n", completed.stderr
    results = list(np.load(tmp_path / "out.npz").values())
    for result, leaf in zip(results, jax.tree.leaves(jax.jit(apply)(state, *inputs(3))), strict=True):
        np.testing.assert_allclose(result, leaf, rtol=2e-5, atol=2e-6)


def test_containers_become_dicts_lists_and_tuples(exported):
    path, _, state, inputs = exported("pair")
    loaded = load(path)
    assert jax.tree.structure(loaded.state) == jax.tree.structure(
        {"layers": [{"kernel": 0, "bias": 0}, {"kernel": 0, "bias": 0}]}
    )
    assert loaded.state["layers"][0]["kernel"].tobytes() == state["layers"][0].kernel.tobytes()
    both, (x, none) = loaded(*inputs(2))
    assert both.keys() == {"mean", "spread"} and x.shape == (2, 2) and none is None


def test_manifest_describes_the_export(exported):
    manifest = json.loads((exported("pair")[0] / "manifest.json").read_text())
    assert manifest["jax"] == jax.__version__ and manifest["jdist"] == jdist.__version__
    assert manifest["platforms"] == ["cpu", "cuda", "tpu"]
    assert manifest["arguments"] == ["x"]
    assert manifest["inputs"] == {"x.in": {"shape": ["batch", 4], "dtype": "float32"}}
    assert manifest["outputs"]["output.0.mean"] == {"shape": ["batch", 2], "dtype": "float32"}
    assert manifest["weights"]["layers.1.bias"] == {"shape": [2], "dtype": "float32"}
    assert manifest["calling_convention_version"] >= 9 and manifest["gradient"]


def test_weights_of_an_export_are_a_safetensors_file(exported):
    path, _, state, _ = exported("pair")
    assert_same(weights.load(path / "weights.safetensors", like=state), state)


SCALE = lambda state, x: x * state
ROWS = jax.ShapeDtypeStruct((1, 3), np.float32)


def exported_scale(path, apply=SCALE, state=2.0, signature=(ROWS,), **options):
    export(path / "x", apply, state, signature, **options)
    return load(path / "x")


def test_input_without_dimensions_is_the_same_for_all_examples(tmp_path):
    loaded = exported_scale(tmp_path, lambda s, x, t: s * x / t, 2.0, (ROWS, 1.0))
    assert loaded(np.ones((2, 3), np.float32), 4).tolist() == [[0.5] * 3] * 2
    assert loaded.apply(4, np.ones((1, 3), np.float32), np.float32(2)).tolist() == [[2] * 3]


def test_random_keys_are_inputs_and_weights(tmp_path):
    draw = lambda key, x, other: x + jax.random.normal(key, x.shape) + jax.random.normal(other, x.shape)
    key, other = jax.random.key(1), jax.random.key(2)
    loaded = exported_scale(tmp_path, draw, key, (ROWS, other))
    x = np.ones((4, 3), np.float32)
    np.testing.assert_allclose(loaded(x, other), jax.jit(draw)(key, x, other), rtol=1e-6)


def test_collectives_of_an_exported_function_are_those_of_one_replica_also_in_a_scope(two, tmp_path):
    with two.scope():
        apply = lambda s, x: s * x + jdist.all_reduce("sum", x) + jdist.num_replicas() + jdist.replica_id()
        loaded = exported_scale(tmp_path, apply)
    assert loaded(np.ones((1, 3), np.float32)).tolist() == [[4, 4, 4]]


def test_function_without_a_gradient_is_exported_without_it(tmp_path):
    count = lambda s, x: jax.lax.while_loop(lambda x: jnp.all(x < 10), lambda x: x * s, x)
    loaded = exported_scale(tmp_path, count)
    assert not loaded.manifest["gradient"]
    assert loaded(np.full((2, 3), 3, np.float32)).max() == 12


def test_loaded_function_can_be_exported_again(tmp_path):
    first = exported_scale(tmp_path)
    export(tmp_path / "again", lambda s, x: first.apply(s, x) + 1, first.state, (ROWS,))
    assert load(tmp_path / "again")(np.ones((2, 3), np.float32)).tolist() == [[3] * 3] * 2


def test_loaded_function_can_be_called_while_another_is_traced(tmp_path):
    loaded = exported_scale(tmp_path)
    assert jax.jit(lambda x: loaded(x) + 1)(np.ones((1, 3), np.float32)).tolist() == [[3] * 3]
    assert loaded(np.ones((2, 3), np.float32)).tolist() == [[2] * 3] * 2


@each_row("size", [0, 1, 5])
def test_batch_of_the_signature_may_have_any_size(size, tmp_path):
    loaded = exported_scale(tmp_path, lambda s, x: s * x / x.max(), signature=(np.zeros((size, 3), np.float32),))
    assert loaded(np.ones((2, 3), np.float32)).shape == (2, 3)


def test_repr_shows_inputs_and_outputs(exported):
    assert repr(load(exported("perceptron")[0])) == (
        "Loaded(x: float32[batch,4] -> float32[batch,2]; 4 arrays of weights, 148 bytes)"
    )


def test_empty_folder_and_existing_export_are_replaced(tmp_path):
    (tmp_path / "x").mkdir()
    exported_scale(tmp_path, state=2.0)
    assert exported_scale(tmp_path, state=3.0)(np.ones((1, 3), np.float32)).tolist() == [[3] * 3]
    assert os.listdir(tmp_path) == ["x"]


@each_row("mine", ["file", "folder/mine"])
def test_path_that_is_not_an_export_is_not_replaced(mine, tmp_path):
    (tmp_path / "folder").mkdir(exist_ok=True)
    (tmp_path / mine).write_text("mine")
    with pytest.raises(FileExistsError, match="exists and is not a file or folder of the kind to be written"):
        export(tmp_path / mine.partition("/")[0], SCALE, 2.0, (ROWS,))
    assert (tmp_path / mine).read_text() == "mine"


def test_failed_export_leaves_the_existing_one(tmp_path):
    exported_scale(tmp_path)
    with pytest.raises(ValueError, match="first dimension is not the batch"):
        export(tmp_path / "x", lambda s, x: x.sum() * s, 1.0, (ROWS,))
    with pytest.raises(FileNotFoundError, match="The folder .* does not exist"):
        export(tmp_path / "none" / "x", SCALE, 1.0, (ROWS,))
    assert load(tmp_path / "x")(np.ones((1, 3), np.float32)).tolist() == [[2] * 3]
    assert os.listdir(tmp_path) == ["x"]


def times(state, x):
    return x @ state


def negated_by_a_callback(s, x):
    return jax.pure_callback(np.negative, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def on_two_devices(s, x):
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    return jax.jit(lambda x: x, out_shardings=jax.NamedSharding(mesh, P()))(x)


FOUR = (np.zeros((4, 3), np.float32),)
PLATFORMS = r"`platforms` must be a non-empty tuple of 'cpu', 'cuda', 'rocm', 'tpu', got"
ANY_BATCH = "accepts the batch size of the signature, but not any batch size. Take sizes from"
NOT_THE_BATCH = "whose first dimension is not the batch. Return"
REFUSED = {
    "bare": (times, ROWS, {}, TypeError, r"`signature` must be a tuple of inputs, got ShapeDtypeStruct. Write `\(value,\)`"),
    "scalar": (times, (1.0,), {}, ValueError, r"No input has a batch dimension: the signature is \(x: float32\[\]\)"),
    "empty": (times, (), {}, ValueError, "No input has a batch dimension"),
    "uneven": (times, ({"a": ROWS, "b": np.zeros((2, 3))},), {}, ValueError, r"the same s.*\(x.a: float32\[1,3\], x.b: float32\[2,3\]\)"),
    "per_replica": (times, (jdist.PerReplica(np.zeros((2, 3))),), {}, TypeError, r"The signature has PerReplica\(.*\) for x. Pass the arrays"),
    "text": (times, ("text",), {}, TypeError, "x is str: devices hold numbers"),
    "shape": (times, (np.zeros((1, 4), np.float32),), {}, ValueError, r"does not accept the signature \(x: float32\[1,4\]\): .*Error: "),
    "count": (times, (ROWS, ROWS), {}, ValueError, r"does not accept the signature \(x: .*, args\[2\]: .*\): TypeError"),
    "reshape": (lambda s, x: x.reshape(4, -1), FOUR, {}, ValueError, ANY_BATCH),
    "decided": (lambda s, x: x @ s if x.shape[0] == int(x.shape[0]) else x, FOUR, {}, ValueError, ANY_BATCH),
    "pairs": (lambda s, x: x.reshape(2, 2, 3), FOUR, {}, ValueError, rf"returns output as float32\[2,2,3\], {NOT_THE_BATCH}"),
    "mean": (lambda s, x: (x @ s, jnp.mean(x)), FOUR, {}, ValueError, rf"returns output.1 as float32\[\], {NOT_THE_BATCH}"),
    "transposed": (lambda s, x: (x @ s).T, FOUR, {}, ValueError, rf"returns output as float32\[2,batch\], {NOT_THE_BATCH}"),
    "state": (lambda s, x: s[0, 0], FOUR, {}, ValueError, rf"returns output as float32\[\], {NOT_THE_BATCH}"),
    "devices": (on_two_devices, FOUR, {}, ValueError, "is compiled for 2 devices, and an export is a function for one device"),
    "callback": (negated_by_a_callback, (ROWS,), {}, ValueError, "cannot be exported for cpu, cuda, tpu: "),
    "platform": (times, (ROWS,), {"platforms": "cpu"}, ValueError, PLATFORMS),
    "no_platform": (times, (ROWS,), {"platforms": ()}, ValueError, PLATFORMS),
    "unknown_platform": (times, (ROWS,), {"platforms": ("cpu", "abacus")}, ValueError, PLATFORMS),
}  # fmt: skip


@each_row("apply, signature, options, error, message", REFUSED.values(), REFUSED)
def test_export_that_is_refused_writes_nothing(apply, signature, options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        export(tmp_path / "x", apply, random(0, 3, 2), signature, **options)
    assert not os.listdir(tmp_path)


def on_mesh(primitive):
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    if primitive == "shard_map":
        return jax.shard_map(lambda x: x, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    return lambda x: jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, P("d")))


@each_row("primitive, within", itertools.product(["shard_map", "sharding_constraint"], ["jit", "cond"]))
def test_apply_that_refers_to_a_mesh_is_refused(primitive, within, tmp_path):
    split = on_mesh(primitive)
    inner = {"jit": jax.jit(split), "cond": lambda x: jax.lax.cond(x.sum() > 0, split, jnp.negative, x)}[within]
    with pytest.raises(ValueError, match=rf"refers to a mesh, in `{primitive}`"):
        export(tmp_path / "x", lambda s, x: inner(x) * s, 2.0, (np.zeros((4, 3), np.float32),))


def test_captured_arrays_are_exported_with_the_program(two, tmp_path):
    captured = two.put(jdist.Sharded(np.ones((2, 3), np.float32))).tree
    loaded = exported_scale(tmp_path, lambda s, x: x * s + captured.sum(0))
    assert loaded(np.ones((4, 3), np.float32)).tolist() == [[4] * 3] * 4


def two_inputs(tmp_path):
    apply = lambda state, image, label: image["pixels"] * state["w"] + label[:, None]
    inputs = {"pixels": ROWS}, jax.ShapeDtypeStruct((1,), np.int32)
    return exported_scale(tmp_path, apply, {"w": np.ones(3, np.float32)}, inputs)


GOOD = ({"pixels": np.ones((2, 3), np.float32)}, np.ones(2, np.int32))


INVALID_INPUTS = [
    (GOOD[:1], r"takes 2 inputs \(image, label\), got 1", TypeError),
    ((GOOD[0], np.ones(3, np.int32)), r"different batch sizes \(image.pixels: .*\[2,3\], label: int32\[3\]\)", ValueError),
    ((GOOD[0], np.ones(2, np.float32)), r"label is float32\[2\], and was exported as int32\[batch\]. Cast", TypeError),
    ((GOOD[0], np.array([2**40, 0])), r"label holds 1099511627776, which is out of the range of int32", ValueError),
    ((GOOD[0], np.ones((2, 1), np.int32)), r"label is int32\[2,1\], and was exported as int32\[batch\]. Pass", ValueError),
    (({"pixels": np.ones((2, 4), np.float32)}, GOOD[1]), r"image.pixels is float32\[2,4\], and was", ValueError),
    (({"pixel": GOOD[0]["pixels"]}, GOOD[1]), r"image does not match .* missing \(image.pixels\) and 1 of 1", ValueError),
    (({"pixels": np.ones((0, 3), np.float32)}, np.ones(0, np.int32)), r"The batch is empty \(image", ValueError),
    ((jdist.PerReplica(GOOD[0]), GOOD[1]), r"image contains PerReplica.*`strategy.run\(loaded.apply", TypeError),
    ((GOOD[0], 1), r"label is int32\[\]", ValueError),
]  # fmt: skip


def test_call_with_an_invalid_input_is_refused_by_its_name(subtests, tmp_path):
    loaded = two_inputs(tmp_path)
    assert loaded(*GOOD).tolist() == [[2] * 3] * 2
    for inputs, message, error in INVALID_INPUTS:
        with subtests.test(message), pytest.raises(error, match=message):
            loaded(*inputs)


def test_state_and_inputs_of_apply_are_refused_by_their_names(tmp_path):
    loaded = two_inputs(tmp_path)
    with pytest.raises(ValueError, match=r"state does not match the exported state: .* missing \(state.w\)"):
        loaded.apply({"v": np.ones(3, np.float32)}, *GOOD)
    with pytest.raises(TypeError, match="label is .*, and was exported as"):
        loaded.apply({"w": np.ones(3, np.float32)}, GOOD[0], np.array(["a", "b"]))


def test_folder_that_is_not_an_export_is_an_error(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(FileNotFoundError, match="is not an export: a folder with .*`jdist.export` writes one"):
            load(path)


def changed_manifest(change):
    def change_folder(folder):
        manifest = folder / "manifest.json"
        manifest.write_text(change(json.loads(manifest.read_text())))

    return change_folder


def truncate_function(folder):
    (folder / "function.bin").write_bytes((folder / "function.bin").read_bytes()[:-10])


def replace_by_function_of_a_later_jax(folder):
    """Writes an operation that StableHLO does not have, as a later JAX could."""
    data = (folder / "function.bin").read_bytes().replace(b"multiply_v1", b"multiply_v9")
    (folder / "function.bin").write_bytes(data)
    function = {"sha256": hashlib.sha256(data).hexdigest()}
    changed_manifest(lambda m: json.dumps({**m, "jax": "99.1", "function": {**m["function"], **function}}))(folder)


NOT_A_MANIFEST = "is not a manifest of `jdist.export`"
DAMAGES = {
    "broken": (changed_manifest(lambda m: "{"), f"{NOT_A_MANIFEST}: .*Export again"),
    "list": (changed_manifest(lambda m: "[]"), NOT_A_MANIFEST),
    "fields": (changed_manifest(lambda m: json.dumps({"format": 1})), f"{NOT_A_MANIFEST}: KeyError"),
    "format": (
        changed_manifest(lambda m: json.dumps({**m, "format": 9, "jdist": "9.0"})),
        "has format 9, written by jdist 9.0, and this version",
    ),
    "digest": (changed_manifest(lambda m: json.dumps({**m, "function": {}})), "is damaged or incomplete"),
    "function": (truncate_function, "is damaged or incomplete: .* Export again"),
    "weights": (
        lambda folder: weights.save(folder / "weights.safetensors", {"other": np.zeros(1)}),
        "weights.safetensors does not match",
    ),
    "later_jax": (
        replace_by_function_of_a_later_jax,
        rf"written by JAX 99.1, and JAX {jax.__version__} cannot read it: JAX reads",
    ),
}


@each_row("damage, message", DAMAGES.values(), DAMAGES)
def test_changed_or_damaged_export_is_refused(damage, message, tmp_path):
    exported_scale(tmp_path)
    damage(tmp_path / "x")
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "x")


def test_export_with_64_bit_types_needs_them_enabled(tmp_path):
    with jax.enable_x64(True):
        loaded = exported_scale(tmp_path, state=np.float64(2), signature=(np.zeros(1),))
        assert loaded(np.ones(1)).dtype == np.float64
    with pytest.raises(RuntimeError, match="uses 64-bit types. Enable them at the start"):
        load(tmp_path / "x")


def test_missing_package_is_an_error_with_the_command_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    for call in (lambda: export(tmp_path / "x", SCALE, 1.0, (ROWS,)), lambda: load(tmp_path / "x")):
        with pytest.raises(ImportError, match=r'`python -m pip install "jdist\[export\]"`'):
            call()


def test_export_in_a_replica_function_is_refused(two, tmp_path):
    with pytest.raises(RuntimeError, match="export"):
        two.run(lambda: export(tmp_path / "x", SCALE, 1.0, (ROWS,)))


@each_row("dtype", ["int2", "uint2", "int4", "uint4", "float8_e4m3", "bfloat16"])
def test_weights_of_few_bits_are_exported(dtype, tmp_path):
    state = {"w": np.asarray([1, 0, 1]).astype(dtype), "b": np.float32(2)}
    inputs = jnp.bfloat16 if dtype == "bfloat16" else jnp.float32
    apply = lambda s, x: x.astype("float32") * (s["w"].dtype == dtype) * s["w"].astype("float32") + s["b"]
    export(tmp_path / "x", apply, state, (jax.ShapeDtypeStruct((1, 3), inputs),), platforms=("cpu",))
    loaded = load(tmp_path / "x")
    assert loaded(jnp.ones((2, 3), inputs)).tolist() == [[3, 2, 3]] * 2
    assert loaded.manifest["platforms"] == ["cpu"]

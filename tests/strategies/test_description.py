"""`Strategy.describe`: placements, bytes, tables and drawings, for states of every kind."""

import html
import io
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

import jdist
from jdist._src.strategies.description import describe
from jdist._src.strategies.mesh_drawing import draw_mesh

from laws import each_row

few = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)


def described(strategy, state=None, **options):
    return describe(type(strategy).__name__, strategy._backend, state, **options)


def only(strategy, leaf):
    (description,) = described(strategy, leaf).leaves
    return description


def mesh(*shape, axes=("data",)):
    return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), axes)


def shape(*sizes, dtype=np.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def deleted():
    leaf = jnp.zeros(3)
    leaf.delete()
    return leaf


def layers(count):
    """The shapes of a state of `9 * count + 2` leaves; a third of them has no dim that is divisible by 4."""
    layer = {"attention": {"kernel": shape(64, 64), "bias": shape(7)}}
    params = {f"layer_{i}": layer | {"scale": shape(64)} for i in range(count)}
    return {"params": params, "opt_state": jax.eval_shape(optax.adam(1e-3).init, params), "step": shape(dtype=np.int32)}


@pytest.fixture
def four():
    return jdist.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"])


@pytest.fixture
def sharded():
    return jdist.ShardedStrategy("all", mesh=mesh(4))


def make_state():
    params = {"w": jnp.zeros((8, 12)), "b": jnp.zeros(3)}
    return {"params": params, "opt_state": optax.adam(1e-3).init(params), "seen": jdist.SyncOnRead(jnp.zeros(5), "sum")}


# Laws that hold for every strategy.


def test_bytes_per_device_are_the_bytes_of_its_shards(strategy):
    state = strategy.init(make_state)
    stored = {kind: dict.fromkeys(strategy.mesh.devices.flat, 0) for kind in ("device", "pinned_host")}
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            stored[leaf.sharding.memory_kind][shard.device] += shard.data.nbytes
    description = described(strategy, state)
    assert description.device_bytes == max(stored["device"].values())
    assert description.host_bytes == max(stored["pinned_host"].values())
    assert description.bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def test_shapes_are_described_as_the_arrays_that_the_strategy_would_create(strategy):
    state = strategy.init(make_state)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    assert described(strategy, shapes) == described(strategy, state)


@pytest.mark.parametrize("state", [None, {}, make_state])
def test_text_html_and_console_have_the_same_contents(strategy, state):
    description = described(strategy, strategy.init(state) if callable(state) else state)
    text, page = str(description), description._repr_html_()
    console = Console(file=io.StringIO(), width=80, color_system=None, force_jupyter=False)
    console.print(description)
    assert [line.rstrip() for line in console.file.getvalue().splitlines()] == text.splitlines()
    for leaf in description.leaves:
        assert leaf.path in text or description.host_bytes  # with six columns, long paths have two lines
        assert leaf.path in page
        assert leaf.placement.split(" ")[0] in text
    assert len(text_of(page).splitlines()) <= len(text.splitlines())  # fewer lines are folded
    assert all(str(device.id) in text for device in strategy.mesh.devices.flat)


@each_row(
    "leaf, placement",
    [
        (1.5, "on the host; not placed"),
        (True, "on the host; not placed"),
        (np.zeros((2, 3)), "on the host; not placed"),
        (np.float32(1), "on the host; not placed"),
        (np.array(["a"]), "on the host; not placed"),
        ("text", "not an array"),
        (print, "not an array"),
        (jdist.PerReplica(2.0), "on the host; not placed"),
        (jdist.SyncOnRead(np.zeros(7), "mean"), "on the host; not placed"),
    ],
)
def test_leaf_that_is_not_placed_counts_no_device_bytes(strategy, leaf, placement):
    description = described(strategy, {"leaf": leaf})
    assert [leaf.placement for leaf in description.leaves] == [placement]
    assert (description.device_bytes, description.host_bytes, description.unsplit) == (0, 0, ())
    assert placement in str(description)


# Descriptions of placements.


@pytest.mark.parametrize(
    "make, placement, device_bytes",
    [
        (lambda: jnp.zeros((4, 3)), "replicated", 48),
        (lambda: jax.random.key(0), "replicated", 8),
        (lambda: jdist.Mirrored(jnp.zeros(3)), "replicated", 12),
        (lambda: jdist.Mirrored(jnp.zeros(3), "mean"), "replicated (Mirrored MEAN)", 12),
        (lambda: jdist.PerReplica(jnp.zeros(3)), "one per replica (PerReplica)", 12),
        (lambda: jdist.PerReplica(jax.random.key(0)), "one per replica (PerReplica)", 8),
        (lambda: jdist.SyncOnRead(jnp.zeros(3, jnp.bfloat16), "sum"), "one per replica (SyncOnRead SUM)", 6),
        (lambda: jdist.Sharded(jnp.zeros((2, 3))), "split dim 0 over 'replica' (4 parts) (Sharded)", 24),
    ],
)
def test_leaf_of_mirrored_strategy_is_described_by_its_wrapper(four, make, placement, device_bytes):
    description = only(four, four.init(make))
    assert (description.placement, description.device_bytes) == (placement, device_bytes)


@pytest.mark.parametrize(
    "sizes, axes, split, placement, part",
    [
        ((4,), ("data",), (None, "data"), "split dim 1 over 'data' (4 parts)", 4),
        ((4,), ("data",), (), "replicated", 1),
        ((1, 4), ("model", "data"), ("model", "data"), "split dim 1 over 'data' (4 parts)", 4),
        ((2, 4), ("a", "b"), ("a", "b"), "split dim 0 over 'a' (2 parts), dim 1 over 'b' (4 parts)", 8),
        ((2, 4), ("a", "b"), (("a", "b"),), "split dim 0 over 'a' and 'b' (8 parts)", 8),
        ((2, 4), ("a", "b"), (None, "b"), "split dim 1 over 'b' (4 parts), 2 copies", 4),
    ],
)
def test_array_is_described_by_its_own_axes(sizes, axes, split, placement, part):
    strategy = jdist.ShardedStrategy("all", mesh=mesh(*sizes, axes=axes))
    leaf = jax.device_put(np.zeros((8, 16), np.float32), NamedSharding(strategy.mesh, PartitionSpec(*split)))
    description = only(strategy, leaf)
    assert (description.placement, description.bytes, description.device_bytes) == (placement, 512, 512 // part)


@pytest.mark.parametrize("virtual, each", [(8, ", 2 per device"), (4, ""), (10, ", 10 per device")])
def test_placement_of_virtual_replicas_includes_the_rows_per_device(virtual, each):
    strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"], virtual_replicas=virtual)
    assert only(strategy, jdist.PerReplica(shape(virtual, 3))).placement == f"one per replica (PerReplica){each}"


def test_placement_of_one_replica_over_many_devices_includes_the_split(sharded):
    assert only(sharded, jdist.PerReplica(shape(1, 8))).placement == (
        "one per replica (PerReplica), split dim 1 over 'data' (4 parts)"
    )
    assert only(sharded, jdist.PerReplica(shape(1, 6))).placement == "one per replica (PerReplica), replicated"


def test_placement_of_a_wrapped_scalar_on_one_device_names_the_device(four):
    assert only(four, jdist.PerReplica(jnp.float32(3))).placement == "one per replica (PerReplica), on cpu:0"


def test_array_in_host_memory_counts_as_host_bytes(four):
    sharding = NamedSharding(four.mesh, PartitionSpec("replica"), memory_kind="pinned_host")
    description = described(
        four, {"far": jax.device_put(np.zeros((8, 2), np.float32), sharding), "near": four.put(1.0)}
    )
    far, near = description.leaves
    assert far.placement == "split dim 0 over 'replica' (4 parts), in host memory (pinned_host)"
    assert (far.device_bytes, far.host_bytes, near.device_bytes, near.host_bytes) == (0, 16, 4, 0)
    assert (description.device_bytes, description.host_bytes) == (4, 16)
    assert [len(row) for row in description._rows()] == [6, 6, 6]


def test_array_on_one_device_counts_only_there(four):
    first, second = (jax.device_put(np.zeros(size, np.float32), jax.devices()[i]) for i, size in enumerate((3, 5)))
    description = described(four, {"first": first, "second": second, "all": four.put(np.zeros(2, np.float32))})
    assert [leaf.placement for leaf in description.leaves] == ["replicated", "on cpu:0", "on cpu:1"]
    assert description.device_bytes == 4 * (5 + 2)


def test_array_on_other_devices_is_outside_the_strategy(four):
    one = jax.device_put(np.zeros(3), jax.devices()[5])
    some = jax.device_put(np.zeros((4, 4)), NamedSharding(mesh(8), PartitionSpec()))
    description = described(four, {"one": one, "some": some})
    assert [leaf.placement for leaf in description.leaves] == [
        "on cpu:5, not this strategy's",
        "replicated, on cpu:0, cpu:1, cpu:2 and 5 more, not this strategy's",
    ]
    assert description.leaves[0].device_bytes == 0


def test_placement_reports_devices_in_another_order(four):
    reversed_mesh = Mesh(four.mesh.devices[::-1], ("replica",))
    leaf = jax.device_put(np.zeros(4), NamedSharding(reversed_mesh, PartitionSpec("replica")))
    assert only(four, leaf).placement == "split dim 0 over 'replica' (4 parts), the devices in another order"


def test_verdicts_of_a_proof_have_a_column(two):
    def step(state, x):
        total, mean = jdist.all_reduce("sum", x.mean()), jdist.all_reduce("mean", x.mean())
        return {"total": total, "mean": mean, "seen": state["seen"] + x.sum()}, None

    program = two.step(step)
    state = two.init(lambda: {"total": 0.0, "mean": 0.0, "seen": jdist.SyncOnRead(jnp.float32(0), "sum")})
    state, _ = program(state, two.split(np.ones(4, np.float32)))
    description = two.describe({**state, "unused": np.float32(0)}, proof=program.proof)
    assert {leaf.path: leaf.proof for leaf in description.leaves} == {
        "mean": "replicated, equivalent",
        "seen": "per replica, equivalent",
        "total": "replicated, not equivalent",
        "unused": "",
    }
    assert re.search(r"placement +proof +bytes", str(description))
    assert "proof" not in str(two.describe(state))


def test_donated_state_is_described(two):
    state = two.init(lambda: {"w": jnp.zeros(3), "keys": jdist.PerReplica(jax.random.key(0))})
    two.step(lambda state: (jax.tree.map(lambda x: x, state), None))(state)
    description = described(two, {"freed": deleted(), "donated": state})
    assert len(description.leaves) == 3
    assert {leaf.placement for leaf in description.leaves} == {"deleted: its memory was donated to a step, or freed"}
    assert (description.bytes, description.device_bytes) == (0, 0)


def test_traced_state_is_described_by_its_shapes(sharded):
    texts = []
    jax.eval_shape(lambda x: texts.append(only(sharded, x).placement), shape(8, 2))
    assert texts == ["split dim 0 over 'data' (4 parts)"]


# Leaves without a divisible dim.


def test_leaf_without_a_divisible_dim_is_named_once_below_the_table(sharded):
    state = {
        "w": shape(8, 4),
        "b": shape(7),
        "c": shape(3, 5),
        "step": shape(),
        "key": jax.eval_shape(jax.random.key, 0),
    }
    description = described(sharded, state)
    assert description.unsplit == ("b", "c")
    assert description.note == "2 leaves are not split over 'data', because no dim is divisible by 4: b, c."
    assert str(description).endswith(description.note)
    assert str(description).count("divisible") == description._repr_html_().count("divisible") == 1


@pytest.mark.parametrize("shard, unsplit", [("optimizer", {"opt_state/0/mu/b"}), ("all", {"b", "opt_state/0/mu/b"})])
def test_note_names_only_leaves_that_the_strategy_would_split(shard, unsplit):
    params = {"b": shape(7), "w": shape(8)}
    state = params | {"opt_state": ({"mu": params},)}
    assert set(described(jdist.ShardedStrategy(shard, mesh=mesh(4)), state).unsplit) == unsplit


def test_note_does_not_name_a_leaf_that_a_pattern_splits():
    strategy = jdist.ShardedStrategy(
        "all", mesh=mesh(4, 2, axes=("data", "model")), model_axis="model", layout={"w": PartitionSpec("model")}
    )
    description = described(strategy, {"w": shape(8, 3), "v": shape(8)})
    assert description.leaves[1].placement == "split dim 0 over 'model' (2 parts), 4 copies"
    assert (
        description.note
        == "1 leaf is not split over 'data', because no dim that `layout` leaves unsplit is divisible by 4: w."
    )


def test_offloaded_state_is_described_where_it_is_stored():
    devices, state = ["cpu:0", "cpu:1"], {"w": shape(8, 2), "b": shape(3)}
    one = described(jdist.CentralStorageStrategy(devices, parameter_device="cpu:5"), state)
    assert [leaf.placement for leaf in one.leaves] == ["on cpu:5", "on cpu:5"]
    assert (one.device_bytes, one.host_bytes, one.note) == (64 + 12, 0, "")
    host = described(jdist.CentralStorageStrategy(devices), state)
    assert all("in host memory (pinned_host)" in leaf.placement for leaf in host.leaves)
    assert (host.device_bytes, host.host_bytes) == (0, 32 + 12)
    assert host.note == "1 leaf is not split over 'replica', because no dim is divisible by 2: b."


def test_note_of_a_strategy_that_splits_nothing_is_empty(four):
    assert described(four, {"b": shape(7)}).note == ""
    assert described(jdist.ShardedStrategy("all", mesh=mesh(1)), {"b": shape(7)}).note == ""
    assert described(jdist.ShardedStrategy("all", mesh=mesh(4)), {"b": np.zeros(7)}).note == ""


def test_note_groups_many_unsplit_leaves_by_path(sharded):
    note = described(sharded, layers(100)).note
    assert note == (
        "300 leaves are not split over 'data', because no dim is divisible by 4: opt_state/*/mu/layer_*/attention/bias, "
        "opt_state/*/nu/layer_*/attention/bias, params/layer_*/attention/bias."
    )


# Large states.


@few
@hypothesis.given(
    st.lists(st.lists(st.sampled_from(["a", "b", "a1", "a2", "c10"]), min_size=1, max_size=4).map(tuple), max_size=40),
    st.integers(1, 20),
)
def test_table_has_at_most_max_rows_and_contains_every_leaf(paths, max_rows):
    state = {}
    for number, path in enumerate(paths):
        node = state
        for key in path:
            node = node.setdefault(key, {})
        node[f"leaf{number}"] = shape(number + 1)
    description = described(jdist.OneDeviceStrategy("cpu:0"), state, max_rows=max_rows)
    *rows, total = description._rows()
    assert len(rows) == len(paths) if len(paths) <= max_rows else 1 <= len(rows) <= max_rows
    assert total[1] == f"{len(paths):,} {'leaf' if len(paths) == 1 else 'leaves'}"
    grouped = [int(row[0].split(" (")[1].split(" ")[0]) if " (" in row[0] else 1 for row in rows]
    assert sum(grouped) == len(paths)


def test_table_of_a_transformer_has_one_row_per_kind_of_leaf(sharded):
    description = described(sharded, layers(150))
    rows = {row[0]: row[1:] for row in description._rows()}
    assert len(description.leaves) == 150 * 9 + 2
    assert len(rows) == 12
    kernel = rows["params/layer_*/attention/kernel (150 leaves)"]
    assert kernel == ("float32[64,64]", "split dim 0 over 'data' (4 parts)", "2.3 MiB", "600.0 KiB")
    assert "opt_state/0/count" in rows  # a single leaf has its own path
    assert len(str(description).splitlines()) < 50


def test_row_of_leaves_that_differ_lists_their_shapes(four):
    row = described(four, {f"w{i}": shape(i) for i in range(1, 6)}, max_rows=2)._rows()[0]
    assert row[:3] == ("w* (5 leaves)", "float32[1], float32[2], float32[3] and 2 more", "replicated")


def test_states_of_one_leaf_and_of_lists_are_described(four):
    assert only(four, four.put(2.0)).path == "state"
    assert described(four, [shape(2)] * 50)._rows()[0][0] == "* (50 leaves)"
    assert described(four, [{"a": shape(2)}, {"b": shape(2)}] * 25, max_rows=1)._rows()[0][0] == "* (50 leaves)"


# Names, drawings, errors.


def text_of(page):
    """Returns the text of an HTML element in which nothing but spans occurs."""
    assert set(re.findall("<(/?[a-z]+)", page)) <= {"pre", "/pre", "span", "/span"}
    return html.unescape(re.sub("<.*?>", "", page))


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "[red]x[/red]", "[/]", "a & b", 'q"uote', ":smile:"])
def test_name_of_a_leaf_is_shown_verbatim(four, name):
    description = described(four, {name: shape(7)})
    assert name in str(description)
    assert name in text_of(description._repr_html_())


def test_name_of_an_axis_is_shown_verbatim_in_a_monospaced_drawing():
    axis = "<b>&x"
    description = described(jdist.ShardedStrategy(mesh=Mesh(np.array(jax.devices()[:2]), (axis,))))
    page = description._repr_html_()
    assert re.match("<pre style=[^>]*monospace", page)
    assert text_of(page).endswith("columns along '<b>&x'\n┌───────┐\n│ 0   1 │\n└───────┘\n")


@pytest.mark.parametrize(
    "state, text",
    [
        (None, "Description(MirroredStrategy, 4 replicas)"),
        ({"w": shape(256, 3)}, "Description(MirroredStrategy, 4 replicas, 1 leaf, 3.0 KiB)"),
        ([shape(2)] * 1000, "Description(MirroredStrategy, 4 replicas, 1,000 leaves, 7.8 KiB)"),
    ],
)
def test_repr_of_a_description_is_one_short_line(four, state, text):
    assert repr(described(four, state)) == text


def test_html_uses_the_colours_of_the_theme(sharded):
    page = described(sharded, {"w": shape(7)})._repr_html_()
    colours = re.findall(r"(?<!-)color:(\w+)|background:(\w+)", page)
    assert {one or other for one, other in colours} == {"inherit", "transparent"}
    assert "<style" not in page


DRAWINGS = {
    "one axis": (
        ["x"],
        np.arange(3),
        np.zeros(3, int),
        "columns along 'x'\n┌───────────┐\n│ 0   1   2 │\n└───────────┘",
    ),
    "two processes": (
        ["x"],
        np.array([0, 1, 2048, 2049]),
        np.array([0, 0, 1, 1]),
        "columns along 'x'\n┌─────────────┬─────────────┐\n│    0      1 │ 2048   2049 │\n└─────────────┴─────────────┘",
    ),
    "tiles": (
        ["x", "y"],
        np.arange(4).reshape(2, 2),
        np.array([[0, 1], [2, 2]]),
        "rows along 'x', columns along 'y'\n┌───┬───┐\n│ 0 │ 1 │\n├───┴───┤\n│ 2   3 │\n└───────┘",
    ),
    "slices": (
        ["p", "x", "y"],
        np.arange(4).reshape(2, 1, 2),
        np.zeros((2, 1, 2), int),
        "rows along 'x', columns along 'y'\n'p' 0\n┌───────┐\n│ 0   1 │\n└───────┘\n'p' 1\n┌───────┐\n│ 2   3 │\n└───────┘",
    ),
}


@pytest.mark.parametrize("axes, ids, processes, drawn", DRAWINGS.values(), ids=DRAWINGS)
def test_mesh_is_drawn_with_lines_between_processes(axes, ids, processes, drawn):
    assert draw_mesh(axes, ids, processes) == drawn


@few
@hypothesis.given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.sampled_from([1, 4, 10**6]))
def test_drawing_of_a_large_mesh_fits_and_contains_its_first_and_last_device(sizes, first):
    ids = np.arange(first, first + np.prod(sizes)).reshape(sizes)
    lines = draw_mesh([f"axis{i}" for i in range(len(sizes))], ids, ids // 8).splitlines()
    words = {word for line in lines for word in line.replace("│", " ").split()}
    assert max(map(len, lines)) <= 120
    assert len(lines) <= 1 + 16 * 35
    assert {str(ids.min()), str(ids.max())} <= words
    assert words >= {"…"} if max(sizes) > 16 else True


@each_row("max_rows", [0, -1, True, 2.5, None])
def test_max_rows_below_one_raises(four, max_rows):
    with pytest.raises((TypeError, ValueError), match=f"`max_rows` must be an integer >= 1, got {max_rows!r}."):
        described(four, None, max_rows=max_rows)


def test_shapes_that_cannot_be_placed_raise_the_error_of_put(four):
    with pytest.raises(ValueError, match=r"state\['rows'\].* float32\[3\]"):
        described(four, {"rows": jdist.PerReplica(shape(3))})
    strategy = jdist.ShardedStrategy(mesh=mesh(4), layout={"kernel": PartitionSpec("data")})
    with pytest.raises(ValueError, match="the pattern 'kernel', which matches no parameter"):
        described(strategy, {"w": shape(8)})
    assert only(strategy, strategy.put(np.zeros(8))).placement == "split dim 0 over 'data' (4 parts)"


def test_description_fits_80_columns():
    params = {"encoder": {"layer_0": {"attention_output_kernel": np.zeros((64, 128), np.float32)}}}
    lines = str(jdist.ShardedStrategy("all").describe({"params": params, "opt_state": [params, params]})).splitlines()
    assert max(map(len, lines)) <= 80 and any("float32[64,128]" in line for line in lines)

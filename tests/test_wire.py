"""The bytes that `examples/wire.py` counts, in programs whose sizes are known."""

import importlib.util
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

_PATH = pathlib.Path(__file__).parent.parent / "examples" / "wire.py"
_SPEC = importlib.util.spec_from_file_location("wire", _PATH)
wire = sys.modules["wire"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(wire)

X = jnp.ones((8, 16), jnp.float32)
SIZE = 8 * 16 * 4


def _found(fn, x=X, shape=(4,), axes=("r",)):
    mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), axes)
    sharded = jax.shard_map(fn, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    return wire.collectives(jax.jit(sharded).lower(x).compile().as_text())


KINDS = {  # what a device of n puts in is `SIZE` bytes
    "all-reduce": (lambda x: lax.psum(x, "r"), lambda n: SIZE * 2 * (n - 1) / n),
    "all-gather": (lambda x: lax.all_gather(x, "r").sum(0), lambda n: SIZE * (n - 1)),
    "reduce-scatter": (lambda x: lax.psum_scatter(x, "r", tiled=True), lambda n: SIZE * (n - 1) / n),
    "all-to-all": (lambda x: lax.all_to_all(x, "r", 0, 0, tiled=True), lambda n: SIZE * (n - 1) / n),
    "collective-permute": (lambda x: lax.ppermute(x, "r", [(i, i ^ 1) for i in range(2)]), lambda n: SIZE),
}


@pytest.mark.parametrize("replicas", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_sends_what_a_ring_sends(kind, replicas):
    fn, sent = KINDS[kind]
    assert _found(fn, shape=(replicas,)) == [(kind, sent(replicas), replicas, 1, False)]


@pytest.mark.parametrize("dtype, width", [(jnp.int8, 1), (jnp.int32, 4), (jnp.bool_, 1)])
def test_an_all_gather_sends_numbers_of_their_own_width(dtype, width):
    (one,) = _found(lambda x: lax.all_gather(x, "r", tiled=True), jnp.ones((8, 16), dtype))
    assert one.bytes_sent == 3 * 8 * 16 * width


@pytest.mark.parametrize("axes, group", [(("a",), 2), (("b",), 4), (("a", "b"), 8)])
def test_a_group_is_along_the_axes_that_are_named(axes, group):
    (one,) = _found(lambda x: lax.psum(x, axes), shape=(2, 4), axes=("a", "b"))
    assert (one.group, one.bytes_sent) == (group, SIZE * 2 * (group - 1) / group)


def test_arrays_that_xla_sends_together_are_one_collective_of_their_bytes():
    (one,) = _found(lambda x: sum(y.sum() for y in lax.psum((x, x[:2] * 2.0), "r")))
    assert one.bytes_sent == (SIZE + SIZE / 4) * 1.5


def test_one_device_sends_nothing():
    assert sum(one.bytes_sent for one in _found(lambda x: lax.psum(x, "r"), shape=(1,))) == 0


def test_a_program_without_collectives_has_none():
    assert _found(lambda x: x * 2) == []


def test_collectives_of_each_branch_are_below_the_conditional_and_others_are_not():
    def fn(x):
        branches = [lambda x: lax.psum(x, "r"), lambda x: x, lambda x: lax.all_gather(x, "r").sum(0)]
        x = lax.switch(x[0, 0].astype(int), branches, x)
        return lax.cond(x.sum() > 3, lambda x: lax.psum(x, "r"), lambda x: x * 2, lax.psum_scatter(x, "r", tiled=True))

    found = sorted((one.kind, one.conditional, one.times) for one in _found(fn))
    assert found == [
        ("all-gather", True, 1),
        ("all-reduce", True, 1),
        ("all-reduce", True, 1),
        ("reduce-scatter", False, 1),
    ]


def test_a_collective_in_loops_runs_once_a_round_of_all_of_them():
    inner = lambda x: lax.fori_loop(0, 5, lambda i, x: lax.psum(x, "r") / 4, x)
    (one,) = _found(lambda x: lax.fori_loop(0, 3, lambda i, x: inner(x * 2), x))
    assert (one.times, one.conditional) == (15, False)


def test_a_loop_of_unknown_length_says_that_it_is_unknown():
    (one,) = _found(lambda x: lax.while_loop(lambda x: x.sum() < 5, lambda x: lax.psum(x, "r"), x))
    assert one.times is None


PROGRAM = """HloModule m, is_scheduled=true, num_partitions=8

ENTRY %main (x: f32[8,16]) -> f32[8,16] {{
  %x = f32[8,16]{{1,0:T(8,128)}} parameter(0)
  %start = {shape} {start}(%x), channel_id=1, {groups}, use_global_device_ids=true, metadata={{op_name="calls=%main"}}
  ROOT %done = f32[8,16]{{1,0}} {done}(%start)
}}
"""


@pytest.mark.parametrize(
    "groups, group",
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", 2),
        ("replica_groups={}", 8),
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['o'=2,'i'=4] {'i'}", 4),
        ("replica_groups=mesh['o'=2,'i'=4] {'o','i'}", 8),
        ("replica_groups=mesh['r'=8] {'r':(1)2}", 2),
    ],
)
def test_every_spelling_of_groups_is_read(groups, group):
    text = PROGRAM.format(shape="f32[8,16]{1,0}", start="all-reduce-start", done="all-reduce-done", groups=groups)
    assert wire.collectives(text) == [("all-reduce", SIZE * 2 * (group - 1) / group, group, 1, False)]


def test_an_asynchronous_collective_counts_once_and_only_what_is_put_in():
    shape = "(f32[8,16]{1,0}, f32[32,16]{1,0}, /*index=2*/u32[], u32[])"
    groups = "replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}"
    text = PROGRAM.format(shape=shape, start="all-gather-start", done="all-gather-done", groups=groups)
    assert wire.collectives(text) == [("all-gather", 3 * SIZE, 4, 1, False)]


def test_a_collective_that_is_not_understood_is_refused():
    text = PROGRAM.format(shape="f32[8,16]", start="collective-broadcast", done="copy", groups="replica_groups={}")
    with pytest.raises(ValueError, match="What `collective-broadcast` sends is not counted here"):
        wire.collectives(text)
    text = PROGRAM.format(shape="f32[8,16]", start="all-reduce", done="copy", groups="replica_groups=everyone")
    with pytest.raises(ValueError, match="Which devices take part cannot be read from this: .*everyone"):
        wire.collectives(text)


@pytest.mark.parametrize("text", ["", "module @jit_f {\n  func.func @main() { return }\n}"])
def test_what_is_no_compiled_program_is_refused(text):
    with pytest.raises(ValueError, match="no text of a compiled program"):
        wire.collectives(text)

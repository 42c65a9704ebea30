"""Collectives and bytes read from the HLO of programs of known size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jdist import hlo

from laws import each_row

X = jnp.ones((8, 16), jnp.float32)
SIZE = 8 * 16 * 4


def collectives_of(fn, x=X, shape=(4,), axes=("r",)):
    mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), axes)
    sharded = jax.shard_map(fn, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    return hlo.collectives(jax.jit(sharded).lower(x).compile(), mesh)


def without_place(collectives):
    return [each[:5] for each in collectives]


KINDS = {  # the operand has `SIZE` bytes per device
    "all-reduce": (lambda x: lax.psum(x, "r"), lambda n: SIZE * 2 * (n - 1) / n),
    "all-gather": (lambda x: lax.all_gather(x, "r").sum(0), lambda n: SIZE * (n - 1)),
    "reduce-scatter": (lambda x: lax.psum_scatter(x, "r", tiled=True), lambda n: SIZE * (n - 1) / n),
    "all-to-all": (lambda x: lax.all_to_all(x, "r", 0, 0, tiled=True), lambda n: SIZE * (n - 1) / n),
    "collective-permute": (lambda x: lax.ppermute(x, "r", [(i, i ^ 1) for i in range(2)]), lambda n: SIZE),
}


@each_row("replicas", [2, 4, 8])
@each_row("kind", KINDS)
def test_bytes_of_each_kind_are_those_of_a_ring_algorithm(kind, replicas):
    fn, sent = KINDS[kind]
    assert without_place(collectives_of(fn, shape=(replicas,))) == [(kind, sent(replicas), replicas, 1, False)]


@pytest.mark.parametrize("dtype, width", [(jnp.int8, 1), (jnp.int32, 4), (jnp.bool_, 1)])
def test_bytes_of_an_all_gather_depend_on_the_dtype(dtype, width):
    (one,) = collectives_of(lambda x: lax.all_gather(x, "r", tiled=True), jnp.ones((8, 16), dtype))
    assert one.bytes_sent == 3 * 8 * 16 * width


@pytest.mark.parametrize("axes, group", [(("a",), 2), (("b",), 4), (("a", "b"), 8)])
def test_group_size_is_the_product_of_the_named_axes(axes, group):
    (one,) = collectives_of(lambda x: lax.psum(x, axes), shape=(2, 4), axes=("a", "b"))
    assert (one.group_size, one.bytes_sent) == (group, SIZE * 2 * (group - 1) / group)


def test_arrays_that_xla_combines_are_one_collective():
    (one,) = collectives_of(lambda x: sum(y.sum() for y in lax.psum((x, x[:2] * 2.0), "r")))
    assert one.bytes_sent == (SIZE + SIZE / 4) * 1.5


def test_one_device_sends_nothing():
    assert sum(one.bytes_sent for one in collectives_of(lambda x: lax.psum(x, "r"), shape=(1,))) == 0


def test_a_program_without_collectives_has_none():
    assert collectives_of(lambda x: x * 2) == []


def test_collectives_of_branches_are_conditional():
    def fn(x):
        branches = [lambda x: lax.psum(x, "r"), lambda x: x, lambda x: lax.all_gather(x, "r").sum(0)]
        x = lax.switch(x[0, 0].astype(int), branches, x)
        return lax.cond(x.sum() > 3, lambda x: lax.psum(x, "r"), lambda x: x * 2, lax.psum_scatter(x, "r", tiled=True))

    collectives = sorted((one.kind, one.conditional, one.executions) for one in collectives_of(fn))
    assert collectives == [
        ("all-gather", True, 1),
        ("all-reduce", True, 1),
        ("all-reduce", True, 1),
        ("reduce-scatter", False, 1),
    ]


def test_count_in_nested_loops_is_the_product_of_the_trip_counts():
    inner = lambda x: lax.fori_loop(0, 5, lambda i, x: lax.psum(x, "r") / 4, x)
    (one,) = collectives_of(lambda x: lax.fori_loop(0, 3, lambda i, x: inner(x * 2), x))
    assert (one.executions, one.conditional) == (15, False)
    assert one.bytes_per_run == 15 * one.bytes_sent > 0


def test_count_in_a_loop_of_unknown_length_is_none():
    (one,) = collectives_of(lambda x: lax.while_loop(lambda x: x.sum() < 5, lambda x: lax.psum(x, "r"), x))
    assert one.executions is None
    assert one.bytes_per_run == one.bytes_sent > 0


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
def test_replica_groups_are_read_in_every_notation(groups, group):
    text = PROGRAM.format(shape="f32[8,16]{1,0}", start="all-reduce-start", done="all-reduce-done", groups=groups)
    assert without_place(hlo.collectives(text)) == [("all-reduce", SIZE * 2 * (group - 1) / group, group, 1, False)]


def test_asynchronous_collective_counts_once_with_its_operand():
    shape = "(f32[8,16]{1,0}, f32[32,16]{1,0}, /*index=2*/u32[], u32[])"
    groups = "replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}"
    text = PROGRAM.format(shape=shape, start="all-gather-start", done="all-gather-done", groups=groups)
    assert without_place(hlo.collectives(text)) == [("all-gather", 3 * SIZE, 4, 1, False)]


def test_unsupported_collective_is_an_error():
    text = PROGRAM.format(shape="f32[8,16]", start="collective-broadcast", done="copy", groups="replica_groups={}")
    with pytest.raises(ValueError, match="The bytes that `collective-broadcast` sends cannot be counted"):
        hlo.collectives(text)
    text = PROGRAM.format(shape="f32[8,16]", start="all-reduce", done="copy", groups="replica_groups=everyone")
    with pytest.raises(ValueError, match="Cannot read the participating devices of a collective from .*everyone"):
        hlo.collectives(text)


@each_row("text", ["", "module @jit_f {\n  func.func @main() { return }\n}"])
def test_text_that_is_not_a_compiled_program_is_an_error(text):
    with pytest.raises(ValueError, match="is not the text of a compiled program"):
        hlo.collectives(text)

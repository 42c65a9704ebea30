"""Values that are proved replicated are bitwise equal on all replicas, and these tests detect mistakes in the analysis."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from jax import lax

import jdist
from jdist._src.core import jax_compat
from jdist._src.execution.backend import ProgramSpec
from jdist._src.execution.replicate import replicate
from jdist._src.execution.traced import UserCall as Call
from jdist._src.jaxpr import interpreter, replication
from jdist._src.replica.context import ReplicaContext

from laws import each_row
from programs import AXIS, SIZE, Step, programs, replica_function

pytestmark = [
    pytest.mark.filterwarnings("ignore::jdist.RepeatedSumWarning"),
    pytest.mark.filterwarnings("ignore::jdist.SharedRandomnessWarning"),
]

REPRODUCIBLE = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
random_programs = given(program=programs(), num_replicas=st.sampled_from((4, 3, 2)))


@functools.cache
def _strategy(num_replicas):
    return jdist.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])


def _inputs(num_replicas, seed):
    same, *own = np.random.default_rng(seed).normal(size=(1 + num_replicas, SIZE)).astype(np.float32)
    return same, jax.random.key(seed), jdist.PerReplica(np.stack(own))


def _distinct_shards(x):
    """Returns the distinct byte strings of the shards of `x`."""
    return {np.asarray(shard.data).tobytes() for shard in x.addressable_shards}


def _unsound_values(program, num_replicas=4):
    """Returns the numbers of the values of `program` that are proved replicated and vary on a few random inputs."""
    replica = replica_function(program)
    unsound = set()
    for seed in range(3):
        values, each = _strategy(num_replicas).run(replica, _inputs(num_replicas, seed))
        for number, (value, own) in enumerate(zip(values, each.tree, strict=True)):
            if isinstance(value, jax.Array) and len(_distinct_shards(value) | _distinct_shards(own)) > 1:
                unsound.add(number)
    return unsound


def _traced(replica, *args):
    """Returns the results of `replica` as the host sees them, with shapes for arrays: it is analyzed, but not run."""
    strategy = _strategy(4)
    call = Call(replica, args, {})
    context = ReplicaContext(strategy.mesh.axis_names, strategy.mesh.size, strategy)
    spec = ProgramSpec("replica", lambda args: call, lambda outputs: ((), outputs), strategy._backend, context)
    return jax.eval_shape(lambda: replicate(call, spec, []).pair[1])


def _check(program, num_replicas):
    """Fails if a value is wrongly proved replicated. A program that would hang and is not refused ends the process."""
    try:
        unsound = _unsound_values(program, num_replicas)
    except jdist.DivergentCollectiveError:
        event("refused")
    else:
        event("run")
        assert not unsound, f"values {unsound} of {program} were proved replicated and vary"


@settings(REPRODUCIBLE, max_examples=25)
@random_programs
def test_value_proved_replicated_in_random_program_is_bitwise_equal_on_all_replicas(program, num_replicas):
    _check(program, num_replicas)


@pytest.mark.slow
@settings(REPRODUCIBLE, max_examples=100)
@random_programs
def test_value_proved_replicated_in_many_random_programs_is_bitwise_equal_on_all_replicas(program, num_replicas):
    _check(program, num_replicas)


@pytest.mark.slow
def test_random_programs_have_every_verdict_often():
    """The property above would be vacuous if all programs were refused, or no value were proved replicated."""
    verdicts = collections.Counter()

    @settings(REPRODUCIBLE, max_examples=60, phases=[Phase.generate])
    @given(programs())
    def judge(program):
        try:
            values, _ = _traced(replica_function(program), *_inputs(4, seed=0))
        except jdist.DivergentCollectiveError:
            verdicts["refused"] += 1
        else:
            verdicts["accepted"] += 1
            verdicts.update("per replica" if isinstance(value, jdist.PerReplica) else "replicated" for value in values)

    judge()
    assert verdicts["accepted"] >= 30
    assert verdicts["refused"] >= 5
    assert min(verdicts["replicated"], verdicts["per replica"]) >= 25


# Functions that JAX traces to one equation that contains a jaxpr. Most of them do not occur in the random programs.
HOLDERS = {
    "composite": lambda fn, x: lax.composite(fn, name="test.fn")(x),
    "custom_linear_solve": lambda fn, x: lax.custom_linear_solve(lambda y: y, x, lambda _, b: fn(b)),
    "custom_root": lambda fn, x: lax.custom_root(lambda y: y - x, x, lambda _, guess: fn(guess), lambda _, y: y),
    "custom_vmap": lambda fn, x: _custom_vmap(fn)(x),
    "linear_call": lambda fn, x: jax.custom_derivatives.linear_call(lambda _, x: fn(x), lambda _, y: y, (), x),
}
every_holder = pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)


def _custom_vmap(fn):
    held = jax.custom_batching.custom_vmap(fn)
    held.def_vmap(lambda size, batched, x: (jax.vmap(fn)(x), True))
    return held


@every_holder
def test_replica_id_inside_one_equation_is_not_proved_replicated(holder):
    replica = lambda x: holder(lambda y: y * jdist.replica_id(), x)
    assert isinstance(_traced(replica, jnp.ones(SIZE)), jdist.PerReplica)


@every_holder
def test_collective_below_varying_predicate_inside_one_equation_raises(holder):
    with pytest.raises(jdist.DivergentCollectiveError):
        _traced(lambda x: holder(lambda y: _on_first_replica(_rotate, y), x), jnp.ones(SIZE))


@every_holder
def test_collective_inside_one_equation_below_varying_predicate_raises(holder):
    with pytest.raises(jdist.DivergentCollectiveError):
        _traced(lambda x: _on_first_replica(lambda y: holder(_rotate, y), x), jnp.ones(SIZE))


def _on_first_replica(fn, x):
    return lax.cond(jdist.replica_id() == 0, fn, jnp.ones_like, x)


def _rotate(x):
    return lax.ppermute(x, AXIS, [(0, 1), (1, 2), (2, 3), (3, 0)])


# Collectives over one of two axes, below a predicate that varies along the other one.
GROUPS = {
    "psum": lambda x: lax.psum(x, "group"),
    "pmax": lambda x: lax.pmax(x, "group"),
    "all_gather": lambda x: lax.all_gather(x, "group").sum(0),
    "all_to_all": lambda x: lax.all_to_all(x, "group", 0, 0, tiled=True),
    "psum_scatter": lambda x: jnp.tile(lax.psum_scatter(x, "group", tiled=True), 2),
}
MESHES = {
    "ppermute": lambda x: lax.ppermute(x, "group", [(0, 1), (1, 0)]),
    "pshuffle": lambda x: lax.pshuffle(x, "group", [1, 0]),
    "in_jit": lambda x: jax.jit(lambda x: lax.ppermute(x, "group", [(0, 1)]))(x),
    "in_composite": lambda x: lax.composite(lambda x: lax.ppermute(x, "group", [(0, 1)]), name="test.fn")(x),
}
PREDICATES = {
    "cond": lambda fn, x: lax.cond(lax.axis_index("replica") == 0, fn, lambda x: x, x),
    "fori_loop": lambda fn, x: lax.fori_loop(0, lax.axis_index("replica") + 1, lambda _, x: fn(x), x),
}
every_predicate = pytest.mark.parametrize("below", PREDICATES.values(), ids=PREDICATES)


def _run_on_two_axes(fn):
    devices = [f"cpu:{i}" for i in range(4)]
    strategy = jdist.MirroredStrategy(devices, cross_device_ops=jdist.HierarchicalAllReduce(group_size=2))
    x = strategy.put(jdist.PerReplica(np.arange(16, dtype=np.float32).reshape(4, 4)))
    return np.asarray(strategy.run(fn, (x,)).tree)


@every_predicate
@pytest.mark.parametrize("fn", GROUPS.values(), ids=GROUPS)
def test_collective_below_a_predicate_that_varies_along_another_axis_runs(fn, below):
    assert np.isfinite(_run_on_two_axes(lambda x: below(fn, x))).all()


@every_predicate
@each_row("fn", MESHES.values(), ids=MESHES)
def test_collective_that_waits_for_the_mesh_below_a_varying_predicate_raises(fn, below):
    reason = r"ppermute at .*test_replication_soundness.py:\d+.* over group waits for every replica, also along replica"
    with pytest.raises(jdist.DivergentCollectiveError, match=reason):
        _run_on_two_axes(lambda x: below(fn, x))


def test_permutation_below_a_replicated_predicate_runs():
    below = lambda fn, x: lax.cond(lax.psum(1, "replica") > 1, fn, jnp.zeros_like, x)
    swapped = _run_on_two_axes(lambda x: below(MESHES["ppermute"], x))
    np.testing.assert_array_equal(swapped, np.arange(16).reshape(2, 2, 4)[::-1].reshape(4, 4))


# Mistakes in the analysis: functions that make one through pytest's monkeypatch.


def _rule(name, rule):
    return lambda patch: patch.setitem(replication._RULES, name, rule)


def _method(name, method):
    return lambda patch: patch.setattr(replication._Analysis, name, method)


def _ordinary(analysis, equation, operands):
    return [replication._propagate(equation, replication._join(*operands))] * len(equation.outvars)


def _replicated(analysis, equation, operands):
    return [replication.REPLICATED] * len(equation.outvars)


def _remat_not_followed(analysis, equation, body, operands):
    return _ordinary(analysis, equation, operands) if equation.primitive.name == "remat2" else body(operands)


def _cond_without_predicate(analysis, equation, index, branches, operands, switch=replication._Analysis.switch):
    return switch(analysis, equation, replication.REPLICATED, branches, operands)


def _cond_of_one_branch(analysis, equation, index, branches, operands):
    return branches[-1](operands)


def _while_without_predicate(analysis, equation, test, body, carry):
    return replication.fixed_point(body, carry, replication._join, replication._vary_alike)


def _one_iteration(patch):
    for module in (replication, interpreter):  # `scan_to_fixed_point` is in the second
        patch.setattr(module, "fixed_point", lambda body, carry, join, are_equal: body(carry))


def _harmless_effects(patch):
    patch.setattr(jax_compat, "may_vary_between_replicas", lambda effect: False)


SAME, OWN = -1, -2  # the inputs of a program: a replicated value, and one value per replica
ONE, TANH, ID = (Step("one", (-1,)),), (Step("tanh", (-1,)),), (Step("replica_id", (-1,)),)

MISTAKES = {
    "axis_index is arithmetic": (_rule("axis_index", _ordinary), Step("replica_id", (SAME,))),
    "ppermute is arithmetic": (_rule("ppermute", _ordinary), Step("shift", (SAME,))),
    "psum_scatter is arithmetic": (_rule("reduce_scatter", _ordinary), Step("scatter", (SAME,))),
    "all_to_all is arithmetic": (_rule("all_to_all", _ordinary), Step("all_to_all", (SAME,))),
    "sums over groups are replicated": (_rule("psum", _replicated), Step("group_sum", (OWN,))),
    "cond has no predicate": (_method("switch", _cond_without_predicate), Step("cond", (OWN, SAME), (ONE, TANH))),
    "cond has one branch": (_method("switch", _cond_of_one_branch), Step("cond", (SAME, OWN), (ONE, TANH))),
    "while has no predicate": (_method("while_loop", _while_without_predicate), Step("while", (SAME,) * 3, (ID, TANH))),
    "scan runs once": (_one_iteration, Step("scan", (OWN, SAME, SAME, SAME), ((Step("tanh", (-2,)),),))),
    "while runs once": (_one_iteration, Step("fori_to", (SAME, OWN, SAME, SAME), (TANH,))),
    "calls are not followed": (_method("call", _remat_not_followed), Step("checkpoint", (SAME,), (ID,))),
    "references are values": (_harmless_effects, Step("write", (SAME, OWN))),
}


@pytest.mark.parametrize(("mistake", "witness"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_in_the_analysis_is_detected(mistake, witness, monkeypatch):
    assert not _unsound_values((witness,))
    mistake(monkeypatch)
    assert _unsound_values((witness,))

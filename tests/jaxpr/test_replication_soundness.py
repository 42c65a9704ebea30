"""What the proof calls mirrored is the same on every replica, bit by bit; and these checks would see it if not."""

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
from jdist._src.execution.replicate import Call, replicate
from jdist._src.jaxpr import replication
from jdist._src.replica.context import ReplicaContext

from programs import AXIS, SIZE, Step, programs, replica_function

pytestmark = pytest.mark.filterwarnings("ignore::jdist.RepeatedSumWarning")

REPRODUCIBLE = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
random_programs = given(program=programs(), num_replicas=st.sampled_from((4, 3, 2)))


@functools.cache
def _strategy(num_replicas):
    return jdist.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])


def _inputs(num_replicas, seed):
    same, *own = np.random.default_rng(seed).normal(size=(1 + num_replicas, SIZE)).astype(np.float32)
    return same, jax.random.key(seed), jdist.PerReplica(np.stack(own))


def _held(x):
    """The different byte strings that the devices hold of `x`."""
    return {np.asarray(shard.data).tobytes() for shard in x.addressable_shards}


def _broken_promises(program, num_replicas=4):
    """Which values of `program` were called mirrored and are not, on a few random inputs: their numbers."""
    replica = replica_function(program)
    broken = set()
    for seed in range(3):
        values, each = _strategy(num_replicas).run(replica, _inputs(num_replicas, seed))
        for number, (value, own) in enumerate(zip(values, each.tree, strict=True)):
            if isinstance(value, jax.Array) and len(_held(value) | _held(own)) > 1:
                broken.add(number)
    return broken


def _traced(replica, *args):
    """What `replica` returns as the host sees it, with shapes for arrays: the whole proof, and nothing is run."""
    strategy = _strategy(4)
    call = Call(replica, args, {})
    context = ReplicaContext(strategy.mesh.axis_names, strategy.mesh.size, strategy)
    run = lambda: replicate(call, lambda *a: ((), replica(*a)), strategy._backend, context).pair[1]
    return jax.eval_shape(run)


def _check(program, num_replicas):
    """Fails if a promise is broken. A program that is refused makes none; one that would hang ends the process."""
    try:
        broken = _broken_promises(program, num_replicas)
    except jdist.DivergentCollectiveError:
        event("refused")
    else:
        event("run")
        assert not broken, f"values {broken} of {program} were called mirrored and differ"


@settings(REPRODUCIBLE, max_examples=40)
@random_programs
def test_value_called_mirrored_in_random_program_is_bit_equal_on_all_replicas(program, num_replicas):
    _check(program, num_replicas)


@pytest.mark.slow
@settings(REPRODUCIBLE, max_examples=300)
@random_programs
def test_value_called_mirrored_in_many_random_programs_is_bit_equal_on_all_replicas(program, num_replicas):
    _check(program, num_replicas)


def test_random_programs_have_every_verdict_often():
    """The property above would be empty if all were refused, or nothing called mirrored."""
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
            verdicts.update("per replica" if isinstance(value, jdist.PerReplica) else "mirrored" for value in values)

    judge()
    assert verdicts["accepted"] >= 30
    assert verdicts["refused"] >= 5
    assert min(verdicts["mirrored"], verdicts["per replica"]) >= 25


# Functions that JAX keeps as a program within one equation, most of which the random programs do not have.
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
def test_replica_id_within_one_equation_is_not_called_mirrored(holder):
    replica = lambda x: holder(lambda y: y * jdist.replica_id(), x)
    assert isinstance(_traced(replica, jnp.ones(SIZE)), jdist.PerReplica)


@every_holder
def test_collective_below_own_predicate_within_one_equation_is_refused(holder):
    with pytest.raises(jdist.DivergentCollectiveError):
        _traced(lambda x: holder(lambda y: _on_first_replica(_rotate, y), x), jnp.ones(SIZE))


@every_holder
def test_collective_within_one_equation_below_own_predicate_is_refused(holder):
    with pytest.raises(jdist.DivergentCollectiveError):
        _traced(lambda x: _on_first_replica(lambda y: holder(_rotate, y), x), jnp.ones(SIZE))


def _on_first_replica(fn, x):
    return lax.cond(jdist.replica_id() == 0, fn, jnp.ones_like, x)


def _rotate(x):
    return lax.ppermute(x, AXIS, [(0, 1), (1, 2), (2, 3), (3, 0)])


# What a mistake in the proof would look like: functions that make one, by way of pytest's monkeypatch.


def _rule(name, rule):
    return lambda patch: patch.setitem(replication._RULES, name, rule)


def _ordinary(flow, equation, operands, control):
    return [replication._join(equation, operands)] * len(equation.outvars)


def _agreeing(flow, equation, operands, control):
    return [replication.REPLICATED] * len(equation.outvars)


def _cond_without_predicate(flow, equation, operands, control):
    return replication._Flow._cond(flow, equation, [replication.REPLICATED, *operands[1:]], control)


def _cond_of_one_branch(flow, equation, operands, control):
    return flow.follow(jax_compat.open_jaxpr(equation.params["branches"][-1]), operands[1:], control)


def _while_without_predicate(flow, equation, operands, control):
    first, second = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    body, consts = jax_compat.open_jaxpr(equation.params["body_jaxpr"]), operands[first : first + second]
    return replication._fixed_point(
        lambda carry: flow.follow(body, consts + carry, control), operands[first + second :]
    )


def _one_turn(patch):
    patch.setattr(replication, "_fixed_point", lambda turn, carry: turn(carry))


def _harmless_effects(patch):
    patch.setattr(jax_compat, "may_vary_between_replicas", lambda effect: False)


SAME, OWN = -1, -2  # what a program begins with
ONE, TANH, ID = (Step("one", (-1,)),), (Step("tanh", (-1,)),), (Step("replica_id", (-1,)),)

MISTAKES = {
    "axis_index is arithmetic": (_rule("axis_index", _ordinary), Step("replica_id", (SAME,))),
    "ppermute is arithmetic": (_rule("ppermute", _ordinary), Step("shift", (SAME,))),
    "psum_scatter is arithmetic": (_rule("reduce_scatter", _ordinary), Step("scatter", (SAME,))),
    "all_to_all is arithmetic": (_rule("all_to_all", _ordinary), Step("all_to_all", (SAME,))),
    "groups agree with each other": (_rule("psum", _agreeing), Step("group_sum", (OWN,))),
    "cond has no predicate": (_rule("cond", _cond_without_predicate), Step("cond", (OWN, SAME), (ONE, TANH))),
    "cond has one branch": (_rule("cond", _cond_of_one_branch), Step("cond", (SAME, OWN), (ONE, TANH))),
    "while has no predicate": (_rule("while", _while_without_predicate), Step("while", (SAME,) * 3, (ID, TANH))),
    "scan turns once": (_one_turn, Step("scan", (OWN, SAME, SAME, SAME), ((Step("tanh", (-2,)),),))),
    "while turns once": (_one_turn, Step("fori_to", (SAME, OWN, SAME, SAME), (TANH,))),
    "calls are not followed": (_rule("remat2", _ordinary), Step("checkpoint", (SAME,), (ID,))),
    "references are values": (_harmless_effects, Step("write", (SAME, OWN))),
}


@pytest.mark.parametrize(("mistake", "witness"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_in_the_proof_is_seen(mistake, witness, monkeypatch):
    assert not _broken_promises((witness,))
    mistake(monkeypatch)
    assert _broken_promises((witness,))

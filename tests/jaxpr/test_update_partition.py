"""The update that is cut out of a step: what it may hold, and that the parts together are the whole."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jdist
from jdist._src.core import jax_compat
from jdist._src.jaxpr import update_partition
from jdist._src.jaxpr.replication import Input

import programs
from laws import among

AXIS, REPLICAS = "replica", 2
few = hypothesis.settings(
    max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(hypothesis.HealthCheck)
)
pytestmark = pytest.mark.filterwarnings("ignore::jdist.RepeatedSumWarning")


class Cut:
    """A step `(state, x) -> (state, output)` of one replica, and its parts; `x` differs between the replicas."""

    def __init__(self, step, state, x, apart=None, own=()):
        leaves, treedef = jax.tree.flatten(state)
        # Each array goes alone, as on most platforms.
        devices, alone = [f"cpu:{i}" for i in range(REPLICAS)], jdist.CommunicationOptions(bytes_per_pack=0)
        strategy = jdist.MirroredStrategy(devices, communication_options=alone)

        def run(*given):
            with jdist._src.replica.context.enter_context(strategy._context):
                return jax.tree.leaves(step(treedef.unflatten(given[:-1]), given[-1]))

        self.given = [*leaves, x]
        traced = jax.make_jaxpr(run, axis_env=[(AXIS, REPLICAS)])(*leaves, x)
        self.whole = jax_compat.jaxpr_function(traced)
        flat = update_partition.inline_calls(traced, [(AXIS, REPLICAS)])
        self.program, self.consts = jax_compat.consts_as_inputs(flat), flat.consts
        self.state = self.program.invars[len(self.consts) : -1]
        # Scalars stay on the devices.
        apart = [i for i, leaf in enumerate(leaves) if jnp.shape(leaf)] if apart is None else apart
        inputs = [Input("", ()) for _ in self.program.invars[:-1]] + [Input("x", (AXIS,))]
        *self.parts, self.numbers = update_partition.split_update(
            self.program,
            inputs,
            (AXIS,),
            [self.state[i] for i in apart],
            [self.program.outvars[i] for i in own],
            len(leaves),
        )
        self.before, self.by_element, self.rest = self.parts
        self.late = {*self.by_element.gives, *self.rest.gives}

    def is_late(self, number):
        """Whether the update makes this result."""
        return self.program.outvars[number] in self.late

    def arrays_sent(self):
        """The arrays that the update needs of the replicas."""
        needs = {var for part in (self.by_element, self.rest) for var in part.needs}
        return [var for var in self.before.gives if var in needs and var.aval.shape]

    def run(self, split, *given):
        """The results of one replica."""
        if not split:
            return self.whole(*given)
        known = dict(zip(self.program.invars, [*self.consts, *given], strict=True)) | self.numbers
        for part in self.parts:
            known.update(part.run(known))
        return [atom.val if isinstance(atom, jax_compat.Literal) else known[atom] for atom in self.program.outvars]

    def check(self):
        """The parts one after the other give what the whole gives, and the update is what it may be."""
        rows = jnp.stack([self.given[-1], 1 - self.given[-1]])
        one = lambda split, x: [jnp.asarray(y) for y in self.run(split, *self.given[:-1], x)]
        over = lambda split: jax.jit(jax.vmap(functools.partial(one, split), axis_name=AXIS))(rows)
        for found, expected in zip(over(True), over(False), strict=True):
            np.testing.assert_allclose(bits(found), bits(expected), rtol=1e-5, atol=1e-6)
        late = [*self.by_element.program.eqns, *self.rest.program.eqns]
        assert not any(jax_compat.uses_axes(equation, frozenset((AXIS,))) or equation.effects for equation in late)
        assert self.program.invars[-1] not in {*self.by_element.needs, *self.rest.needs}
        assert sum(len(part.program.eqns) for part in self.parts) == len(self.program.eqns)
        self.check_pieces()

    def check_pieces(self):
        pieces = self.by_element.pieces()
        assert sum(len(piece.program.eqns) for piece in pieces) == len(self.by_element.program.eqns)
        gives = [var for piece in pieces for var in piece.gives]
        assert len(gives) == len(set(gives))
        assert set(gives) == set(self.by_element.gives)
        arrays = [{v for v in [*p.needs, *p.gives] if v.aval.shape} for p in pieces]
        assert sum(map(len, arrays)) == len(set().union(*arrays))


def bits(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


# --- training steps


def first_params():
    return {"a": jnp.full((4, 6), 0.3), "b": jnp.full((6, 4), 0.2), "c": jnp.full(4, 0.1)}


def loss_of(params, x):
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] + params["c"] - x) ** 2)


def step_of(tx, loss=loss_of):
    def step(state, x):
        params, opt_state = state
        value, grads = jdist.all_reduce("mean", jax.value_and_grad(loss)(params, x))
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": value, "norm": optax.tree.norm(updates)}

    return step


def cut(tx, loss=loss_of, **options):
    state = ((params := first_params()), tx.init(params))
    return Cut(step_of(tx, loss), state, jnp.linspace(-1, 1, 12).reshape(3, 4), **options)


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adamw": optax.adamw(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": optax.lamb(1e-2),
    "muon": optax.contrib.muon(1e-2),
    "multi_steps": optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2).gradient_transformation(),
}


@jax.custom_vjp
def halved(x):
    return x


halved.defvjp(lambda x: (x, None), lambda _, g: (g / 2,))


def _repeated(params, x):
    _, k = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.5 + lax.pmean(x.mean(), AXIS)), (0, 1.0))
    return loss_of(params, x) * (1 + k**2)


LOSSES = {
    "plain": loss_of,
    "jit": jax.jit(loss_of),
    "remat": jax.checkpoint(loss_of),
    "custom_vjp": lambda params, x: halved(loss_of(params, x)),
    "scan": lambda params, x: lax.scan(lambda c, row: (c + loss_of(params, row[None]), None), 0.0, x)[0],
    "cond": lambda params, x: lax.cond(
        lax.pmean(x.sum(), AXIS) > 0, loss_of, lambda p, x: 2 * loss_of(p, -x), params, x
    ),
    "while": _repeated,
}


STEPS = {name: (tx, loss_of) for name, tx in OPTIMIZERS.items()}
STEPS |= {f"adamw_{name}": (OPTIMIZERS["adamw"], loss) for name, loss in LOSSES.items()}


@pytest.mark.parametrize("name", among(STEPS, "sgd", "muon", "adamw_scan", "adamw_cond", "adamw_while"))
def test_parts_of_a_training_step_one_after_the_other_are_the_step(name):
    tx, loss = STEPS[name]
    found = cut(tx, loss)
    found.check()
    assert all(map(found.is_late, range(3)))  # the new parameters
    loss, norm = len(found.state), len(found.state) + 1  # where the outputs stand
    assert not found.is_late(loss)
    assert found.is_late(norm) or tx is OPTIMIZERS["sgd"]


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_update_by_element_needs_one_array_a_parameter_of_the_replicas(name):
    found = cut(OPTIMIZERS[name])
    assert sorted(var.aval.shape for var in found.arrays_sent()) == [(4,), (4, 6), (6, 4)]
    assert len(found.by_element.pieces()) >= 3
    assert not any(map(_is_array_of_state(found), found.rest.gives))


def _is_array_of_state(found):
    results = set(found.program.outvars[: len(found.state)])
    return lambda var: bool(var.aval.shape) and var in results


def test_update_is_empty_where_nothing_is_apart():
    found = cut(OPTIMIZERS["adamw"], apart=())
    assert not found.late
    assert not found.by_element.pieces()
    found.check()


def test_update_makes_only_what_depends_on_what_is_apart():
    state = {"a": jnp.ones(4), "b": jnp.ones(4)}
    step = lambda s, x: ({"a": s["a"] + lax.psum(x, AXIS), "b": s["b"] * 2}, ())
    found = Cut(step, state, jnp.ones(4), apart=(0,))
    assert (found.is_late(0), found.is_late(1)) == (True, False)
    found.check()


def test_update_does_not_make_what_each_replica_keeps_as_its_own():
    step = lambda s, x: ({"a": s["a"] * 2, "b": s["b"] + 1}, ())
    found = Cut(step, {"a": jnp.ones(4), "b": jnp.ones(4)}, jnp.ones(4), own=(1,))
    assert (found.is_late(0), found.is_late(1)) == (True, False)
    found.check()


KEPT_OUT = {
    "differs": lambda w, x: (w + lax.psum(x, AXIS), w * x),
    "said after": lambda w, x: (lax.pmean(w * 2 + x, AXIS), w),
    "number": lambda w, x: (w * 2, w + lax.axis_index(AXIS)),
    "gathered": lambda w, x: (lax.all_gather(w + x, AXIS).sum(0), x),
    "printed": lambda w, x: (w * 2, jax.debug.print("{}", w * 3)),
    "in a loop": lambda w, x: (lax.fori_loop(0, 2, lambda _, w: lax.pmean(w + x, AXIS), w), x),
    "handed on": lambda w, x: (w, (w, lax.psum(x, AXIS))),
    "constant": lambda w, x: (jnp.zeros(4), w),
    "handed twice": lambda w, x: ((v := w * 2 + lax.psum(x, AXIS)), (v, v + 1)),
    "one in all": lambda w, x: (w.at[0].set(lax.psum(x, AXIS)[0]), w.sum()),
}


@pytest.mark.parametrize("step", KEPT_OUT.values(), ids=KEPT_OUT)
def test_step_of_any_kind_is_its_parts_one_after_the_other(step):
    Cut(step, jnp.linspace(0, 1, 4), jnp.linspace(-1, 2, 4)).check()


@few
@hypothesis.given(programs.programs(depth=2))
def test_random_program_is_its_parts_one_after_the_other(program):
    def step(state, own):
        number = jnp.full(programs.SIZE, lax.axis_index(AXIS), jnp.float32)
        same, other = state
        values = programs.evaluate(program, [other * 2, number, jnp.linspace(-1, 1, programs.SIZE), own, same])
        return (lax.pmean(values[-1], AXIS) * same, other + lax.pmean(values[0], AXIS)), values

    state = jnp.linspace(-0.5, 0.5, programs.SIZE), jnp.linspace(0.1, 0.2, programs.SIZE)
    try:
        found = Cut(step, state, jnp.linspace(0.2, 0.9, programs.SIZE))
    except jdist.DivergentCollectiveError:
        hypothesis.reject()
    late = [*found.by_element.program.eqns, *found.rest.program.eqns]
    assert not any(jax_compat.uses_axes(equation, frozenset((AXIS,))) for equation in late)
    found.check_pieces()
    run = functools.partial(found.run, True)
    replica = lambda run: jax.shard_map(
        lambda *given: [jnp.asarray(y)[None] for y in run(*given[:-1], given[-1][0])],
        mesh=jdist.MirroredStrategy(["cpu:0", "cpu:1"]).mesh,
        in_specs=(jax.P(), jax.P(), jax.P(AXIS)),
        out_specs=jax.P(AXIS),
        check_vma=False,
    )
    rows = jnp.stack([found.given[-1], 1 - found.given[-1]])
    results = [jax.jit(replica(one))(*found.given[:-1], rows) for one in (run, functools.partial(found.run, False))]
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)

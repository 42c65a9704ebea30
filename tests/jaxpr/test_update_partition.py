"""The split of a step into a compute part and an update part: the parts together compute the step."""

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
from jdist._src.jaxpr.interpreter import uses_axes
from jdist._src.jaxpr.replication import Input

import programs
from laws import among

AXIS, REPLICAS = "replica", 2
few = hypothesis.settings(
    max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(hypothesis.HealthCheck)
)
pytestmark = [
    pytest.mark.filterwarnings("ignore::jdist.RepeatedSumWarning"),
    pytest.mark.filterwarnings("ignore::jdist.SharedRandomnessWarning"),
]


class SplitStep:
    """A step `(state, x) -> (state, output)` of one replica, and its parts; `x` varies between the replicas."""

    def __init__(self, step, state, x, remote=None, per_replica=()):
        leaves, treedef = jax.tree.flatten(state)
        # One all-reduce per array, as on most platforms.
        options = jdist.CommunicationOptions(bytes_per_pack=0)
        strategy = jdist.MirroredStrategy([f"cpu:{i}" for i in range(REPLICAS)], communication_options=options)

        def run(*arguments):
            with jdist._src.replica.context.enter_context(strategy._context):
                return jax.tree.leaves(step(treedef.unflatten(arguments[:-1]), arguments[-1]))

        self.arguments = [*leaves, x]
        traced = jax.make_jaxpr(run, axis_env=[(AXIS, REPLICAS)])(*leaves, x)
        self.run_unsplit = jax_compat.jaxpr_function(traced)
        flat = update_partition.inline_calls(traced, [(AXIS, REPLICAS)])
        self.program, self.consts = jax_compat.consts_as_inputs(flat), flat.consts
        self.state = self.program.invars[len(self.consts) : -1]
        # Scalars stay on the devices.
        remote = [i for i, leaf in enumerate(leaves) if jnp.shape(leaf)] if remote is None else remote
        inputs = [Input("", ()) for _ in self.program.invars[:-1]] + [Input("x", (AXIS,))]
        partition = update_partition.split_update(
            self.program,
            inputs,
            (AXIS,),
            [self.state[i] for i in remote],
            [self.program.outvars[i] for i in per_replica],
            len(leaves),
        )
        *self.parts, self.literals = partition
        self.compute, self.elementwise, self.rest = self.parts
        self.updated = {*self.elementwise.outputs, *self.rest.outputs}

    def is_updated(self, number):
        """Whether the update part computes this result."""
        return self.program.outvars[number] in self.updated

    def arrays_sent(self):
        """Returns the arrays that the compute part sends to the update part."""
        inputs = {var for part in (self.elementwise, self.rest) for var in part.inputs}
        return [var for var in self.compute.outputs if var in inputs and var.aval.shape]

    def run(self, is_split, *arguments):
        """Returns the results of one replica, computed by the parts one after the other or by the unsplit step."""
        if not is_split:
            return self.run_unsplit(*arguments)
        values = dict(zip(self.program.invars, [*self.consts, *arguments], strict=True)) | self.literals
        for part in self.parts:
            values.update(part.run(values))
        return [atom.val if isinstance(atom, jax_compat.Literal) else values[atom] for atom in self.program.outvars]

    def check(self):
        """Checks that the parts one after the other compute the step, and that the update is pure and without collectives."""
        rows = jnp.stack([self.arguments[-1], 1 - self.arguments[-1]])
        replica = lambda is_split, x: [jnp.asarray(y) for y in self.run(is_split, *self.arguments[:-1], x)]
        replicas = lambda is_split: jax.jit(jax.vmap(functools.partial(replica, is_split), axis_name=AXIS))(rows)
        for result, expected in zip(replicas(True), replicas(False), strict=True):
            np.testing.assert_allclose(numbers(result), numbers(expected), rtol=1e-5, atol=1e-6)
        update = [*self.elementwise.program.eqns, *self.rest.program.eqns]
        assert not any(uses_axes(equation, frozenset((AXIS,))) or equation.effects for equation in update)
        assert self.program.invars[-1] not in {*self.elementwise.inputs, *self.rest.inputs}
        assert sum(len(part.program.eqns) for part in self.parts) == len(self.program.eqns)
        self.check_split_by_array()

    def check_split_by_array(self):
        parts = self.elementwise.split_by_array()
        assert sum(len(part.program.eqns) for part in parts) == len(self.elementwise.program.eqns)
        outputs = [var for part in parts for var in part.outputs]
        assert len(outputs) == len(set(outputs))
        assert set(outputs) == set(self.elementwise.outputs)
        arrays = [{v for v in [*part.inputs, *part.outputs] if v.aval.shape} for part in parts]
        assert sum(map(len, arrays)) == len(set().union(*arrays))


def numbers(x):
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


def split_step(tx, loss=loss_of, **options):
    state = ((params := first_params()), tx.init(params))
    return SplitStep(step_of(tx, loss), state, jnp.linspace(-1, 1, 12).reshape(3, 4), **options)


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
def test_parts_of_a_training_step_compute_the_step(name):
    tx, loss = STEPS[name]
    split = split_step(tx, loss)
    split.check()
    assert all(map(split.is_updated, range(3)))  # the new parameters
    loss, norm = len(split.state), len(split.state) + 1  # the positions of the outputs
    assert not split.is_updated(loss)
    assert split.is_updated(norm) or tx is OPTIMIZERS["sgd"]


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_elementwise_update_receives_one_array_per_parameter(name):
    split = split_step(OPTIMIZERS[name])
    assert sorted(var.aval.shape for var in split.arrays_sent()) == [(4,), (4, 6), (6, 4)]
    assert len(split.elementwise.split_by_array()) >= 3
    assert not any(map(_is_array_of_state(split), split.rest.outputs))


def _is_array_of_state(split):
    results = set(split.program.outvars[: len(split.state)])
    return lambda var: bool(var.aval.shape) and var in results


def test_update_is_empty_without_remote_state():
    split = split_step(OPTIMIZERS["adamw"], remote=())
    assert not split.updated
    assert not split.elementwise.split_by_array()
    split.check()


def test_update_computes_only_results_that_depend_on_remote_state():
    state = {"a": jnp.ones(4), "b": jnp.ones(4)}
    step = lambda s, x: ({"a": s["a"] + lax.psum(x, AXIS), "b": s["b"] * 2}, ())
    split = SplitStep(step, state, jnp.ones(4), remote=(0,))
    assert (split.is_updated(0), split.is_updated(1)) == (True, False)
    split.check()


def test_update_does_not_compute_results_that_are_stored_per_replica():
    step = lambda s, x: ({"a": s["a"] * 2, "b": s["b"] + 1}, ())
    split = SplitStep(step, {"a": jnp.ones(4), "b": jnp.ones(4)}, jnp.ones(4), per_replica=(1,))
    assert (split.is_updated(0), split.is_updated(1)) == (True, False)
    split.check()


OTHER_STEPS = {
    "varying": lambda w, x: (w + lax.psum(x, AXIS), w * x),
    "reduced after": lambda w, x: (lax.pmean(w * 2 + x, AXIS), w),
    "index": lambda w, x: (w * 2, w + lax.axis_index(AXIS)),
    "gathered": lambda w, x: (lax.all_gather(w + x, AXIS).sum(0), x),
    "printed": lambda w, x: (w * 2, jax.debug.print("{}", w * 3)),
    "in a loop": lambda w, x: (lax.fori_loop(0, 2, lambda _, w: lax.pmean(w + x, AXIS), w), x),
    "returned unchanged": lambda w, x: (w, (w, lax.psum(x, AXIS))),
    "constant": lambda w, x: (jnp.zeros(4), w),
    "returned twice": lambda w, x: ((v := w * 2 + lax.psum(x, AXIS)), (v, v + 1)),
    "indexed": lambda w, x: (w.at[0].set(lax.psum(x, AXIS)[0]), w.sum()),
}


@pytest.mark.parametrize("step", OTHER_STEPS.values(), ids=OTHER_STEPS)
def test_parts_of_a_step_of_any_kind_compute_the_step(step):
    SplitStep(step, jnp.linspace(0, 1, 4), jnp.linspace(-1, 2, 4)).check()


@pytest.mark.slow
@few
@hypothesis.given(programs.programs(depth=2))
def test_parts_of_a_random_program_compute_the_program(program):
    def step(state, own):
        index = jnp.full(programs.SIZE, lax.axis_index(AXIS), jnp.float32)
        first, second = state
        values = programs.evaluate(program, [second * 2, index, jnp.linspace(-1, 1, programs.SIZE), own, first])
        return (lax.pmean(values[-1], AXIS) * first, second + lax.pmean(values[0], AXIS)), values

    state = jnp.linspace(-0.5, 0.5, programs.SIZE), jnp.linspace(0.1, 0.2, programs.SIZE)
    try:
        split = SplitStep(step, state, jnp.linspace(0.2, 0.9, programs.SIZE))
    except jdist.DivergentCollectiveError:
        hypothesis.reject()
    update = [*split.elementwise.program.eqns, *split.rest.program.eqns]
    assert not any(uses_axes(equation, frozenset((AXIS,))) for equation in update)
    split.check_split_by_array()
    run = functools.partial(split.run, True)
    replica = lambda run: jax.shard_map(
        lambda *arguments: [jnp.asarray(y)[None] for y in run(*arguments[:-1], arguments[-1][0])],
        mesh=jdist.MirroredStrategy(["cpu:0", "cpu:1"]).mesh,
        in_specs=(jax.P(), jax.P(), jax.P(AXIS)),
        out_specs=jax.P(AXIS),
        check_vma=False,
    )
    rows = jnp.stack([split.arguments[-1], 1 - split.arguments[-1]])
    results = [jax.jit(replica(one))(*split.arguments[:-1], rows) for one in (run, functools.partial(split.run, False))]
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)

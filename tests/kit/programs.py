"""Random replica functions, to test the replication analysis with.

A program is a tuple of steps. A step names one of `OPERATIONS`, its operands, and the programs that it runs as branches, loop
bodies or functions. Every value is a float32 vector of `SIZE` numbers in (-1, 1).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax

import jdist

SIZE = 4
AXIS = "replica"


class Step(NamedTuple):
    """One operation of a program.

    Attributes:
        name: A key of `OPERATIONS`.
        operands: The index of each operand among the values so far: -1 is the newest. Wraps around.
        blocks: The programs that the operation runs. Their values are the values so far, followed by their arguments.
    """

    name: str
    operands: tuple[int, ...]
    blocks: tuple["Program", ...] = ()

    def __repr__(self):
        return f"Step{tuple(self)}"


Program = tuple[Step, ...]


class Operation(NamedTuple):
    """The computation of a step.

    Attributes:
        apply: Maps the operands, and the blocks as functions of vectors, to a vector or a tuple of vectors.
        operands: The number of operands.
        blocks: The number of programs that it runs.
        smooth: Whether it is differentiable.
        smooth_blocks: Whether its blocks have to be differentiable.
        sealed: Whether its blocks use their arguments only: JAX forbids these functions to close over values.
    """

    apply: Callable[..., Any]
    operands: int
    blocks: int = 0
    smooth: bool = True
    smooth_blocks: bool = False
    sealed: bool = False


def evaluate(program: Program, values: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the results of the steps of `program`; each step computes from `values` and the results before."""
    values = list(values)
    start = len(values)
    for step in program:
        operation = OPERATIONS[step.name]
        operands = [values[index % len(values)] for index in step.operands]
        closure = () if operation.sealed else tuple(values)
        blocks = [
            lambda *args, block=block, closure=closure: evaluate(block, closure + args)[-1] for block in step.blocks
        ]
        results = operation.apply(*operands, *blocks)
        # Bounded and injective: different numbers stay different.
        values += [jax.nn.soft_sign(value) for value in (results if isinstance(results, tuple) else (results,))]
    return values[start:]


def replica_function(program: Program) -> Callable[..., Any]:
    """Returns the replica function that returns the results of `program` twice: plain, and as `PerReplica`.

    Its arguments are a replicated vector, a replicated random key, and a varying vector. The program starts with the values,
    from -1 back: the replicated vector, the varying vector, a constant, the replica index, noise from the key.
    """

    def replica(same: jax.Array, key: jax.Array, own: jax.Array) -> tuple[list[jax.Array], jdist.PerReplica]:
        index = jnp.full(SIZE, jdist.replica_id(), jnp.float32)
        values = evaluate(program, [jax.random.normal(key, SIZE), index, jnp.linspace(-1, 1, SIZE), own, same])
        return values, jdist.PerReplica(values)

    return replica


def programs(depth: int = 3, steps: int = 5, smooth: bool = False) -> st.SearchStrategy[Program]:
    """Returns a strategy of programs of up to `steps` steps, with blocks nested `depth` deep."""
    return st.lists(_steps(depth, smooth), min_size=1, max_size=steps).map(tuple)


def _steps(depth: int, smooth: bool) -> st.SearchStrategy[Step]:
    # Few collectives: most of those below a varying predicate are refused, and with many of them all values are replicated.
    kinds = [_WITHIN] * 3 + [_ACROSS] + ([_FLOW] * 2 + [_FUNCTIONS] if depth else [])
    names = [[name for name in kind if OPERATIONS[name].smooth or not smooth] for kind in kinds]
    return st.one_of(*map(st.sampled_from, names)).flatmap(lambda name: _step(name, depth, smooth))


def _step(name: str, depth: int, smooth: bool) -> st.SearchStrategy[Step]:
    operation = OPERATIONS[name]
    operands = st.tuples(*[st.integers(-6, -1)] * operation.operands)
    blocks = st.tuples(*[programs(depth - 1, 2, smooth or operation.smooth_blocks)] * operation.blocks)
    return st.builds(Step, st.just(name), operands, blocks)


def _number(x: jax.Array, below: int) -> jax.Array:
    """Returns an integer below `below` that depends on every bit of `x`."""
    return (lax.bitcast_convert_type(x, jnp.uint32).sum() % below).astype(jnp.int32)


def _replicas(x: jax.Array) -> jax.Array:
    """Returns one multiple of `x` per replica: `[replica, SIZE]`."""
    return jnp.outer(jnp.arange(1.0, jdist.num_replicas() + 1), x)


def _ring(wrap: bool) -> list[tuple[int, int]]:
    n = jdist.num_replicas()
    return [(i, (i + 1) % n) for i in range(n if wrap else n - 1)]


def _groups() -> list[list[int]]:
    """Returns pairs of neighbours, or groups of one replica if the number of replicas is odd or 2."""
    n = jdist.num_replicas()
    size = 2 if n % 2 == 0 and n > 2 else 1
    return [list(range(i, i + size)) for i in range(0, n, size)]


def _noise(x: jax.Array, own: bool) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(0), lax.bitcast_convert_type(x, jnp.uint32)[0])
    return jax.random.normal(jdist.replica_key(key) if own else key, SIZE)


def _write(x, y):
    ref = jax.new_ref(x)
    ref[1:] = y[1:]
    return ref[...]


def _cond(x, y, then, otherwise):
    return lax.cond(_number(x, 2) == 0, then, otherwise, y)


def _switch(x, y, *branches):
    return lax.switch(_number(x, len(branches)), branches, y)


def _rotate(carry, block, *args):
    """Rotates the carry, so that the variation of one entry reaches another in the next iteration only."""
    a, b, c = carry
    return b, c, block(a, *args)


def _scan(a, b, c, x, block):
    carry, ys = lax.scan(lambda carry, row: (_rotate(carry, block, row), carry[0]), (a, b, c), jnp.stack([x, -x]))
    return *carry, ys.sum(0)


def _fori(a, b, c, block):
    return lax.fori_loop(0, 2, lambda i, carry: _rotate(carry, block, jnp.full(SIZE, i, jnp.float32)), (a, b, c))


def _fori_to(x, a, b, c, block):
    return lax.fori_loop(0, _number(x, 4), lambda _, carry: _rotate(carry, block), (a, b, c))


def _while(a, b, c, test, block):
    more = lambda state: (state[0] < 4) & (_number(test(state[1]), 4) > 0)
    _, *carry = lax.while_loop(more, lambda state: (state[0] + 1, *_rotate(state[1:], block)), (0, a, b, c))
    return tuple(carry)


def _value_and_slope(fn, x):
    value, pull_back = jax.vjp(fn, x)
    return value, *pull_back(jnp.ones_like(x))


def _custom_jvp(x, block, slope):
    fn = jax.custom_jvp(block)
    fn.defjvp(lambda xs, tangents: (block(*xs), slope(*xs) * tangents[0]))
    return _value_and_slope(fn, x)


def _custom_vjp(x, block, slope):
    fn = jax.custom_vjp(block)
    fn.defvjp(lambda x: (block(x), x), lambda x, cotangent: (slope(x) * cotangent,))
    return _value_and_slope(fn, x)


def _solve(x, block):
    # Not the block alone: JAX cannot vmap a solution that does not depend on the right side.
    return lax.custom_linear_solve(lambda y: y, x, lambda _, b: b + block(b))


def _rows_and_replicas(x, y):
    return jax.vmap(lambda row: lax.psum(row, ("row", AXIS)), axis_name="row")(jnp.stack([x, y])).sum(0)


_WITHIN = {
    "tanh": Operation(jnp.tanh, 1),
    "sort": Operation(jnp.sort, 1),
    "one": Operation(jnp.ones_like, 1),
    "add": Operation(jnp.add, 2),
    "mul": Operation(jnp.multiply, 2),
    "dot": Operation(lambda x, y: jnp.outer(x, y) @ x, 2),
    "where": Operation(lambda x, y, z: jnp.where(x > y, y, z), 3),
    "take": Operation(lambda x, y: x[(_number(y, SIZE) + jnp.arange(SIZE)) % SIZE], 2),
    "put": Operation(lambda x, y: x.at[_number(y, SIZE)].set(y[0]), 2),
    "noise": Operation(lambda x: _noise(x, own=False), 1),
    "own_noise": Operation(lambda x: _noise(x, own=True), 1),
    "barrier": Operation(lambda x, y: lax.optimization_barrier((x, y)), 2),
    "write": Operation(_write, 2, smooth=False),
}
_ACROSS = {
    "psum": Operation(lambda x: lax.psum(x, AXIS), 1),
    "pmean": Operation(lambda x: lax.pmean(x, AXIS), 1),
    "pmax": Operation(lambda x: lax.pmax(x, AXIS), 1, smooth=False),
    "pmin": Operation(lambda x: lax.pmin(x, AXIS), 1, smooth=False),
    "gather": Operation(lambda x: lax.all_gather(x, AXIS).sum(0), 1),
    "all_reduce_sum": Operation(lambda x: jdist.all_reduce("sum", x), 1),
    "all_reduce_max": Operation(lambda x: jdist.all_reduce("max", x), 1, smooth=False),
    "all_gather": Operation(lambda x: jdist.all_gather(x, 0)[::-1][:SIZE], 1),
    "rows_and_replicas": Operation(_rows_and_replicas, 2),
    "replica_id": Operation(lambda x: x + lax.axis_index(AXIS), 1),
    "rotate": Operation(lambda x: lax.ppermute(x, AXIS, _ring(wrap=True)), 1),
    "shift": Operation(lambda x: lax.ppermute(x, AXIS, _ring(wrap=False)), 1),
    "scatter": Operation(lambda x: lax.psum_scatter(_replicas(x), AXIS), 1),
    "all_to_all": Operation(lambda x: lax.all_to_all(_replicas(x), AXIS, 0, 0).sum(0), 1),
    "group_sum": Operation(lambda x: lax.psum(x, AXIS, axis_index_groups=_groups()), 1),
    "group_gather": Operation(lambda x: lax.all_gather(x, AXIS, axis_index_groups=_groups()).sum(0), 1),
}
_FLOW = {
    "cond": Operation(_cond, 2, blocks=2),
    "switch": Operation(_switch, 2, blocks=3),
    "scan": Operation(_scan, 4, blocks=1),
    "fori": Operation(_fori, 3, blocks=1),
    "fori_to": Operation(_fori_to, 4, blocks=1, smooth=False),
    "while": Operation(_while, 3, blocks=2, smooth=False),
}
_FUNCTIONS = {
    "jit": Operation(lambda x, block: jax.jit(block)(x), 1, blocks=1),
    "checkpoint": Operation(lambda x, block: jax.checkpoint(block)(x), 1, blocks=1),
    "vmap": Operation(lambda x, y, block: jax.vmap(block)(jnp.stack([x, y])).sum(0), 2, blocks=1),
    "grad": Operation(lambda x, block: jax.grad(lambda x: block(x).sum())(x), 1, blocks=1, smooth_blocks=True),
    "custom_jvp": Operation(_custom_jvp, 1, blocks=2, sealed=True),
    "custom_vjp": Operation(_custom_vjp, 1, blocks=2, sealed=True),
    "solve": Operation(_solve, 1, blocks=1, smooth=False, smooth_blocks=True),
}
OPERATIONS = _WITHIN | _ACROSS | _FLOW | _FUNCTIONS

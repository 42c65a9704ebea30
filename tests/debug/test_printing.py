"""`debug.print`: lines in the order of the program and of the replicas, for every strategy, and errors of the format."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jdist

from laws import STRATEGIES

PLACES = {
    "one_device": STRATEGIES["one_device"],
    "mirrored_3": STRATEGIES["mirrored_3"],
    "mirrored_8": STRATEGIES["mirrored_8"],
    "groups_2": STRATEGIES["groups_2"],
    "sharded_4": STRATEGIES["sharded_4"],
    "central_2": STRATEGIES["central_2"],
    "virtual_4_on_2": lambda: jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=4),
    "virtual_3_on_2": lambda: jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=3),
    "virtual_2": lambda: jdist.MirroredStrategy(["cpu:0"], virtual_replicas=2),
    "virtual_1": lambda: jdist.MirroredStrategy(["cpu:0"], virtual_replicas=1),
}


def ones(strategy):
    return strategy.put(jdist.PerReplica(np.ones(strategy.num_replicas_in_sync, np.float32)))


def each(replicas, text):
    return [f"[replica {replica}] {text}" for replica in replicas]


def looping_step(state, x):
    """Prints outside and inside loops and branches, between collectives; later lines have fewer operands to wait for."""
    jdist.debug.print("start {s}", s=state)

    def body(total, i):
        jdist.debug.print("iteration {}", i)
        even = lambda total: (jdist.debug.print("even"), total)[1]
        total = lax.cond(jdist.replica_id() % 2 == 0, even, lambda total: total, total)
        total += jdist.all_reduce("mean", x)
        jdist.debug.print("end of {}", i)
        return total, None

    state, _ = lax.scan(body, state, jnp.arange(2))
    jdist.debug.print("done")
    return state, None


def lines_of_step(num_replicas, start):
    replicas = range(num_replicas)
    lines = each(replicas, f"start {start:.1f}")
    for i in range(2):
        lines += each(replicas, f"iteration {i}") + each(replicas[::2], "even") + each(replicas, f"end of {i}")
    return lines + each(replicas, "done")


@pytest.mark.parametrize("name", PLACES)
def test_lines_are_in_the_order_of_steps_calls_and_replicas(name, capfd):
    strategy = PLACES[name]()
    step, state = strategy.step(looping_step), strategy.init(lambda: jnp.float32(0))
    expected = []
    for number in range(3):
        state, _ = step(state, ones(strategy))
        expected += lines_of_step(strategy.num_replicas_in_sync, 2.0 * number)
        assert capfd.readouterr().out.splitlines() == expected  # when the call has returned
        expected = []
    strategy.run(looping_step, (jnp.float32(0), ones(strategy)))
    assert capfd.readouterr().out.splitlines() == lines_of_step(strategy.num_replicas_in_sync, 0.0)


@pytest.mark.parametrize("name", ["mirrored_3", "groups_2", "sharded_4", "central_2", "virtual_3_on_2"])
def test_steps_of_a_call_are_in_order(name, capfd):
    strategy = PLACES[name]()
    step = strategy.step(looping_step, steps_per_call=2)
    step(strategy.init(lambda: jnp.float32(0)), [ones(strategy)] * 2)
    count = strategy.num_replicas_in_sync
    assert capfd.readouterr().out.splitlines() == lines_of_step(count, 0.0) + lines_of_step(count, 2.0)


def _calls(x):
    @jax.jit
    def inner(y):
        jdist.debug.print("inner {:.0f}", y)
        return y * 2

    inner(inner(x))


def _vmap(x):
    jax.vmap(lambda i: jdist.debug.print("example {}", i))(jnp.arange(2))


def _grad(x):
    def loss(x):
        jdist.debug.print("loss of {}", x)
        return x**2

    jax.grad(loss)(x)


def _while(x):
    def body(i):
        jdist.debug.print("body {}", i)
        return i + 1

    def test(i):
        jdist.debug.print("test {}", i)
        return i < jdist.replica_id()

    lax.while_loop(test, body, 0)
    jdist.debug.print("after")


def _nested(x):
    def inner(i, j, carry):
        jdist.debug.print("{} {}", i, j)
        return carry

    lax.fori_loop(0, 2, lambda i, c: lax.fori_loop(0, 2, lambda j, d: inner(i, j, d), c), 0)


def _branches(x):
    branches = [lambda i=i: jdist.debug.print("branch {}", i) for i in range(3)]
    lax.switch(1 - jdist.replica_id(), branches)
    jdist.debug.print("after")


TWO = (0, 1)
FUNCTIONS = {
    "calls": (_calls, each(TWO, "inner 1") + each(TWO, "inner 2")),
    "vmap": (_vmap, each(TWO, "example 0") + each(TWO, "example 1")),
    "grad": (_grad, each(TWO, "loss of 1.0")),
    "while": (
        _while,
        each(TWO, "test 0") + each((1,), "body 0") + each((1,), "test 1") + each(TWO, "after"),
    ),
    "nested loops": (_nested, [line for i in TWO for j in TWO for line in each(TWO, f"{i} {j}")]),
    "branches": (_branches, each((1,), "branch 0") + each((0,), "branch 1") + each(TWO, "after")),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("place", ["mirrored_2", "groups_2", "virtual_2"])
def test_lines_of_transformed_functions(name, place, capfd):
    strategy = {**PLACES, **STRATEGIES}[place]()
    function, expected = FUNCTIONS[name]
    strategy.run(function, (jnp.float32(1),))
    assert capfd.readouterr().out.splitlines() == expected


def test_devices_of_a_replica_print_in_a_shard_map(capfd):
    def step(state, x):
        part = lambda x: (jdist.debug.print("{} rows", len(x)), lax.psum(x.sum(), "model"))[1]
        return state, jax.shard_map(part, in_specs=(P("model"),), out_specs=P(), axis_names={"model"})(x)

    strategy = PLACES["groups_2"]()
    strategy.step(step)(strategy.put(0.0), strategy.split(np.ones((8, 3), np.float32)))
    assert sorted(capfd.readouterr().out.splitlines()) == sorted(2 * each(TWO, "2 rows"))


def test_fields_are_formatted_as_by_format_and_every_line_has_the_replica(two, capfd):
    def fn(x):
        jdist.debug.print("{{}} {0.dtype} {name!r} {half:.2f}", x, name="a", half=jnp.bfloat16(0.5))
        jdist.debug.print("matrix", jnp.eye(2), 3)

    two.run(fn, (jnp.float32(1),))
    lines = [[f"[replica {r}] matrix [[1. 0.]", f"[replica {r}]  [0. 1.]] 3"] for r in TWO]
    assert capfd.readouterr().out.splitlines() == each(TWO, "{} float32 'a' 0.50") + sum(lines, [])


def test_function_without_arguments_and_results(two, capfd):
    two.run(lambda: jdist.debug.print("here"))
    assert capfd.readouterr().out.splitlines() == each(TWO, "here")


def test_random_keys_can_be_printed(two, capfd):
    two.run(lambda key: jdist.debug.print("key {}", key), (jax.random.key(3),))
    assert capfd.readouterr().out.count("[replica 1] key") == 1


@pytest.mark.parametrize("in_mode", ["disable_jit", "debug_strategy"])
def test_operation_by_operation(in_mode, capfd):
    def fn(x):
        jdist.debug.print("first {}", x)
        jdist.debug.print("second {}", jdist.all_reduce("max", x))

    if in_mode == "debug_strategy":
        jdist.testing.DebugStrategy(2).run(fn, (jnp.float32(1),))
    else:
        with jax.disable_jit():
            jdist.MirroredStrategy(["cpu:0", "cpu:1"]).run(fn, (jnp.float32(1),))
    assert capfd.readouterr().out.splitlines() == each(TWO, "first 1.0") + each(TWO, "second 1.0")


def test_inside_a_jit_and_compiled_by_the_user_no_line_is_lost(two, capfd):
    def step(state, x):
        jdist.debug.print("x {}", x)
        return state, None

    program, state = two.step(step), two.init(lambda: jnp.float32(0))
    x = two.put(np.float32(1))
    jax.block_until_ready(jax.jit(program)(state, x))
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.splitlines()) == each(TWO, "x 1.0")
    program = two.step(step)
    compiled = two.compile(program, state, x)
    state, _ = compiled(state, x)
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.splitlines()) == each(TWO, "x 1.0")
    program(state, x)
    assert capfd.readouterr().out.splitlines() == each(TWO, "x 1.0")


def test_workers_of_parameter_servers_print(capfd):
    strategy = jdist.ParameterServerStrategy(workers=["cpu:0", "cpu:1"])
    state = strategy.init(lambda: jnp.float32(0))
    step = strategy.step(lambda state, x: (state - jdist.all_reduce("mean", x), jdist.debug.print("x {}", x)))
    for _ in range(4):
        state, _ = step(state, np.float32(1))
    float(np.asarray(state))
    jax.effects_barrier()
    assert capfd.readouterr().out.splitlines() == ["[replica 0] x 1.0"] * 4


def test_outside_a_strategy_it_is_the_print_of_jax(two, capfd):
    jax.jit(lambda x: jdist.debug.print("x {}", x))(1.0)
    with two.scope():
        jdist.debug.print("y {y}", y=2)
    jax.effects_barrier()
    assert capfd.readouterr().out.splitlines() == ["x 1.0", "y 2"]


FORMATS = {
    "{x": "ValueError: expected '}' before end of string",
    "{} {}": "IndexError",
    "{y}": "KeyError: 'y'",
    "{:d}": "ValueError: Unknown format code 'd'",
    "{0.missing}": "AttributeError",
}


@pytest.mark.parametrize("fmt", FORMATS)
def test_errors_of_the_format_are_raised_while_tracing(fmt, two):
    with pytest.raises(ValueError, match="`jdist.debug.print` cannot format") as caught:
        two.run(lambda x: jdist.debug.print(fmt, x), (jnp.float32(1),))
    assert FORMATS[fmt] in str(caught.value)


def test_unused_arguments_are_errors(two):
    with pytest.raises(ValueError, match=r"it does not use the argument 1, 'k'. Pass a format string"):
        two.run(lambda x: jdist.debug.print("{}", x, x, k=x), (jnp.float32(1),))
    with pytest.raises(ValueError, match="cannot format '{:.2f}': TypeError"):
        two.run(lambda x: jdist.debug.print("{:.2f}", x), (jnp.ones(2),))


def test_lines_before_an_error_of_the_program_are_printed(two, capfd):
    def fail(x):
        raise RuntimeError("failed on purpose")

    def fn(x):
        jdist.debug.print("before {}", x)
        jax.debug.callback(fail, jdist.all_reduce("max", x))

    with pytest.raises(Exception, match="failed on purpose"):
        two.run(fn, (jnp.float32(1),))
        jax.effects_barrier()
    assert set(capfd.readouterr().out.splitlines()) <= set(each(TWO, "before 1.0"))


@pytest.mark.parametrize("name", ["mirrored_3", "virtual_3_on_2"])
def test_results_are_those_without_prints(name):
    strategy = PLACES[name]()

    def step(state, x):
        return lax.scan(lambda c, i: (c + jnp.sin(i * jdist.all_reduce("mean", x)), None), state, jnp.arange(3.0))[
            0
        ], x * 2

    def printing(state, x):
        jdist.debug.print("{}", state)
        return lax.scan(
            lambda c, i: ((jdist.debug.print("{}", c), c + jnp.sin(i * jdist.all_reduce("mean", x)))[1], None),
            state,
            jnp.arange(3.0),
        )[0], x * 2

    results = [strategy.step(fn)(strategy.init(lambda: jnp.float32(0)), ones(strategy)) for fn in (step, printing)]
    jdist.testing.assert_bitwise_equal(*results)


def test_callbacks_of_jax_run_with_virtual_replicas():
    strategy = PLACES["virtual_3_on_2"]()
    received = []

    def fn(x):
        jax.debug.callback(lambda x: received.append(int(x)), jdist.replica_id())
        return lax.cond(
            x > 0,
            lambda: (jax.debug.callback(lambda i: received.append(10 + int(i)), jdist.replica_id()), 1.0)[1],
            lambda: 2.0,
        )

    assert float(strategy.run(fn, (jnp.float32(1),))) == 1.0
    jax.effects_barrier()
    assert sorted(received) == [0, 1, 2, 10, 11, 12]

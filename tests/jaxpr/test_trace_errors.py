"""JAX's tracing errors are raised again in terms of the replica function's own arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist

from laws import STRATEGIES, each_row

NEEDS_A_VALUE = {
    "if": (lambda x, flag: x if flag else -x, (1.0, True), r"a value computed from `flag` .*functools\.partial"),
    "float": (lambda x: float(x), (1.0,), r"a value computed from `x` .*To log a value, return it .*`float\(loss\)`"),
    "item": (lambda x: (x + 1).item(), (1.0,), r"a value computed from `x` .*`jax\.debug\.print`"),
    "f_string": (lambda x: f"{x:.3f}", (1.0,), r"a traced value .*To log a value, return it"),
    "loss": (
        lambda w: jax.grad(lambda w: w if w**2 > 1 else w)(w),
        (1.0,),
        r"a value computed from `w` .*`jax\.lax\.cond`",
    ),
    "in_scan": (
        lambda x: jax.lax.scan(lambda c, _: (float(c), _), x, None, 2),
        (1.0,),
        r"a traced value .*To log a value",
    ),
    "shape": (lambda size: jnp.zeros(size), (3,), r"a value computed from `size`"),
    "numpy": (lambda tree: np.sin(tree["a"]), ({"a": 1.0},), r"a value computed from `tree\['a'\]`"),
    "replica_id": (lambda: 1.0 if jdist.replica_id() == 0 else 2.0, (), r"the replica index .*lax\.cond.*on the host"),
    "index": (lambda: [1, 2][jdist.replica_id()], (), r"the replica index"),
    "other": (lambda: float(jax.lax.axis_index("replica") + 1.0), (), r"a traced value .*close over it"),
}


@pytest.mark.parametrize("case", NEEDS_A_VALUE)
def test_traced_value_used_in_python_is_named_with_the_line(case, two):
    fn, args, message = NEEDS_A_VALUE[case]
    with pytest.raises(TypeError, match=rf"test_trace_errors\.py:\d+ in .* needs {message}") as caught:
        two.run(fn, args)
    assert isinstance(caught.value.__cause__, TypeError)


def test_mask_as_an_index_is_refused_with_the_line_and_the_fix(two):
    message = (
        r"test_trace_errors\.py:\d+ in <lambda> selects elements by a mask .*`jnp\.where\(mask, x, 0\)`.*weights=mask"
    )
    with pytest.raises(IndexError, match=message):
        two.run(lambda x: x[x > 0], (np.ones(3),))


def test_flag_bound_by_partial_selects_code(two):
    fn = lambda x, flag: x if flag else -x
    assert float(two.run(functools.partial(fn, flag=False), (1.0,))) == -1


def test_captured_array_that_is_sharded_over_the_mesh_is_refused_with_the_fix(two):
    table = two.put(jdist.PerReplica(np.arange(2.0))).tree
    message = (
        r"test_trace_errors\.py:\d+ in <lambda> uses an array that the function closes over.*`jdist\.PerReplica\(x\)`"
    )
    with pytest.raises(ValueError, match=message):
        two.run(lambda x: x + table[0], (1.0,))


def test_type_error_of_the_function_itself_passes_through(two):
    def fail(x):
        raise TypeError("of the function")

    with pytest.raises(TypeError, match=r"^of the function"):
        two.run(fail, (1.0,))


def test_value_error_of_the_function_itself_passes_through(two):
    def fail(x):
        raise ValueError("of the function")

    with pytest.raises(ValueError, match=r"^of the function"):
        two.run(fail, (1.0,))


# -- the arguments of the function in a note ---------------------------------------------------------------------------

X, Y = np.zeros((8, 3), np.float32), np.zeros(8, np.float32)
WRONG = lambda outputs, targets: optax.squared_error(jnp.zeros((len(outputs), 2)), targets)


def entry_points(strategy):
    """Returns calls in which the loss fails, by name."""
    trainer = jdist.Trainer((lambda key, x: jnp.zeros(3), lambda w, x: x @ w), optax.sgd(0.1), WRONG, strategy=strategy)
    (batch,) = strategy.distribute_dataset((X, Y), 8)
    state = trainer.init(X)

    def replica_function(w, batch):
        return w, WRONG(*batch)

    loss = lambda params, batch: WRONG(*batch)

    def train_step():
        with strategy.scope():
            return jdist.train_step(loss, optax.sgd(0.1))(trainer.init(X), batch)

    def eval_step():
        with strategy.scope():
            return jdist.eval_step(lambda state, batch: {"loss": WRONG(*batch)})(1.0, batch)

    return {
        "run": lambda: strategy.run(replica_function, (1.0, batch)),
        "step": lambda: strategy.step(replica_function)(strategy.put(jnp.zeros(3)), batch),
        "train_step": train_step,
        "eval_step": eval_step,
        "fit": lambda: trainer.fit((X, Y), batch_size=8, progress="off"),
        "evaluate": lambda: trainer.evaluate(state, (X, Y), batch_size=8),
    }


def notes_of(error):
    return "\n".join(getattr(error, "__notes__", ()))


@each_row("name", ["mirrored_2", "sharded_4", "one_device", "central_2"])
def test_error_in_the_loss_has_a_note_with_the_arguments_of_the_replica(name):
    strategy = STRATEGIES[name]()
    count, share = strategy.num_replicas_in_sync, 8 // strategy.num_replicas_in_sync
    part = f"one of {count} replicas" if count > 1 else "the only replica"
    for entry_point, call in entry_points(strategy).items():
        with pytest.raises((ValueError, AssertionError), match="hape") as caught:  # optax before 0.2.8: AssertionError
            call()
        notes = notes_of(caught.value)
        assert f"was traced for {part}, with" in notes and f"float32[{share},3], float32[{share}]" in notes, entry_point
        if entry_point in ("fit", "evaluate"):
            assert f"The loss was called with outputs float32[{share}] and targets float32[{share}]." in notes


@pytest.mark.parametrize("inputs", [(), (np.zeros(4), np.zeros(4))], ids=len)
def test_wrong_number_of_inputs_has_a_note_with_the_signature(inputs, two):
    def train(state, batch):
        return state, None

    with pytest.raises(TypeError, match="positional argument") as caught:
        two.step(train)(two.put(1.0), *two.split(inputs))
    count = f"{1 + len(inputs)} argument{'s' * bool(inputs)}"
    assert f"`train(state, batch)` was called with {count}. A batch is one argument, `step(state," in notes_of(
        caught.value
    )


def test_type_error_in_the_function_has_no_note_about_its_signature(two):
    with pytest.raises(TypeError, match="positional argument") as caught:
        two.run(lambda x: (lambda: x)(x), (1.0,))
    assert "was called with" not in notes_of(caught.value)


def test_note_counts_the_arrays_of_a_large_argument(two):
    with pytest.raises(ZeroDivisionError) as caught:
        two.run(lambda tree: 1 / 0, ({str(i): np.zeros(3) for i in range(99)},))
    assert (
        "`<lambda>` was traced for one of 2 replicas, with its part of the batch: tree dict of 99 arrays."
        in notes_of(caught.value)
    )

"""`jdist.step`: the program of the current strategy, its arguments, and the lifetime of programs."""

import copy
import dataclasses
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist

from laws import STRATEGIES, each_row, rows


def descend(w, x, rate=0.5):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((w * x) ** 2))(w)
    loss, grad = jdist.all_reduce("mean", (loss, grad))
    return w - rate * grad, {"loss": loss, "largest": x.max()}


def forget_all_reduce(w, x):
    return w - x.mean(), None


module_step = jdist.step(descend, donate=False)


@jdist.step
def total(state, x, *inputs, scale=1.0, **others):
    """Adds everything."""
    added = x + sum(inputs) + sum(value * 10**i for i, (_, value) in enumerate(sorted(others.items())))
    return state + jdist.all_reduce("mean", scale * added), None


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


# -- equality with `strategy.step` -------------------------------------------------------------------------------------


def test_step_has_the_results_and_the_proof_of_a_step_of_the_current_strategy(strategy):
    x, w = rows(strategy, 6), np.float32(3)
    expected_program = strategy.step(descend)
    expected = expected_program(strategy.put(w), x)
    with strategy.scope():
        result = module_step(jdist.init(lambda: jnp.float32(3)), x)
    assert bits(result) == bits(expected)
    shardings, expected_shardings = ([leaf.sharding for leaf in jax.tree.leaves(tree)] for tree in (result, expected))
    assert shardings == expected_shardings
    assert module_step.proof == module_step.on(strategy).proof == expected_program.proof


def test_step_without_all_reduce_is_rejected_like_a_step_of_the_strategy(two):
    step = jdist.step(forget_all_reduce)
    with two.scope(), pytest.raises(jdist.NotMirroredError, match="state is not proved to be replicated"):
        step(two.put(1.0), rows(two, 3))


def test_step_follows_the_current_strategy_and_traces_once_per_strategy():
    traces = []

    @jdist.step
    def count(state):
        traces.append(jdist.num_replicas())
        return state + jdist.num_replicas(), None

    two, three = STRATEGIES["mirrored_2"](), STRATEGIES["mirrored_3"]()
    for _ in range(2):
        for strategy in (two, three):
            with strategy.scope():
                assert float(count(strategy.put(0.0))[0]) == strategy.num_replicas_in_sync
    jdist.set_strategy(three)
    try:
        assert float(count(three.put(0.0))[0]) == 3
    finally:
        jdist.set_strategy(None)
    assert float(count.on(two)(two.put(0.0))[0]) == 2
    assert traces == [2, 3]
    state, _ = count(0.0)  # without a strategy: one replica on the default device
    assert float(state) == 1 and len(state.sharding.device_set) == 1


def test_wrapped_function_runs_as_plain_jax():
    assert module_step.__wrapped__ is descend
    w, outputs = module_step.__wrapped__(np.float32(1), np.float32([1, 3]), rate=0.1)
    assert float(w) == pytest.approx(0) and float(outputs["loss"]) == 5


def test_options_are_those_of_the_strategy(two):
    def compute(state, x):
        loss, grad = jdist.value_and_grad(lambda w, x: w * x)(state, x)
        return state - jdist.all_reduce("mean", grad), jdist.all_reduce("mean", loss)

    options = {"precision": jdist.Precision(compute_dtype=jnp.bfloat16), "steps_per_call": 2, "donate": False}
    x = [rows(two, 4, seed=seed) for seed in range(2)]
    state = two.put(np.float32(1))
    with two.scope():
        result = jdist.step(**options)(compute)(state, x)
    assert bits(result) == bits(two.step(**options)(compute)(state, x))
    assert result[1].shape == (2,) and float(state) == 1


def test_compiler_options_reach_the_compiler(two):
    options = {"xla_no_such_option": True}
    with two.scope(), pytest.raises(ValueError, match="xla_no_such_option"):
        jdist.step(descend, compiler_options=options)(two.put(1.0), rows(two, 3))
    with pytest.raises(ValueError, match="xla_no_such_option"):
        two.compile(two.step(descend, compiler_options=options), two.put(1.0), rows(two, 3))
    step = jdist.step(descend, compiler_options={"xla_cpu_enable_fast_math": False})
    assert float(step(1.0, np.ones(3))[0]) == 0


def test_strategy_compiles_a_step(two):
    assert "all-reduce" in two.compile(module_step, two.put(1.0), rows(two, 3)).as_text()


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_inputs_by_name_are_bound_by_the_signature_and_share_a_program(two):
    traces = []

    @jdist.step
    def add(state, x, y=10.0):
        traces.append(1)
        return state + jdist.all_reduce("mean", x) + y, None

    with two.scope():
        calls = [add(0.0, 1.0, 2.0), add(0.0, 1.0, y=2.0), add(0.0, y=2.0, x=1.0), add(state=0.0, x=1.0, y=2.0)]
        assert [float(state) for state, _ in calls] == [3.0] * 4 and len(traces) == 1
        assert float(add(0.0, x=1.0)[0]) == 11


def test_inputs_that_python_passes_by_name_only(two):
    traces = []
    total.on(two).on_trace.append(traces.append)
    with two.scope():
        assert float(total(0.0, 1.0, scale=2.0)[0]) == 2
        assert float(total(0.0, 1.0, a=2.0, b=3.0)[0]) == float(total(0.0, 1.0, b=3.0, a=2.0)[0]) == 33
        assert len(traces) == 2  # the order of the names has no effect
        assert float(total(0.0, 1.0, 2.0)[0]) == 3
    with pytest.raises(
        TypeError, match=r"^`total\(.*\)` is called with the input `scale` by name, in addition to inputs"
    ):
        total(0.0, 1.0, 2.0, scale=2.0)


def test_message_names_an_input_that_was_passed_by_name(two):
    step = jdist.step(lambda state, *, x: (state, x))
    with two.scope(), pytest.raises(TypeError, match="^x is 'text'"):
        step(0.0, x="text")


def test_static_arguments_are_python_values_with_one_program_each(two):
    traces = []

    @jdist.step(static_argnames=("negate", "offset"))
    def add(state, x, negate=False, *, offset=0):
        traces.append((negate, offset))
        return state + (-x if negate else x) + offset, None

    with two.scope():
        values = [add(0.0, 1.0)[0], add(0.0, 1.0, True)[0], add(0.0, x=1.0, negate=True)[0], add(0.0, 1.0, negate=1)[0]]
        assert list(map(float, values)) == [1, -1, -1, -1]
        assert traces == [(False, 0), (True, 0), (1, 0)]  # 1 and True are different values
        assert float(add(0.0, 1.0, offset=4, negate=True)[0]) == 3
    program = add.on(two, offset=4, negate=True)
    assert float(program(0.0, 1.0)[0]) == 3 and len(traces) == 4
    assert program.proof == add.proof


INVALID_STATIC_ARGNAMES = {
    "unknown": (
        "train",
        ValueError,
        r"^`static_argnames` contains 'train', which is not an input of `descend`: its inputs are `x`,",
    ),
    "state": ("w", ValueError, r"^`static_argnames` contains 'w', which is not an input"),
    "not_last": (
        "x",
        ValueError,
        r"^The input `rate` of `descend` follows the static `x`\. .*`def descend\(state, rate, \*, x\)`",
    ),
    "number": (1, TypeError, r"^`static_argnames` must be the name of a parameter or a tuple of names, got 1\.$"),
}


@each_row("names, kind, message", INVALID_STATIC_ARGNAMES.values(), ids=INVALID_STATIC_ARGNAMES)
def test_invalid_static_argnames_raise_at_the_definition(names, kind, message):
    with pytest.raises(kind, match=message):
        jdist.step(static_argnames=names)(descend)


INVALID_CALLS = {
    "unknown_name": (
        lambda s: module_step(1.0, 2.0, train=True),
        r"^`descend\(w, x, rate=0\.5\)` is called with other .*'train'",
    ),
    "missing": (lambda s: module_step(w=1.0), r"^`descend\(.*\)` is called with other arguments: missing .*'x'"),
    "nothing": (lambda s: module_step(), r"^`descend` is a step and was called without arguments"),
    "unhashable": (
        lambda s: jdist.step(descend, static_argnames="rate")(1.0, 2.0, rate=[1]),
        r"^The static arguments of `descend` must be hashable",
    ),
    "on_no_strategy": (lambda s: module_step.on("cpu:0"), r"^`strategy` must be a strategy, .*got 'cpu:0'"),
    "on_with_an_input": (
        lambda s: module_step.on(s, x=1.0),
        r"^`on` got `x`, which is not in the `static_argnames` of `descend`",
    ),
    "step_of_a_step": (lambda s: s.step(module_step), r"^`descend` is a step already\. .*`descend\.on\(strategy\)`"),
    "not_a_function": (lambda s: jdist.step(1), r"^`fn` must be a function, got int"),
    "donate": (lambda s: jdist.step(donate=0), r"^`donate` is True or False, got 0"),
    "compiler_options": (
        lambda s: s.step(compiler_options="fast"),
        r"^`compiler_options` maps names to values, got str",
    ),
    "static_argnums": (
        lambda s: jdist.step(descend, static_argnums=2),
        r"^`jdist\.step` has no argument `static_argnums`\. Write `static_argnames=`, the names of the last parameters\.$",
    ),
    "unknown_option": (
        lambda s: jdist.step(descend, others=True),
        r"Its arguments are `fn`, `precision`, .*`static_argnames`\.$",
    ),
}


@each_row("call, message", INVALID_CALLS.values(), ids=INVALID_CALLS)
def test_invalid_call_raises(call, message, two):
    with pytest.raises(TypeError, match=message):
        call(two)


def test_step_inside_a_replica_function_names_the_function_to_call(two):
    with pytest.raises(RuntimeError, match=r"inside a replica function\. .*of a step `step\.__wrapped__`"):
        two.run(lambda: module_step(1.0, 2.0))


def test_call_outside_the_scope_of_the_state_is_an_error_with_a_note(two):
    state = two.put(1.0)
    with pytest.raises(ValueError, match="w is on .*cpu:1, and this strategy uses") as caught:
        module_step(state, 2.0)
    assert "No strategy is current" in caught.value.__notes__[-1]


# -- donation ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::jdist.RetraceWarning")
def test_errors_for_a_donated_state_name_donate(two):
    step, state, x = jdist.step(descend), two.put(1.0), rows(two, 3)
    with two.scope():
        step(state, x)
        with pytest.raises(ValueError, match=r"state was donated to an earlier step.*`donate=False`"):
            step(state, x)
        with pytest.raises(ValueError, match=r"x .*was deleted: .*`donate=False` leaves"):
            step(two.put(1.0), state)
    with pytest.raises(ValueError, match=r"was deleted: it was donated to a step.*`donate=False` leaves"):
        two.put(state)


# -- methods, copies, lifetime -----------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Model:
    w: jax.Array

    @jdist.step
    def descend(self, x):
        w, outputs = descend(self.w, x)
        return Model(w), outputs


class Holder:
    def __init__(self, rate):
        self.rate = rate
        self.bound = jdist.step(self._descend)

    def _descend(self, w, x):
        return descend(w, x, self.rate)

    train = jdist.step(_descend)


def test_method_of_a_pytree_has_the_object_as_its_state(two):
    with two.scope():
        model, outputs = jdist.init(lambda: Model(jnp.float32(1))).descend(rows(two, 3))
    expected = two.step(descend)(two.put(np.float32(1)), rows(two, 3))
    assert bits((model.w, outputs)) == bits(expected)


def test_method_of_another_object_is_refused_and_a_bound_method_is_accepted(two):
    holder = Holder(0.25)
    with pytest.raises(
        TypeError, match=r"method of Holder, which is not a pytree.*`self\._descend = jdist\.step\(self\.__descend\)`"
    ):
        holder.train(1.0, 1.0)
    with two.scope():
        assert float(holder.bound(1.0, 1.0)[0]) == 0.5


def test_step_is_pickled_and_copied_by_name():
    assert pickle.loads(pickle.dumps(total)) is total
    assert copy.deepcopy(total) is copy.copy(total) is total
    assert total.__name__ == "total" and total.__doc__ == "Adds everything."


def test_step_does_not_keep_a_strategy_and_a_strategy_does_not_keep_a_step():
    def call(step, strategy):
        with strategy.scope():
            step(strategy.put(1.0), rows(strategy, 3))
            step(strategy.put(1.0), x=rows(strategy, 3))

    strategy = STRATEGIES["mirrored_2"]()
    call(module_step, strategy)
    reference, program = weakref.ref(strategy), weakref.ref(module_step.on(strategy))
    del strategy
    gc.collect()
    assert reference() is None and program() is None
    with pytest.raises(RuntimeError, match="its strategy does not exist any more"):
        module_step.proof  # noqa: B018

    strategy, step = STRATEGIES["mirrored_2"](), jdist.step(lambda w, x: descend(w, x))
    call(step, strategy)
    function = weakref.ref(step.__wrapped__)
    del step
    gc.collect()
    assert function() is None and len(strategy._steps) == 0


def test_proof_is_of_the_last_call(two):
    step = jdist.step(lambda state, *, x=0.0: (state, x))
    with pytest.raises(RuntimeError, match="Nothing is proved yet"):
        step.proof  # noqa: B018
    with two.scope():
        for _ in range(2):
            step(1.0)
            assert len(step.proof.replicated) == 2 and not step.proof.per_replica
            step(1.0, x=rows(two))
            assert step.proof.per_replica

"""`debug.explain`: the verdict on each leaf equals the proof, with reasons, for all strategies and kinds of states."""

import xml.dom.minidom

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist import testing
from jdist._src.debug.flow_drawing import Flow, FlowNode, draw_flow

from laws import STATES, STRATEGIES, among, each_row

X = np.linspace(-1, 1, 96, dtype=np.float32).reshape(24, 4)
MAKERS = {
    **STRATEGIES,
    "debug_2": lambda: testing.DebugStrategy(2),
    "virtual_8": lambda: jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=8),
    "central_device": lambda: jdist.CentralStorageStrategy(["cpu:1", "cpu:2"], parameter_device="cpu:0"),
    "parameter_server": lambda: jdist.ParameterServerStrategy(workers=2),
}


def mixed_step(state, x):
    """A leaf that is replicated, one that is not, and outputs of each kind."""
    mean = jdist.all_reduce("mean", x.mean())
    return {"w": state["w"] + mean, "m": state["m"] + x.mean()}, {"all": mean, "mine": x.sum(), "one": 1}


MIXED_STATE = {"w": jnp.zeros(()), "m": jnp.zeros(())}


def shapes(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


@pytest.mark.parametrize("kind", among(STATES, "optax", "nnx", "policy"))
@pytest.mark.parametrize("name", among(MAKERS, "mirrored_3", "sharded_4", "central_2"))
def test_verdicts_are_those_of_the_proof(name, kind):
    if (name, kind) == ("parameter_server", "policy"):
        pytest.skip("The workers share one state, so this policy has no meaning.")
    strategy, state_kind = MAKERS[name](), STATES[kind]()
    step = strategy.step(state_kind.step)
    state, x = strategy.init(state_kind.make), strategy.split(X)
    explanation = jdist.debug.explain(step, state, x)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array))
    step(state, x)
    assert [leaf.path for leaf in explanation.leaves if leaf.verdict != "one per replica" and leaf.replicated] != []
    for leaf in explanation.leaves:
        assert leaf.reasons and not leaf.fix
        wrapper_name = max(
            (one for one in (*step.proof.replicated, *step.proof.per_replica) if leaf.path.startswith(one)), key=len
        )
        assert leaf.replicated or wrapper_name in step.proof.per_replica
    assert explanation.problems == ()


@pytest.mark.parametrize("name", [name for name in MAKERS])
def test_a_step_that_is_refused_is_explained_alike_under_every_strategy(name):
    strategy = MAKERS[name]()
    x = strategy.split(X)
    explanation = jdist.debug.explain(strategy.step(mixed_step), MIXED_STATE, x)
    verdicts = {leaf.path: leaf.verdict for leaf in explanation.leaves}
    assert verdicts == {
        "state['m']": "not proved",
        "state['w']": "replicated",
        "output['all']": "replicated",
        "output['mine']": "one per replica",
        "output['one']": "replicated",
    }
    (problem,) = explanation.problems
    line = mixed_step.__code__.co_firstlineno + 3
    assert problem.reasons[0] == "x, which holds one value per replica"
    assert f"test_explain.py:{line} in mixed_step" in problem.reasons[-1]
    assert "jdist.all_reduce" in problem.fix and "jdist.PerReplica(x)" in problem.fix
    reasons = {leaf.path: leaf.reasons for leaf in explanation.leaves}
    assert reasons["state['w']"][0].startswith("result of all_reduce at ")
    assert f"test_explain.py:{line - 1}" in reasons["state['w']"][0]
    assert reasons["output['one']"] == ("a constant",)
    with pytest.raises(jdist.NotMirroredError):
        strategy.step(mixed_step)(strategy.put(MIXED_STATE), x)


def test_forms_of_a_step_and_of_its_arguments_have_one_explanation(two):
    x = two.split(X)
    leaves = jdist.debug.explain(two.step(mixed_step), MIXED_STATE, x).leaves
    late = jdist.step(mixed_step)
    with two.scope():
        assert jdist.debug.explain(mixed_step, MIXED_STATE, x).leaves == leaves
        assert jdist.debug.explain(late, MIXED_STATE, x=x).leaves == leaves
    assert jdist.debug.explain(mixed_step, MIXED_STATE, x, strategy=two).leaves == leaves
    assert jdist.debug.explain(late, MIXED_STATE, x, strategy=two).leaves == leaves
    assert jdist.debug.explain(mixed_step, shapes(MIXED_STATE), shapes(x), strategy=two).leaves == leaves
    with pytest.raises(RuntimeError, match="Nothing is proved yet"):
        late.proof  # noqa: B018


def test_several_steps_per_call(two):
    def step(w, x):
        return w + jdist.all_reduce("mean", x.mean()), x.mean()

    x = two.split(X)
    state, output = jdist.debug.explain(two.step(step, steps_per_call=2), 0.0, [x, x]).leaves
    assert (state.replicated, output.replicated) == (True, False)


def test_reasons_in_loops_and_branches(two):
    def step(state, x):
        def body(i, carry):
            return carry + jdist.all_reduce("sum", x.mean() * carry)

        looped = jax.lax.fori_loop(0, 3, body, state["a"])
        chosen = jax.lax.cond(state["a"] > 0, lambda: jdist.all_reduce("max", x.max()), lambda: 0.0)
        counted = jax.lax.while_loop(lambda c: c < 3, lambda c: c + 1, state["n"])
        return {"a": looped, "b": chosen, "n": counted}, None

    leaves = jdist.debug.explain(step, {"a": 1.0, "b": 0.0, "n": 0}, two.split(X), strategy=two).leaves
    first = step.__code__.co_firstlineno
    a, b, n = (leaf.reasons[0] for leaf in leaves)
    assert f"test_explain.py:{first + 2}" in a
    assert f"test_explain.py:{first + 5}" in b
    assert n == "computed from replicated inputs: state['n']"
    assert all(leaf.replicated for leaf in leaves)


def test_text_and_picture_contain_all_leaves(two, tmp_path):
    explanation = jdist.debug.explain(mixed_step, MIXED_STATE, two.split(X), strategy=two)
    text = str(explanation)
    assert text.startswith("mixed_step, 2 replicas: 3 of 5 results are replicated, 1 not proved\n")
    assert repr(explanation) == f"Explanation({text.splitlines()[0]})"
    assert "Not proved to be replicated: state['m']\nwhy  x, which holds one value per replica" in text
    explanation.save(tmp_path / "step.svg")
    picture = (tmp_path / "step.svg").read_text(encoding="utf-8")
    assert picture == explanation.svg
    xml.dom.minidom.parseString(picture)
    for part in ("state[&#x27;m&#x27;]", "not proved", "all_reduce", "one per replica"):
        assert part in picture
    assert "href" not in picture
    assert explanation._repr_html_().startswith("<svg")
    assert explanation.problems[0].path in explanation._repr_html_().replace("&#x27;", "'")
    with pytest.raises(ValueError, match=r"Write `save\('step.svg'\)`, got 'step.png'"):
        explanation.save("step.png")


def test_many_leaves_share_rows_and_problems_are_listed(two):
    def step(state, x):
        return jax.tree.map(lambda w: w + x.mean(), state), None

    state = {f"layer{i}": {"w": 0.0, "b": 0.0} for i in range(60)}
    explanation = jdist.debug.explain(step, state, two.split(X), strategy=two)
    assert len(explanation.problems) == 120
    text = str(explanation)
    assert "state['layer*']['b']" in text and "60 not proved" in text
    assert "Not proved to be replicated: state['layer0']['b'], " in text and "and 116 more" in " ".join(text.split())
    assert len(text.splitlines()) < 40
    assert explanation.svg.count("<g>") < 20


def test_more_causes_than_are_explained_are_listed():
    leaves = [jdist.debug.LeafExplanation(f"state['w{i}']", False, (f"x{i}",), "Reduce it.") for i in range(7)]
    text = str(jdist.debug.Explanation("step", 2, tuple(leaves), Flow((), (), ())))
    assert text.endswith("Not proved either: state['w5'], state['w6'].")


def test_a_divergent_collective_is_an_error_as_in_the_step(two):
    def step(w, x):
        return jax.lax.cond(x.mean() > 0, lambda: jdist.all_reduce("sum", w), lambda: w), None

    with pytest.raises(jdist.DivergentCollectiveError):
        jdist.debug.explain(step, 1.0, two.split(X), strategy=two)


WRONG = {
    "not a step": (lambda two: jdist.debug.explain(3, 1.0), TypeError, "function"),
    "named": (lambda two: jdist.debug.explain(two.step(mixed_step), 1.0, y=1), TypeError, "`mixed_step.*` is called with other arguments: "),
    "strategy": (lambda two: jdist.debug.explain(two.step(mixed_step), 1.0, strategy=jdist.OneDeviceStrategy("cpu:0")), ValueError, "Another strategy made the step"),
}  # fmt: skip


@each_row("call, error, message", WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused(call, error, message, two):
    with pytest.raises(error, match=message):
        call(two)


def test_drawing_of_collectives_that_use_the_results_of_each_other():
    collectives = (FlowNode(("a",), "varying", (0, 2)), FlowNode(("b",), "varying", (1,)))
    picture = draw_flow(
        "<loop>", Flow((FlowNode(("x" * 99,), "varying"),), collectives, (FlowNode(("y",), "varying", (2,)),))
    )
    xml.dom.minidom.parseString(picture)
    assert "&lt;loop&gt;" in picture and "x" * 45 not in picture
    xml.dom.minidom.parseString(draw_flow("empty", Flow((), (), ())))

"""Sharding annotations while a strategy traces: which axes keep their effect, and that nothing changes elsewhere."""

import inspect
import threading

from jax.lax import with_sharding_constraint  # by name, before jdist is imported  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdist._src.core.sharding_annotations import restrict_annotations

from laws import each_row

P = PartitionSpec
U = PartitionSpec.UNCONSTRAINED
MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("replica", "model"))
OTHER = Mesh(np.array(jax.devices()[:8]).reshape(8, 1), ("model", "data"))
X = jnp.ones((8, 4))


def constraints(fn, axis_names=frozenset({"replica"})):
    """Returns the specs of the constraints that `fn` of a replica traces, where the replica spans the axis `"model"`."""

    def restricted(x):
        with restrict_annotations("replica"):
            return fn(x)

    mapped = jax.shard_map(
        restricted, mesh=MESH, in_specs=P("replica"), out_specs=P("replica"), axis_names=axis_names, check_vma=False
    )
    program = jax.make_jaxpr(jax.jit(mapped))(X)
    jax.jit(mapped).lower(X).compile()
    return [equation.params["sharding"].spec for equation in equations(program) if is_constraint(equation)]


def equations(program):
    for equation in getattr(program, "jaxpr", program).eqns:
        yield equation
        for value in equation.params.values():
            if hasattr(value, "eqns"):
                yield from equations(value)


def is_constraint(equation):
    return equation.primitive.name == "sharding_constraint"


SPECS = {
    "an axis of the replica": (P(None, "model"), P(None, "model")),
    "an unknown axis": (P("data", "model"), P(None, "model")),
    "the axis of the replicas": (P("replica", "model"), P(None, "model")),
    "both in one dim": (P(("replica", "model")), P(("model",))),
    "only others": (P("data", ("replica", "stage")), P(None, None)),
    "unconstrained": (P(U, "data"), P(U, None)),
    "another mesh": (NamedSharding(OTHER, P("data", "model")), P(None, "model")),
}


@each_row("given, expected", SPECS.values(), ids=SPECS)
def test_automatic_axes_of_the_mesh_keep_their_effect(given, expected):
    assert constraints(lambda x: with_sharding_constraint(x, given)) == [expected]


@each_row("given, expected", SPECS.values(), ids=SPECS)
def test_annotations_without_an_automatic_axis_add_no_equation(given, expected):
    constrain = lambda x: with_sharding_constraint(x, given)
    assert constraints(constrain, frozenset(MESH.axis_names)) == []
    with restrict_annotations("replica"):  # no mesh in the context
        assert constrain(np.float32([[1.0]])) == jnp.float32([[1.0]])
        assert isinstance(constrain(np.float32([[1.0]])), jax.Array)


def test_outside_a_strategy_a_named_sharding_is_left_to_jax():
    def specs(sharding):
        with restrict_annotations("outside"):
            program = jax.make_jaxpr(jax.jit(lambda x: with_sharding_constraint(x, sharding)))(X)
        return [equation.params["sharding"].spec for equation in equations(program) if is_constraint(equation)]

    assert specs(P("model")) == specs(P("unknown")) == []
    assert specs(NamedSharding(OTHER, P("model"))) == [P("model")]
    with restrict_annotations("replica"):  # a model that a replica function calls
        assert specs(NamedSharding(OTHER, P("model"))) == []
    with jax.set_mesh(Mesh(MESH.devices, MESH.axis_names)):
        assert specs(P("unknown", "model")) == [P(None, "model")]


def test_trees_of_annotations():
    def constrain(x):
        a, b = with_sharding_constraint((x, 2 * x), (P("model"), NamedSharding(OTHER, P(None, "data"))))
        return with_sharding_constraint({"sum": a + b}, P("model"))["sum"]

    assert constraints(constrain) == [P("model"), P(None, None), P("model")]
    assert constraints(constrain, frozenset(MESH.axis_names)) == []


def test_variables_of_nnx_keep_the_automatic_axes():
    def constrain(x):
        return x + nnx.Param(jnp.ones((4,)), out_sharding=("model",), eager_sharding=True)[...]

    assert constraints(constrain) == [P("model")]
    assert constraints(constrain, frozenset(MESH.axis_names)) == []


def test_constraints_inside_a_nested_shard_map_have_no_effect():
    def nested(x):
        body = lambda x: with_sharding_constraint(x, P("model")) + jax.lax.psum(1, "model")
        return jax.shard_map(
            body, in_specs=P(None, "model"), out_specs=P(None, "model"), axis_names={"model"}, check_vma=False
        )(x)

    assert constraints(nested) == []


def test_jax_is_unchanged_outside():
    """Also in another thread, while a strategy traces in this one."""
    results = []

    def use_jax():
        with jax.set_mesh(MESH):
            results.append(jax.jit(lambda x: with_sharding_constraint(x, P("model")))(X).sharding.spec)
            variable = jax.jit(lambda x: nnx.Param(x, out_sharding=("replica", None), eager_sharding=True)[...])
            results.append(variable(X).sharding.spec)
            with pytest.raises(ValueError, match="Resource axis: data"):
                with_sharding_constraint(X, P("data"))
            with pytest.raises(ValueError, match="Resource axis: data"):
                nnx.Param(X, out_sharding=("data", None), eager_sharding=True)
        with pytest.raises(RuntimeError, match="non-empty mesh"):
            with_sharding_constraint(X, P("model"))
        results.append("complete")

    with restrict_annotations("replica"):
        thread = threading.Thread(target=use_jax)
        thread.start()
        thread.join()
    use_jax()
    assert results == [P("model"), P("replica"), "complete"] * 2


def test_constraint_function_has_the_parameters_that_the_hook_passes():
    with restrict_annotations("replica"):
        pass
    assert list(inspect.signature(with_sharding_constraint.original).parameters) == ["x", "shardings"]
    assert with_sharding_constraint is jax.lax.with_sharding_constraint
    file = with_sharding_constraint.original.__code__.co_filename
    assert with_sharding_constraint.__code__.co_filename == file  # the lines of equations are those of the user

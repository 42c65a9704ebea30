"""`VariableSynchronization` and `VariableAggregation`: members by name, and the aggregation of rows."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist._src.values import aggregation as aggregations

from laws import each_row

CHOICES = [jdist.VariableSynchronization, jdist.VariableAggregation]


@pytest.mark.parametrize("member", [member for kind in CHOICES for member in kind], ids=str)
def test_member_is_found_by_its_name_in_any_case(member):
    kind = type(member)
    for name in (member, member.name, member.name.lower(), member.name.title(), member.value):
        assert kind.of(name) is member


BAD = [
    (jdist.VariableSynchronization, "on_writ"),
    (jdist.VariableSynchronization, None),
    *((jdist.VariableAggregation, name) for name in ("", 1, " sum", [], jdist.VariableSynchronization.NONE)),
]


@each_row("kind, name", BAD)
def test_unknown_name_is_refused_with_all_names(kind, name):
    word = kind.__name__.removeprefix("Variable").lower()
    text = f"Invalid variable {word} mode: {name!r}; take one of {', '.join(repr(member.name) for member in kind)}"
    with pytest.raises(ValueError, match=re.escape(text)):
        kind.of(name)


ADDED = {jdist.VariableAggregation.SUM: np.sum, jdist.VariableAggregation.MEAN: np.mean}
NUMPY = {**ADDED, jdist.VariableAggregation.ONLY_FIRST_REPLICA: lambda x, axis: x[0]}


@pytest.mark.parametrize("how", NUMPY, ids=str)
def test_aggregated_rows_are_replicated_on_their_devices(how, strategy):
    rows = np.random.default_rng(0).normal(size=(strategy.num_replicas_in_sync, 2, 3)).astype(np.float32)
    placed = strategy.put(jdist.PerReplica(rows)).tree
    result = aggregations.aggregate_rows(how, "value", placed)
    np.testing.assert_allclose(result, NUMPY[how](rows, axis=0), rtol=1e-5, atol=1e-6)
    assert result.sharding.device_set == set(strategy.mesh.devices.flat)
    assert result.sharding.is_fully_replicated
    for elsewhere in (rows, jnp.asarray(rows)):
        np.testing.assert_allclose(aggregations.aggregate_rows(how, "value", elsewhere), result, rtol=1e-5, atol=1e-6)
    traced = jax.jit(lambda x: aggregations.aggregate_rows(how, "value", x))(rows)
    np.testing.assert_allclose(traced, result, rtol=1e-5, atol=1e-6)

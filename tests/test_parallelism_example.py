"""The annotated transformer: the same numbers under all strategies of the example."""

import importlib.util
import re

import jax
import numpy as np
import optax
import pytest

import jdist

from example_runs import EXAMPLES, assert_invalid_arguments, run

EXAMPLE = EXAMPLES / "parallelism.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("parallelism_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


POLICIES = {
    "mean": lambda: optax.chain(jdist.sync.mean(), optax.adam(1e-2)),
    "int8": lambda: optax.chain(jdist.sync.int8(), optax.sgd(0.1)),
    "diloco": lambda: jdist.sync.diloco(optax.adam(1e-2), optax.sgd(0.7, momentum=0.9, nesterov=True), every=2),
}


def test_losses_are_equal_under_every_strategy(example):
    losses = {name: example.train(make(), POLICIES["mean"](), 3, 16) for name, make in example.STRATEGIES.items()}
    expected = losses.pop("one device")
    assert expected[-1] < expected[0]
    for values in losses.values():
        np.testing.assert_allclose(values, expected, rtol=1e-4)


@pytest.mark.parametrize("policy", ["int8", "diloco"])
def test_policy_between_tensor_parallel_replicas_equals_it_between_devices(example, policy):
    tensor_parallel = example.STRATEGIES["2 replicas of 2 tensor-parallel devices"]()
    expected = example.train(jdist.MirroredStrategy(jax.devices()[:2]), POLICIES[policy](), 4, 16)
    np.testing.assert_allclose(example.train(tensor_parallel, POLICIES[policy](), 4, 16), expected, rtol=1e-3)


def test_program_prints_a_line_per_strategy():
    done = run(EXAMPLE, "--steps", "2", "--width", "8")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(.+?) +loss (\S+) to (\S+)$", done.stdout, re.MULTILINE)
    assert len(rows) == 6 and len({tuple(losses) for _, *losses in rows}) == 1


def test_invalid_arguments():
    assert_invalid_arguments("parallelism.py", {"--steps x": "invalid int value: 'x'"})

"""`jdist.testing.variants` on chex and absl test cases, beside `parameterized` and `chex.variants`."""

import unittest

import chex
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import jdist
from jdist.testing import variants


def mean(x):
    return jdist.all_reduce("mean", x.mean())


class ChexTest(chex.TestCase):
    @variants(one_device=True, mirrored=(2, 3), central=2)
    def test_replicas(self):
        strategy = self.variant.strategy
        assert jdist.get_strategy() is strategy
        x = strategy.split(np.arange(6, dtype=np.float32))
        assert self.variant(mean)(x) == 2.5

    @variants(sharded=4, mirrored=[2, True])
    @parameterized.parameters((1.0, 2.0), (3.0, 4.0))
    def test_numbered(self, x, y):
        assert self.variant(lambda x, y: jdist.all_reduce("mean", x) - y)(x, y=y) == x - y

    @variants(mirrored=2)
    @parameterized.named_parameters(("one", 1.0), ("two", 2.0))
    def test_named(self, x):
        assert x in (1.0, 2.0)

    @chex.variants(with_jit=True, without_jit=True, with_device=True, without_device=True)
    @variants(mirrored=2)
    def test_both(self):
        x = jdist.get_strategy().split(np.arange(8, dtype=np.float32))
        assert self.variant(mean)(x) == 3.5

    @chex.variants(with_jit=True)
    def test_of_chex_only(self):
        assert self.variant(lambda x: x + 1)(1) == 2


def test_generated_names_have_the_strategy():
    names = {name for name in dir(ChexTest) if name.startswith("test_")}
    assert {
        "test_replicas_one_device",
        "test_replicas_mirrored_2",
        "test_replicas_mirrored_3",
        "test_replicas_central_2",
    } <= names
    assert {f"test_numbered{i}_{name}" for i in (0, 1) for name in ("sharded_4", "mirrored_2", "mirrored")} <= names
    assert {"test_named_one_mirrored_2", "test_named_two_mirrored_2"} <= names
    assert {"test_both_mirrored_2__with_jit", "test_both_mirrored_2__without_jit"} <= names
    assert "test_replicas" not in names


def errors(case):
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    return {test.id().rpartition(".")[2]: text for test, text in result.errors + result.failures}


def test_failure_and_misuse_are_reported():
    class Case(chex.TestCase):
        @variants(mirrored=2)
        def test_wrong(self):
            assert self.variant(lambda x: x + 1)(1.0) == 1.0

        @variants(mirrored=9)
        def test_many(self):
            pass

        @variants(mirrored=2)
        def test_options(self):
            self.variant(mean, static_argnums=0)

    class Plain(absltest.TestCase):
        @variants(mirrored=2)
        def test_plain(self):
            pass

    texts = errors(Case)
    assert len(texts) == 3
    assert "AssertionError" in texts["test_wrong_mirrored_2"]
    assert "'mirrored_9' needs 9 devices, and this process has 8 (cpu)" in texts["test_many_mirrored_9"]
    assert "`self.variant` got an unexpected argument `static_argnums`" in texts["test_options_mirrored_2"]
    assert "must be in a class that inherits from `chex.TestCase`" in errors(Plain)["test_plain"]


def test_arguments_are_checked():
    with pytest.raises(ValueError, match=r"`variants\(\)` needs at least one strategy. Write `variants\(mirrored=2"):
        variants()
    with pytest.raises(ValueError, match="`mirrored` must be an integer >= 1, got 0"):
        variants(mirrored=0)
    with pytest.raises(TypeError, match="`sharded` must be an integer >= 1, got 'four'"):
        variants(sharded=["four"])
    with pytest.raises(TypeError, match="Write `@chex.variants` above `@jdist.testing.variants`"):
        variants(mirrored=2)(chex.variants(with_jit=True)(lambda self: None))

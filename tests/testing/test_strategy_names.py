"""Strategies by name, and the decorator `strategies` for pytest functions."""

import chex
import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jdist
from jdist import testing


@pytest.mark.parametrize(
    "name, kind, devices",
    [
        ("one_device", jdist.OneDeviceStrategy, 1),
        ("mirrored_3", jdist.MirroredStrategy, 3),
        ("mirrored", jdist.MirroredStrategy, 8),
        ("sharded_4", jdist.ShardedStrategy, 4),
        ("central_2", jdist.CentralStorageStrategy, 2),
    ],
)
def test_name_selects_the_class_and_the_first_devices(name, kind, devices):
    strategy = testing.strategy(name)
    assert type(strategy) is kind
    assert list(strategy.devices) == jax.devices()[:devices]


@pytest.mark.parametrize("name", ["mirrord_2", "one_device_2", "mirrored_0", "mirrored_-1", "mirrored_2 ", "", None, 3])
def test_unknown_name_is_an_error_where_the_test_is_defined(name):
    for use in (testing.strategy, testing.strategies):
        with pytest.raises(
            ValueError, match=f"Unknown strategy {name!r}. A name is `one_device`, or `mirrored`, .* such as"
        ):
            use(name)


def test_more_replicas_than_devices_is_an_error_that_names_the_setting():
    with pytest.raises(ValueError) as error:
        testing.strategy("mirrored_9")
    assert str(error.value) == (
        "'mirrored_9' needs 9 devices, and this process has 8 (cpu). With pytest, set `jdist_devices = 9` in "
        "`[tool.pytest.ini_options]` of pyproject.toml; elsewhere, call `jdist.use_cpu_devices(9)` before the first use of JAX."
    )


def test_no_names_and_classes_are_errors():
    with pytest.raises(
        ValueError, match=r"`strategies\(\)` needs at least one name. Write `strategies\(\"one_device\""
    ):
        testing.strategies()
    with pytest.raises(TypeError, match="decorates test functions and methods, and A is a class. Decorate its methods"):
        testing.strategies("one_device")(type("A", (), {}))
    with pytest.raises(TypeError, match="method test_it of a `unittest.TestCase`. Write `@jdist.testing.variants"):

        @testing.strategies("one_device")
        def test_it():
            pass

        test_it()


seen = []


def virtual_4():
    return jdist.MirroredStrategy(["cpu:0", "cpu:1"], virtual_replicas=4)


@testing.strategies("one_device", "mirrored_2", virtual_4)
@pytest.mark.parametrize("x", [1.0])
def test_strategy_is_current_and_passed_beside_other_arguments(x, tmp_path, strategy):
    assert jdist.get_strategy() is strategy
    assert strategy.run(lambda y: jdist.all_reduce("mean", y), (x,)) == x
    assert tmp_path.name.startswith("test_")
    seen.append((type(strategy).__name__, strategy.num_replicas_in_sync))


def test_each_strategy_ran_once():
    assert seen == [("OneDeviceStrategy", 1), ("MirroredStrategy", 2), ("MirroredStrategy", 4)]
    assert not jdist.has_strategy()


class TestMethods:
    @testing.strategies("mirrored_2")
    def test_method_without_the_parameter(self):
        assert jdist.get_strategy().num_replicas_in_sync == 2

    @testing.strategies("mirrored_2", "sharded_4")
    @given(st.integers())
    def test_property(self, number):
        assert jdist.has_strategy()


@testing.strategies("one_device", "mirrored_2")
def test_replica_function_is_traced_once(strategy):
    @strategy.step
    @chex.assert_max_traces(n=1)
    def step(state, x):
        return state + jdist.all_reduce("mean", x.mean()), None

    state = strategy.init(lambda: 0.0)
    for value in (1.0, 2.0, 3.0):
        state, _ = step(state, strategy.split(jax.numpy.full(8, value)))
    assert state == 6
    assert "replicated" in str(step.proof)
    with pytest.raises(AssertionError, match="Function 'step' is traced > 1 times"):
        step(state, strategy.split(jax.numpy.ones(16)))

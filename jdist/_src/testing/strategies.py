"""Strategies by name, and the decorator that runs a pytest test under several of them."""

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jdist._src.core.tree import one_line
from jdist._src.strategies.base import Strategy
from jdist._src.strategies.central_storage import CentralStorageStrategy
from jdist._src.strategies.mirrored import MirroredStrategy
from jdist._src.strategies.one_device import OneDeviceStrategy
from jdist._src.strategies.sharded import ShardedStrategy

# By the kind in a name: creates a strategy on devices.
_CONSTRUCTORS: dict[str, Callable[[list[jax.Device]], Strategy]] = {
    "one_device": lambda devices: OneDeviceStrategy(devices[0]),
    "mirrored": MirroredStrategy,
    "sharded": lambda devices: ShardedStrategy(mesh=Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))),
    "central": CentralStorageStrategy,
}
_NAME_PATTERN = re.compile(rf"({'|'.join(_CONSTRUCTORS)})(?:_([1-9]\d*))?")


def strategy(name: str) -> Strategy:
    """Returns a new strategy on the first devices of this process, by its name.

    Args:
        name: `"one_device"`, or `"mirrored"`, `"sharded"` or `"central"`, with the number of devices: `"mirrored_2"` is a
            `jdist.MirroredStrategy` on two devices of this process. Without a number, on all devices of all processes.

    Raises:
        ValueError: The name is unknown, or this process has fewer devices.

    Example:
        >>> jdist.testing.strategy("mirrored_2")
        MirroredStrategy(['cpu:0', 'cpu:1'])
    """
    kind, count = _parse(name)
    if kind == "one_device":
        return OneDeviceStrategy(jax.local_devices()[0])
    return _CONSTRUCTORS[kind](jax.devices() if count is None else _local_devices(name, count))


def strategies(*choices: str | Callable[[], Strategy]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that runs a pytest test once under each strategy.

    The strategy is the current strategy while the test runs (`jdist.get_strategy()`), and is passed to the test if it has a
    parameter `strategy`. It is created when the test runs, so collecting the tests does not start JAX. The trace counters of
    `chex.assert_max_traces` start at zero for each strategy.

    Args:
        choices: Names of strategies as `jdist.testing.strategy` accepts them, or functions without parameters that return a
            strategy.

    Raises:
        TypeError: It decorates a class or a method of a `unittest.TestCase`; use `jdist.testing.variants` there. Or
            `choices` contains a strategy, or the test itself.
        ValueError: A name is unknown, or `choices` is empty.

    Example:
        >>> @jdist.testing.strategies("one_device", "mirrored_2", "sharded_4")
        ... def test_mean_of_ones_is_one(strategy):
        ...     assert strategy.run(lambda x: jdist.all_reduce("mean", x), (1.0,)) == 1.0
    """
    if not choices:
        raise ValueError(
            f'`strategies()` needs at least one name. Write `strategies("one_device", "mirrored_2")`. {_NAMES_ADVICE}'
        )
    for choice in choices:
        if isinstance(choice, Strategy):
            raise TypeError(
                f"Pass a function that returns the strategy, `strategies(lambda: {choice!r})`, or a name. {_NAMES_ADVICE}"
            )
        if not callable(choice):
            _parse(choice)
        elif inspect.isfunction(choice) and choice.__name__.startswith("test"):
            raise TypeError(
                f"`@jdist.testing.strategies` is written without names above `{choice.__name__}`. Write "
                f'`@jdist.testing.strategies("one_device", "mirrored_2")`. {_NAMES_ADVICE}'
            )

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        import pytest

        if inspect.isclass(test):
            raise TypeError(
                f"`jdist.testing.strategies` decorates test functions and methods, and {test.__name__} is a class. Decorate "
                "its methods."
            )
        signature = inspect.signature(test)
        is_passed = "strategy" in signature.parameters

        @functools.wraps(test)
        def run(*args: Any, strategy: Any = None, **kwargs: Any) -> None:
            if strategy is None:
                raise TypeError(
                    f"`jdist.testing.strategies` does not work for the method {test.__name__} of a `unittest.TestCase`. Write "
                    "`@jdist.testing.variants(mirrored=2)` there."
                )
            current = start_strategy(strategy)
            with current.scope():
                test(*args, **({**kwargs, "strategy": current} if is_passed else kwargs))

        added = [inspect.Parameter("strategy", inspect.Parameter.KEYWORD_ONLY)]
        others = [parameter for name, parameter in signature.parameters.items() if name != "strategy"]
        run.__signature__ = signature.replace(parameters=others + added)  # pyright: ignore[reportAttributeAccessIssue]
        ids = [choice if isinstance(choice, str) else choice.__name__ for choice in choices]
        return pytest.mark.parametrize("strategy", choices, ids=ids)(run)

    return decorate


def start_strategy(choice: str | Callable[[], Strategy]) -> Strategy:
    """Returns a new strategy for one test, and sets the trace counters of chex to zero if chex is imported."""
    if "chex" in sys.modules:
        sys.modules["chex"].clear_trace_counter()
    return choice() if callable(choice) else strategy(choice)


_NAMES_ADVICE = (
    "A name is `one_device`, or `mirrored`, `sharded` or `central` with a number of devices, such as `mirrored_2`."
)


def _parse(name: object) -> tuple[str, int | None]:
    match = _NAME_PATTERN.fullmatch(name) if isinstance(name, str) else None
    if match is None or (match[1] == "one_device" and match[2]):
        raise ValueError(f"Unknown strategy {one_line(name)}. {_NAMES_ADVICE}")
    return match[1], int(match[2]) if match[2] else None


def _local_devices(name: str, count: int) -> list[jax.Device]:
    devices = jax.local_devices()
    if count > len(devices):
        platform = (
            "" if devices[0].platform == "cpu" else " To test on CPU devices instead, set `JAX_PLATFORMS=cpu` as well."
        )
        raise ValueError(
            f"{name!r} needs {count} devices, and this process has {len(devices)} ({devices[0].platform}). With pytest, set "
            f"`jdist_devices = {count}` in `[tool.pytest.ini_options]` of pyproject.toml; elsewhere, call "
            f"`jdist.use_cpu_devices({count})` before the first use of JAX.{platform}"
        )
    return devices[:count]

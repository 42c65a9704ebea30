"""Tests of `chex.TestCase` and absltest under several strategies."""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jdist._src.core.arguments import as_int
from jdist._src.core.call_errors import explains_arguments
from jdist._src.strategies.base import Strategy
from jdist._src.testing.strategies import start_strategy

# pytest leaves the frames of this module out of the traceback of a failed assertion.
__tracebackhide__ = operator.methodcaller("errisinstance", AssertionError)


@explains_arguments("variants")
def variants(
    *,
    one_device: bool = False,
    mirrored: int | Sequence[int] = (),
    sharded: int | Sequence[int] = (),
    central: int | Sequence[int] = (),
) -> Callable[[Any], "VariantTests"]:
    """Returns a decorator that runs a method of a `chex.TestCase` once under each strategy.

    In the method, `self.variant(fn)` returns a function that runs the replica function `fn` by `strategy.run`, and
    `self.variant.strategy` is the strategy, which is also the current strategy. The class inherits from `chex.TestCase` or
    `absl.testing.parameterized.TestCase`. A decorator `parameterized` is written below this one. `@chex.variants` is written
    above it, and then each of its variants runs with each strategy: `jax.jit` of a program, for example.

    Args:
        one_device: Whether to run under `jdist.OneDeviceStrategy`.
        mirrored: Numbers of replicas of a `jdist.MirroredStrategy`: `2`, or `(2, 8)` for two tests. True for all devices.
        sharded: Numbers of devices of a `jdist.ShardedStrategy`.
        central: Numbers of replicas of a `jdist.CentralStorageStrategy`.

    Raises:
        TypeError: A number is not an integer, or `chex.variants` is below this decorator.
        ValueError: A number is less than 1, or all arguments are omitted. When a test runs: this process has fewer devices.

    Example:
        >>> import chex
        >>> class MeanTest(chex.TestCase):
        ...     @jdist.testing.variants(mirrored=2, sharded=4)
        ...     def test_mean(self):
        ...         mean = self.variant(lambda x: jdist.all_reduce("mean", x))
        ...         self.assertEqual(mean(1.0), 1.0)
        >>> [name for name in dir(MeanTest) if name.startswith("test_mean")]
        ['test_mean_mirrored_2', 'test_mean_sharded_4']
    """
    names = ["one_device"] if one_device else []
    for kind, counts in (("mirrored", mirrored), ("sharded", sharded), ("central", central)):
        for count in counts if isinstance(counts, Sequence) else [counts]:
            names.append(kind if count is True else f"{kind}_{as_int(f'`{kind}`', count, minimum=1)}")
    if not names:
        raise ValueError("`variants()` needs at least one strategy. Write `variants(mirrored=2, sharded=4)`.")
    return lambda test: VariantTests(test, names)


class VariantTests:
    """The tests of one method, one per strategy, which `absl.testing.parameterized.TestCase` adds to its class.

    Args:
        test: The method, or the iterable of tests that `parameterized` returns.
        names: The names of the strategies.
    """

    def __init__(self, test: Any, names: Sequence[str]):
        if type(test).__module__.partition(".")[0] == "chex":
            raise TypeError(
                "`@jdist.testing.variants` is above `@chex.variants`, which replaces `self.variant` in its tests. Write "
                "`@chex.variants` above `@jdist.testing.variants`."
            )
        self._test = test
        self._names = names

    def __iter__(self) -> Iterator[Callable[..., None]]:
        if not isinstance(self._test, Iterable):
            yield from (_run_under(name, self._test, self._test.__name__) for name in self._names)
            return
        for i, test in enumerate(self._test):
            is_named = getattr(test, "__x_use_name__", False)  # else `parameterized` numbers the tests
            yield from (
                _run_under(name, test, test.__name__ if is_named else f"{test.__name__}{i}") for name in self._names
            )

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(
            "A method with `@jdist.testing.variants` must be in a class that inherits from `chex.TestCase` or "
            "`absl.testing.parameterized.TestCase`. For pytest functions, write `@jdist.testing.strategies(...)`."
        )


class Variant:
    """`self.variant` of a test: runs replica functions under the strategy of the test.

    Attributes:
        strategy: The strategy.
    """

    def __init__(self, strategy: Strategy, outer: Callable[..., Callable[..., Any]] | None):
        self.strategy = strategy
        self._outer = outer

    def __call__(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Returns a function that runs `fn` on each replica; `options` are arguments of a variant of chex."""
        if options and self._outer is None:
            raise TypeError(
                f"`self.variant` got an unexpected argument `{next(iter(options))}`. Bind arguments that are not arrays: "
                "`self.variant(functools.partial(fn, name=value))`."
            )

        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            return self.strategy.run(fn, args, kwargs)

        return self._outer(run, **options) if self._outer else run


def _run_under(strategy_name: str, test: Callable[..., None], test_name: str) -> Callable[..., None]:
    """Returns `test` under a strategy, with the attributes by which `parameterized.TestCase` names a test."""

    @functools.wraps(test)
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        strategy = start_strategy(strategy_name)
        self.variant = Variant(strategy, vars(self).get("variant"))  # of `chex.variants`
        with strategy.scope():
            test(self, *args, **kwargs)

    run.__name__ = f"{test_name}_{strategy_name}"
    vars(run).update(__x_use_name__=True, __x_params_repr__=getattr(test, "__x_params_repr__", ""))
    return run

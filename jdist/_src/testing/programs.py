"""Assertions about programs: which collectives they contain, and which transfers they make."""

import contextlib
import operator
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jdist._src.core.arguments import as_int
from jdist._src.core.jax_compat import on_host_read
from jdist._src.core.tree import describe_type, dtype_and_shape, one_line
from jdist._src.devices.hlo import KINDS, Collective, collectives
from jdist._src.strategies.current import get_strategy

# pytest leaves the frames of this module out of the traceback of a failed assertion.
__tracebackhide__ = operator.methodcaller("errisinstance", AssertionError)


def assert_collectives(step: Any, expected: Mapping[str, int], *args: Any) -> None:
    """Raises AssertionError unless a compiled program executes these collectives, and no others.

    The program is compiled for the shapes of `args`, and not run. XLA combines and replaces collectives, so the numbers
    depend on the devices and on the version of JAX.

    Args:
        step: A step of a strategy, or a function `(state, *inputs) -> (state, outputs)`, which is compiled for the current
            strategy; a function of `jax.jit`; or a compiled program, without `args`.
        expected: The number of executions per call by kind: `{"all-reduce": 1}`. Kinds that are not listed must not occur; `{}`
            for a program without communication.
        args: The arguments of the step: arrays or their shapes.

    Raises:
        AssertionError: The numbers differ, or a collective is in a loop of unknown length. The message lists every collective.
        TypeError: `step` is none of these, `expected` is not a mapping, or a number is not an integer.
        ValueError: A kind is unknown, or a number is negative.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> @strategy.step
        ... def step(w, x):
        ...     return w - jdist.all_reduce("mean", x.mean()), None
        >>> x = strategy.split(np.ones(8, np.float32))
        >>> jdist.testing.assert_collectives(
        ...     step, {"all-reduce": 1}, strategy.put(np.float32(0)), x
        ... )
    """
    _check_expected(expected)
    communicating = [each for each in collectives(_compiled(step, args)) if each.group_size > 1]
    if unbounded := [each for each in communicating if each.executions is None]:
        raise AssertionError(
            f"The number of executions of {_describe(unbounded)} is unknown: it is in a loop without a constant length."
        )
    executions = Counter[str]()
    for each in communicating:
        executions[each.kind] += each.executions or 0
    if +executions != +Counter(expected):
        raise AssertionError(
            f"The program executes {dict(executions) or 'no collectives'}, expected {dict(expected) or 'no collectives'}. "
            f"Its collectives: {_describe(communicating) or 'none'}."
        )


@contextlib.contextmanager
def assert_no_transfer() -> Iterator[None]:
    """Returns a context manager in which an implicit transfer between host and devices is an AssertionError.

    Implicit transfers are a numpy array or a Python number among the arguments of a program, `float(loss)`, `print(loss)`,
    `np.asarray(x)`, and an array on other devices than the program uses. Explicit ones are allowed: `strategy.put`,
    `jax.device_put`, `jax.device_get`. It is `jax.transfer_guard("disallow")` for this thread, and also reports values that are
    read from CPU devices, which JAX does not. (`np.asarray` of an array on a single CPU device shares its memory, and is not
    reported.) Run a step once before the block, because tracing transfers constants.

    Raises:
        AssertionError: There was such a transfer. The message names the array; the traceback shows the line.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> loss = strategy.run(lambda x: jdist.all_reduce("mean", x), (1.0,))
        >>> with jdist.testing.assert_no_transfer():
        ...     float(loss)
        Traceback (most recent call last):
        AssertionError: A device-to-host transfer of float32[]: its value is read on the host...
    """
    try:
        with jax.transfer_guard("disallow"), on_host_read(_refuse_read):
            yield
    except jax.errors.JaxRuntimeError as error:
        if not (match := re.search(r"Disallowed (\S+) transfer: (?:aval=)?(\w+\(.*?\)|[^,]*)", str(error))):
            raise
        raise AssertionError(
            f"An implicit {match[1]} transfer of {match[2]}. Place the value before the block, with `strategy.put`, "
            "`strategy.split` or `jax.device_put`."
        ) from error


def _compiled(step: Any, args: tuple[Any, ...]) -> jax.stages.Compiled:
    if isinstance(step, jax.stages.Compiled):
        if args:
            raise TypeError("A compiled program has its shapes already: `assert_collectives(compiled, expected)`.")
        return step
    if hasattr(step, "lower") and args:
        return step.lower(*args).compile()
    if not callable(step) or not args:
        raise TypeError(
            f"`assert_collectives(step, expected, state, *inputs)` compiles a step for its arguments; got "
            f"{describe_type(step)} with {len(args)} arguments."
        )
    return get_strategy().compile(step, *args)


def _check_expected(expected: Mapping[str, int]) -> None:
    if not isinstance(expected, Mapping):
        raise TypeError(
            f'`expected` must map kinds of collectives to numbers, such as `{{"all-reduce": 1}}`, got {one_line(expected)}.'
        )
    for kind, number in expected.items():
        if kind not in KINDS:
            raise ValueError(f"Unknown collective {one_line(kind)}; the kinds are {', '.join(map(repr, KINDS))}.")
        as_int(f"`expected[{kind!r}]`", number, minimum=0)


def _describe(listed: list[Collective]) -> str:
    return ", ".join(
        f"{each.kind} over {each.group_size} devices ({each.bytes_sent:.0f} bytes, {each.executions or 'unknown'} times)"
        for each in listed
    )


def _refuse_read(array: jax.Array) -> None:
    raise AssertionError(
        f"A device-to-host transfer of {dtype_and_shape(array)}: its value is read on the host. Read it after the block, or "
        "with `jax.device_get`."
    )

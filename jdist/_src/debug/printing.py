"""`debug.print`: prints of replica functions, in the order of the program and of the replicas."""

import string
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._src.jaxpr.ordered_calls import HostFunction
from jdist._src.replica.context import ReplicaContext, current_context


def print(fmt: str, *args: Any, **kwargs: Any) -> None:  # noqa: A001  # as `jax.debug.print`
    """Prints values in a replica function, one line per replica, in order.

    Each line begins with the index of its replica: `[replica 3] loss 0.25`. The lines of one call of a program, of a step for
    example, are printed when the program has finished, before the call returns. Their order is the order of the program: all
    replicas of a `print`, in the order of their indices, and then the next one. A `print` in a loop prints all replicas of one
    iteration before the next iteration, in `scan`, in `while_loop`, and in the steps of a step with `steps_per_call`. A
    replica that does not reach a `print`, in a branch of a `cond`, has no line. Under `jax.vmap`, each example has its lines.

    With several processes, each one prints the lines of its own replicas. A `ShardedStrategy` has one replica. Outside a
    strategy this is `jax.debug.print`. A call of a program with a `print` waits for its results, and a program without one is
    not changed.

    Lines are in the order in which they arrive, as those of `jax.debug.print`, in four cases: a step that is called inside a
    `jax.jit`, a program of `Strategy.compile`, the steps of a `ParameterServerStrategy`, whose workers are asynchronous, and a
    `jax.shard_map` over the devices of a replica, of which each device has its line.

    Args:
        fmt: A format string: `"loss {}"`, `"{x:.3f} at {step}"`. Without a replacement field, the arguments follow it.
        args: The values of the fields without a name: arrays and other objects.
        kwargs: The values of the fields with a name.

    Raises:
        ValueError: While the function is traced: the format string is invalid, does not use an argument, uses one that is
            missing, or has a format that a value does not have, as `:.2f` of an array with dimensions.

    Example:
        >>> strategy = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> def fn(x):
        ...     for _ in range(2):
        ...         jdist.debug.print("x = {:.1f}", x + jdist.replica_id())
        >>> strategy.run(fn, (0.5,))
        [replica 0] x = 0.5
        [replica 1] x = 1.5
        [replica 0] x = 0.5
        [replica 1] x = 1.5
    """
    context = current_context()
    if not isinstance(context, ReplicaContext) or not context.axes:
        jax.debug.print(fmt, *args, **kwargs)
        return
    leaves, treedef = jax.tree.flatten((args, kwargs))
    is_array = [isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves]

    def values(arrays: Sequence[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        remaining = iter(arrays)
        return treedef.unflatten(
            [next(remaining) if each else leaf for leaf, each in zip(leaves, is_array, strict=True)]
        )

    def write(replica_id: jax.Array, *arrays: jax.Array) -> None:
        prefix = f"[replica {int(replica_id)}] "
        lines = _text(fmt, *values(arrays)).split("\n")
        sys.stdout.write("".join(f"{prefix}{line}\n" for line in lines))

    arrays = [leaf for leaf, each in zip(leaves, is_array, strict=True) if each]
    try:
        _text(fmt, *values(list(map(_example, arrays))))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(
            f"`jdist.debug.print` cannot format {fmt!r}: {type(error).__name__}: {error}. Pass a format string with a field "
            'per argument, `"x = {x}"`, and not an f-string, which formats the traced values.'
        ) from error
    if context.is_asynchronous:
        jax.debug.callback(write, context.replica_id_in_sync_group, *arrays)
    else:
        HostFunction(write).call(context.replica_id_in_sync_group, *arrays)


class _Formatter(string.Formatter):
    """Formats values, and refuses values that the format string does not use."""

    def check_unused_args(self, used_args: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        names = [i for i in range(len(args)) if i not in used_args] + [name for name in kwargs if name not in used_args]
        if names:
            raise ValueError(f"it does not use the argument {', '.join(map(repr, names))}")


def _text(fmt: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    has_fields = any(field is not None for _, field, _, _ in string.Formatter().parse(fmt))
    if not has_fields and not kwargs:
        return " ".join(map(str, (fmt.format(), *args)))
    return _Formatter().vformat(fmt, args, kwargs)


def _example(x: Any) -> Any:
    """Returns an array of the shape and dtype of `x`, to try the format while values are traced."""
    return x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else np.zeros(x.shape, x.dtype)

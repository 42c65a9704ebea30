"""`jdist check FILE.py[:function]`: checks functions that a file maps over devices with `jax.pmap` or `jax.shard_map`."""

import argparse
import contextlib
import functools
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from jdist._src.command_line.verb import Verb
from jdist._src.core.tree import describe_type

_NUM_DEVICES = 4
_ADVICE = (
    "Write `def check(): return (state, batch)`, the arguments of the function, or "
    "`def check(): return [(step, (state, batch))]`."
)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="FILE.py[:function]",
        nargs="?",
        help="a file with a function `check()`, which returns the arguments of the function, a tuple of arrays or shapes, or "
        "a list of pairs `(function, arguments)`",
    )
    parser.add_argument("--devices", type=int, metavar="N", help=f"the number of CPU devices (default {_NUM_DEVICES})")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--run",
        nargs=argparse.REMAINDER,
        metavar="train.py ...",
        help="run this program with these arguments, and check all functions that it maps; must be the last option",
    )


def _run(arguments: argparse.Namespace) -> int:
    is_program = arguments.run is not None
    if is_program == bool(arguments.target) or arguments.run == []:
        return _refuse("Pass one file: `jdist check FILE.py:function`, or `jdist check --run train.py ARGUMENTS`.")
    file, function = (arguments.run[0], "") if is_program else _split_target(arguments.target)
    if not os.path.isfile(file):
        return _refuse(f"{file} does not exist.")
    if arguments.devices is not None and arguments.devices < 1:
        return _refuse(f"`--devices` must be at least 1, got {arguments.devices}.")
    try:
        _use_cpu(arguments.devices)
    except RuntimeError as error:  # JAX has started
        return _refuse(str(error))
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))  # as `python FILE.py` does
    if is_program:
        report, failed = _check_program(file, arguments.run)
    else:
        try:
            namespace = runpy.run_path(file)
            pairs = _pairs(file, namespace, function)
        except _UsageError as error:
            return _refuse(str(error))
        except Exception:
            traceback.print_exc()
            return _refuse(f"{file} could not be loaded.")
        report, failed = _check_functions(pairs)
    if arguments.json:
        print(report.to_json())
    elif report.functions or not failed:  # after a failure, "no function is mapped" would name another cause
        print(report)
    return 1 if report.num_findings or failed else 0


def _refuse(message: str) -> int:
    print(f"jdist check: {message}", file=sys.stderr)
    return 2


class _UsageError(Exception):
    pass


def _split_target(target: str) -> tuple[str, str]:
    file, _, function = target.rpartition(":")
    return (file, function) if file.endswith(".py") else (target, "")


def _use_cpu(count: int | None) -> None:
    import jax

    from jdist._src.core.jax_compat import has_backend
    from jdist._src.devices.cpu_devices import use_cpu_devices

    if not has_backend():
        jax.config.update("jax_platforms", "cpu")
        count = count or _NUM_DEVICES
    if count is not None:
        use_cpu_devices(count)


def _pairs(file: str, namespace: dict[str, Any], name: str) -> list[tuple[Any, tuple[Any, ...]]]:
    """Returns the functions to check, with their arguments."""
    make = namespace.get("check")
    if not callable(make):
        raise _UsageError(f"{file} does not define a function `check`. {_ADVICE}")
    fn = None
    if name:
        first, *rest = name.split(".")
        if first not in namespace:
            raise _UsageError(f"{file} does not define {first!r}.")
        try:
            fn = functools.reduce(getattr, rest, namespace[first])
        except AttributeError as error:
            raise _UsageError(f"{file}: {error}") from None
    result: Any = make()
    if isinstance(result, tuple) and fn is not None:
        return [(fn, result)]
    is_list = isinstance(result, list) and all(
        isinstance(pair, tuple) and len(pair) == 2 and callable(pair[0]) and isinstance(pair[1], tuple)
        for pair in result
    )
    if not is_list:
        name_advice = "" if fn or not isinstance(result, tuple) else f" Name the function: `jdist check {file}:step`."
        raise _UsageError(f"`check()` of {file} returned {describe_type(result)}. {_ADVICE}{name_advice}")
    pairs = [pair for pair in result if fn is None or pair[0] is fn]
    if not pairs:
        raise _UsageError(f"`check()` of {file} does not return arguments of {name or 'a function'}. {_ADVICE}")
    return pairs


def _check_functions(pairs: Sequence[tuple[Any, tuple[Any, ...]]]) -> tuple[Any, bool]:
    """Returns the report, and whether a function raised an exception."""
    from jdist._src.debug.check import check
    from jdist._src.debug.check_report import CheckReport

    functions, failed = [], False
    for fn, args in pairs:
        try:
            functions += check(fn, *args).functions
        except Exception:
            traceback.print_exc()
            print(f"jdist check: {getattr(fn, '__name__', fn)} could not be traced.", file=sys.stderr)
            failed = True
    return CheckReport(tuple(functions)), failed


def _check_program(file: str, arguments: Sequence[str]) -> tuple[Any, bool]:
    """Returns the report, and whether the program failed."""
    from jdist._src.debug.check import report_on
    from jdist._src.jaxpr.mapped_functions import record_mapped_functions

    failed = False
    with record_mapped_functions() as functions, _arguments(arguments):
        try:
            runpy.run_path(file, run_name="__main__")
        except SystemExit as exit:
            failed = exit.code not in (None, 0)
        except Exception:
            traceback.print_exc()
            failed = True
    if failed:
        print(f"jdist check: {file} failed. The report covers the functions that it called before.", file=sys.stderr)
    return report_on(functions), failed


@contextlib.contextmanager
def _arguments(arguments: Sequence[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = list(arguments)
    try:
        yield
    finally:
        sys.argv = before


CHECK = Verb(
    "check functions under jax.pmap and jax.shard_map, also without jdist; the exit status is 1 if there are findings",
    "check train.py:step",
    _add_arguments,
    _run,
)

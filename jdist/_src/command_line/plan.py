"""`jdist plan FILE.py`: prints the plan that the function `plan()` of a file returns."""

import argparse
import os
import runpy
import sys
from typing import Any

from jdist._src.command_line.verb import Verb
from jdist._src.core.tree import describe_type


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE.py", help="a file with a function `plan()` that returns `jdist.plan(...)`"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--html", metavar="PATH", help="also write the plan as an HTML page")


def _run(arguments: argparse.Namespace) -> int:
    file = arguments.file
    if not os.path.isfile(file):
        print(f"jdist plan: {file} does not exist.", file=sys.stderr)
        return 2
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))  # as `python FILE.py` does
    make_plan: Any = runpy.run_path(file).get("plan")
    if not callable(make_plan):
        print(
            f"jdist plan: {file} does not define a function `plan`. Write `def plan(): return jdist.plan(strategy, step, "
            "state, *inputs, over=[8, 64])`.",
            file=sys.stderr,
        )
        return 2
    from jdist._src.plan.plan import Plan

    result = make_plan()
    if not isinstance(result, Plan):
        print(
            f"jdist plan: `plan()` of {file} must return the result of `jdist.plan(...)`, and returned "
            f"{describe_type(result)}.",
            file=sys.stderr,
        )
        return 2
    print(result.to_json() if arguments.json else result)
    if arguments.html:
        path = result.save(arguments.html)
        print(f"Wrote {path}.", file=sys.stderr)
    return 0 if result.fits else 1


PLAN = Verb(
    "compile a step for hardware that is not attached; the exit status is 1 if it does not fit",
    "plan train_plan.py --html plan.html",
    _add_arguments,
    _run,
)

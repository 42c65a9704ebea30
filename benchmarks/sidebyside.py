"""How the benchmarks measure: the same work by jdist and by its peers, in turn, in one process; a ratio a round.

A ratio is jdist's rate over the peer's: higher is better, 1 is the same. Each round times every candidate once, in random
order, so that a machine that slows down slows all of them; the row gives the median over the rounds, and the quartiles.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a figure to quote")
    options.add_argument("--json", action="store_true", help="one JSON object a row")
    return options


def seconds(work: Callable[[], object]) -> float:
    """The time that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def rounds(candidates: dict[str, Callable[[], float]], count: int) -> dict[str, list[float]]:
    """Asks every candidate for its seconds, `count` times in turn, in random order; one more round before warms up."""
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(count + 1):
        for name, measure in random.sample(list(candidates.items()), len(candidates)):
            value = measure()
            if number:
                taken[name].append(value)
    return taken


def report(case: str, taken: dict[str, list[float]], as_json: bool, steps: int = 1) -> None:
    """Prints a row for each peer of `"jdist"`; `steps` is how many steps one measurement has."""
    ours = taken["jdist"]
    for peer, theirs in taken.items():
        if peer == "jdist":
            continue
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        more = statistics.median(a - b for a, b in zip(ours, theirs, strict=True)) / steps * 1e6
        step = statistics.median(ours) / steps * 1e6
        row = {
            "case": case,
            "peer": peer,
            "ratio": middle,
            "low": low,
            "high": high,
            "microseconds": step,
            "more": more,
        }
        if as_json:
            print(json.dumps(row))
        else:
            print(
                f"{case:28} against {peer:20} ratio {middle:6.3f}  [{low:6.3f}, {high:6.3f}]   "
                f"{step:12,.1f} us a step, {more:+10.1f} us",
                flush=True,
            )


def mesh_of(devices):
    """A mesh as one writes it by hand: a replica a device."""
    import numpy as np
    from jax.sharding import AxisType, Mesh

    return Mesh(np.array(devices), ("replica",), axis_types=(AxisType.Auto,))


def versions(as_json: bool) -> None:
    """Says what is measured, and on what."""
    import jax
    import jaxlib

    import jdist

    devices = jax.devices()
    line = (
        f"jdist {jdist.__version__}, jax {jax.__version__}, jaxlib {jaxlib.__version__}, Python "
        f"{sys.version.split()[0]}, {len(devices)} x {devices[0].device_kind}"
    )
    print(json.dumps({"versions": line}) if as_json else line, flush=True)

"""Interleaved measurements: the same work by jdist and by its peers, alternating in one process, as a ratio per round.

A ratio is jdist's rate divided by the peer's: higher is better, 1 means equal. Each round times every candidate once, in random
order, so that a machine that slows down affects all of them; a row has the median over the rounds, and the quartiles.
"""

import argparse
import importlib.util
import json
import random
import statistics
import sys
import time
from collections.abc import Callable


def parser(description: str) -> argparse.ArgumentParser:
    """Returns a parser with the options that all benchmarks share."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer rounds, for a quick check")
    options.add_argument("--rounds", type=int, help="rounds instead of the number of this script")
    options.add_argument("--json", action="store_true", help="print one JSON object per row")
    return options


def seconds(work: Callable[[], object]) -> float:
    """Returns the seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def rounds(
    candidates: dict[str, Callable[[], float]], count: int, order: random.Random | None = None
) -> dict[str, list[float]]:
    """Times every candidate once per round, in random order, for `count` rounds after one warm-up round.

    Several processes pass an `order` with the same seed.
    """
    sample = (order or random).sample
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(count + 1):
        for name, measure in sample(list(candidates.items()), len(candidates)):
            value = measure()
            if number:
                taken[name].append(value)
    return taken


def rows(case: str, taken: dict[str, list[float]], steps: int = 1) -> list[dict[str, object]]:
    """Returns a row for each peer of `"jdist"`; `steps` is the number of steps per measurement."""
    ours, found = taken["jdist"], []
    for peer, theirs in taken.items():
        if peer == "jdist":
            continue
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        more = statistics.median(a - b for a, b in zip(ours, theirs, strict=True)) / steps * 1e6
        row = {"case": case, "peer": peer, "ratio": middle, "low": low, "high": high, "rounds": len(ratios)}
        found.append({**row, "microseconds": statistics.median(ours) / steps * 1e6, "more": more})
    return found


def report(case: str, taken: dict[str, list[float]], as_json: bool, steps: int = 1) -> None:
    """Prints a row for each peer of `"jdist"`; `steps` is the number of steps per measurement."""
    for row in rows(case, taken, steps):
        if as_json:
            print(json.dumps(row))
        else:
            print(
                f"{case:28} against {row['peer']:20} ratio {row['ratio']:6.3f}  [{row['low']:6.3f}, {row['high']:6.3f}]   "
                f"{row['microseconds']:12,.1f} us per step, {row['more']:+10.1f} us",
                flush=True,
            )


def mesh_of(devices):
    """Returns a hand-written mesh with one replica per device."""
    import numpy as np
    from jax.sharding import AxisType, Mesh

    return Mesh(np.array(devices), ("replica",), axis_types=(AxisType.Auto,))


def version_line() -> str:
    """Returns the versions and the devices."""
    import jax
    import jaxlib

    import jdist

    devices = jax.devices()
    return (
        f"jdist {jdist.__version__}, jax {jax.__version__}, jaxlib {jaxlib.__version__}, Python "
        f"{sys.version.split()[0]}, {len(devices)} x {devices[0].device_kind}"
    )


def versions(as_json: bool) -> None:
    """Prints the versions and the devices."""
    print(json.dumps({"versions": version_line()}) if as_json else version_line(), flush=True)


def has(library: str, as_json: bool) -> bool:
    """Returns whether the library of a peer is installed; prints a line if not."""
    installed = importlib.util.find_spec(library) is not None
    if not installed:
        line = f"{library} is not installed, its row is skipped"
        print(json.dumps({"skipped": line}) if as_json else line, flush=True)
    return installed

"""Usage: python run_seeds.py START END. Prints each wrong verdict, and the number of verdicts and of true relations."""

import collections
import gc
import pathlib
import sys
import time
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).parent / "tests" / "kit"))
sys.path.insert(0, str(pathlib.Path(__file__).parent / "tests" / "jaxpr"))

import test_equivalence_programs as properties

import random_steps

gc.set_threshold(100_000, 50, 50)
seconds, pairs, operations = (collections.Counter() for _ in range(3))
problems = 0
start, end = map(int, sys.argv[1:3])
began = time.perf_counter()
for seed in range(start, end):
    try:
        case = properties.Case(seed)
    except Exception:
        print("=== seed", seed, "raised")
        traceback.print_exc(limit=-4)
        continue
    seconds.update(case.seconds)
    operations.update(line.split()[0] for line in case.log)
    for (output, kind), verdict in case.verdicts.items():
        pairs[kind, case.comparison.truth(output, kind), verdict.name] += 1
    for problem in case.problems():
        print(f"=== {problem}\n", flush=True)
        problems += 1
count = end - start
print(
    {name: f"{1000 * value / count:.1f} ms" for name, value in seconds.items()},
    f"{count / (time.perf_counter() - began):.1f} programs/s",
)
for (kind, truth, verdict), number in sorted(pairs.items()):
    print(f"{kind:10} {truth:10} {verdict:15} {number:6} {number / pairs.total():.1%}")
print(f"{problems} wrong verdicts")
print({name: operations[name] for name in [*random_steps.OPERATIONS, "output"]})

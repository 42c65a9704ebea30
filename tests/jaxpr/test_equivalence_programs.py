"""Verdicts on the equivalence of random programs are right: the programs run on N replicas, and on one with the whole batch."""

import collections
import time

import jax
import numpy as np
import pytest

try:
    from jdist._src.jaxpr.equivalence import REPLICATED, Relation, relate
except ImportError:  # TODO: remove with the stub below when the analysis exists.
    relate = None

import random_steps
from random_steps import AXIS, Comparison, random_program

MAX_UNKNOWN = 1.0  # the largest share of outputs whose relation may be unknown


def relations_of(local, whole, num_replicas):
    """Returns the relation of each output, and the stub's relation while there is no analysis."""
    if relate is None:
        return [_Unknown()] * len(local.jaxpr.outvars)
    split = Relation.split((AXIS,), 0)
    inputs = [REPLICATED] * random_steps.REPLICATED_INPUTS + [split] * random_steps.BATCHES
    return relate(local, whole, inputs, {AXIS: num_replicas})


class _Unknown:
    def verdict(self):
        return "unknown"


class Case:
    """The verdicts on the program of a seed, and its true relations."""

    def __init__(self, seed):
        self.seconds = collections.Counter()
        self.program = program = random_program(seed)
        self.log, whole_log = [], []
        start = time.perf_counter()
        self.local, self.whole = program.trace(program.num_replicas, self.log), program.trace(1, whole_log)
        assert self.log == whole_log, f"the traces of seed {seed} differ"
        traced = time.perf_counter()
        self.relations = relations_of(self.local, self.whole, program.num_replicas)
        self.verdicts = [relation.verdict() for relation in self.relations]
        analyzed = time.perf_counter()
        self.comparison = Comparison(program, self.local, self.whole)
        self.seconds.update(trace=traced - start, analysis=analyzed - traced, run=time.perf_counter() - analyzed)

    def problems(self):
        """Returns the descriptions of the wrong verdicts."""
        return [self.describe(i) for i, verdict in enumerate(self.verdicts) if self.comparison.problem(i, verdict)]

    def describe(self, output):
        relation, verdict = self.relations[output], self.verdicts[output]
        reason = relation.explain() if hasattr(relation, "explain") else ""
        jaxpr = random_steps.part_of(self.local, output)
        return (
            f"{self.program}, output {output}: the analysis says {verdict!r}; it {self.comparison.problem(output, verdict)}\n"
            f"{relation}\n{reason}\n{jaxpr}\noperations: {'; '.join(self.log)}"
        )


def check_programs(seeds):
    """Fails if a verdict on the program of a seed is wrong, or if too many are "unknown"."""
    problems, verdicts = [], collections.Counter()
    for seed in seeds:
        case = Case(seed)
        problems += case.problems()
        verdicts.update(case.verdicts)
    assert not problems, f"{len(problems)} wrong verdicts\n\n" + "\n\n".join(problems[:5])
    assert verdicts["unknown"] <= MAX_UNKNOWN * verdicts.total(), verdicts


def test_verdicts_on_random_programs_are_right():
    check_programs(range(400))


@pytest.mark.slow
def test_verdicts_on_many_random_programs_are_right():
    check_programs(range(400, 3400))


def test_replicas_compute_the_results_that_verdicts_are_compared_with():
    """The results in float64 by numpy, against those of XLA."""
    for seed in range(12):
        program = random_program(seed)
        trace = program.trace(program.num_replicas)
        comparison = Comparison(program, trace, program.trace(1))
        inputs = program.inputs(1, 0)
        many, _ = comparison.results(inputs)
        args = random_steps.arguments(inputs, program.num_replicas, 0)
        run = random_steps.on_replicas(trace, program.num_replicas)
        for result, expected in zip(many[0], jax.jit(run)(*args), strict=True):
            np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-4, err_msg=f"{program}")


def test_random_programs_have_every_relation_often():
    """The properties above would be vacuous if all outputs were equal, or if all differed."""
    kinds = collections.Counter()
    for seed in range(100):
        program = random_program(seed)
        comparison = Comparison(program, program.trace(program.num_replicas), program.trace(1))
        kinds.update(map(comparison.kind, range(len(comparison.errors))))
    assert min(kinds["equal"], kinds["differs"]) > 0.25 * kinds.total(), kinds
    assert kinds["undefined"] < 0.02 * kinds.total(), kinds

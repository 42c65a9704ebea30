"""Verdicts on the equivalence of random programs are right: the programs run on N replicas, and on one with the global batch."""

import collections
import time

import jax
import numpy as np
import pytest

from jdist._src.jaxpr.counterexamples import ResultForm, with_counterexamples
from jdist._src.jaxpr.equivalence import relate
from jdist._src.jaxpr.equivalence_verdict import EQUIVALENT, verdict_of
from jdist._src.jaxpr.relations import REPLICATED, Relation
from jdist._src.jaxpr.replication import may_vary

import random_steps
from random_steps import AXIS, BATCHES, REPLICATED_INPUTS, Comparison, random_program

MAX_UNKNOWN = 1.0  # the largest share of verdicts that may be "unknown"


_READS = {False: ("sum", "mean"), True: ("split", "sum", "mean")}  # of values that vary, by whether they have a dim


class Case:
    """The verdicts on the program of a seed, and its true relations.

    Attributes:
        verdicts: By the number of an output and the kind as which it is read, the verdict. Outputs that are proved replicated are read
            as "replicated", others as "split", "sum" and "mean".
    """

    def __init__(self, seed):
        self.seconds = collections.Counter()
        self.program = program = random_program(seed)
        self.log, single_log = [], []
        start = time.perf_counter()
        self.local, self.single = program.trace(program.num_replicas, self.log), program.trace(1, single_log)
        assert self.log == single_log, f"the traces of seed {seed} differ"
        traced = time.perf_counter()
        sizes = {AXIS: program.num_replicas}
        inputs = [REPLICATED] * REPLICATED_INPUTS + [Relation.split({0: (AXIS,)})] * BATCHES
        self.relations = relate(self.local, self.single, inputs, sizes)
        varying = may_vary(self.local, [False] * REPLICATED_INPUTS + [True] * BATCHES, (AXIS,))
        outputs = [
            (output, kind)
            for output, varies in enumerate(varying)
            for kind in (_READS[bool(self.local.out_avals[output].shape)] if varies else ("replicated",))
        ]
        self.verdicts = {}
        for output, kind in outputs:
            verdict = verdict_of(self.relations[output], kind, sizes, kind == "replicated")
            forms = [ResultForm(kind if i == output else "replicated") for i in range(len(varying))]
            verdicts = [verdict if i == output else EQUIVALENT for i in range(len(varying))]
            self.verdicts[output, kind] = with_counterexamples(verdicts, self.local, self.single, inputs, forms, sizes)[
                output
            ]
        analyzed = time.perf_counter()
        self.comparison = Comparison(program, self.local, self.single)
        self.seconds.update(trace=traced - start, analysis=analyzed - traced, run=time.perf_counter() - analyzed)

    def problems(self):
        """Returns the descriptions of the wrong verdicts."""
        return [
            self.describe(output, kind, problem)
            for (output, kind), verdict in self.verdicts.items()
            if not verdict.reason.startswith("in distribution")
            and (problem := self.comparison.problem(output, verdict.name, kind))
        ]

    def describe(self, output, kind, problem):
        verdict = self.verdicts[output, kind]
        reason = "\n".join(verdict.lines)
        jaxpr = random_steps.part_of(self.local, output)
        return (
            f"{self.program}, output {output}, read as {kind}: the verdict is {verdict}; it {problem}\n"
            f"{self.relations[output]}\n{reason}\n{jaxpr}\noperations: {'; '.join(self.log)}"
        )


def check_programs(seeds):
    """Fails if a verdict on the program of a seed is wrong, or if too many are "unknown"."""
    problems, verdicts = [], collections.Counter()
    for seed in seeds:
        try:
            case = Case(seed)
        except Exception as error:
            error.add_note(f"The program of seed {seed}.")
            raise
        problems += case.problems()
        verdicts.update(verdict.name for verdict in case.verdicts.values())
    assert not problems, f"{len(problems)} wrong verdicts\n\n" + "\n\n".join(problems[:5])
    assert verdicts["unknown"] <= MAX_UNKNOWN * verdicts.total(), verdicts


def test_verdicts_on_random_programs_are_right():
    check_programs(range(400))


@pytest.mark.slow
def test_verdicts_on_many_random_programs_are_right():
    check_programs(range(400, 1900))


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
        kinds.update(comparison.truth(output) for output in range(len(comparison.results(program.inputs(1, 0))[0][0])))
    assert min(kinds["equal"], kinds["differs"]) > 0.25 * kinds.total(), kinds
    assert kinds["undefined"] < 0.02 * kinds.total(), kinds

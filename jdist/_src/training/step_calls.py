"""The calls of the training step in `fit`: their floating point operations, and the rates since the last row of the history."""

import math
import numbers
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jdist._src.core.tree import PyTree, one_line
from jdist._src.devices.hardware import hardware_of
from jdist._src.execution.program import Program
from jdist._src.execution.traced import Proof, Traced
from jdist._src.jaxpr.flops import matmul_flops
from jdist._src.strategies.base import Strategy
from jdist._src.training.step_inputs import DrawnBatch
from jdist._src.training.steps import TrainCarry
from jdist._src.values.base import is_distributed


class CountedProgram:
    """A program of training steps, and the floating point operations of a step, which are counted while JAX traces it.

    Mutable: it holds the counts.

    Args:
        program: The program.

    Attributes:
        num_traces: The number of different shapes that it was traced for.
    """

    def __init__(self, program: Program):
        self.program = program
        self.num_traces = 0
        self._counts: dict[Any, float] = {}  # by the shapes of state and inputs
        self._only_count: float | None = math.nan  # None if the counts differ
        self._traced: float | None = None
        program.on_trace.append(self._count)

    def __call__(self, carry: TrainCarry, inputs: tuple[Any, ...]) -> tuple[TrainCarry, jax.Array]:
        """Calls the program."""
        result = self.program(carry, *inputs)
        if self._traced is not None:
            self._counts[_shapes((carry, inputs))], self._traced = self._traced, None
            self.num_traces = len(self._counts)
            counts = set(self._counts.values())
            self._only_count = counts.pop() if len(counts) == 1 else None
        return result

    def flops(self, carry: TrainCarry, inputs: tuple[Any, ...]) -> float:
        """Returns the operations of a step of all replicas for the arguments of an earlier call; NaN if unknown."""
        if self._only_count is not None:
            return self._only_count
        return self._counts.get(_shapes((carry, inputs)), math.nan)

    def _count(self, traced: Traced) -> None:
        self._traced = matmul_flops(traced.jaxpr) * self.program.backend.replicas.size / traced.num_steps


class StepCalls:
    """Runs groups of batches in one `fit`: a complete group by one program, one batch by another.

    Mutable: it holds the totals.

    Args:
        single: The program of one step.
        several: The program of several steps per call, or None.

    Attributes:
        flops: The floating point operations of the matrix products and convolutions of all steps; NaN if unknown.
        compile_seconds: The duration of the calls that compiled a program.
    """

    def __init__(self, single: CountedProgram, several: CountedProgram | None):
        self._single, self._several = single, several
        self.flops = self.compile_seconds = 0.0

    def __call__(self, carry: TrainCarry, batches: Sequence[DrawnBatch]) -> tuple[TrainCarry, jax.Array]:
        """Returns the carry and the outcomes after the steps with these batches."""
        program, inputs = self._single, batches[0].inputs
        if self._several is not None and len(batches) > 1:
            program, inputs = self._several, tuple(map(list, zip(*(batch.inputs for batch in batches), strict=True)))
        num_traces, start = program.num_traces, time.perf_counter()
        result = program(carry, inputs)
        if program.num_traces > num_traces:
            self.compile_seconds += time.perf_counter() - start
        self.flops += len(batches) * program.flops(carry, inputs)
        return result

    @property
    def proof(self) -> Proof:
        """The proof of the program of several steps; of the program of one step, if there were fewer steps."""
        program = self._several if self._several is not None and self._several.num_traces else self._single
        return program.program.proof


class Totals(NamedTuple):
    """Sums since the start of a `fit`, at one time.

    Attributes:
        time: The time in seconds.
        examples: The number of examples.
        tokens: The number of tokens; None if they are not counted.
        flops: See `StepCalls`.
        compile_seconds: See `StepCalls`.
    """

    time: float
    examples: int
    tokens: int | None
    flops: float
    compile_seconds: float

    def rates_since(self, start: "Totals", peak_flops: float | None) -> dict[str, float]:
        """Returns the rates since `start`: examples and tokens per second, and the model flops utilization, if known.

        Args:
            start: The totals before.
            peak_flops: The operations per second of all devices, or None.

        Source:
            The utilization: A. Chowdhery et al., "PaLM: scaling language modeling with pathways", arXiv:2204.02311, appendix B.

        Example:
            >>> start, end = Totals(0.0, 0, 0, 0.0, 0.0), Totals(10.0, 500, 4000, 1.5e12, 4.0)
            >>> # in 6 of the 10 seconds no program was compiled
            >>> end.rates_since(start, peak_flops=1e12)
            {'examples_per_second': 50.0, 'tokens_per_second': 400.0, 'mfu': 0.25}
        """
        seconds, flops = self.time - start.time, self.flops - start.flops
        rates = {"examples_per_second": (self.examples - start.examples) / seconds}
        if self.tokens is not None and start.tokens is not None:
            rates["tokens_per_second"] = (self.tokens - start.tokens) / seconds
        run_seconds = seconds - (self.compile_seconds - start.compile_seconds)
        if peak_flops is not None and run_seconds > 0 and flops > 0:  # not if they are NaN
            rates["mfu"] = flops / run_seconds / peak_flops
        return rates


def peak_flops(strategy: Strategy, of_device: Any) -> float | None:
    """Returns the peak operations per second of all devices of a strategy; None if unknown, or if workers run steps.

    Args:
        strategy: The strategy.
        of_device: The peak operations per second of one device; None for the published number of a known device.

    Raises:
        ValueError: `of_device` is not a positive number.
    """
    is_number = isinstance(of_device, numbers.Real) and not isinstance(of_device, bool)
    if of_device is not None and not (is_number and 0 < float(of_device) < math.inf):
        raise ValueError(
            "`peak_flops` must be a positive number, the peak floating point operations per second of one device, such as "
            f"`peak_flops=989e12`, got {one_line(of_device)}."
        )
    if strategy._context.is_asynchronous:
        return None
    devices = list(strategy.mesh.devices.flat)
    if of_device is not None:
        return len(devices) * float(of_device)
    chips = [hardware_of(device) for device in devices]
    return None if None in chips else sum(chip.flops for chip in chips if chip)


def _shapes(tree: PyTree) -> Any:
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_distributed)
    arrays = (array for leaf in leaves for array in jax.tree.leaves(leaf))
    return treedef, tuple((array.shape, array.dtype) for array in arrays)

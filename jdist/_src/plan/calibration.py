"""Measures the rates of attached devices and the time of a step on them, and compares it with the model."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist._src.core.nn_modules import is_nnx_module
from jdist._src.core.tree import PyTree
from jdist._src.devices.hardware import Hardware, hardware_of
from jdist._src.execution.program import Program
from jdist._src.plan.cost_model import StepTime
from jdist._src.replica.context import all_reduce
from jdist._src.strategies.base import Strategy
from jdist._src.values.base import is_distributed

_SECONDS = 40.0  # of the steps; a minute with the compilation of a small step and the rates
_MAX_STEPS = 200
_MATRIX = 1024  # rows of the matrices of the measured products
_VECTOR = 2**24  # elements of the measured vectors


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A measurement of a step on attached devices.

    Attributes:
        kind: The kind of the devices.
        devices: The number of the devices.
        hardware: The rates of the devices: from the manufacturer, or measured where these are unknown.
        predicted: The seconds of a step according to the model.
        measured: The median of the measured seconds of a step.
        steps: The number of measured steps.
    """

    kind: str
    devices: int
    hardware: Hardware
    predicted: float
    measured: float
    steps: int

    @property
    def factor(self) -> float:
        """The factor by which the times of the model are multiplied."""
        return self.measured / self.predicted

    @property
    def error(self) -> float:
        """The relative error of the model before the correction: -0.3 if it predicts a step that is 30 % too short."""
        return self.predicted / self.measured - 1


def measured_calibration(
    strategy: Strategy,
    program: Program,
    state: Any,
    inputs: Sequence[PyTree],
    model: Callable[[Hardware], StepTime],
) -> Calibration:
    """Runs a step on attached devices, and returns the measurement.

    Args:
        strategy: The strategy, on attached devices.
        program: The step.
        state: A function that creates the state, or the state.
        inputs: The shapes of the inputs, which are zeros in the measurement.
        model: Returns the time of the step according to the model.
    """
    device = strategy.devices[0]
    hardware = hardware_of(device) or measured_hardware(strategy)
    value = strategy.init(state) if creates_state(state) else strategy.put(state)
    arguments = [_zeros(strategy, tree) for tree in inputs]
    value, _ = jax.block_until_ready(program(value, *arguments))
    seconds: list[float] = []
    start = time.perf_counter()
    while len(seconds) < _MAX_STEPS:
        begin = time.perf_counter()
        value, _ = jax.block_until_ready(program(value, *arguments))
        seconds.append(time.perf_counter() - begin)
        if time.perf_counter() - start > _SECONDS:
            break
    predicted = model(hardware).total
    return Calibration(
        device.device_kind, strategy.mesh.size, hardware, predicted, statistics.median(seconds), len(seconds)
    )


def creates_state(state: Any) -> bool:
    """Whether `state` is a function that creates the state. A module is callable too, and is a state."""
    return callable(state) and not is_nnx_module(state) and jax.tree_util.all_leaves([state])


def measured_hardware(strategy: Strategy) -> Hardware:
    """Returns the measured rates of the devices of a strategy while all of them work."""
    count = strategy.mesh.size
    is_cpu = strategy.devices[0].platform == "cpu"
    dtype = jnp.float32 if is_cpu else jnp.bfloat16
    rows = strategy.distribute_values_from_function(lambda _: jnp.ones((_MATRIX, _MATRIX), dtype))
    product = _seconds(strategy, lambda x: x @ x, rows)
    vector = strategy.distribute_values_from_function(lambda _: jnp.ones(_VECTOR, jnp.float32))
    copy = _seconds(strategy, lambda x: x * 2 + 1, vector)
    reduce = _seconds(strategy, lambda x: all_reduce("sum", x), vector) if count > 1 else copy
    sent = 2 * (count - 1) / count * 4 * _VECTOR if count > 1 else 4 * _VECTOR
    rate = sent / reduce
    kind = strategy.devices[0].device_kind
    flops = 2 * _MATRIX**3 / product
    return Hardware(f"{kind} (measured)", flops, 0, 8 * _VECTOR / copy, rate, rate, "measured on these devices")


def _seconds(strategy: Strategy, fn: Callable[[Any], Any], value: Any) -> float:
    """Returns the median of the seconds of a function of one replica."""
    call = lambda: jax.block_until_ready(jax.tree.leaves(strategy.run(fn, (value,))))
    call()
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _zeros(strategy: Strategy, tree: PyTree) -> PyTree:
    """Returns zeros in the shapes of an input, on the devices of a strategy."""

    def zeros(item: Any) -> Any:
        if is_distributed(item) and item._is_stacked:
            one = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), item.tree)
            return strategy.distribute_values_from_function(lambda _: one)
        return strategy.put(jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jax.typeof(x).dtype), item))

    return jax.tree.map(zeros, tree, is_leaf=is_distributed)

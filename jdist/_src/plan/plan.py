"""`plan`: compiles a step for devices that need not be attached, and reports memory, collectives and a model of its time."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jdist._src.core import jax_compat
from jdist._src.core.arguments import as_int
from jdist._src.core.tree import PyTree, describe_type, one_line, short_line
from jdist._src.devices.hardware import Hardware, hardware_of
from jdist._src.devices.hlo import Collective, module_collectives
from jdist._src.devices.hlo_text import HloModule
from jdist._src.devices.topology import Topology, is_topology_device, topology_of
from jdist._src.execution.program import Program
from jdist._src.execution.traced import Traced
from jdist._src.jaxpr.flops import matmul_flops
from jdist._src.plan.buffers import Buffer, peak_buffers
from jdist._src.plan.calibration import Calibration, creates_state, measured_calibration
from jdist._src.plan.cost_model import StepTime, step_time
from jdist._src.plan.memory import MemoryPlan, argument_sizes, compiled_memory, memory_limit, refused_memory
from jdist._src.plan.remedies import Remedy, Variant, variants
from jdist._src.plan.sizes import on_topology, scaled_inputs, scaled_state, with_num_devices
from jdist._src.plan.traffic import memory_traffic
from jdist._src.replica.gradients import GradientOptions, other_gradient_options
from jdist._src.strategies.base import Strategy
from jdist._src.strategies.late_bound_step import Step
from jdist._src.values.base import is_distributed
from jdist._src.values.per_replica import PerReplica

_NUM_BUFFERS = 3


@dataclasses.dataclass(frozen=True)
class SizePlan:
    """The plan of a step on one set of devices.

    Attributes:
        strategy: The name of the strategy.
        devices: The number of devices.
        replicas: The number of replicas.
        hardware: The topology, or the kind of the devices.
        fits: Whether the step fits into the memory of each device; None if that is unknown.
        memory: Bytes per device.
        largest: The largest buffers of one device: arguments, and temporaries that exist at the peak.
        collectives: The collectives of the program, at each call site; none if it was not compiled because it does not fit.
        flops: The flops of the matrix products and convolutions of one step on one device.
        memory_traffic: Bytes that one device reads from and writes to its memory in one step.
        time: The time of a step according to a model; None if the hardware is unknown, or the program does not fit.
        remedies: If it does not fit, variants that may fit, each compiled.
    """

    strategy: str
    devices: int
    replicas: int
    hardware: str
    fits: bool | None
    memory: MemoryPlan
    largest: tuple[Buffer, ...]
    collectives: tuple[Collective, ...]
    flops: float
    memory_traffic: float
    time: StepTime | None
    remedies: tuple[Remedy, ...] = ()

    @property
    def collective_bytes(self) -> float:
        """Bytes that one device sends per step."""
        return sum(each.bytes_per_run for each in self.collectives)


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The memory, collectives and time of a step on different numbers of devices. Tables when printed and in a notebook.

    Attributes:
        step: The name of the step.
        sizes: The plan for each number of devices.
        calibration: The measurement that corrects the model of the time, or None.
    """

    step: str
    sizes: tuple[SizePlan, ...]
    calibration: Calibration | None = None

    @property
    def fits(self) -> bool:
        """Whether the step fits on all planned numbers of devices."""
        return all(size.fits is not False for size in self.sizes)

    def __repr__(self) -> str:
        verdicts = {None: "unknown", True: "fits", False: "does not fit"}
        sizes = ", ".join(f"{size.devices:,} devices: {verdicts[size.fits]}" for size in self.sizes)
        return f"Plan({self.step}, {sizes})"

    def __str__(self) -> str:
        from jdist._src.plan.tables import plan_text

        return plan_text(self)

    def __rich__(self) -> Any:
        from jdist._src.plan.tables import plan_tables

        return plan_tables(self)

    def _repr_html_(self) -> str:
        from jdist._src.plan.tables import plan_html

        return plan_html(self)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as dicts, lists, numbers and strings, for JSON. Sizes are in bytes, times in seconds."""
        data: dict[str, Any] = {"step": self.step, "sizes": []}
        for size in self.sizes:
            row = dataclasses.asdict(size)
            row["largest"] = [buffer._asdict() for buffer in size.largest]
            row["collectives"] = [each._asdict() for each in size.collectives]
            row["collective_bytes"] = size.collective_bytes
            data["sizes"].append(row)
        data["calibration"] = dataclasses.asdict(self.calibration) if self.calibration else None
        return data

    def to_json(self) -> str:
        """Returns `to_dict` as the text of a JSON document."""
        return json.dumps(self.to_dict(), indent=2)

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Writes the plan as one self-contained HTML page, atomically, and returns its path.

        Raises:
            OSError: The file cannot be written.
        """
        from jdist._src.plan.page import write_page

        return write_page(self, path)


def plan(
    strategy: Strategy,
    step: Any,
    state: PyTree,
    *inputs: PyTree,
    over: Sequence[int | Strategy] | None = None,
    device_memory: int | None = None,
    calibrate: Strategy | None = None,
    remedies: bool = True,
    compiler_options: Any = None,
) -> Plan:
    """Compiles a step for devices that need not be attached, and reports its memory, its collectives and a model of its time.

    Nothing is executed and no array is created. The compiler of the hardware decides whether the step fits, which collectives
    it runs and which buffers it needs. The time of a step is a model of published rates of the hardware, and is marked as one.

    Args:
        strategy: Such as `jdist.TPUStrategy(topology="v5e:4x4")`, or any strategy on topology devices or attached devices.
        step: A function of one replica, as for `strategy.step`; a result of `strategy.step`, `jdist.step` or
            `jdist.train_step`; or a `Trainer`, for the step of its `fit`.
        state: A function that creates the state, as for `strategy.init`; or the state or its shapes. None for a `Trainer`,
            whose model and optimizer create it.
        inputs: The other arguments of the step: arrays or `jax.ShapeDtypeStruct`s, a batch as `PerReplica` of
            `[replica, batch, ...]`, such as `dataset.element_spec`.
        over: Numbers of devices, or other strategies. For a number, the strategy is built again on this number of devices of
            the same kind, with the same number of examples per device. By default the devices of `strategy`.
        device_memory: The bytes that a device has for the step, in place of what the compiler or the device reports.
        calibrate: A strategy on attached devices on which the step is measured, for a minute at most, to correct the model of
            the time. `state` is then a function or arrays.
        remedies: Whether to compile variants of a step that does not fit.
        compiler_options: Options of XLA, such as `jdist.xla_flags("tpu").compiler_options`.

    Returns:
        A `Plan`: print it, or see `plan.sizes`, `plan.to_json()` and `plan.save("plan.html")`.

    Raises:
        TypeError: `strategy` is not a strategy, or `over` not a list of numbers and strategies.
        ValueError: There are no such devices; the message lists the numbers that exist. Or the step cannot be compiled.
        NotMirroredError: A leaf of the new state may differ between the replicas.

    Example:
        >>> strategy = jdist.TPUStrategy(topology="v5e:4x4")
        >>> def step(w, x):
        ...     loss, grad = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
        ...     return w - 0.1 * jdist.all_reduce("mean", grad), jdist.all_reduce("mean", loss)
        >>> batch = jdist.PerReplica(jax.ShapeDtypeStruct((16, 8, 1024), "float32"))
        >>> plan = jdist.plan(
        ...     strategy, step, lambda: jax.numpy.zeros((1024, 1024)), batch, over=[8, 512]
        ... )
        >>> plan
        Plan(step, 8 devices: fits, 512 devices: fits)
        >>> [size.memory.parameters for size in plan.sizes], plan.sizes[0].collectives[0].kind
        ([4194304, 4194304], 'all-reduce')
    """
    if not isinstance(strategy, Strategy):
        raise TypeError(f"`strategy` must be a strategy, got {describe_type(strategy)}.")
    if hasattr(step, "_planned_step"):
        step, state = _step_and_state(step, state, inputs)
    name = _name_of(step)
    limit = None if device_memory is None else as_int("`device_memory`", device_memory, 1)
    sizes = [_strategy_of(strategy, item) for item in _as_list(over, strategy)]
    case_of = lambda other: _Case(
        other, step, _state_for(state, strategy, other), scaled_inputs(inputs, strategy, other)
    )
    calibration = None
    if calibrate is not None:
        case = case_of(calibrate)
        model = _time_model(case, compiler_options)
        calibration = measured_calibration(case.strategy, case.program(), state, case.inputs, model)
    planned = [_size_plan(case_of(other), state, limit, calibration, remedies, compiler_options) for other in sizes]
    return Plan(name, tuple(planned), calibration)


@dataclasses.dataclass(frozen=True)
class _Case:
    """A step to compile.

    Attributes:
        strategy: The strategy.
        step: As for `plan`.
        state: The shapes of the state.
        inputs: The shapes of the other arguments.
    """

    strategy: Strategy
    step: Any
    state: PyTree
    inputs: Sequence[PyTree]

    def program(self) -> Program:
        """Returns a new program of the step for the strategy, so that it is traced again."""
        if isinstance(self.step, (Step, Program)):
            return self.strategy.step(self.step.__wrapped__, **vars(self.step.options))
        return self.strategy.step(self.step)


@dataclasses.dataclass(frozen=True)
class _Compiled:
    """A compiled step.

    Attributes:
        memory: Bytes per device.
        fits: Whether it fits.
        flops: Flops per device.
        traffic: Bytes that one device reads from and writes to its memory.
        collectives: The collectives.
        buffers: The arguments and the temporaries at the peak, the largest first.
        uses_gradients: Whether the step reads the options of `other_gradient_options`.
        is_refused: Whether the compiler refused it because it does not fit.
    """

    memory: MemoryPlan
    fits: bool | None
    flops: float
    traffic: float
    collectives: tuple[Collective, ...]
    buffers: tuple[Buffer, ...]
    uses_gradients: bool
    is_refused: bool = False

    def time(self, strategy: Strategy, calibration: Calibration | None) -> StepTime | None:
        """Returns the time of the step; None if it is unknown."""
        hardware = _hardware(strategy, calibration)
        if hardware is None or self.is_refused:
            return None
        factor = calibration.factor if calibration else 1.0
        return step_time(self.flops, self.traffic, self.collectives, strategy.mesh, hardware, factor)


def _size_plan(
    case: _Case,
    state: Any,
    limit: int | None,
    calibration: Calibration | None,
    with_remedies: bool,
    compiler_options: Any,
) -> SizePlan:
    strategy = case.strategy
    compiled = _compile(case, limit, compiler_options)
    tried: list[Remedy] = []
    if compiled.fits is False and with_remedies:
        for group in variants(strategy, case.inputs, compiled.uses_gradients):
            for variant in group:
                tried.append(_try(variant, case, state, limit, calibration, compiler_options))
                if tried[-1].fits:
                    break
    buffers = compiled.buffers
    if compiled.is_refused:
        buffers = _buffers_of_larger_device(case, compiler_options) or buffers
    return SizePlan(
        type(strategy).__name__,
        strategy.mesh.size,
        strategy.num_replicas_in_sync,
        _hardware_name(strategy),
        compiled.fits,
        compiled.memory,
        buffers[:_NUM_BUFFERS],
        compiled.collectives,
        compiled.flops,
        compiled.traffic,
        compiled.time(strategy, calibration),
        tuple(tried),
    )


def _compile(
    case: _Case, limit: int | None, options: Any, gradient_options: GradientOptions | None = None
) -> _Compiled:
    strategy, program = case.strategy, case.program()
    arguments, sizes = argument_sizes(strategy, case.state, case.inputs)
    device_limit = memory_limit(strategy.devices[0]) if limit is None else limit
    traces: list[Traced] = []
    program.on_trace.append(traces.append)
    with other_gradient_options(gradient_options or GradientOptions()) as override:
        lowered = program.lower(case.state, *case.inputs)
    flops = matmul_flops(traces[-1].jaxpr) * strategy.num_replicas_in_sync / strategy.mesh.size
    try:
        with jax_compat.lines_in_cache_key():
            compiled = lowered.compile(program.compiler_options(options))
    except jax.errors.JaxRuntimeError as error:
        memory = refused_memory(error, sizes)
        if memory is None:
            raise
        memory = dataclasses.replace(memory, limit=min(memory.limit or 0, limit) if limit else memory.limit)
        largest = tuple(sorted(arguments, key=lambda buffer: -buffer.bytes))
        return _Compiled(memory, False, flops, 0.0, (), largest, override.is_used, is_refused=True)
    module = HloModule(_hlo_text(compiled))
    peak = peak_buffers(module)
    memory = compiled_memory(compiled, sizes, peak, device_limit)
    fits = None if device_limit is None else memory.total <= device_limit
    if strategy.devices[0].platform == "tpu" and limit is None:
        fits = True  # its compiler refuses a program that does not fit
    largest = tuple(sorted([*arguments, *peak], key=lambda buffer: -buffer.bytes))
    collectives = tuple(each for each in module_collectives(module, strategy.mesh) if each.group_size > 1)
    return _Compiled(memory, fits, flops, memory_traffic(module), collectives, largest, override.is_used)


def _hlo_text(compiled: jax.stages.Compiled) -> str:
    """Returns the HLO text of a compiled program.

    Raises:
        RuntimeError: jaxlib cannot read the program of this compiler.
    """
    try:
        return compiled.as_text() or ""
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"JAX {jax.__version__} cannot read the compiled program ({short_line(error, 120)}). The compiler may be newer "
            "than JAX: install the libtpu, or the CUDA plugin, of this version of JAX, such as by "
            f'`pip install "jax[tpu]=={jax.__version__}"`.'
        ) from error


def _try(
    variant: Variant, case: _Case, state: Any, limit: int | None, calibration: Calibration | None, options: Any
) -> Remedy:
    """Compiles a variant of a step that does not fit."""
    other = dataclasses.replace(case, strategy=variant.strategy, inputs=variant.inputs)
    if variant.strategy is not case.strategy:
        other = dataclasses.replace(other, state=_state_for(state, case.strategy, variant.strategy))
    try:
        compiled = _compile(other, limit, options, variant.options)
    except (ValueError, TypeError, RuntimeError) as error:  # this step cannot run in this way
        return Remedy(variant.name, None, note=short_line(error))
    time = compiled.time(variant.strategy, calibration)
    seconds = None if time is None else time.total
    return Remedy(variant.name, compiled.fits, compiled.memory.total, seconds, variant.note)


def _buffers_of_larger_device(case: _Case, options: Any) -> tuple[Buffer, ...]:
    """Returns the buffers of a step that a TPU compiler refused, compiled for the TPU generation with most memory."""
    try:
        larger = on_topology(case.strategy, Topology("v5p:2x2x1").of_size(case.strategy.mesh.size))
        return _compile(dataclasses.replace(case, strategy=larger), None, options).buffers
    except (ValueError, TypeError, RuntimeError):
        return ()


def _time_model(case: _Case, options: Any) -> Callable[[Hardware], StepTime]:
    """Returns a function from the rates of the devices to the time of the step according to the model."""
    compiled = _compile(case, None, options)
    return lambda hardware: step_time(
        compiled.flops, compiled.traffic, compiled.collectives, case.strategy.mesh, hardware
    )


def _step_and_state(trainer: Any, state: Any, inputs: Sequence[PyTree]) -> tuple[Any, Any]:
    """Returns the step of the `fit` of a `Trainer`, and the function that creates its state.

    Raises:
        TypeError: A state is given, or there is no batch of values per replica.
    """
    items = jax.tree.leaves(inputs[:1], is_leaf=is_distributed)
    if state is not None or not items or not all(isinstance(item, PerReplica) for item in items):
        raise TypeError(
            "A `Trainer` creates its state from a batch: write `jdist.plan(strategy, trainer, None, batch)`, with a batch of "
            "`jdist.PerReplica`s as the step of `fit` receives it, such as `dataset.element_spec`."
        )
    shapes = lambda item: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), item.tree)
    return trainer._planned_step(jax.tree.map(shapes, inputs[0], is_leaf=is_distributed))


def _as_list(over: Any, strategy: Strategy) -> list[Any]:
    if over is None:
        return [strategy]
    if isinstance(over, (str, bytes)) or not isinstance(over, Sequence) or not over:
        raise TypeError(f"`over` must be a list of numbers of devices, such as [8, 64], got {one_line(over)}.")
    return list(over)


def _strategy_of(strategy: Strategy, item: Any) -> Strategy:
    return item if isinstance(item, Strategy) else with_num_devices(strategy, as_int("A number in `over`", item, 1))


def _state_for(state: Any, old: Strategy, new: Strategy) -> PyTree:
    """Returns the shapes of the state under a strategy."""
    if creates_state(state):
        return jax.eval_shape(lambda: new.init(state))
    return scaled_state(state, old, new)


def _hardware(strategy: Strategy, calibration: Calibration | None) -> Hardware | None:
    device = strategy.devices[0]
    if calibration and calibration.kind == device.device_kind:
        return calibration.hardware
    return hardware_of(device)


def _hardware_name(strategy: Strategy) -> str:
    device = strategy.devices[0]
    if not is_topology_device(device):
        return device.device_kind
    topology = topology_of(device)
    slices = f" x {topology.num_slices} slices" if topology.num_slices > 1 else ""
    kind = f"{device.device_kind} " if topology.gpu_target_config else ""
    return f"{kind}{topology.topology}{slices}"


def _name_of(step: Any) -> str:
    return getattr(step, "__name__", None) or getattr(getattr(step, "__wrapped__", None), "__name__", "step")

"""The stages of the programs of `Strategy.run`, `Strategy.init` and `Strategy.step`, in order."""

from jdist._src.devices.dispatch import is_bounded
from jdist._src.execution.annotation_stage import ShardingAnnotations
from jdist._src.execution.argument_stages import ArgumentErrors, HostValues
from jdist._src.execution.backend import ProgramSpec
from jdist._src.execution.cpu_stages import DonatedMemory, OneAtATime
from jdist._src.execution.equivalence import EquivalenceCheck
from jdist._src.execution.host_calls import HostCalls
from jdist._src.execution.multi_step import RepeatedSteps, StackedSteps, StepLoop
from jdist._src.execution.nn_module_stage import Modules
from jdist._src.execution.process_stage import Processes
from jdist._src.execution.retraces import Retraces
from jdist._src.execution.stage import Stage
from jdist._src.values.process_calls import processes_of


def stages_of(spec: ProgramSpec, loop: StepLoop | None = None) -> list[Stage]:
    """Returns the stages of a program, from the nearest to the user to the nearest to the devices.

    Args:
        spec: The program.
        loop: How it runs several steps per call, if it does.
    """
    mesh, backend_stages = spec.backend.replicas.mesh, spec.backend.stages(spec)
    num_steps = lambda: loop.num_steps if loop and loop.scans else int(spec.has_state)
    processes = Processes(spec, num_steps) if len(processes_of(mesh)) > 1 else None
    packs = not any(stage.places_state for stage in backend_stages)
    stages: list[Stage | None] = [
        ArgumentErrors(spec),  # names the arguments as the user passed them
        Modules(spec.has_state, spec.donates, packs),  # arrays from here on
        Retraces(spec) if spec.has_state else None,  # names the leaves of arrays
        *spec.function_stages,  # in each step
        StackedSteps(loop) if loop else None,  # before anything reads the batches
        # The values of all steps, before the first one runs.
        HostValues(spec, processes.record_host_values if processes else None),
        RepeatedSteps(loop) if loop else None,  # what follows runs once per step
        *spec.user_stages,  # around all that a step computes
        ShardingAnnotations(sees_global_arrays=bool(spec.backend.replicas.batch_axes)),
        HostCalls(spec),
        *backend_stages,
        processes,
        DonatedMemory() if is_bounded(mesh) and spec.donates else None,
        OneAtATime() if is_bounded(mesh) else None,  # nothing is donated before the wait for the previous call
        # Last: it reads the trace before another stage changes it.
        EquivalenceCheck(spec) if spec.has_state and spec.equivalence != "ignore" else None,
    ]
    present = [stage for stage in stages if stage is not None]
    if loop:
        loop.stages = present
    return present

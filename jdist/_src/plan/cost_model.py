"""A model of the time of a step: a roofline of its computation, and the time of its collectives.

Source:
    S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for multicore architectures",
    Communications of the ACM 52(4), 2009.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from jdist._src.devices.hardware import Hardware
from jdist._src.devices.hlo import Collective
from jdist._src.devices.topology import is_topology_device, topology_of


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The time of a step according to a model, in seconds.

    Computation takes the longer one of the time of its flops and of its memory traffic, at the rates of the manufacturer.
    Collectives send their bytes at the rate of the links, and the model adds those that the schedule does not overlap with
    computation. Latencies are not in the model. It is a lower bound, unless it is calibrated.

    Attributes:
        compute: The flops of matrix products and convolutions at the peak rate.
        memory: The memory traffic at the peak rate.
        communication: All collectives.
        exposed: The collectives without those that run beside computation.
        total: The step.
        hardware: The name of the device.
        calibration: The factor of the model to a measured step; 1 without a measurement.
    """

    compute: float
    memory: float
    communication: float
    exposed: float
    total: float
    hardware: str
    calibration: float = 1.0

    @property
    def efficiency(self) -> float:
        """The share of the step that is not exposed communication: the throughput per device relative to one device."""
        return 1 - self.exposed * self.calibration / self.total if self.total else 1.0

    @property
    def bound(self) -> str:
        """The largest part of the time: `"compute"`, `"memory"` or `"communication"`."""
        times = {"compute": self.compute, "memory": self.memory, "communication": self.exposed}
        return max(times, key=lambda name: times[name])


def step_time(
    flops: float,
    traffic: float,
    collectives: Sequence[Collective],
    mesh: Mesh,
    hardware: Hardware,
    calibration: float = 1.0,
) -> StepTime:
    """Returns the time of a step.

    Args:
        flops: The flops of one device.
        traffic: The bytes that one device reads from and writes to its memory.
        collectives: The collectives of the program, with their axes.
        mesh: The devices.
        hardware: The rates of one device.
        calibration: A factor for the complete step.
    """
    compute, memory = flops / hardware.flops, traffic / hardware.memory_bandwidth
    hidden = exposed = 0.0
    for each in collectives:
        rate = hardware.network_bandwidth if crosses_network(each, mesh) else hardware.link_bandwidth
        seconds = each.bytes_per_run / rate
        hidden, exposed = (hidden + seconds, exposed) if each.overlaps else (hidden, exposed + seconds)
    busy, communication = max(compute, memory), hidden + exposed
    exposed += max(0.0, hidden - busy)
    total = (busy + exposed) * calibration
    return StepTime(compute, memory, communication, exposed, total, hardware.name, calibration)


def crosses_network(collective: Collective, mesh: Mesh) -> bool:
    """Whether a collective has groups with devices of several slices, NVLink domains or, if these are unknown, processes."""
    if collective.kind == "send":
        return True
    domains = _domains(mesh)
    if collective.axes is None:
        return bool((domains != domains.flat[0]).any()) and collective.group_size > (domains == domains.flat[0]).sum()
    if collective.group_size * len(np.unique(domains)) <= mesh.size:  # of a program for several slices
        return False
    first = domains[tuple(slice(None) if axis in collective.axes else 0 for axis in mesh.axis_names)]
    return bool((first != first.flat[0]).any())


def _domains(mesh: Mesh) -> np.ndarray:
    """Returns for each device of a mesh the number of its slice or NVLink domain."""
    first = mesh.devices.flat[0]
    if first.platform == "tpu":
        number = lambda device: getattr(device, "slice_index", 0) or 0
    elif is_topology_device(first):
        _, hosts, gpus = map(int, topology_of(first).topology.split("x"))
        number = lambda device: device.id // (hosts * gpus)
    else:
        number = lambda device: device.process_index
    return np.vectorize(number, otypes=[int])(mesh.devices)

"""Published facts of accelerators: peak flops, memory, and bandwidths, per device of JAX.

The manufacturer publishes the numbers, and programs do not reach them. Each row has its source.
"""

import dataclasses
import re
from typing import Any


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The peak rates and the memory of one device, according to its manufacturer.

    Attributes:
        name: The name of the chip: `"TPU v5e"`.
        flops: Dense floating point operations per second in bfloat16 (float16 on GPUs without bfloat16).
        memory: Bytes of device memory.
        memory_bandwidth: Bytes per second between the device and its memory.
        link_bandwidth: Bytes per second that the device sends at most to the other devices of its slice or NVLink domain, over
            all its links.
        network_bandwidth: Bytes per second that the device sends at most to another slice or domain: its share of the network
            of the data center.
        source: The page that contains the numbers.
    """

    name: str
    flops: float
    memory: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    source: str


_TPU = "https://docs.cloud.google.com/tpu/docs/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_GIB = 2**30


def _chip(
    name: str, tflops: float, memory_gib: float, memory_gbps: float, link_gbps: float, network_gbps: float, source: str
) -> Hardware:
    """Returns the row of a chip, from TFLOP/s, GiB and GB/s."""
    rates = (memory_gbps * 1e9, link_gbps * 1e9, network_gbps * 1e9)
    return Hardware(name, tflops * 1e12, memory_gib * _GIB, *rates, source)


# By `device_kind`. Link bandwidths are half of the published bidirectional ones. Network: NICs of the host, per chip.
_CHIPS: tuple[tuple[str, int, Hardware], ...] = (  # (pattern, cores per chip, chip)
    (r"TPU v2", 2, _chip("TPU v2", 46, 16, 700, 62, 3.1, _TPU + "v2")),
    (r"TPU v3", 2, _chip("TPU v3", 123, 32, 900, 82, 3.1, _TPU + "v3")),
    (r"TPU v4", 2, _chip("TPU v4", 275, 32, 1228, 150, 6.2, _TPU + "v4")),
    (r"TPU v5 lite|TPU v5e", 1, _chip("TPU v5e", 197, 16, 819, 200, 3.1, _TPU + "v5e")),
    (r"TPU v5p?", 1, _chip("TPU v5p", 459, 95, 2765, 600, 6.2, _TPU + "v5p")),
    (r"TPU v6 lite|TPU v6e", 1, _chip("TPU v6e", 918, 32, 1640, 400, 12.5, _TPU + "v6e")),
    (r"TPU ?v?7x?", 2, _chip("TPU7x", 2307, 192, 7380, 600, 12.5, _TPU + "tpu7x")),
    (r".*V100.*", 1, _chip("V100", 125, 32, 900, 150, 1.5, _NVIDIA + "v100/")),
    (r".*T4\b.*", 1, _chip("T4", 65, 16, 320, 16, 1.5, _NVIDIA + "tesla-t4/")),
    (r".*A100.*40GB.*", 1, _chip("A100 40 GB", 312, 40, 1555, 300, 25, _NVIDIA + "a100/")),
    (r".*A100.*", 1, _chip("A100 80 GB", 312, 80, 2039, 300, 25, _NVIDIA + "a100/")),
    (r".*A10G?\b.*", 1, _chip("A10", 125, 24, 600, 32, 1.5, _NVIDIA + "products/a10-gpu/")),
    (r".*L4\b.*", 1, _chip("L4", 121, 24, 300, 32, 1.5, _NVIDIA + "l4/")),
    (r".*L40S.*", 1, _chip("L40S", 362, 48, 864, 32, 25, _NVIDIA + "l40s/")),
    (r".*H200.*", 1, _chip("H200", 989, 141e9 / _GIB, 4800, 450, 50, _NVIDIA + "h200/")),
    (r".*H100.*PCIe.*", 1, _chip("H100 PCIe", 756, 80, 2000, 64, 25, _NVIDIA + "h100/")),
    (r".*H100.*", 1, _chip("H100", 989, 80, 3350, 450, 50, _NVIDIA + "h100/")),
    (r".*G?B200.*", 1, _chip("B200", 2250, 180e9 / _GIB, 8000, 900, 50, _NVIDIA + "dgx-b200/")),
)


def hardware_of(device: Any) -> Hardware | None:
    """Returns the facts of a device; None if its kind is not in the table, such as a CPU.

    Some chips are two devices for JAX, each with half of the chip: their devices differ in `core_on_chip`.

    Args:
        device: A `jax.Device`, of this process or of a topology.

    Example:
        >>> chip = hardware_of(jdist.topology_devices("v5e:2x2")[0])
        >>> chip.name, chip.flops / 1e12
        ('TPU v5e', 197.0)
    """
    for pattern, cores, chip in _CHIPS:
        if re.fullmatch(pattern, device.device_kind):
            parts = cores if _has_two_cores(device) else 1
            return dataclasses.replace(
                chip,
                flops=chip.flops / parts,
                memory=chip.memory / parts,
                memory_bandwidth=chip.memory_bandwidth / parts,
                link_bandwidth=chip.link_bandwidth / parts,
                network_bandwidth=chip.network_bandwidth / parts,
            )
    return None


def _has_two_cores(device: Any) -> bool:
    return any(getattr(other, "core_on_chip", 0) for other in device.client.devices())

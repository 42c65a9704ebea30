"""The table of hardware facts."""

import types

import jax
import pytest

import jdist
from jdist._src.devices.hardware import _CHIPS, hardware_of

TOPOLOGIES = {  # devices per chip that JAX has
    "v2:2x2": ("TPU v2", 2),
    "v3:2x2": ("TPU v3", 2),
    "v4:2x2x1": ("TPU v4", 2),
    "v5e:2x2": ("TPU v5e", 1),
    "v5p:2x2x1": ("TPU v5p", 1),
    "v6e:2x2": ("TPU v6e", 1),
    "tpu7x:2x2x1": ("TPU7x", 2),
}
GPUS = {
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H200": "H200",
    "NVIDIA A100-SXM4-40GB": "A100 40 GB",
    "NVIDIA A100-SXM4-80GB": "A100 80 GB",
    "NVIDIA A10G": "A10",
    "NVIDIA L4": "L4",
    "NVIDIA L40S": "L40S",
    "Tesla T4": "T4",
    "Tesla V100-SXM2-16GB": "V100",
    "NVIDIA B200": "B200",
    "NVIDIA GB200": "B200",
}


def a_device(kind):
    """Returns what `hardware_of` reads of a device that is not here."""
    device = types.SimpleNamespace(device_kind=kind)
    device.client = types.SimpleNamespace(devices=lambda: [device])
    return device


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_tpus_are_known_and_cores_share_their_chip(topology):
    name, devices_per_chip = TOPOLOGIES[topology]
    (chip,) = (chip for _, _, chip in _CHIPS if chip.name == name)
    found = hardware_of(jdist.topology_devices(topology)[0])
    assert found.name == name
    for field in ("flops", "memory", "memory_bandwidth", "link_bandwidth", "network_bandwidth"):
        assert getattr(found, field) * devices_per_chip == getattr(chip, field)


@pytest.mark.parametrize("kind", GPUS)
def test_gpus_are_known_by_the_names_that_cuda_reports(kind):
    assert hardware_of(a_device(kind)).name == GPUS[kind]


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA GeForce RTX 9999", "TPU v99"])
def test_unknown_devices_have_no_facts(kind):
    assert hardware_of(a_device(kind)) is None


def test_cpu_devices_of_this_process_have_no_facts():
    assert hardware_of(jax.devices()[0]) is None


def test_each_row_has_a_source_and_plausible_numbers():
    for _, _, chip in _CHIPS:
        assert chip.source.startswith("https://")
        assert 1e13 < chip.flops < 1e16
        assert 2**33 < chip.memory < 2**39
        assert chip.memory_bandwidth > chip.link_bandwidth > chip.network_bandwidth

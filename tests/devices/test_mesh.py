"""The mesh of a strategy: accepted device names, the order of devices, errors, virtual replicas."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

import jdist
from jdist._src.devices import mesh as meshes

from laws import each_row

ACCEPTED = {
    "all_by_default": (None, range(8)),
    "names_in_their_order": (["cpu:5", "cpu:1"], [5, 1]),
    "name_without_an_index_is_the_first": (["cpu"], [0]),
    "name_in_capitals": (["CPU:3"], [3]),
    "several_names": (["Cpu:2", "cpu:7"], [2, 7]),
    "tuple": (("cpu:4",), [4]),
    "tensorflow_short": (["/cpu:1", "/CPU:0"], [1, 0]),
    "tensorflow_device": (["/device:CPU:3", "device:cpu:2"], [3, 2]),
    "tensorflow_full": (["/job:localhost/replica:0/task:0/device:CPU:1"], [1]),
    "tensorflow_without_replica": (["/job:localhost/task:0/cpu:5", "/job:localhost/device:CPU:6"], [5, 6]),
    "tensorflow_worker": (["/job:worker/replica:0/task:0/device:CPU:7"], [7]),
    "tensorflow_task": (["/task:0/device:CPU:4"], [4]),
}

REFUSED = {
    "empty": ([], ValueError, r"`devices` is empty\. Name at least one device, or omit it"),
    "duplicate": (
        ["cpu:1", "cpu:0", "cpu:1"],
        ValueError,
        r"has duplicates: cpu:1\. A device holds one replica; name it once",
    ),
    "same_by_name_and_index": (["cpu", "cpu:0"], ValueError, r"has duplicates: .*name it once"),
    "index_too_high": (
        ["cpu:8"],
        ValueError,
        r"Device 'cpu:8' not found\. This process has cpu:0, .*cpu:7\..*use_cpu_devices",
    ),
    "unknown_platform": (
        ["abacus:0"],
        ValueError,
        r"Device 'abacus:0' not found\. This process has cpu:0, .*A device name is a platform and an index, such as 'cpu:0'",
    ),
    "no_gpu": (
        ["/gpu:0"],
        ValueError,
        r"Device '/gpu:0' not found\. This process has cpu:0, .*JAX found no GPU: install JAX with GPU(?!.*use_cpu_devices)",
    ),
    "no_tpu": (
        ["TPU:1"],
        ValueError,
        r"Device 'TPU:1' not found\. .*JAX found no TPU: on a TPU machine(?!.*use_cpu_devices)",
    ),
    "tensorflow_index_too_high": (
        ["/device:CPU:8"],
        ValueError,
        r"Device '/device:CPU:8' not found\. This process has cpu:0, .*cpu:7\..*use_cpu_devices",
    ),
    "tensorflow_other_task": (
        ["/job:worker/replica:0/task:1/device:CPU:0"],
        ValueError,
        r"is TensorFlow's name of a device of another process, and this is process 0\. .*pass `jax\.devices\(\)`",
    ),
    "tensorflow_parameter_server": (["/job:ps/task:0/cpu:0"], ValueError, "a device of another process"),
    "tensorflow_wildcard": (
        ["/device:CPU:*"],
        ValueError,
        r"Device '/device:CPU:\*' not found\. This process has cpu:0",
    ),
    "tensorflow_job_only": (
        ["/job:localhost"],
        ValueError,
        r"Device '/job:localhost' not found\. This process has cpu:0",
    ),
    "no_platform": (["0"], ValueError, r"Device '0' not found\. This process has cpu:0"),
    "negative_index": (["cpu:-1"], ValueError, r"Device 'cpu:-1' not found\. This process has cpu:0"),
    "number": ([0], TypeError, r"A device must be a `jax.Device` or a name such as 'cpu:0', got 0"),
    "none": ([None], TypeError, r"A device must be a `jax.Device` or a name such as 'cpu:0', got None"),
    "one_device": (jax.devices()[0], TypeError, r"list of devices, got .*; write \["),
    "one_name": ("cpu:0", TypeError, r"`devices` must be a list of devices, got 'cpu:0'; write \['cpu:0'\]"),
    "how_many": (
        2,
        TypeError,
        r"`devices` must be a list of devices, got 2: write `MirroredStrategy\(jax\.devices\(\)\[:2\]\)`",
    ),
}


@dataclasses.dataclass(frozen=True)
class StandIn:
    """A device of a platform that this machine does not have, as the platform check reads it."""

    platform: str

    def __str__(self):
        return f"{self.platform}:0"


@pytest.mark.parametrize("devices, ids", ACCEPTED.values(), ids=ACCEPTED)
def test_mesh_of_named_devices_keeps_their_order(devices, ids):
    assert [device.id for device in meshes.replica_mesh(devices).devices.flat] == list(ids)


def test_mesh_of_device_objects_keeps_their_order():
    devices = jax.devices()[3:0:-1]
    assert list(meshes.replica_mesh(devices).devices.flat) == devices


@each_row("devices, error, message", REFUSED.values(), ids=REFUSED)
def test_invalid_devices_are_errors(devices, error, message):
    with pytest.raises(error, match=message):
        jdist.MirroredStrategy(devices)


@pytest.mark.parametrize(
    "make",
    [
        lambda name: jdist.MirroredStrategy([name]),
        jdist.OneDeviceStrategy,
        lambda name: jdist.CentralStorageStrategy([name]),
        lambda name: jdist.CentralStorageStrategy([name], parameter_device=name),
    ],
    ids=["mirrored", "one_device", "central", "central_on_a_device"],
)
@pytest.mark.parametrize("name", ["/cpu:0", "/device:CPU:0", "/job:localhost/replica:0/task:0/device:CPU:0"])
def test_strategies_accept_tensorflow_device_names(make, name):
    assert list(make(name).mesh.devices.flat) == jax.devices()[:1]


@each_row("strategy", [jdist.MirroredStrategy, jdist.CentralStorageStrategy])
def test_mesh_with_a_model_axis_is_an_error_that_names_sharded_strategy(strategy):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    message = (
        r"axes 'data', 'model'.*for a group of devices per replica, `jdist\.MirroredStrategy\(mesh=.*"
        r"`jdist\.ShardedStrategy\(mesh=mesh, model_axis=\.\.\.\)`"
    )
    with pytest.raises(TypeError, match=message):
        strategy(mesh)


def test_devices_of_two_platforms_are_an_error():
    with pytest.raises(ValueError, match=r"mixes the platforms cpu and gpu, .*Use the devices of one platform"):
        meshes._check([StandIn("gpu"), StandIn("cpu")])


@each_row(
    "device, error, message",
    [
        (["cpu:0"], TypeError, r"A device must be a `jax.Device` or a name such as 'cpu:0', got \['cpu:0'\]"),
        ("cpu:99", ValueError, r"Device 'cpu:99' not found\. This process has"),
    ],
)
def test_invalid_device_of_one_device_strategy_is_an_error(device, error, message):
    with pytest.raises(error, match=message):
        jdist.OneDeviceStrategy(device)


def test_mesh_has_one_auto_axis_over_all_replicas():
    mesh = meshes.replica_mesh(["cpu:5", "cpu:1", "cpu:2"])
    assert mesh.axis_names == ("replica",)
    assert dict(mesh.shape) == {"replica": 3}
    assert mesh.axis_types == (AxisType.Auto,)


def test_shardings_of_replicas_are_fully_replicated_and_one_row_per_replica():
    mesh = meshes.replica_mesh(["cpu:5", "cpu:1"])
    replicas = meshes.Replicas.from_mesh(mesh, None)
    mirrored, split = replicas.replicated_sharding, replicas.per_replica_sharding
    assert mirrored.is_fully_replicated
    assert split.is_equivalent_to(jax.NamedSharding(mesh, PartitionSpec("replica")), 2)
    assert split.shard_shape((2, 3)) == (1, 3)


@pytest.mark.parametrize(
    "virtual, each, axes, local",
    [
        (None, 1, ("replica",), [5, 1]),
        (2, 1, ("replica",), [5, 1]),
        (6, 3, ("replica",), [5, 5, 5, 1, 1, 1]),
        (5, 3, (), [5, 5, 5, 1, 1]),
    ],
)
def test_devices_run_consecutive_virtual_replicas(virtual, each, axes, local):
    replicas = meshes.Replicas.from_mesh(meshes.replica_mesh(["cpu:5", "cpu:1"]), virtual)
    assert (replicas.size, replicas.max_per_device, replicas.per_replica_axes) == (virtual or 2, each, axes)
    assert [device.id for device in replicas.local_devices.values()] == local


@each_row(
    "virtual, error, message",
    [
        (1, ValueError, "`virtual_replicas=1` is less than the number of devices, 2"),
        (0, ValueError, "`virtual_replicas` must be an integer >= 1, got 0"),
        (2.0, TypeError, "`virtual_replicas` must be an integer >= 1, got 2.0"),
        (True, TypeError, "`virtual_replicas` must be an integer >= 1, got True"),
    ],
)
def test_invalid_number_of_virtual_replicas_is_an_error(virtual, error, message):
    with pytest.raises(error, match=message):
        jdist.MirroredStrategy(["cpu:5", "cpu:1"], virtual_replicas=virtual)


def test_local_mesh_devices_are_numbered_by_mesh_position():
    mesh = meshes.replica_mesh(["cpu:5", "cpu:1"])
    assert [(number, device.id) for number, device in meshes.local_mesh_devices(mesh).items()] == [(0, 5), (1, 1)]

"""One process of several that creates strategies with default or local devices; prints the warnings of each construction.

Then it pickles a strategy on all devices, and one on a local device, into FOLDER, and loads the pickles of the next process.

python local_devices_worker.py COORDINATOR COUNT NUMBER FOLDER
"""

import pathlib
import pickle
import sys
import warnings

import jax

address, count, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if count > 1:
    jax.distributed.initialize(address, count, number, coordinator_bind_address=address)

import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import jdist

local, everyone = jax.local_devices(), jax.devices()
constructions = {
    "mirrored, devices of all": lambda: jdist.MirroredStrategy(everyone),
    "mirrored, local devices": lambda: jdist.MirroredStrategy(local),
    "mirrored": lambda: jdist.MirroredStrategy(),
    "mirrored again": lambda: jdist.MirroredStrategy(["cpu:0"]),
    "central, devices of all": lambda: jdist.CentralStorageStrategy(everyone),
    "central by name": lambda: jdist.CentralStorageStrategy(["/cpu:0"]),
    "central again": lambda: jdist.CentralStorageStrategy(),
    "default": lambda: jdist.get_strategy(),
    "one device, explicit": lambda: jdist.OneDeviceStrategy(local[0]),
    "one device": lambda: jdist.OneDeviceStrategy(),
    "one device again": lambda: jdist.OneDeviceStrategy("cpu:0"),
    "sharded, devices of all": lambda: jdist.ShardedStrategy(mesh=Mesh(np.array(everyone), ("data",))),
    "sharded": lambda: jdist.ShardedStrategy(),
    "sharded again": lambda: jdist.ShardedStrategy(),
    "auto": lambda: jdist.auto_strategy(),
}
for name, make in constructions.items():
    with warnings.catch_warnings(record=True, action="always") as caught:
        make()
    for warning in caught:
        in_this_file = warning.filename == __file__
        print(f"{name}: {warning.category.__name__} {in_this_file} {warning.message}")

folder = pathlib.Path(sys.argv[4])
strategies = jdist.MirroredStrategy(everyone[::-1]), jdist.OneDeviceStrategy(local[1])
(folder / str(number)).write_bytes(pickle.dumps(strategies))
if count > 1:
    multihost_utils.sync_global_devices("written")
for strategy in pickle.loads((folder / str((number + 1) % count)).read_bytes()):
    print("read:", *(everyone.index(device) for device in strategy.mesh.devices.flat))

if count > 1:
    # The process that hosts the coordinator exits last.
    jax.distributed.shutdown()

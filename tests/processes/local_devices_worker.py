"""Creates strategies with default or local devices on one process of several, and pickles and loads strategies."""

import pathlib
import pickle
import warnings

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import jdist


def warnings_and_devices(folder):
    """Returns the warnings and errors of each construction, and the devices of strategies that the next process pickled."""
    folder, count, number = pathlib.Path(folder), jax.process_count(), jax.process_index()
    local, everyone = jax.local_devices(), jax.devices()
    warned = []
    constructions = {
        "mirrored, devices of all": lambda: jdist.MirroredStrategy(everyone),
        "mirrored, local devices": lambda: jdist.MirroredStrategy(local),
        "mirrored": lambda: jdist.MirroredStrategy(),
        "mirrored by name": lambda: jdist.MirroredStrategy(["cpu:0"]),
        "mirrored by name again": lambda: jdist.MirroredStrategy(["cpu:0", "cpu:1"]),
        "central, devices of all": lambda: jdist.CentralStorageStrategy(everyone),
        "central by name": lambda: jdist.CentralStorageStrategy(["/cpu:0"]),
        "central": lambda: jdist.CentralStorageStrategy(),
        "default": lambda: jdist.get_strategy(),
        "default init": lambda: jdist.init(lambda: np.float32(0)),
        "default step": lambda: jdist.step(lambda w: (w, None))(np.float32(0)),
        "workers": lambda: jdist.ParameterServerStrategy(workers=1),
        "workers, explicit": lambda: jdist.ParameterServerStrategy(workers=local[:1]),
        "one device, explicit": lambda: jdist.OneDeviceStrategy(local[0]),
        "one device": lambda: jdist.OneDeviceStrategy(),
        "one device by name": lambda: jdist.OneDeviceStrategy("cpu:0"),
        "sharded, devices of all": lambda: jdist.ShardedStrategy(mesh=Mesh(np.array(everyone), ("data",))),
        "sharded": lambda: jdist.ShardedStrategy(),
        "auto": lambda: jdist.auto_strategy(),
    }
    for name, make in constructions.items():
        with warnings.catch_warnings(record=True, action="always") as caught:
            try:
                make()
            except RuntimeError as error:
                warned.append(f"{name}: {error}")
        for warning in caught:
            in_this_file = warning.filename == __file__
            warned.append(f"{name}: {warning.category.__name__} {in_this_file} {warning.message}")

    strategies = jdist.MirroredStrategy(everyone[::-1]), jdist.OneDeviceStrategy(local[1])
    (folder / str(number)).write_bytes(pickle.dumps(strategies))
    if count > 1:
        multihost_utils.sync_global_devices("written")
    loaded = pickle.loads((folder / str((number + 1) % count)).read_bytes())
    devices = [[everyone.index(device) for device in strategy.mesh.devices.flat] for strategy in loaded]
    return warned, devices

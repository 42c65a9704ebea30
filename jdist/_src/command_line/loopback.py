"""The program of two processes that `jdist doctor` starts: they join each other and compute one all-reduce."""

import faulthandler

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from jdist._src.cluster.environment import EnvironmentClusterResolver

_TIMEOUT_SECONDS = 60.0


def _main() -> None:
    faulthandler.dump_traceback_later(_TIMEOUT_SECONDS, exit=True)
    EnvironmentClusterResolver().initialize()
    total = multihost_utils.process_allgather(jnp.float32(1 + jax.process_index())).sum()
    if (jax.process_count(), total) != (2, 3):
        raise RuntimeError(f"The sum over {jax.process_count()} processes is {total}, but must be 3 over 2 processes.")


if __name__ == "__main__":
    _main()

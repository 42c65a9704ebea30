"""Finds the resolver of the environment in which this process runs."""

import os
from collections.abc import Callable, Mapping

from jdist._src.cluster.environment import EnvironmentClusterResolver, check_no_lone_address
from jdist._src.cluster.kubernetes import KubernetesClusterResolver
from jdist._src.cluster.mpi import MPIClusterResolver
from jdist._src.cluster.resolver import ClusterNotFoundError, ClusterResolver
from jdist._src.cluster.sagemaker import SageMakerClusterResolver
from jdist._src.cluster.settings import Variables
from jdist._src.cluster.slurm import SlurmClusterResolver
from jdist._src.cluster.tf_config import TFConfigClusterResolver
from jdist._src.cluster.tpu import TPUClusterResolver

# Explicit settings first, then launchers, which number processes, then platforms, which number hosts: a launcher may start
# several processes per host of a platform, such as `mpirun` on SageMaker. `mpirun` in a Slurm job may inherit the variables of
# `srun`.
_CANDIDATES = (
    EnvironmentClusterResolver,
    TFConfigClusterResolver,
    MPIClusterResolver,
    SlurmClusterResolver,
    SageMakerClusterResolver,
    TPUClusterResolver,
    KubernetesClusterResolver,
)


def resolve(environ: Mapping[str, str] | None = None) -> ClusterResolver:
    """Returns the resolver of the environment in which this process runs, from environment variables.

    Tries, in this order: `EnvironmentClusterResolver`, `TFConfigClusterResolver`, `MPIClusterResolver`, `SlurmClusterResolver`,
    `SageMakerClusterResolver`, `TPUClusterResolver`, `KubernetesClusterResolver`. The first that finds its settings is
    returned, also if there is one process only. No request is sent: on a Cloud TPU without variables, pass
    `TPUClusterResolver()`, and for an instance group `GCEClusterResolver()`.

    Args:
        environ: The environment variables to read; default: `os.environ`.

    Raises:
        ClusterNotFoundError: No resolver found its settings. The message has the reason of each.
        ValueError: The settings of a resolver are incomplete or malformed. The resolvers after it are not tried.

    Example:
        >>> environ = {
        ...     "JAX_COORDINATOR_ADDRESS": "10.0.0.1:8476",
        ...     "JAX_NUM_PROCESSES": "2",
        ...     "JAX_PROCESS_ID": "1",
        ... }
        >>> resolver = jdist.cluster.resolve(environ)
        >>> type(resolver).__name__, resolver.process_id
        ('EnvironmentClusterResolver', 1)
    """
    variables = dict(os.environ if environ is None else environ)
    reasons = ""
    for resolver in _CANDIDATES:
        outcome = _try(resolver, variables)
        if not isinstance(outcome, Exception):
            return outcome
        if not isinstance(outcome, ClusterNotFoundError):
            raise outcome
        reasons += f"\n  {resolver.__name__}: {outcome}"
    check_no_lone_address(variables)
    raise ClusterNotFoundError(
        f"No cluster found. Start the program with a launcher such as `jdist run`, or pass a resolver.{reasons}"
    )


def resolve_each(environ: Mapping[str, str] | None = None) -> dict[str, ClusterResolver | ValueError]:
    """Returns, for each resolver that `resolve` tries, the resolver, or the error with the reason why it did not match.

    Args:
        environ: The environment variables to read; default: `os.environ`.

    Returns:
        The outcomes by the name of the class, in the order of `resolve`. An error is a `ClusterNotFoundError` if the settings
        are absent, and another ValueError if they are incomplete or malformed.

    Example:
        >>> outcomes = jdist.cluster.resolve_each({"SM_HOSTS": '["algo-1"]', "TF_CONFIG": "{"})
        >>> print(outcomes["SageMakerClusterResolver"])
        SM_HOSTS is '["algo-1"]', but SM_CURRENT_HOST is not set. ...
    """
    variables = dict(os.environ if environ is None else environ)
    return {resolver.__name__: _try(resolver, variables) for resolver in _CANDIDATES}


def _try(resolver: Callable[..., ClusterResolver], variables: Variables) -> ClusterResolver | ValueError:
    try:
        # A query of the metadata server of a TPU takes seconds.
        return resolver(environ={"TPU_SKIP_MDS_QUERY": "1", **variables})
    except ValueError as error:
        return error
    except TypeError as error:  # of a JSON value with the wrong type
        return ValueError(str(error))

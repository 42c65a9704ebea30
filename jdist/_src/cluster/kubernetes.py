"""The pods of a Kubernetes job: of an indexed Job or a JobSet from the environment, of any pods from the Kubernetes API."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jdist._src.cluster.kubernetes_api import PodCluster, find_pods
from jdist._src.cluster.resolver import ClusterNotFoundError
from jdist._src.cluster.settings import (
    Variables,
    check_complete,
    check_index,
    coordinator_override,
    missing,
    read_integer,
    unknown_addresses,
)
from jdist._src.cluster.simple import SimpleClusterResolver

_INDEX, _COUNT = "JOB_COMPLETION_INDEX", "JOB_COMPLETIONS"
_JOBSET = ("JOBSET_REPLICAS", "JOBSET_JOB_INDEX")


class KubernetesClusterResolver(SimpleClusterResolver):
    """The pods of a Kubernetes job, one process per pod.

    Without `job_to_label_mapping`, this pod is one of an indexed Job, or of a JobSet, and no request is sent. Kubernetes sets
    `JOB_COMPLETION_INDEX`, and the manifest sets `JOB_COMPLETIONS` to the number of pods. The pods need a headless Service,
    named `subdomain` in the pod template. In a JobSet with several replicas of the Job, the manifest sets `JOBSET_REPLICAS` and
    `JOBSET_JOB_INDEX` from the annotations `jobset.sigs.k8s.io/replicatedjob-replicas` and `.../job-index`.

    With `job_to_label_mapping`, the pods are requested from the Kubernetes API. Pods of indexed Jobs are ordered by their
    completion index, others by name.

    Args:
        job_to_label_mapping: The label selectors of the pods of each job, such as `{"worker": ["job-name=train"]}`. Needs the
            package `kubernetes` (extra `jdist[kubernetes]`) and the permission to list pods.
        num_processes: The number of pods; default: `JOB_COMPLETIONS`, in a JobSet times `JOBSET_REPLICAS`.
        port: The port where process 0 listens.
        coordinator_address: The `"host:port"` where process 0 listens. Default: `JAX_COORDINATOR_ADDRESS`, or the first pod.
        namespace: The namespace of the pods; default: the namespace of this pod.
        client: A client of the API with the method `list_namespaced_pod`; default: the client of `kubernetes`, with the service
            account of this pod.
        timeout_seconds: The time limit until all pods run, for the API.
        hosts_file: The file with the domain of this pod.
        environ: The environment variables to read; default: `os.environ`.

    Raises:
        ClusterNotFoundError: This process is not in a pod of an indexed Job, or the API returned zero pods.
        ValueError: The settings are incomplete, or contradict each other.
        RuntimeError: A pod does not run, or the API returned an error.
        ImportError: The API is needed, and the package `kubernetes` is not installed.

    Example:
        >>> resolver = KubernetesClusterResolver(
        ...     coordinator_address="train-0.train:8476",
        ...     environ={"JOB_COMPLETION_INDEX": "1", "JOB_COMPLETIONS": "2"},
        ... )
        >>> resolver.master(), resolver.num_processes, resolver.process_id
        ('train-0.train:8476', 2, 1)
    """

    _source: ClassVar[str] = "the Kubernetes job"

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        *,
        num_processes: int | None = None,
        port: int = 8476,
        coordinator_address: str | None = None,
        namespace: str | None = None,
        client: Any = None,
        timeout_seconds: float = 300.0,
        hosts_file: str = "/etc/hosts",
        environ: Mapping[str, str] | None = None,
    ):
        variables = os.environ if environ is None else environ
        address = coordinator_override(coordinator_address, variables)
        if num_processes is not None and num_processes < 1:
            raise ValueError(f"`num_processes` must be >= 1, got {num_processes}.")
        if job_to_label_mapping is None:
            cluster = _from_variables(variables, num_processes, port, address, pathlib.Path(hosts_file))
        else:
            count = num_processes or _pod_count(variables)
            cluster = find_pods(job_to_label_mapping, count, port, variables, namespace, client, timeout_seconds)
        spec, task_type, task_id = cluster
        super().__init__(
            spec,
            task_type=task_type,
            task_id=task_id,
            environment="variables" if job_to_label_mapping is None else "api",
            coordinator_address=address,
        )


def _pod_count(variables: Variables) -> int | None:
    if missing(variables, (_COUNT,)):
        return None
    replicas = 1 if missing(variables, (_JOBSET[0],)) else read_integer(variables, _JOBSET[0], 1)
    return read_integer(variables, _COUNT, 1) * replicas


def _from_variables(
    variables: Variables, num_processes: int | None, port: int, address: str | None, hosts_file: pathlib.Path
) -> PodCluster:
    if missing(variables, (_INDEX,)):
        raise ClusterNotFoundError(
            f"This process is not in a pod of an indexed Job of Kubernetes: {_INDEX} is not set. Write `completionMode: "
            "Indexed` in the Job, or pass `job_to_label_mapping`."
        )
    replicas, job_index = 1, 0
    if missing(variables, _JOBSET) != [*_JOBSET]:
        check_complete(variables, _JOBSET, "Set both from the annotations of the pod, or none of them.")
        replicas = read_integer(variables, _JOBSET[0], 1)
        job_index = check_index(read_integer(variables, _JOBSET[1]), _JOBSET[1], replicas, _JOBSET[0])
    pod_index = read_integer(variables, _INDEX)
    total = num_processes or _pod_count(variables)
    if total is None:
        raise ValueError(
            f"{_INDEX} is {pod_index}, but the number of pods is unknown: Kubernetes does not pass it. Set the variable "
            f"{_COUNT} in the pod template to `completions` of the Job (`env: [{{name: {_COUNT}, value: '4'}}]`), or pass "
            "`num_processes`."
        )
    if total % replicas:
        raise ValueError(
            f"The number of pods is {total}, which {_JOBSET[0]} {replicas} does not divide. Correct one of them."
        )
    completions = total // replicas
    check_index(pod_index, _INDEX, completions, _COUNT if num_processes is None else "the number of pods per Job")
    names = [(job, pod) for job in range(replicas) for pod in range(completions)]
    task_id = names.index((job_index, pod_index))
    suffix = f"-{job_index}-{pod_index}" if replicas > 1 else f"-{pod_index}"
    domain = _domain(variables, suffix, hosts_file, is_needed=address is None and total > 1)
    if domain is None:
        return unknown_addresses(total, address or f"localhost:{port}"), "worker", task_id
    base, subdomain = domain
    hosts = [f"{base}-{job}-{pod}" if replicas > 1 else f"{base}-{pod}" for job, pod in names]
    return {"worker": [f"{host}.{subdomain}:{port}" for host in hosts]}, "worker", task_id


def _domain(variables: Variables, suffix: str, hosts_file: pathlib.Path, *, is_needed: bool) -> tuple[str, str] | None:
    """Returns the host of this pod without `suffix`, and the domain of the pods. Kubernetes writes both into `/etc/hosts`."""
    host = variables.get("HOSTNAME", "").strip()
    problem = f"HOSTNAME is {host!r}, which does not end with {suffix!r}, as the hosts of an indexed Job do"
    if host.endswith(suffix):
        try:
            lines = hosts_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            lines, problem = [], f"{hosts_file} cannot be read: {error}"
        else:
            problem = f"{hosts_file} has no domain of {host}: the pod template has no `subdomain`"
        for name in (name for line in lines for name in line.partition("#")[0].split()[1:]):
            if name.startswith(f"{host}."):
                return host.removesuffix(suffix), name.removeprefix(f"{host}.")
    if is_needed:
        raise ValueError(
            f"The address of the first pod is unknown. {problem}. Create a headless Service (`clusterIP: None`) that selects "
            "the pods, and write its name as `subdomain` in the pod template, or set JAX_COORDINATOR_ADDRESS."
        )
    return None

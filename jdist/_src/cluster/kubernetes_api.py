"""Pods of a Kubernetes cluster, requested from its API."""

import importlib
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jdist._src.cluster.polling import poll
from jdist._src.cluster.resolver import ClusterNotFoundError
from jdist._src.cluster.settings import Variables, with_port
from jdist._src.cluster.simple import Addresses
from jdist._src.core.optional_import import optional_import
from jdist._src.core.tree import one_line

_NAMESPACE_FILE = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_INDEX = "batch.kubernetes.io/job-completion-index"
_REQUEST_SECONDS = 30.0


PodCluster: TypeAlias = tuple[Mapping[str, Addresses], str, int]  # the addresses of the pods, and the task of this pod


def find_pods(
    selectors: Mapping[str, Sequence[str]],
    count: int | None,
    port: int,
    variables: Variables,
    namespace: str | None,
    client: Any,
    timeout_seconds: float,
) -> PodCluster:
    """Returns the pods that the label selectors of each job select, after all of them run.

    Args:
        selectors: The label selectors of each job.
        count: The number of pods.
        port: The port of the addresses.
        variables: The environment variables, which identify this pod.
        namespace: The namespace of the pods, or None for the namespace of this pod.
        client: A client of the API, or None.
        timeout_seconds: The time limit until all pods run.

    Raises:
        ClusterNotFoundError: The API returned zero pods, or this process is not in a pod.
        ValueError: The number of pods is unknown, or this pod is not one of them.
        RuntimeError: A pod does not run, or the API returned an error.
    """
    if count is None:
        raise ValueError(
            "The number of pods is unknown, and pods that are not created yet would be missed. Pass `num_processes`, or set "
            "JOB_COMPLETIONS in the pod template."
        )
    client = _load_client() if client is None else client
    space = namespace or variables.get("POD_NAMESPACE") or _read_namespace()
    pods = poll(lambda deadline: _request(client, space, selectors, count, deadline), timeout_seconds)
    spec = {job: [with_port(pod.status.pod_ip, port) for pod in pods[job]] for job in pods}
    return spec, *_own_task(pods, variables)


def _load_client() -> Any:
    with optional_import("The Kubernetes API needs the package kubernetes", "jdist[kubernetes]"):
        kubernetes = importlib.import_module("kubernetes")
    try:
        kubernetes.config.load_incluster_config()
    except kubernetes.config.ConfigException as error:
        raise ClusterNotFoundError(
            f"This process is not in a pod of Kubernetes: {error}. Elsewhere, pass `client=kubernetes.client.CoreV1Api()`."
        ) from error
    return kubernetes.client.CoreV1Api()


def _read_namespace() -> str:
    try:
        return _NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"The namespace of the pods is unknown: {error}. Pass `namespace`.") from error


def _request(
    client: Any, namespace: str, selectors: Mapping[str, Sequence[str]], count: int, deadline: float
) -> tuple[dict[str, list[Any]], Exception | None]:
    """Returns the pods of each job, and the error if they do not all run yet."""
    pods: dict[str, list[Any]] = {}
    for job, job_selectors in selectors.items():
        if isinstance(job_selectors, str):
            raise TypeError(
                f"The selectors of job {job!r} must be a list, such as ['job-name=train'], got {one_line(job_selectors)}."
            )
        pods[job] = [pod for selector in job_selectors for pod in _list(client, namespace, selector, deadline)]
    found = [pod for job_pods in pods.values() for pod in job_pods]
    waiting = [pod for pod in found if pod.status.phase == "Pending" or not pod.status.pod_ip]
    for pod in found:
        if pod.status.phase not in ("Pending", "Running"):
            raise RuntimeError(
                f'Pod "{pod.metadata.name}" is not running; phase: "{pod.status.phase}". See `kubectl logs '
                f"{pod.metadata.name} -n {namespace}`."
            )
    if len(found) > count:
        names = ", ".join(pod.metadata.name for pod in found)
        raise ValueError(
            f"The selectors {dict(selectors)} select {len(found)} pods, but the number of pods is {count}: {names}. Correct "
            "the selectors, or `num_processes`."
        )
    if not found:
        return pods, ClusterNotFoundError(
            f"The namespace {namespace!r} has no pods with the labels {dict(selectors)}. Correct `job_to_label_mapping` or "
            "`namespace`."
        )
    if not waiting and len(found) == count:
        return pods, None
    names = "".join(f", {pod.metadata.name} is {pod.status.phase}" for pod in waiting)
    return pods, RuntimeError(
        f"{len(found)} of {count} pods exist, and {len(found) - len(waiting)} run{names}. See `kubectl get pods -n "
        f"{namespace}`, or pass a larger `timeout_seconds`."
    )


def _list(client: Any, namespace: str, selector: str, deadline: float) -> list[Any]:
    """Returns the pods of a selector, in the order of their completion indices, or else of their names."""
    seconds = min(max(deadline - time.monotonic(), 1.0), _REQUEST_SECONDS)
    try:
        pods = client.list_namespaced_pod(namespace, label_selector=selector, _request_timeout=seconds).items
    except Exception as error:  # of the client, which has many types
        status: Any = getattr(error, "status", None)
        advice = {
            401: "The token of the service account is not accepted.",
            403: "Give the service account of the pod a Role with the verb `list` for `pods`.",
        }.get(status, "Test it with `kubectl get pods` in a pod of the same service account.")
        reason = getattr(error, "reason", None) or error
        raise RuntimeError(
            f"The Kubernetes API did not list the pods with {selector!r} in the namespace {namespace!r}: "
            f"{type(error).__name__} {status or ''} {reason}. {advice}"
        ) from error
    labels = [(pod.metadata.labels or {}).get(_INDEX, "") for pod in pods]
    has_indices = all(label.isdigit() for label in labels)
    order = lambda pod: (int(pod.metadata.labels[_INDEX]) if has_indices else 0, pod.metadata.name)
    return sorted(pods, key=order)


def _own_task(pods: dict[str, list[Any]], variables: Variables) -> tuple[str, int]:
    own_name, own_host, own_ip = (variables.get(name) for name in ("POD_NAME", "HOSTNAME", "POD_IP"))
    for job, job_pods in pods.items():
        for index, pod in enumerate(job_pods):
            names = {pod.metadata.name, getattr(pod.spec, "hostname", None)}
            is_own = pod.metadata.name == own_name if own_name else own_host in names if own_host else False
            if is_own or (own_ip and pod.status.pod_ip == own_ip):
                return job, index
    found = ", ".join(pod.metadata.name for job_pods in pods.values() for pod in job_pods)
    raise ValueError(
        f"This process is not in one of the pods {found}: POD_NAME is {own_name!r}, HOSTNAME is {own_host!r}, POD_IP is "
        f"{own_ip!r}. Set POD_NAME in the pod template from the field `metadata.name`, or correct `job_to_label_mapping`."
    )

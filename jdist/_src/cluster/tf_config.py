"""The cluster of the environment variable `TF_CONFIG`."""

import json
import os
from collections.abc import Mapping
from typing import Any, ClassVar

from jdist._src.cluster.resolver import ClusterNotFoundError
from jdist._src.cluster.simple import SimpleClusterResolver, task_index

_EXAMPLE = '{"cluster": {"worker": ["10.0.0.1:8476", "10.0.0.2:8476"]}, "task": {"type": "worker", "index": 0}}'


class TFConfigClusterResolver(SimpleClusterResolver):
    """The processes that the variable `TF_CONFIG` describes, as for TensorFlow.

    `TF_CONFIG` is JSON with the key `"cluster"` (a cluster spec), and `"task"` with the `"type"` and the `"index"` of this
    process. The address of the chief, or else of worker 0, is where process 0 listens.

    Args:
        task_type: The job of this process, instead of that in `TF_CONFIG`.
        task_id: The index of this process in its job, instead of that in `TF_CONFIG`.
        coordinator_address: The `"host:port"` where process 0 listens. Default: the address of process 0.
        num_accelerators: The number of accelerators of each kind per process.
        environ: The environment variables to read; default: `os.environ`.

    Raises:
        ClusterNotFoundError: `TF_CONFIG` is not set, or has neither a cluster nor a task.
        TypeError: A value in `TF_CONFIG` has the wrong JSON type.
        ValueError: `TF_CONFIG` is not JSON, or does not describe a cluster with this process.

    Example:
        >>> cluster = '{"worker": ["10.0.0.1:8476", "10.0.0.2:8476"]}'
        >>> text = f'{{"cluster": {cluster}, "task": {{"type": "worker", "index": 1}}}}'
        >>> resolver = TFConfigClusterResolver(environ={"TF_CONFIG": text})
        >>> resolver.master(), resolver.num_processes, resolver.process_id
        ('10.0.0.1:8476', 2, 1)
    """

    _source: ClassVar[str] = "TF_CONFIG"
    _task_advice: ClassVar[str] = (
        'Add the task of each process to its TF_CONFIG, such as "task": {"type": "worker", "index": 0}.'
    )

    def __init__(
        self,
        *,
        task_type: str | None = None,
        task_id: int | None = None,
        coordinator_address: str | None = None,
        num_accelerators: Mapping[str, int] | None = None,
        environ: Mapping[str, str] | None = None,
    ):
        config = _parse((os.environ if environ is None else environ).get("TF_CONFIG", ""))
        task = _mapping(config.get("task"), "task")
        if "cluster" not in config and not task:
            raise ClusterNotFoundError(f"TF_CONFIG has neither a cluster nor a task. Set it to {_EXAMPLE}.")
        if task_type is None and "type" in task:
            task_type = str(task["type"])
        if task_id is None and "index" in task:
            task_id = task_index(task["index"], "The task index in TF_CONFIG")
        cluster = _mapping(config.get("cluster"), "cluster")
        if "master" in cluster and "chief" not in cluster:  # the same job in TensorFlow 1, and in a TFJob of Kubeflow
            cluster = {"chief" if job == "master" else job: addresses for job, addresses in cluster.items()}
            task_type = "chief" if task_type == "master" else task_type
        if not cluster and not task:
            raise ClusterNotFoundError(f"The cluster in TF_CONFIG is empty. Set TF_CONFIG to {_EXAMPLE}.")
        super().__init__(
            cluster,
            task_type=task_type,
            task_id=task_id,
            environment=str(config.get("environment") or "variables"),
            num_accelerators=num_accelerators,
            coordinator_address=coordinator_address,
        )
        self._own_task()  # raises if unknown


def _parse(text: str) -> dict[str, Any]:
    if not text.strip():
        raise ClusterNotFoundError(f"TF_CONFIG is not set. Set it on each process to {_EXAMPLE}.")
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        start, end = max(error.pos - 20, 0), error.pos + 20
        before, after = text[start : error.pos], text[error.pos : end]
        raise ValueError(
            f"TF_CONFIG is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno} (character {error.pos}), "
            f"after {before!r} and before {after!r}. Correct it, for example {_EXAMPLE}."
        ) from error
    return _mapping(config, None)


def _mapping(value: Any, key: str | None) -> dict[str, Any]:
    if value is None and key is not None:
        return {}
    if not isinstance(value, dict):
        name = "TF_CONFIG" if key is None else f"The {key} in TF_CONFIG"
        raise TypeError(f"{name} must be a JSON object, got {json.dumps(value)}. For example {_EXAMPLE}.")
    return value

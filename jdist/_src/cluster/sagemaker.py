"""The hosts of an Amazon SageMaker training job: one process per host."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

from jdist._src.cluster.resolver import ClusterNotFoundError
from jdist._src.cluster.settings import (
    check_complete,
    coordinator_override,
    missing,
    read_integer,
    with_port,
)
from jdist._src.cluster.simple import SimpleClusterResolver

_NAMES = ("SM_HOSTS", "SM_CURRENT_HOST")
_EXAMPLE = """SM_HOSTS='["algo-1", "algo-2"]' and SM_CURRENT_HOST=algo-1"""


class SageMakerClusterResolver(SimpleClusterResolver):
    """The hosts of an Amazon SageMaker training job, with one process per host.

    The hosts are in `SM_HOSTS` and `SM_CURRENT_HOST`, which SageMaker's training toolkit sets. A container without the toolkit
    has them in a file. The hosts are numbered in alphabetical order.

    Args:
        port: The port where process 0 listens.
        coordinator_address: The `"host:port"` where process 0 listens. Default: `JAX_COORDINATOR_ADDRESS`, or the first host.
        resource_config: The file with the hosts, which is read if neither variable is set.
        environ: The environment variables to read; default: `os.environ`.

    Raises:
        ClusterNotFoundError: Neither the variables nor the file exist.
        ValueError: The settings are incomplete or malformed, or this host is not one of the hosts.

    Example:
        >>> resolver = SageMakerClusterResolver(
        ...     environ={
        ...         "SM_HOSTS": '["algo-1", "algo-2"]',
        ...         "SM_CURRENT_HOST": "algo-2",
        ...         "SM_NUM_GPUS": "8",
        ...     }
        ... )
        >>> (
        ...     resolver.master(),
        ...     resolver.num_processes,
        ...     resolver.process_id,
        ...     resolver.num_accelerators(),
        ... )
        ('algo-1:2223', 2, 1, {'GPU': 8})
    """

    _source: ClassVar[str] = "the SageMaker job"

    def __init__(
        self,
        *,
        port: int = 2223,
        coordinator_address: str | None = None,
        resource_config: str = "/opt/ml/input/config/resourceconfig.json",
        environ: Mapping[str, str] | None = None,
    ):
        variables = os.environ if environ is None else environ
        if missing(variables, _NAMES) == [*_NAMES]:
            path = pathlib.Path(resource_config)
            config = _read_file(path)
            hosts = _hosts(config.get("hosts"), f"`hosts` in {path}")
            current, source, environment = config.get("current_host"), f"`current_host` in {path}", "file"
        else:
            check_complete(variables, _NAMES, f"Set both on each host, such as {_EXAMPLE}.")
            hosts = _hosts(_parse(variables["SM_HOSTS"], "SM_HOSTS"), "SM_HOSTS")
            current, source, environment = variables["SM_CURRENT_HOST"].strip(), "SM_CURRENT_HOST", "variables"
        if current not in hosts:
            raise ValueError(
                f"{source} is {current!r}, which is not one of the hosts {', '.join(hosts)}. Correct one of them."
            )
        accelerators = None
        if not missing(variables, ("SM_NUM_GPUS",)):
            count = read_integer(variables, "SM_NUM_GPUS")
            accelerators = {"GPU": count} if count else {}
        super().__init__(
            {"worker": [with_port(host, port) for host in hosts]},
            task_type="worker",
            task_id=hosts.index(current),
            environment=environment,
            num_accelerators=accelerators,
            coordinator_address=coordinator_override(coordinator_address, variables),
        )


def _read_file(path: pathlib.Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ClusterNotFoundError(
            f"This is not a SageMaker job: {' and '.join(_NAMES)} are not set, and {path} does not exist. Elsewhere, use "
            "another resolver."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    config = _parse(text, str(path))
    if not isinstance(config, dict):
        raise ValueError(f"{path} must have a JSON object with `hosts` and `current_host`, got {text!r}.")
    return config


def _parse(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{source} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}, got {text!r}. For example "
            f"{_EXAMPLE}."
        ) from error


def _hosts(hosts: Any, source: str) -> list[str]:
    """Returns the hosts in alphabetical order, as on all processes."""
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) and host for host in hosts):
        raise ValueError(f"{source} must be a list of hosts, got {hosts!r}. For example {_EXAMPLE}.")
    return sorted(set(hosts))

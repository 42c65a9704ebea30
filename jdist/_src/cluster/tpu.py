"""The processes of a TPU, from environment variables or from the metadata server of Cloud TPU.

Each setting is stored under the name of its environment variable, also if it comes from the metadata server. The server is
queried only if the variables do not identify the processes.
"""

import dataclasses
import http.client
import math
import os
import re
import time
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from jdist._src.cluster.metadata import get_attribute, metadata_server
from jdist._src.cluster.resolver import ClusterNotFoundError
from jdist._src.cluster.settings import Variables, coordinator_override, with_port
from jdist._src.cluster.simple import SimpleClusterResolver

_PORT = "8482"  # JAX's default port on a TPU; libtpu and Megascale use others
_SKIP, _PATH = "TPU_SKIP_MDS_QUERY", "TPU_PROCESS_ADDRESSES_PATH"
_PROCESSES, _HOSTS = "TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"
_IDS = ("TPU_WORKER_ID", "CLOUD_TPU_TASK_ID")
_SLICES = ("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS")
_TYPE, _TOPOLOGY, _BOUNDS = "TPU_ACCELERATOR_TYPE", "TPU_TOPOLOGY", "TPU_CHIPS_PER_PROCESS_BOUNDS"
# The metadata attributes that correspond to a variable, and the lines of the attribute `tpu-env` that do.
_ATTRIBUTES = {_HOSTS: "worker-network-endpoints", _IDS[0]: "agent-worker-number", _TYPE: "accelerator-type"}
_TPU_ENV = {_TOPOLOGY: "TOPOLOGY"} | {name: name for name in _SLICES}


class _Setting(NamedTuple):
    text: str
    source: str  # the variable or attribute, for messages


_Settings = dict[str, _Setting]


@dataclasses.dataclass(frozen=True, init=False)
class TPUClusterResolver(SimpleClusterResolver):
    """The processes of a TPU with one slice or several. All settings are read once, in the constructor.

    There is one process per host, on that host: start the same program on each. Environment variables are read first (GKE and
    notebooks set them), then the metadata server of the virtual machine. The constructor does not start a JAX backend and
    connects only to the metadata server.

    Args:
        tpu: None, `""` or `"local"`, which all mean the TPU of this host. A TPU of another host cannot be reached.
        coordinator_address: The `"host:port"` where process 0 listens. Default: `JAX_COORDINATOR_ADDRESS`, or the host of
            process 0 with the port `JAX_COORDINATOR_PORT`, or 8482.
        environ: The environment variables to read; default: `os.environ`.
        timeout_seconds: The time limit for all requests to the metadata server together.

    Attributes:
        addresses: The addresses of the processes of this slice, ordered by index: hosts, some with a port.
        worker_id: The index of this process in its slice.
        num_slices: The number of slices.
        slice_id: The index of this slice.
        coordinator_address: The `"host:port"` where process 0 listens, the same on every process.
        accelerator_type: For example `"v5litepod-16"`, or None if unknown.
        topology: The chips of this slice, for example `"4x4"`, or None if unknown.
        chips_per_process: The number of chips per process, or None if unknown. In JAX, a chip of v2 and v3 is two devices.
        environment: The source of the settings: `"variables"`, or `"metadata"` if the server was queried for the settings that
            the variables do not contain.

    Raises:
        ClusterNotFoundError: No settings of a TPU were found.
        ValueError: The settings contradict each other.
        RuntimeError: The metadata server was queried, and did not return a valid response.

    Example:
        >>> resolver = TPUClusterResolver(
        ...     environ={
        ...         "TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2",
        ...         "TPU_WORKER_ID": "1",
        ...         "TPU_TOPOLOGY": "2x4",
        ...     }
        ... )
        >>> (
        ...     resolver.master(),
        ...     resolver.num_processes,
        ...     resolver.process_id,
        ...     resolver.num_accelerators(),
        ... )
        ('10.0.0.1:8482', 2, 1, {'TPU': 4})
        >>> resolver.initialize()  # doctest: +SKIP
    """

    addresses: tuple[str, ...]
    worker_id: int
    num_slices: int
    slice_id: int
    accelerator_type: str | None
    topology: str | None
    chips_per_process: int | None

    _source: ClassVar[str] = "the TPU"
    _no_accelerators: ClassVar[str] = f"neither {_TOPOLOGY} nor {_BOUNDS} is set"

    def __init__(
        self,
        tpu: str | None = None,
        *,
        coordinator_address: str | None = None,
        environ: Mapping[str, str] | None = None,
        timeout_seconds: float = 5.0,
    ):
        if tpu not in (None, "", "local"):
            raise ValueError(
                f"Cannot connect to the TPU {tpu!r}: JAX runs on the hosts of the TPU. Omit `tpu`, and start this program on "
                f"each host (`gcloud compute tpus tpu-vm ssh {tpu} --worker=all --command=...`)."
            )
        if not 0 < timeout_seconds < math.inf:
            raise ValueError(f"`timeout_seconds` must be a finite number > 0, got {timeout_seconds}.")
        variables = os.environ if environ is None else environ
        settings = _from_variables(variables)
        queries_server = not _identify_process(settings) and _SKIP not in variables
        if queries_server:
            settings = _from_metadata(metadata_server(variables), timeout_seconds) | settings
        addresses, source = _addresses(settings, variables)
        num_slices, slice_id = _slices(settings)
        # If several processes share a host, the task ID is the process index and the worker ID is the host index.
        names = reversed(_IDS) if _PROCESSES in settings else _IDS
        index = next((settings[name] for name in names if name in settings), None)
        worker_id = _index(index, len(addresses), f"{source} lists {len(addresses)} processes", "TPU_WORKER_ID")
        chips = _chips_per_process(settings, len(addresses), source)
        first = slice_id * len(addresses)
        unknown = dict.fromkeys(range(num_slices * len(addresses)))  # of the other slices
        super().__init__(
            {"worker": unknown | dict(enumerate(addresses, first))},
            task_type="worker",
            task_id=first + worker_id,
            environment="metadata" if queries_server else "variables",
            num_accelerators=None if chips is None else {"TPU": chips},
            coordinator_address=_coordinator(coordinator_address, settings, variables, addresses[0], num_slices),
        )
        # The dataclass is frozen, so the fields are set through `vars`.
        vars(self).update(
            addresses=addresses,
            worker_id=worker_id,
            num_slices=num_slices,
            slice_id=slice_id,
            accelerator_type=settings[_TYPE].text if _TYPE in settings else None,
            topology=settings[_TOPOLOGY].text if _TOPOLOGY in settings else None,
            chips_per_process=chips,
        )


def _from_variables(variables: Variables) -> _Settings:
    names = (_PATH, _PROCESSES, _HOSTS, *_IDS, *_SLICES, _TYPE, _TOPOLOGY, _BOUNDS)
    settings = {name: _Setting(text, name) for name in names if (text := variables.get(name, "").strip())}
    if path := settings.pop(_PATH, None):
        try:
            with open(path.text, encoding="utf-8") as file:
                settings[_PROCESSES] = _Setting(file.read().strip(), f"{path.text} (from {_PATH})")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{_PATH} is {path.text!r}, which cannot be read: {error}") from error
    return settings


def _identify_process(settings: _Settings) -> bool:
    """Whether `settings` contain the processes of the slice and, if there are several, the index of this one."""
    processes = settings.get(_PROCESSES) or settings.get(_HOSTS)
    return processes is not None and ("," not in processes.text or any(name in settings for name in _IDS))


def _addresses(settings: _Settings, variables: Variables) -> tuple[tuple[str, ...], str]:
    """Returns the addresses of the processes of this slice, and their source."""
    processes = settings.get(_PROCESSES) or settings.get(_HOSTS)
    if processes is None:
        raise ClusterNotFoundError(_not_found_message(settings, variables))
    addresses = tuple(address.strip() for address in processes.text.split(","))
    if not all(addresses):
        raise ValueError(f"{processes.source} is {processes.text!r}: a name is empty. Name each process of the slice.")
    if duplicates := sorted({address for address in addresses if addresses.count(address) > 1}):
        raise ValueError(
            f"{processes.source} is {processes.text!r}, which has duplicates: {', '.join(duplicates)}. Name each process once."
        )
    return addresses, processes.source


def _slices(settings: _Settings) -> tuple[int, int]:
    """Returns the number of slices, and the index of this slice."""
    setting = settings.get(_SLICES[0], _Setting("1", f"{_SLICES[0]} (not set)"))
    count = _integer(setting)
    if count < 1:
        raise ValueError(f"{setting.source} is 0, but must be at least 1.")
    return count, _index(settings.get(_SLICES[1]), count, f"{setting.source} is {count}", _SLICES[1])


def _index(setting: _Setting | None, count: int, count_text: str, variable: str) -> int:
    """Returns an index below `count`. Messages show `count_text` (count and source) and `variable`, which sets the index."""
    valid = f"an integer from 0 to {count - 1}"
    if setting is None and count > 1:
        raise ValueError(f"{count_text}, but the index of this one is not set. Set {variable} on each host to {valid}.")
    if setting is None:
        return 0
    if (number := _integer(setting)) >= count:
        raise ValueError(f"{setting.source} is {number}, but {count_text}: it must be {valid}. Correct one of them.")
    return number


def _integer(setting: _Setting) -> int:
    if not re.fullmatch("[0-9]+", setting.text):
        raise ValueError(f"{setting.source} must be an integer >= 0, got {setting.text!r}.")
    return int(setting.text)


def _coordinator(argument: str | None, settings: _Settings, variables: Variables, first: str, num_slices: int) -> str:
    if explicit := coordinator_override(argument, variables):
        return explicit
    coordinator = settings.get(_SLICES[2])
    if coordinator is None and num_slices > 1:
        raise ValueError(
            f"There are {num_slices} slices, but the host of process 0 is not set: {first} is only the first host of this "
            f"slice. Set {_SLICES[2]} on every host to the first host of slice 0."
        )
    port = variables.get("JAX_COORDINATOR_PORT") or _PORT
    if not re.fullmatch("[0-9]+", port):
        raise ValueError(f"JAX_COORDINATOR_PORT must be a port number, got {port!r}.")
    host = coordinator.text if coordinator else first
    if host.count(":") == 1 or host.startswith("["):  # the port of a host in these settings is that of another service
        host = re.sub(":[0-9]+$", "", host)
    return with_port(host, int(port))


def _chips_per_process(settings: _Settings, count: int, source: str) -> int | None:
    bounds = settings.get(_BOUNDS)
    if bounds and re.fullmatch("[1-9][0-9]*(,[1-9][0-9]*)*", bounds.text):
        return math.prod(map(int, bounds.text.split(",")))
    topology = settings.get(_TOPOLOGY)
    if not topology or not (shape := re.match("[1-9][0-9]*(x[1-9][0-9]*)+", topology.text)):
        return None
    chips = math.prod(map(int, shape[0].split("x")))
    if chips % count:
        raise ValueError(
            f"{source} lists {count} processes, which does not divide the {chips} chips of {topology.source} "
            f"({topology.text!r}). List every process of this slice once, and no process of another slice."
        )
    return chips // count


def _not_found_message(settings: _Settings, variables: Variables) -> str:
    present = ", ".join(f"{setting.source} is {setting.text!r}" for setting in settings.values()) or "none"
    skipped = f"the server was not queried because {_SKIP} is set (JAX sets it if it finds no TPU chip)"
    result = skipped if _SKIP in variables else f"the server at {metadata_server(variables)} does not have it"
    return (
        f"Found no TPU: the processes are unknown. Searched for {_HOSTS} and {_PROCESSES} in the environment, and for the "
        f"metadata attribute {_ATTRIBUTES[_HOSTS]!r}: {result}. TPU settings found: {present}. Run this on the hosts of a TPU, "
        f"or set {_HOSTS} and TPU_WORKER_ID on each host. Without a TPU, use `jax.distributed.initialize`."
    )


def _from_metadata(server: str, timeout: float) -> _Settings:
    deadline = time.monotonic() + timeout  # of all requests together
    request = lambda attribute: _request_attribute(server, attribute, timeout, deadline)
    settings = {name: _Setting(request(key), f"metadata attribute {key!r}") for name, key in _ATTRIBUTES.items()}
    # Endpoints are hosts, or in an older format `name:id:host`.
    endpoints = settings[_HOSTS]
    parts = [endpoint.split(":") for endpoint in endpoints.text.split(",")]
    if any(len(part) not in (1, 3) for part in parts):
        raise RuntimeError(f"{endpoints.source} must be a list of hosts, or of `name:id:host`, got {endpoints.text!r}.")
    settings[_HOSTS] = endpoints._replace(text=",".join(part[-1] for part in parts))
    # Lines such as MEGASCALE_NUM_SLICES: '2'.
    lines = (line.partition(":") for line in request("tpu-env").splitlines())
    values = {key.strip(): value.strip().strip("'\"") for key, _, value in lines}
    for name, key in _TPU_ENV.items():
        settings[name] = _Setting(values.get(key, ""), f"{key} of metadata attribute 'tpu-env'")
    return {name: setting for name, setting in settings.items() if setting.text}


def _request_attribute(server: str, attribute: str, timeout: float, deadline: float) -> str:
    """Returns the value of a metadata attribute; an empty string if the server does not have it."""
    path = f"/computeMetadata/v1/instance/attributes/{attribute}"
    cause = None
    try:
        status, flavor, text = get_attribute(deadline, server, path)
        if status == 404:
            return ""
        if status == 200 and flavor == "Google":
            return text
        problem = (
            f"Its response has status {status} and `Metadata-Flavor` {flavor!r}; a metadata server returns 'Google'"
        )
    except TimeoutError as error:
        problem, cause = f"No complete response within {timeout:g} seconds, counted from the first request", error
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        problem, cause = f"{type(error).__name__}: {error}", error
    raise RuntimeError(
        f"The request to the metadata server failed: http://{server}{path}. {problem}. The server was queried because the "
        "environment variables do not identify the processes of the TPU. On the hosts of a TPU try again; elsewhere set "
        f"{_HOSTS} and TPU_WORKER_ID on each process, or {_SKIP}=1 to skip the query."
    ) from cause

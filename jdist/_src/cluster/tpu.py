"""The processes of a TPU: who they are, from the environment or from the metadata server of Cloud TPU.

A fact has the name of the environment variable that says it, also when the metadata server does. Where the environment says
who the processes are, the server is not asked.
"""

import dataclasses
import http.client
import math
import os
import re
import time
from collections.abc import Mapping
from typing import NamedTuple

import jax

from jdist._src.cluster.metadata import get_attribute

_PORT = "8482"  # what JAX takes on a TPU; libtpu and Megascale have other ones
_SKIP, _PATH = "TPU_SKIP_MDS_QUERY", "TPU_PROCESS_ADDRESSES_PATH"
_PROCESSES, _HOSTS = "TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"
_IDS = ("TPU_WORKER_ID", "CLOUD_TPU_TASK_ID")
_SLICES = ("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS")
_TYPE, _TOPOLOGY, _BOUNDS = "TPU_ACCELERATOR_TYPE", "TPU_TOPOLOGY", "TPU_CHIPS_PER_PROCESS_BOUNDS"
# The metadata attributes that say the same as a variable, and the rows of the attribute `tpu-env`.
_ATTRIBUTES = {_HOSTS: "worker-network-endpoints", _IDS[0]: "agent-worker-number", _TYPE: "accelerator-type"}
_TPU_ENV = {_TOPOLOGY: "TOPOLOGY"} | {name: name for name in _SLICES}


class _Fact(NamedTuple):
    text: str
    by: str  # who says so, for messages


_Facts = dict[str, _Fact]
_Variables = Mapping[str, str]


@dataclasses.dataclass(frozen=True, init=False)
class TPUClusterResolver:
    """Who the processes of a TPU are: those of one slice, or of several. It looks once, when it is made.

    There is a process a host, and it runs on that host: start the same program on each. The environment is asked first
    (GKE, notebooks, and whoever sets the variables), then the metadata server of the virtual machine. Making one starts no
    JAX backend and opens no connection but to that server.

    Args:
        tpu: None, `""` or `"local"`, which all mean the TPU of this host. A TPU of another host cannot be reached.
        coordinator_address: Where process 0 is to listen, `"host:port"`. Else `JAX_COORDINATOR_ADDRESS`, or the host of
            process 0 with the port `JAX_COORDINATOR_PORT`, or 8482.
        environ: The variables to read; those of this process by default.
        timeout_seconds: How long to wait for the answers of the metadata server, all together.

    Attributes:
        addresses: The processes of this slice in the order of their numbers, as they were found: hosts, some with a port.
        worker_id: The number of this process among them.
        num_slices: How many slices there are.
        slice_id: The number of this one.
        coordinator_address: Where process 0 listens, `"host:port"`: the same on every process.
        accelerator_type: Such as `"v5litepod-16"`, if it is known.
        topology: The chips of this slice, such as `"4x4"`, if it is known.
        chips_per_process: How many chips each process has, if it is known.
        environment: Where it was found: `"variables"`, or `"metadata"` if the server was asked for what those do not say.

    Raises:
        ValueError: Nothing was found; or what was found does not fit together.
        RuntimeError: The metadata server was asked, and gave no answer that can be used.

    Example:
        >>> resolver = TPUClusterResolver(
        ...     environ={"TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2", "TPU_WORKER_ID": "1", "TPU_TOPOLOGY": "2x4"}
        ... )
        >>> resolver.master(), resolver.num_processes, resolver.process_id, resolver.num_accelerators()
        ('10.0.0.1:8482', 2, 1, {'TPU': 4})
        >>> resolver.initialize()  # doctest: +SKIP
    """

    addresses: tuple[str, ...]
    worker_id: int
    num_slices: int
    slice_id: int
    coordinator_address: str
    accelerator_type: str | None
    topology: str | None
    chips_per_process: int | None
    environment: str

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
                f"There is no connecting to the TPU {tpu!r} from elsewhere: JAX runs on its own hosts. Leave out `tpu`, and "
                f"start this program on each of them (`gcloud compute tpus tpu-vm ssh {tpu} --worker=all --command=...`)."
            )
        if not 0 < timeout_seconds < math.inf:
            raise ValueError(f"`timeout_seconds` is a number of seconds above 0, got {timeout_seconds}.")
        variables = os.environ if environ is None else environ
        facts = _from_variables(variables)
        asks = not _say_who(facts) and _SKIP not in variables
        if asks:
            facts = _from_metadata(_server(variables), timeout_seconds) | facts
        addresses, by = _addresses(facts, variables)
        num_slices, slice_id = _slices(facts)
        # The record is frozen, so its fields are put in as a whole.
        vars(self).update(
            addresses=addresses,
            worker_id=_worker_id(facts, len(addresses), by),
            num_slices=num_slices,
            slice_id=slice_id,
            coordinator_address=_coordinator(coordinator_address, facts, variables, addresses[0], num_slices),
            accelerator_type=facts[_TYPE].text if _TYPE in facts else None,
            topology=facts[_TOPOLOGY].text if _TOPOLOGY in facts else None,
            chips_per_process=_chips_per_process(facts, len(addresses), by),
            environment="metadata" if asks else "variables",
        )

    @property
    def num_processes(self) -> int:
        """How many processes there are, in all slices."""
        return self.num_slices * len(self.addresses)

    @property
    def process_id(self) -> int:
        """The number of this process among all, slice by slice: what `jax.process_index()` will be."""
        return self.slice_id * len(self.addresses) + self.worker_id

    @property
    def task_type(self) -> str:
        """`"worker"`: every process of a TPU is one."""
        return "worker"

    @property
    def task_id(self) -> int:
        """`process_id`, as TensorFlow says it."""
        return self.process_id

    def cluster_spec(self) -> dict[str, dict[int, str]]:
        """`{"worker": {process: address}}`. Processes of other slices are not in it: nothing here says their addresses."""
        first = self.slice_id * len(self.addresses)
        return {"worker": dict(enumerate(self.addresses, first))}

    def master(self) -> str:
        """`coordinator_address`, as TensorFlow says it."""
        return self.coordinator_address

    def num_accelerators(self) -> dict[str, int]:
        """How many chips each process has. JAX shows those of v2 and v3 as two devices each.

        Raises:
            RuntimeError: Nothing said it.
        """
        if self.chips_per_process is None:
            raise RuntimeError(
                f"How many chips a process has is said neither by {_TOPOLOGY} nor by {_BOUNDS}. After `initialize()`, ask "
                "`jax.local_device_count()`."
            )
        return {"TPU": self.chips_per_process}

    def initialize(self) -> None:
        """Joins the other processes, unless there are none or it has been done. To be called before JAX is used.

        Raises:
            RuntimeError: A JAX backend was started before; or the others cannot be reached.
        """
        if self.num_processes > 1 and not jax.distributed.is_initialized():
            jax.distributed.initialize(
                self.coordinator_address,
                self.num_processes,
                self.process_id,
                cluster_detection_method="deactivate",  # all is known: JAX need not look for itself
            )


def _from_variables(variables: _Variables) -> _Facts:
    names = (_PATH, _PROCESSES, _HOSTS, *_IDS, *_SLICES, _TYPE, _TOPOLOGY, _BOUNDS)
    facts = {name: _Fact(text, name) for name in names if (text := variables.get(name, "").strip())}
    if path := facts.pop(_PATH, None):
        try:
            with open(path.text, encoding="utf-8") as file:
                facts[_PROCESSES] = _Fact(file.read().strip(), f"{path.text} (of {_PATH})")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{_PATH} is {path.text!r}, which cannot be read: {error}") from error
    return facts


def _say_who(facts: _Facts) -> bool:
    """Whether a process can tell from `facts` who it is. Of one, it need not be told which."""
    processes = facts.get(_PROCESSES) or facts.get(_HOSTS)
    return processes is not None and ("," not in processes.text or any(name in facts for name in _IDS))


def _addresses(facts: _Facts, variables: _Variables) -> tuple[tuple[str, ...], str]:
    """The processes of this slice, and who says so."""
    found = facts.get(_PROCESSES) or facts.get(_HOSTS)
    if found is None:
        raise ValueError(_nothing_found(facts, variables))
    addresses = tuple(address.strip() for address in found.text.split(","))
    if not all(addresses):
        raise ValueError(f"{found.by} is {found.text!r}, where a name is missing. Name each process of the slice.")
    if twice := sorted({address for address in addresses if addresses.count(address) > 1}):
        raise ValueError(f"{found.by} is {found.text!r}, which has {', '.join(twice)} twice. Name each process once.")
    return addresses, found.by


def _worker_id(facts: _Facts, count: int, by: str) -> int:
    # Where several processes share a host, the task is the process, and the worker is the host.
    names = reversed(_IDS) if _PROCESSES in facts else _IDS
    said = next((facts[name] for name in names if name in facts), None)
    return _which(said, count, f"{by} names {count} processes", "TPU_WORKER_ID")


def _slices(facts: _Facts) -> tuple[int, int]:
    """How many slices there are, and which this one is."""
    many = facts.get("MEGASCALE_NUM_SLICES", _Fact("1", "MEGASCALE_NUM_SLICES, which is not set,"))
    count = _number(many)
    if count < 1:
        raise ValueError(f"{many.by} is 0: there is at least one slice.")
    return count, _which(facts.get(_SLICES[1]), count, f"{many.by} means slices: {count}", _SLICES[1])


def _which(fact: _Fact | None, count: int, said: str, variable: str) -> int:
    """Which of `count` this one is; `said` says how many there are, and `variable` is to say which."""
    numbers = f"a number from 0 to {count - 1}"
    if fact is None and count > 1:
        raise ValueError(f"{said}, and nothing says which this one is. Set {variable} on each, {numbers}.")
    if fact is None:
        return 0
    if (number := _number(fact)) >= count:
        raise ValueError(f"{fact.by} is {number}, but {said}: it is {numbers}. Make the two fit.")
    return number


def _number(fact: _Fact) -> int:
    if not re.fullmatch("[0-9]+", fact.text):
        raise ValueError(f"{fact.by} is {fact.text!r}, which is no whole number from 0 on.")
    return int(fact.text)


def _coordinator(chosen: str | None, facts: _Facts, variables: _Variables, first: str, num_slices: int) -> str:
    given = variables.get("JAX_COORDINATOR_ADDRESS") if chosen is None else chosen
    if given:
        if not re.fullmatch(r"([^:\s]+|\[[^\]\s]+\]):[0-9]+", given):
            by = "JAX_COORDINATOR_ADDRESS" if chosen is None else "`coordinator_address`"
            raise ValueError(f"{by} is a host with a port, such as '10.0.0.1:8482', got {given!r}.")
        return given
    leader = facts.get("MEGASCALE_COORDINATOR_ADDRESS")
    if leader is None and num_slices > 1:
        raise ValueError(
            f"There are {num_slices} slices, and nothing says where process 0 is: {first} is the first of this slice "
            "only. Set MEGASCALE_COORDINATOR_ADDRESS to the first host of slice 0, on all."
        )
    port = variables.get("JAX_COORDINATOR_PORT") or _PORT
    if not re.fullmatch("[0-9]+", port):
        raise ValueError(f"JAX_COORDINATOR_PORT is {port!r}, which is no port.")
    host = leader.text if leader else first
    if host.count(":") > 1 and not host.startswith("["):
        return f"[{host}]:{port}"  # IPv6
    # A port that comes with the host is that of something else.
    return re.sub(":[0-9]+$", "", host) + f":{port}"


def _chips_per_process(facts: _Facts, count: int, by: str) -> int | None:
    bounds = facts.get(_BOUNDS)
    if bounds and re.fullmatch("[1-9][0-9]*(,[1-9][0-9]*)*", bounds.text):
        return math.prod(map(int, bounds.text.split(",")))
    topology = facts.get(_TOPOLOGY)
    if not topology or not (shape := re.match("[1-9][0-9]*(x[1-9][0-9]*)+", topology.text)):
        return None
    chips = math.prod(map(int, shape[0].split("x")))
    if chips % count:
        raise ValueError(
            f"{by} names {count} processes, which do not share the {chips} chips equally that {topology.by} says "
            f"({topology.text!r}). Name every process of this slice once, and those of no other slice."
        )
    return chips // count


def _nothing_found(facts: _Facts, variables: _Variables) -> str:
    found = ", ".join(f"{fact.by} is {fact.text!r}" for fact in facts.values()) or "nothing of a TPU"
    skipped = f"it was not asked, since {_SKIP} is set (JAX sets it where it sees no TPU chip)"
    asked = skipped if _SKIP in variables else f"that at {_server(variables)} has none"
    return (
        f"Found no TPU: nothing says who its processes are. Looked for {_HOSTS} and {_PROCESSES} in the environment, and for "
        f"{_ATTRIBUTES[_HOSTS]!r} at the metadata server: {asked}. What there is: {found}. Run this on the hosts of a TPU, or "
        f"set {_HOSTS} and TPU_WORKER_ID on each. Processes without a TPU join by `jax.distributed.initialize`."
    )


def _from_metadata(server: str, timeout: float) -> _Facts:
    deadline = time.monotonic() + timeout  # of all requests together
    ask = lambda attribute: _ask(server, attribute, timeout, deadline)
    said = {name: _Fact(ask(key), f"metadata attribute {key!r}") for name, key in _ATTRIBUTES.items()}
    said[_HOSTS] = _hosts(said[_HOSTS])
    # Rows such as MEGASCALE_NUM_SLICES: '2'.
    rows = (row.partition(":") for row in ask("tpu-env").splitlines())
    values = {row.strip(): value.strip().strip("'\"") for row, _, value in rows}
    for name, row in _TPU_ENV.items():
        said[name] = _Fact(values.get(row, ""), f"{row} of metadata attribute 'tpu-env'")
    return {name: fact for name, fact in said.items() if fact.text}


def _hosts(endpoints: _Fact) -> _Fact:
    """They are hosts, or `name:id:host` each, as they once were."""
    parts = [endpoint.split(":") for endpoint in endpoints.text.split(",")]
    if any(len(part) not in (1, 3) for part in parts):
        raise RuntimeError(f"{endpoints.by} is a list of hosts, or of `name:id:host`, got {endpoints.text!r}.")
    return endpoints._replace(text=",".join(part[-1] for part in parts))


def _server(variables: _Variables) -> str:
    return variables.get("GCE_METADATA_HOST") or variables.get("GCE_METADATA_IP") or "metadata.google.internal"


def _ask(server: str, attribute: str, timeout: float, deadline: float) -> str:
    """What the server says; nothing if it does not know."""
    path = f"/computeMetadata/v1/instance/attributes/{attribute}"
    cause = None
    try:
        status, flavor, text = get_attribute(deadline, server, path)
        if status == 404:
            return ""
        if status == 200 and flavor == "Google":
            return text
        wrong = f"It answered {status}, with {flavor!r} where a metadata server says 'Google' in `Metadata-Flavor`"
    except TimeoutError as error:
        wrong, cause = f"It gave no complete answer within {timeout:g} seconds, counted from the first request", error
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        wrong, cause = f"{type(error).__name__}: {error}", error
    raise RuntimeError(
        f"The metadata server was asked for http://{server}{path}, since the environment does not say who the processes of the "
        f"TPU are. {wrong}. On the hosts of a TPU try again; elsewhere set {_HOSTS} and TPU_WORKER_ID on each process, or "
        f"{_SKIP}=1 so that it is not asked."
    ) from cause

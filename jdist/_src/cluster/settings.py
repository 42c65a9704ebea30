"""Checks of settings that several resolvers read: addresses, integers, and ports derived from a job."""

import re
import zlib
from collections.abc import Mapping, Sequence

from jdist._src.core.tree import one_line

Variables = Mapping[str, str]
COORDINATOR_VARIABLES = ("JDIST_COORDINATOR_ADDRESS", "JAX_COORDINATOR_ADDRESS")
DEFAULT_PORT = 8476  # where process 0 listens, if nothing identifies the job


def check_coordinator(address: str, source: str) -> str:
    """Returns `address`. An address that is not a host with a port is a ValueError that names `source`."""
    match = re.fullmatch(r"(?:[^:\s]+|\[[^\]\s]+\]):([0-9]+)", address)
    if not match:
        raise ValueError(f"{source} must be a host with a port, such as '10.0.0.1:8476', got {one_line(address)}.")
    if not 0 < int(match[1]) < 65536:
        raise ValueError(f"{source} is {address!r}, but a port is a number from 1 to 65535. Correct the port.")
    return address


def with_port(host: str, port: int) -> str:
    """Returns `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def coordinator_override(argument: str | None, variables: Variables) -> str | None:
    """Returns the address of process 0 that the user has set: the argument, or a variable of jdist or of JAX."""
    if argument is not None:
        return check_coordinator(argument, "`coordinator_address`")
    for name in COORDINATOR_VARIABLES:
        if address := variables.get(name, "").strip():
            return check_coordinator(address, name)
    return None


def read_integer(variables: Variables, name: str, minimum: int = 0) -> int:
    """Returns the variable `name`, which is set, as an integer of at least `minimum`."""
    text = variables[name].strip()
    if not re.fullmatch("[0-9]+", text) or int(text) < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {text!r}.")
    return int(text)


def check_index(index: int, index_name: str, count: int, count_name: str) -> int:
    """Returns `index`. An index of `count` or more is a ValueError that names both variables."""
    if index >= count:
        raise ValueError(
            f"{index_name} is {index}, but {count_name} is {count}: the index must be from 0 to {count - 1}. Correct one of "
            "them."
        )
    return index


def missing(variables: Variables, names: Sequence[str]) -> list[str]:
    """Returns the `names` that are not set. An empty variable is not set."""
    return [name for name in names if not variables.get(name, "").strip()]


def check_complete(variables: Variables, names: Sequence[str], advice: str) -> None:
    """Raises ValueError if some of `names` are not set, with their names and the values of the others."""
    if absent := missing(variables, names):
        present = ", ".join(f"{name} is {variables[name]!r}" for name in names if name not in absent)
        raise ValueError(f"{present}, but {', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not set. {advice}")


def port_of_job(job: str) -> int:
    """Returns a port that depends on the job only, so that the jobs of one host rarely choose the same port.

    It is above Linux's ephemeral ports (32768 to 60999), and 256 ports follow it.
    """
    return 61440 + zlib.crc32(job.encode()) % 3840


def unknown_addresses(count: int, coordinator: str) -> dict[str, dict[int, str | None]]:
    """Returns the cluster spec of `count` workers with the address of the first only."""
    return {"worker": {index: None if index else coordinator for index in range(count)}}

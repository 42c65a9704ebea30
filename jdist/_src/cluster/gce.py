"""The instances of an instance group of Google Compute Engine, from the metadata server and the Compute Engine API.

Both are plain HTTP: an instance has a metadata server, which returns a token for the API, so no client library and no
credentials are needed.
"""

import contextlib
import http.client
import json
import os
import re
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any, ClassVar

from jdist._src.cluster.metadata import get_attribute, metadata_server
from jdist._src.cluster.polling import poll
from jdist._src.cluster.resolver import ClusterNotFoundError
from jdist._src.cluster.settings import coordinator_override, with_port
from jdist._src.cluster.simple import SimpleClusterResolver

_MAX_BYTES = 1 << 26


class GCEClusterResolver(SimpleClusterResolver):
    """The instances of a zonal instance group of Google Compute Engine, one process per instance, ordered by name.

    The constructor sends requests to the metadata server of this instance, and to the Compute Engine API with the token of the
    service account. It returns when all instances of the group run.

    Args:
        instance_group: The name of the group; default: the managed group that created this instance.
        project: The project of the group; default: the project of this instance.
        zone: The zone of the group; default: the zone of this instance.
        port: The port where process 0 listens.
        coordinator_address: The `"host:port"` where process 0 listens. Default: `JAX_COORDINATOR_ADDRESS`, or the first
            instance.
        timeout_seconds: The time limit until all instances run.
        api: The address of the Compute Engine API.
        environ: The environment variables to read; default: `os.environ`.

    Raises:
        ClusterNotFoundError: This process is not on an instance of Compute Engine.
        ValueError: The group is unknown, is regional, or does not have this instance.
        RuntimeError: An instance does not run, or a request failed.

    Example:
        >>> from jdist.cluster import GCEClusterResolver
        >>> resolver = GCEClusterResolver("workers")  # doctest: +SKIP
        >>> resolver.initialize()  # doctest: +SKIP
    """

    _source: ClassVar[str] = "the instance group"

    def __init__(
        self,
        instance_group: str | None = None,
        *,
        project: str | None = None,
        zone: str | None = None,
        port: int = 8476,
        coordinator_address: str | None = None,
        timeout_seconds: float = 300.0,
        api: str = "https://compute.googleapis.com",
        environ: Mapping[str, str] | None = None,
    ):
        variables = os.environ if environ is None else environ
        server = metadata_server(variables)
        name = _metadata(server, "instance/name")
        project = project or _metadata(server, "project/project-id")
        zone = zone or _metadata(server, "instance/zone").rsplit("/", 1)[-1]
        group = instance_group or _own_group(server)
        url = f"{api}/compute/v1/projects/{project}/zones/{zone}"
        hosts = poll(lambda deadline: _request_hosts(server, url, group, deadline), timeout_seconds)
        if name not in hosts:
            raise ValueError(
                f"This instance is {name!r}, which is not in the instance group {group!r} of {project}/{zone}: "
                f"{', '.join(hosts)}. Correct `instance_group`."
            )
        super().__init__(
            {"worker": [with_port(host, port) for host in hosts.values()]},
            task_type="worker",
            task_id=list(hosts).index(name),
            environment="api",
            coordinator_address=coordinator_override(coordinator_address, variables),
        )


def _metadata(server: str, attribute: str, *, default: str | None = None) -> str:
    path, seconds = f"/computeMetadata/v1/{attribute}", 5.0
    try:
        status, flavor, text = get_attribute(time.monotonic() + seconds, server, path)
    except TimeoutError as error:
        raise RuntimeError(f"No response within {seconds:g} seconds: http://{server}{path}. Try again.") from error
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        raise ClusterNotFoundError(
            f"This process is not on an instance of Google Compute Engine: the request to http://{server}{path} failed "
            f"({type(error).__name__}: {error}). Elsewhere, use another resolver."
        ) from error
    if status == 404 and default is not None:
        return default
    if status != 200 or flavor != "Google":
        raise RuntimeError(
            f"The metadata server returned status {status} and `Metadata-Flavor` {flavor!r} for http://{server}{path}, "
            "expected 200 and 'Google'. Test the address with `curl`."
        )
    return text


def _own_group(server: str) -> str:
    created_by = _metadata(server, "instance/attributes/created-by", default="")
    match = re.search("/zones/[^/]+/instanceGroupManagers/([^/]+)$", created_by)
    if not match:
        regional = f": it was created by {created_by!r}" if created_by else ""
        raise ValueError(
            f"This instance is not in a zonal managed instance group{regional}. Pass `instance_group`, the name of a group in "
            "one zone."
        )
    return match[1]


def _request_hosts(server: str, url: str, group: str, deadline: float) -> tuple[dict[str, str], Exception | None]:
    """Returns the addresses of the instances of the group by name, ordered by name, and the error if one does not run yet."""
    seconds = max(deadline - time.monotonic(), 1.0)
    token = json.loads(_metadata(server, "instance/service-accounts/default/token"))["access_token"]
    instances = _request_all(
        f"{url}/instanceGroups/{group}/listInstances", token, seconds, body={"instanceState": "ALL"}
    )
    states = {item["instance"].rsplit("/", 1)[-1]: item["status"] for item in instances}
    if not states:
        return {}, ValueError(f"The instance group {group!r} has no instances ({url}). Correct `instance_group`.")
    if waiting := [f"{name} is {state}" for name, state in sorted(states.items()) if state != "RUNNING"]:
        return {}, RuntimeError(
            f"{len(waiting)} of {len(states)} instances of the group {group!r} do not run: {', '.join(waiting)}. Start them, "
            "or pass a larger `timeout_seconds`."
        )
    fields = "items(name,networkInterfaces(networkIP)),nextPageToken"
    items = _request_all(f"{url}/instances?fields={urllib.parse.quote(fields)}", token, seconds)
    addresses = {item["name"]: item["networkInterfaces"][0]["networkIP"] for item in items if item["name"] in states}
    if absent := sorted(states.keys() - addresses.keys()):  # deleted in between
        return {}, RuntimeError(
            f"The instances {', '.join(absent)} of the group {group!r} do not exist any more. Try again."
        )
    return dict(sorted(addresses.items())), None


def _request_all(url: str, token: str, seconds: float, body: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Returns the items of all pages of a list."""
    items: list[dict[str, Any]] = []
    page = ""
    while True:
        separator = "&" if "?" in url else "?"
        response = _request(f"{url}{separator}maxResults=500{page}", token, seconds, body)
        items += response.get("items", [])
        if "nextPageToken" not in response:
            return items
        page = f"&pageToken={urllib.parse.quote(response['nextPageToken'])}"


def _request(url: str, token: str, seconds: float, body: dict[str, str] | None) -> dict[str, Any]:
    parts = urllib.parse.urlsplit(url)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    try:
        # Not `urllib`, which would send the token to the target of a redirect.
        with contextlib.closing(connect(parts.netloc, timeout=seconds)) as connection:
            text = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", f"{parts.path}?{parts.query}", text, headers)
            response = connection.getresponse()
            status, content = response.status, response.read(_MAX_BYTES).decode()
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        raise RuntimeError(f"The request to {url} failed: {type(error).__name__}: {error}. Try again.") from error
    if status != 200:
        advice = {
            403: "Give the service account of the instance the role `roles/compute.viewer`, and the instance the scope "
            "`compute-ro`.",
            404: "Correct the project, the zone and `instance_group`.",
        }.get(status, "Try again.")
        raise RuntimeError(
            f"The Compute Engine API returned status {status} for {url}: {' '.join(content.split())[:300]} {advice}"
        )
    return json.loads(content)

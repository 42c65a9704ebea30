"""Google Compute Engine: instance groups from a metadata server and an API on the loopback interface, and errors."""

import json
import socket
import urllib.parse

import pytest

from jdist.cluster import ClusterNotFoundError, GCEClusterResolver

from http_servers import http_server

ATTRIBUTES = {
    "instance/name": "worker-b",
    "instance/zone": "projects/123/zones/us-central1-a",
    "project/project-id": "proj",
    "instance/attributes/created-by": "projects/123/zones/us-central1-a/instanceGroupManagers/workers",
    "instance/service-accounts/default/token": '{"access_token": "secret", "expires_in": 3599}',
}
ADDRESSES = {"worker-c": "10.0.0.3", "worker-a": "10.0.0.1", "worker-b": "10.0.0.2", "other": "10.0.0.9"}


def listed(*states):
    instances = [f"https://host/zones/z/instances/worker-{name}" for name in "cab"]
    return [{"instance": name, "status": state} for name, state in zip(instances, states, strict=True)]


class Server:
    """A metadata server and an API in one, with a log of the requests."""

    def __init__(self):
        self.attributes = dict(ATTRIBUTES)
        self.flavor = "Google"
        self.groups = [listed("RUNNING", "RUNNING", "RUNNING")]  # one answer per request; the last one again and again
        self.addresses = dict(ADDRESSES)
        self.status, self.page_size = 200, 100
        self.requests = []

    def answer(self, request):
        status, text = self.contents(request)
        return status, {"Metadata-Flavor": self.flavor} if self.flavor else {}, text.encode()

    def contents(self, request):
        url = urllib.parse.urlsplit(request.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        if url.path.startswith("/computeMetadata/v1/"):
            attribute = url.path.removeprefix("/computeMetadata/v1/")
            value = self.attributes.get(attribute)
            return (404, "") if value is None else (200, value)
        self.requests.append((request.command, url.path, request.body))
        assert request.headers["Authorization"] == "Bearer secret"
        if self.status != 200:
            return self.status, '{"error": {"message":\n "denied"}}'
        if url.path.endswith("/listInstances"):
            items = self.groups.pop(0) if len(self.groups) > 1 else self.groups[0]
        else:
            items = [{"name": n, "networkInterfaces": [{"networkIP": ip}]} for n, ip in self.addresses.items()]
        first = int(query.get("pageToken", 0))
        page = {"items": items[first : first + self.page_size]} if items else {}
        end = first + self.page_size
        return 200, json.dumps(page | ({"nextPageToken": str(end)} if end < len(items) else {}))


@pytest.fixture
def server():
    """A running server; `server.host` is its address."""
    fake = Server()
    with http_server(fake.answer) as fake.host:
        yield fake


def make_resolver(server, *args, environ=(), **options):
    defaults = {"api": f"http://{server.host}", "timeout_seconds": 0}
    return GCEClusterResolver(*args, environ={"GCE_METADATA_HOST": server.host} | dict(environ), **defaults | options)


def test_instances_of_the_group_are_processes_in_the_order_of_their_names(server):
    resolver = make_resolver(server)
    assert resolver.cluster_spec() == {"worker": {0: "10.0.0.1:8476", 1: "10.0.0.2:8476", 2: "10.0.0.3:8476"}}
    assert (resolver.process_id, resolver.num_processes, resolver.master()) == (1, 3, "10.0.0.1:8476")
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("worker", 1, "api")
    zone = "/compute/v1/projects/proj/zones/us-central1-a"
    assert server.requests == [
        ("POST", f"{zone}/instanceGroups/workers/listInstances", '{"instanceState": "ALL"}'),
        ("GET", f"{zone}/instances", ""),
    ]


def test_arguments_replace_the_project_zone_group_and_port(server):
    resolver = make_resolver(server, "group", project="p", zone="z", port=5, environ={"JAX_COORDINATOR_ADDRESS": "a:1"})
    assert resolver.cluster_spec()["worker"][0] == "10.0.0.1:5"
    assert resolver.master() == "a:1"
    assert server.requests[0][1] == "/compute/v1/projects/p/zones/z/instanceGroups/group/listInstances"


def test_all_pages_of_the_instances_are_requested(server):
    server.page_size = 1
    assert make_resolver(server).num_processes == 3
    assert len(server.requests) == 3 + 4


def test_instances_that_do_not_run_yet_are_requested_again(server):
    server.groups = [listed("RUNNING", "STAGING", "RUNNING"), [], *server.groups]
    assert make_resolver(server, timeout_seconds=60).num_processes == 3


@pytest.mark.parametrize("change, kind, message", [
    ({"groups": [listed("RUNNING", "STAGING", "TERMINATED")]}, RuntimeError, r"2 of 3 instances of the group 'workers' do not run: worker-a is STAGING, worker-b is TERMINATED"),
    ({"groups": [[]]}, ValueError, r"The instance group 'workers' has no instances \(http://.*\)\. Correct `instance_group`"),
    ({"addresses": {"worker-a": "1"}}, RuntimeError, r"The instances worker-b, worker-c of the group 'workers' do not exist any more"),
    ({"attributes": ATTRIBUTES | {"instance/name": "x"}}, ValueError, r"This instance is 'x', which is not in the instance group 'workers' of proj/us-central1-a: worker-a, worker-b, worker-c"),
    ({"attributes": {k: v for k, v in ATTRIBUTES.items() if "created" not in k}}, ValueError, r"not in a zonal managed instance group\. Pass `instance_group`"),
    ({"attributes": ATTRIBUTES | {"instance/attributes/created-by": "projects/1/regions/r/instanceGroupManagers/g"}}, ValueError, r"not in a zonal managed instance group: it was created by 'projects/1/regions/r"),
    ({"attributes": {}}, RuntimeError, r"metadata server returned status 404 and `Metadata-Flavor` 'Google' for http://.*/instance/name, expected 200"),
    ({"flavor": None}, RuntimeError, r"metadata server returned status 200 and `Metadata-Flavor` None"),
    ({"status": 403}, RuntimeError, r"API returned status 403 for http://.*denied.* Give the service account of the instance the role `roles/compute\.viewer`"),
    ({"status": 404}, RuntimeError, r"API returned status 404 .* Correct the project, the zone and `instance_group`"),
    ({"status": 500}, RuntimeError, r"API returned status 500 .* Try again"),
])  # fmt: skip
def test_group_that_is_not_the_cluster_is_an_error(server, change, kind, message):
    vars(server).update(change)
    with pytest.raises(kind, match=message):
        make_resolver(server)


@pytest.mark.parametrize("variable", ["GCE_METADATA_HOST", "GCE_METADATA_IP"])
def test_host_without_a_metadata_server_is_not_found(variable):
    environ = {variable: "127.0.0.1:1"}
    with pytest.raises(
        ClusterNotFoundError, match=r"not on an instance of Google Compute Engine: .*127\.0\.0\.1:1.*Connection refused"
    ):
        GCEClusterResolver(environ=environ)


def test_api_that_cannot_be_reached_is_an_error(server):
    with pytest.raises(RuntimeError, match=r"The request to http://127\.0\.0\.1:1/.* failed: ConnectionRefusedError"):
        make_resolver(server, api="http://127.0.0.1:1")


@pytest.mark.slow
def test_metadata_server_that_does_not_answer_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        environ = {"GCE_METADATA_HOST": f"127.0.0.1:{listener.getsockname()[1]}"}
        with pytest.raises(
            RuntimeError, match=r"No response within 5 seconds: http://127\.0\.0\.1:.*/instance/name\. Try again"
        ):
            GCEClusterResolver(environ=environ)

"""The processes of a TPU from variables and from a metadata server on the loopback interface, and errors."""

import concurrent.futures
import contextlib
import dataclasses
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import time

import hypothesis
import hypothesis.strategies as st
import jax
import pytest
from jax.experimental import multihost_utils

import jdist
from jdist.cluster import ClusterResolver, TPUClusterResolver

from http_servers import http_server
from laws import each_row

few = hypothesis.settings(max_examples=100, deadline=None, derandomize=True, database=None)
SKIP = "TPU_SKIP_MDS_QUERY"
TWO = {"TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2", "TPU_WORKER_ID": "1"}
SLICES = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "first:8080"}
POD = {
    "worker-network-endpoints": "10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4",
    "agent-worker-number": "2",
    "accelerator-type": "v5litepod-16",
    "tpu-env": "ACCELERATOR_TYPE: 'v5litepod-16'\nALT: 'false'\nTOPOLOGY: '4x4'\nWORKER_ID: '2'\nWRAP: 'a:b'\nUID: ''\n",
}


def make_resolver(*settings, **options):
    """Returns the resolver of a process with these variables only, which does not query a server."""
    return TPUClusterResolver(
        environ={SKIP: "1"} | {k: v for setting in settings for k, v in setting.items()}, **options
    )


class Server:
    """A metadata server with attributes, a log of its requests, and optional wrong statuses, flavor or delay."""

    def __init__(self, attributes, statuses=(), flavor="Google", delay=0):
        self.attributes, self.statuses, self.flavor, self.delay = attributes, list(statuses), flavor, delay
        self.requests = []

    def answer(self, request):
        time.sleep(self.delay)
        attribute = request.path.removeprefix("/computeMetadata/v1/instance/attributes/")
        self.requests.append((attribute, request.headers["Metadata-Flavor"]))
        value = self.attributes.get(attribute)
        status = self.statuses.pop(0) if self.statuses else 404 if value is None else 200
        headers = {"Metadata-Flavor": self.flavor} if self.flavor else {}
        return status, headers, value if isinstance(value, bytes) else (value or "").encode()


@pytest.fixture
def metadata():
    """Starts metadata servers, and returns each with the environment variables that contain its address."""
    with contextlib.ExitStack() as stack:

        def start(*args, **kwargs):
            server = Server(*args, **kwargs)
            return server, {"GCE_METADATA_HOST": stack.enter_context(http_server(server.answer))}

        yield start


# Laws


@st.composite
def clusters(draw):
    """Slices with the same number of hosts: the number of slices, and the variables of every process in order."""
    hosts, slices = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    port = draw(st.sampled_from(["", ":8471"]))
    leader = draw(st.sampled_from(["s0-h0", "s0-h0:8080"]))
    number = draw(st.sampled_from(["TPU_WORKER_ID", "CLOUD_TPU_TASK_ID"]))
    names = draw(st.sampled_from(["TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"]))
    several = {"MEGASCALE_NUM_SLICES": str(slices), "MEGASCALE_COORDINATOR_ADDRESS": leader} if slices > 1 else {}
    return slices, [
        {names: ",".join(f"s{s}-h{h}{port}" for h in range(hosts)), number: str(worker)}
        | (several | {"MEGASCALE_SLICE_ID": str(s)} if several else {})
        for s in range(slices)
        for worker in range(hosts)
    ]


@few
@hypothesis.given(clusters())
def test_processes_of_all_slices_are_numbered_once_and_agree_on_the_coordinator(cluster):
    slices, processes = cluster
    resolvers = [make_resolver(process) for process in processes]
    assert (
        [resolver.process_id for resolver in resolvers]
        == [resolver.task_id for resolver in resolvers]
        == list(range(len(processes)))
    )
    assert {resolver.num_processes for resolver in resolvers} == {len(processes)}
    assert {resolver.num_slices for resolver in resolvers} == {slices}
    assert (
        {resolver.coordinator_address for resolver in resolvers}
        == {resolver.master() for resolver in resolvers}
        == {"s0-h0:8482"}
    )


@few
@hypothesis.given(clusters())
def test_specs_of_the_slices_together_are_the_spec_of_the_cluster(cluster):
    _, processes = cluster
    resolvers = [make_resolver(process) for process in processes]
    addresses = {}
    for resolver in resolvers:
        addresses |= resolver.cluster_spec()[resolver.task_type]
        assert resolver.cluster_spec()["worker"][resolver.task_id] == resolver.addresses[resolver.worker_id]
    assert sorted(addresses) == list(range(len(processes)))
    assert len(set(addresses.values())) == len(processes)


@few
@hypothesis.given(clusters(), st.data())
def test_process_without_an_index_is_an_error_if_there_are_several(cluster, data):
    slices, processes = cluster
    process = data.draw(st.sampled_from(processes))
    variables = {k: v for k, v in process.items() if k not in ("TPU_WORKER_ID", "CLOUD_TPU_TASK_ID")}
    if len(processes) == slices:
        assert make_resolver(variables) == make_resolver(process)
    else:
        with pytest.raises(
            ValueError, match=rf"lists {len(processes) // slices} processes, but the index of this one is not set"
        ):
            make_resolver(variables)


# The environment


def test_resolver_implements_the_protocol():
    assert isinstance(make_resolver(TWO), ClusterResolver)


def test_resolver_is_a_frozen_record_that_compares_by_value_and_pickles():
    resolver = make_resolver(TWO)
    assert pickle.loads(pickle.dumps(resolver)) == resolver == make_resolver(TWO)
    assert hash(resolver) == hash(make_resolver(TWO))
    assert resolver != make_resolver(TWO, {"TPU_WORKER_ID": "0"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolver.worker_id = 0


def test_resolver_reads_the_variables_of_the_process_once(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("TPU_", "CLOUD_TPU_", "MEGASCALE_", "JAX_COORD"))]:
        monkeypatch.delenv(name)
    for name, value in TWO.items():
        monkeypatch.setenv(name, value)
    resolver = TPUClusterResolver()
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    assert (resolver.process_id, TPUClusterResolver().process_id) == (1, 0)
    assert resolver.environment == "variables"


ONE_HOST = {"TPU_PROCESS_ADDRESSES": "localhost:8476,localhost:8477", "CLOUD_TPU_TASK_ID": "1", "TPU_WORKER_ID": "0"}
WITH_COORDINATOR = TWO | SLICES | {"JAX_COORDINATOR_ADDRESS": "b:2", "JAX_COORDINATOR_PORT": "7"}


@each_row("variables, options, expected", [
    (TWO, {"tpu": None}, {"process_id": 1, "num_slices": 1, "slice_id": 0, "task_type": "worker"}),
    (TWO, {"tpu": ""}, {"process_id": 1}),
    (TWO, {"tpu": "local"}, {"process_id": 1}),
    (TWO | {"CLOUD_TPU_TASK_ID": "0"}, {}, {"process_id": 1}),  # TPU_WORKER_ID has priority if hosts are listed
    (
        TWO | {"TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_TOPOLOGY": "2x4"}, {},
        {"accelerator_type": "v5litepod-8", "topology": "2x4"},
    ),
    (
        {"TPU_WORKER_HOSTNAMES": "localhost"} | ONE_HOST, {},
        {"process_id": 1, "num_processes": 2, "coordinator_address": "localhost:8482"},
    ),
    (  # a notebook
        {"TPU_PROCESS_ADDRESSES": "local", "CLOUD_TPU_TASK_ID": "0"}, {}, {"process_id": 0, "num_processes": 1},
    ),
    # The port of the host is not that of the coordinator.
    ({"TPU_WORKER_HOSTNAMES": "h"}, {}, {"coordinator_address": "h:8482"}),
    ({"TPU_WORKER_HOSTNAMES": "h:1"}, {}, {"coordinator_address": "h:8482"}),
    ({"TPU_WORKER_HOSTNAMES": "fd00::1"}, {}, {"coordinator_address": "[fd00::1]:8482"}),
    ({"TPU_WORKER_HOSTNAMES": "[fd00::1]:1"}, {}, {"coordinator_address": "[fd00::1]:8482"}),
    ({"TPU_WORKER_HOSTNAMES": "[::1]"}, {}, {"coordinator_address": "[::1]:8482"}),
    # The most explicit setting of the coordinator has priority.
    (TWO | SLICES | {"JAX_COORDINATOR_PORT": "7"}, {}, {"coordinator_address": "first:7"}),
    (WITH_COORDINATOR, {}, {"coordinator_address": "b:2"}),
    (WITH_COORDINATOR, {"coordinator_address": "[::1]:3"}, {"coordinator_address": "[::1]:3"}),
])  # fmt: skip
def test_variables_and_arguments_determine_the_attributes(variables, options, expected):
    resolver = make_resolver(variables, **options)
    assert {name: getattr(resolver, name) for name in expected} == expected


@each_row("variables, chips", [
    ({"TPU_TOPOLOGY": "2x4"}, 4),
    ({"TPU_TOPOLOGY": "2x2x2"}, 4),
    ({"TPU_TOPOLOGY": "4x4x8_untwisted"}, 64),
    ({"TPU_TOPOLOGY": "2x4", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1"}, 1),
    ({"TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1"}, 4),
    ({}, None),
    ({"TPU_TOPOLOGY": "twisted"}, None),
    ({"TPU_TOPOLOGY": "0x4"}, None),
    ({"TPU_TOPOLOGY": " "}, None),
])  # fmt: skip
def test_chips_per_process_come_from_the_bounds_or_the_topology_or_are_an_error(variables, chips):
    resolver = make_resolver(TWO, variables)
    if chips is None:
        with pytest.raises(
            RuntimeError, match=r"neither TPU_TOPOLOGY nor .* is set.*use `jax\.local_device_count\(\)`"
        ):
            resolver.num_accelerators()
    else:
        assert resolver.num_accelerators() == {"TPU": chips}


def test_addresses_in_a_file_have_priority(tmp_path):
    file = tmp_path / "addresses"
    file.write_text("a:1,b:1,c:1\n")
    assert make_resolver(TWO, {"TPU_PROCESS_ADDRESSES_PATH": str(file)}).addresses == ("a:1", "b:1", "c:1")


@pytest.mark.parametrize(
    "content, message", [(b"", "a name is empty"), (b"\xff", "cannot be read"), (None, "cannot be")]
)
def test_file_without_addresses_is_an_error_with_its_path(tmp_path, content, message):
    file = tmp_path / "addresses"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=f"TPU_PROCESS_ADDRESSES_PATH.*{message}") as error:
        make_resolver(TWO, {"TPU_PROCESS_ADDRESSES_PATH": str(file)})
    assert str(file) in str(error.value)


# Errors


@each_row("variables, options, message", [
    *(({"TPU_WORKER_ID": text}, {}, f"TPU_WORKER_ID must be an integer >= 0, got '{text}'") for text in ("-1", "one", "1.0", "٣")),
    ({"TPU_WORKER_ID": "2"}, {}, "TPU_WORKER_ID is 2, but TPU_WORKER_HOSTNAMES lists 2 processes: it must be an integer from 0 to 1"),
    ({"TPU_WORKER_ID": ""}, {}, "TPU_WORKER_HOSTNAMES lists 2 processes, but the index of this one is not set. Set TPU_WORKER_ID on each"),
    ({"TPU_WORKER_HOSTNAMES": "a,,b"}, {}, "TPU_WORKER_HOSTNAMES is 'a,,b': a name is empty"),
    ({"TPU_WORKER_HOSTNAMES": "a,b,"}, {}, "TPU_WORKER_HOSTNAMES is 'a,b,': a name is empty"),
    ({"TPU_WORKER_HOSTNAMES": "a,b,c, b,a"}, {}, "TPU_WORKER_HOSTNAMES is 'a,b,c, b,a', which has duplicates: a, b"),
    ({"TPU_WORKER_HOSTNAMES": "a,b,c", "TPU_TOPOLOGY": "4x4"}, {}, r"lists 3 processes.* 16 chips of TPU_TOPOLOGY \('4x4'\)"),
    (SLICES | {"MEGASCALE_NUM_SLICES": "0"}, {}, "MEGASCALE_NUM_SLICES is 0, but must be at least 1"),
    (SLICES | {"MEGASCALE_NUM_SLICES": "two"}, {}, "MEGASCALE_NUM_SLICES must be an integer >= 0, got 'two'"),
    (SLICES | {"MEGASCALE_SLICE_ID": "2"}, {}, "MEGASCALE_SLICE_ID is 2, but MEGASCALE_NUM_SLICES is 2: .* 0 to 1"),
    (SLICES | {"MEGASCALE_NUM_SLICES": ""}, {}, r"MEGASCALE_SLICE_ID is 1, but MEGASCALE_NUM_SLICES \(not set\) is 1"),
    (SLICES | {"MEGASCALE_SLICE_ID": ""}, {}, "MEGASCALE_NUM_SLICES is 2, but the index of this one is not set.*MEGASCALE_SLICE_ID"),
    (SLICES | {"MEGASCALE_COORDINATOR_ADDRESS": ""}, {}, "2 slices, but the host of process 0 is not set: 10.0.0.1 is only the first"),
    ({"JAX_COORDINATOR_PORT": "http"}, {}, "JAX_COORDINATOR_PORT must be a port number, got 'http'"),
    ({"JAX_COORDINATOR_ADDRESS": "10.0.0.1"}, {}, "JAX_COORDINATOR_ADDRESS must be a host with a port.*got '10.0.0.1'"),
    ({"JAX_COORDINATOR_ADDRESS": "::1:80"}, {}, "JAX_COORDINATOR_ADDRESS must be a host with a port.*got '::1:80'"),
    *(
        ({}, {"coordinator_address": text}, f"`coordinator_address` must be a host with a port.*got '{text}'")
        for text in ("10.0.0.1", "a:b", ":80", "http://a:80")
    ),
    *(
        ({}, {"timeout_seconds": value}, f"`timeout_seconds` must be a finite number > 0, got {value}")
        for value in (0, -1, float("inf"), float("nan"))
    ),
    ({}, {"tpu": "pod"}, "Cannot connect to the TPU 'pod'.*gcloud compute tpus tpu-vm ssh pod --worker=all"),
    (
        {"TPU_WORKER_HOSTNAMES": "", "TPU_WORKER_ID": ""}, {},
        r"(?s)Found no TPU.*Searched for TPU_WORKER_HOSTNAMES and TPU_PROCESS_ADDRESSES"
        r"(?=.*the server was not queried because TPU_SKIP_MDS_QUERY is set)(?=.*TPU settings found: none\.)"
        "(?=.*set TPU_WORKER_HOSTNAMES and TPU_WORKER_ID on each)",
    ),
    (
        {"TPU_WORKER_HOSTNAMES": "", "TPU_WORKER_ID": "3", "TPU_TOPOLOGY": "2x2"}, {},
        "TPU settings found: TPU_WORKER_ID is '3', TPU_TOPOLOGY is '2x2'",
    ),
])  # fmt: skip
def test_wrong_variables_and_arguments_are_errors_with_their_names(variables, options, message):
    with pytest.raises(ValueError, match=message):
        make_resolver(TWO, variables, **options)


# The metadata server


def test_metadata_contain_the_processes(metadata):
    server, variables = metadata(POD)
    resolver = TPUClusterResolver(environ=variables)
    assert resolver.cluster_spec() == {"worker": {0: "10.0.0.1", 1: "10.0.0.2", 2: "10.0.0.3", 3: "10.0.0.4"}}
    assert (resolver.process_id, resolver.num_processes, resolver.master()) == (2, 4, "10.0.0.1:8482")
    assert (resolver.accelerator_type, resolver.topology) == ("v5litepod-16", "4x4")
    assert (resolver.num_accelerators(), resolver.environment) == ({"TPU": 4}, "metadata")
    assert {flavor for _, flavor in server.requests} == {"Google"}
    assert sorted(attribute for attribute, _ in server.requests) == sorted(POD)


def test_metadata_of_several_slices_match_the_variables(metadata):
    lines = "".join(f"{name}: '{value}'\n" for name, value in SLICES.items())
    _, variables = metadata(POD | {"tpu-env": POD["tpu-env"] + lines})
    resolver = TPUClusterResolver(environ=variables)
    expected = make_resolver({"TPU_WORKER_HOSTNAMES": POD["worker-network-endpoints"], "TPU_WORKER_ID": "2"}, SLICES)
    assert (resolver.process_id, resolver.num_processes, resolver.num_slices, resolver.slice_id) == (6, 8, 2, 1)
    assert (resolver.cluster_spec(), resolver.coordinator_address) == (
        expected.cluster_spec(),
        expected.coordinator_address,
    )
    assert resolver.coordinator_address == "first:8482"


@pytest.mark.parametrize("variables", [TWO, {"TPU_WORKER_HOSTNAMES": "localhost"}, {"TPU_PROCESS_ADDRESSES": "local"}])
def test_metadata_server_is_not_queried_if_the_variables_identify_the_process(metadata, variables):
    server, address = metadata(POD)
    assert TPUClusterResolver(environ=variables | address).environment == "variables"
    assert not server.requests


HOSTS = ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4")
OLDER = "a:0:10.0.0.1,b:1:10.0.0.2,c:2:10.0.0.3,d:3:10.0.0.4"  # a name and a number before the host


@each_row("attributes, variables, expected", [
    (POD | {"worker-network-endpoints": OLDER}, {}, (HOSTS, 2, "4x4")),
    ({name: POD[name] for name in ("worker-network-endpoints", "agent-worker-number")}, {}, (HOSTS, 2, None)),
    (POD, {"TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_TOPOLOGY": "2x2x4"}, (("a", "b", "c", "d"), 2, "2x2x4")),
])  # fmt: skip
def test_metadata_may_be_older_or_incomplete_and_complete_the_variables(metadata, attributes, variables, expected):
    _, address = metadata(attributes)
    resolver = TPUClusterResolver(environ=address | variables)
    assert (resolver.addresses, resolver.process_id, resolver.topology) == expected


def test_metadata_requests_do_not_use_a_proxy(metadata, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    _, variables = metadata(POD)
    assert TPUClusterResolver(environ=variables).process_id == 2


def test_request_to_a_busy_server_is_repeated(metadata):
    server, variables = metadata(POD, statuses=[503, 503])
    assert TPUClusterResolver(environ=variables).process_id == 2
    assert len(server.requests) == len(POD) + 2


@pytest.mark.parametrize("statuses, count", [([503] * 9, 3), ([500], 1), ([403], 1), ([302], 1)])
def test_request_that_returns_an_error_is_repeated_at_most_twice(metadata, statuses, count):
    server, variables = metadata(POD, statuses)
    message = rf"failed: http://{variables['GCE_METADATA_HOST']}/.*worker-network-endpoints.*has status {statuses[0]}"
    with pytest.raises(RuntimeError, match=message):
        TPUClusterResolver(environ=variables)
    assert len(server.requests) == count


def test_server_without_tpu_attributes_is_an_error(metadata):
    _, variables = metadata({})
    message = (
        f"Found no TPU.*'worker-network-endpoints': the server at {variables['GCE_METADATA_HOST']} does not have it"
    )
    with pytest.raises(ValueError, match=message):
        TPUClusterResolver(environ=variables)


@pytest.mark.parametrize("flavor", [None, "Other"])
def test_response_without_the_metadata_flavor_is_an_error(metadata, flavor):
    _, variables = metadata(POD, flavor=flavor)
    with pytest.raises(
        RuntimeError, match=f"Its response has status 200 and `Metadata-Flavor` {flavor!r}; a metadata .*'Google'"
    ):
        TPUClusterResolver(environ=variables)


@each_row("attributes, kind, message", [
    ({"worker-network-endpoints": "a:1,b:2"}, RuntimeError, "must be a list of hosts, or of `name:id:host`, got 'a:1,b:2'"),
    ({"worker-network-endpoints": "a,b:2:3:4"}, RuntimeError, "must be a list of hosts, or of `name:id:host`, got 'a,b:2:3:4'"),
    ({"worker-network-endpoints": b"\xff\xfe"}, RuntimeError, "worker-network-endpoints.*UnicodeDecodeError"),
    ({"worker-network-endpoints": "a,,b"}, ValueError, "metadata attribute 'worker-network-endpoints' is 'a,,b': a name"),
    ({"agent-worker-number": "<p>"}, ValueError, "metadata attribute 'agent-worker-number' must be an integer >= 0, got '<p>'"),
    ({"agent-worker-number": "4"}, ValueError, "metadata attribute 'agent-worker-number' is 4, but .* lists 4 processes"),
    ({"agent-worker-number": ""}, ValueError, "'worker-network-endpoints' lists 4 processes, but the index of this one is not set"),
    ({"tpu-env": "TOPOLOGY: '3x3'"}, ValueError, r"the 9 chips of TOPOLOGY of metadata attribute 'tpu-env' \('3x3'\)"),
    ({"tpu-env": "MEGASCALE_NUM_SLICES: '2'"}, ValueError, "MEGASCALE_NUM_SLICES of metadata attribute 'tpu-env' is 2, but"),
])  # fmt: skip
def test_invalid_metadata_are_errors_with_their_names(metadata, attributes, kind, message):
    _, variables = metadata(POD | attributes)
    with pytest.raises(kind, match=message):
        TPUClusterResolver(environ=variables)


def test_server_of_another_protocol_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RuntimeError, match="worker-network-endpoints.*BadStatusLine"):
            TPUClusterResolver(environ={"GCE_METADATA_HOST": f"127.0.0.1:{listener.getsockname()[1]}"})
        thread.join()


def test_request_without_a_response_ends_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        variables = {"GCE_METADATA_HOST": f"127.0.0.1:{listener.getsockname()[1]}"}
        with pytest.raises(RuntimeError, match=r"No complete response within 0\.2 seconds.*TPU_SKIP_MDS_QUERY=1"):
            TPUClusterResolver(environ=variables, timeout_seconds=0.2)


def test_response_that_arrives_byte_by_byte_ends_at_the_deadline():
    body = b"localhost".rjust(100)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        is_over = threading.Event()

        def answer(connection):
            # The response would be complete after the deadline: a time limit per read would accept it.
            with connection, contextlib.suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nMetadata-Flavor: Google\r\nContent-Length: 100\r\n\r\n")
                for i in range(len(body)):
                    if is_over.wait(0.02):
                        return
                    connection.sendall(body[i : i + 1])

        def serve():
            with contextlib.suppress(OSError):
                while not is_over.is_set():
                    answer(listener.accept()[0])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        variables = {"GCE_METADATA_HOST": f"127.0.0.1:{listener.getsockname()[1]}"}
        with pytest.raises(RuntimeError, match=r"No complete response within 0\.3 seconds, counted from the first"):
            TPUClusterResolver(environ=variables, timeout_seconds=0.3)
        is_over.set()
        socket.create_connection(listener.getsockname()).close()  # so that `accept` returns
        thread.join()


def test_all_requests_share_one_deadline(metadata):
    server, variables = metadata(POD, delay=0.4)
    with pytest.raises(RuntimeError, match=r"tpu-env|accelerator-type|agent-worker-number"):
        TPUClusterResolver(environ=variables, timeout_seconds=1)
    assert len(server.requests) < len(POD)


@each_row("variable", ["GCE_METADATA_HOST", "GCE_METADATA_IP"])
def test_missing_server_is_an_error_with_its_address(variable):
    with socket.socket() as bound:  # but not listening
        bound.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=f"failed: http://{host}/.*ConnectionRefusedError"):
            TPUClusterResolver(environ={variable: host})


@each_row("host", ["http://127.0.0.1", "127.0.0.1:http", "a b"])
def test_invalid_server_address_is_an_error(host):
    with pytest.raises(RuntimeError, match=f"failed: http://{re.escape(host)}/"):
        TPUClusterResolver(environ={"GCE_METADATA_HOST": host})


# JAX


CHECK = """
import socket
def fail(*args): raise AssertionError("a connection")
socket.socket.connect = fail
import jdist.cluster
resolver = jdist.cluster.TPUClusterResolver(environ={"TPU_WORKER_HOSTNAMES": "a"})
resolver.initialize()
from jax._src import xla_bridge
import jax
assert not xla_bridge.backends_are_initialized(), "a backend is up"
assert not jax.distributed.is_initialized(), "a single process was initialized"
print("processes:", resolver.num_processes)
"""


def test_resolver_of_one_process_starts_no_backend_and_no_connection():
    done = subprocess.run([sys.executable, "-W", "error", "-c", CHECK], capture_output=True, text=True, timeout=120)
    assert done.stdout == "processes: 1\n", done.stderr


def slice_ids(port, number):
    """Returns the slice of each process and the number of devices, after this process has joined as one of two slices."""
    os.environ |= {
        "TPU_WORKER_HOSTNAMES": "127.0.0.1",
        "TPU_WORKER_ID": "0",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": str(number),
        "MEGASCALE_COORDINATOR_ADDRESS": "127.0.0.1:8080",
        "JAX_COORDINATOR_PORT": str(port),
        "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",
    }
    resolver = TPUClusterResolver()
    resolver.initialize()
    resolver.initialize()
    assert (jax.process_count(), jax.process_index()) == (resolver.num_processes, resolver.process_id)
    slices = multihost_utils.process_allgather(jax.numpy.int32(resolver.slice_id))
    return slices.ravel().tolist(), len(jax.devices())


@pytest.mark.slow
def test_two_slices_initialize_through_their_resolvers():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]

    def results_of_slice(number):
        with jdist.testing.processes(1) as one:
            return one.run(f"{__name__}:slice_ids", port, number)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(results_of_slice, range(2))) == [[([0, 1], 2)]] * 2

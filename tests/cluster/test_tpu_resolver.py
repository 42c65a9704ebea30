"""Who the processes of a TPU are: from variables, from a metadata server on the loopback interface, and what is refused."""

import contextlib
import dataclasses
import http.server
import os
import pickle
import re
import socket
import subprocess
import sys
import threading

import hypothesis
import hypothesis.strategies as st
import pytest

from jdist.cluster import ClusterResolver, TPUClusterResolver

from processes.runner import run_processes

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


def resolved(*settings, **options):
    """The resolver of a process that has only these variables, and asks no server."""
    return TPUClusterResolver(environ={SKIP: "1"} | {k: v for each in settings for k, v in each.items()}, **options)


class Server:
    """A metadata server: what it knows, what it was asked, and a way to answer other than it should."""

    def __init__(self, attributes, statuses=(), flavor="Google"):
        self.attributes, self.statuses, self.flavor = attributes, list(statuses), flavor
        self.asked = []

    def answer(self, handler):
        attribute = handler.path.removeprefix("/computeMetadata/v1/instance/attributes/")
        self.asked.append((attribute, handler.headers["Metadata-Flavor"]))
        known = self.attributes.get(attribute)
        handler.send_response(self.statuses.pop(0) if self.statuses else 404 if known is None else 200)
        if self.flavor:
            handler.send_header("Metadata-Flavor", self.flavor)
        handler.end_headers()
        handler.wfile.write(known if isinstance(known, bytes) else (known or "").encode())


@pytest.fixture
def metadata():
    """Starts metadata servers, and gives each with the variables that lead to it."""
    with contextlib.ExitStack() as stack:

        def start(*args, **kwargs):
            server = Server(*args, **kwargs)

            class Handler(http.server.BaseHTTPRequestHandler):
                do_GET = lambda handler: server.answer(handler)
                log_message = lambda *_: None

            listener = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
            thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(listener.shutdown)
            return server, {"GCE_METADATA_HOST": f"127.0.0.1:{listener.server_port}"}

        yield start


# Laws


@st.composite
def clusters(draw):
    """Slices of equally many hosts: the variables of every process, in order."""
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
    found = [resolved(process) for process in processes]
    assert [each.process_id for each in found] == [each.task_id for each in found] == list(range(len(processes)))
    assert {each.num_processes for each in found} == {len(processes)}
    assert {each.num_slices for each in found} == {slices}
    assert {each.coordinator_address for each in found} == {each.master() for each in found} == {"s0-h0:8482"}


@few
@hypothesis.given(clusters())
def test_specs_of_the_slices_make_up_that_of_the_cluster(cluster):
    _, processes = cluster
    found = [resolved(process) for process in processes]
    everyone = {}
    for each in found:
        everyone |= each.cluster_spec()[each.task_type]
        assert each.cluster_spec()["worker"][each.task_id] == each.addresses[each.worker_id]
    assert sorted(everyone) == list(range(len(processes)))
    assert len(set(everyone.values())) == len(processes)


@few
@hypothesis.given(clusters(), st.data())
def test_process_that_is_not_told_its_number_is_refused_where_there_are_several(cluster, data):
    slices, processes = cluster
    process = data.draw(st.sampled_from(processes))
    kept = {k: v for k, v in process.items() if k not in ("TPU_WORKER_ID", "CLOUD_TPU_TASK_ID")}
    if len(processes) == slices:
        assert resolved(kept) == resolved(process)
    else:
        with pytest.raises(ValueError, match=rf"names {len(processes) // slices} processes, and nothing says which"):
            resolved(kept)


# The environment


def test_resolver_is_what_is_asked_of_any():
    assert isinstance(resolved(TWO), ClusterResolver)


def test_resolver_is_a_record_that_can_be_compared_and_sent_and_not_changed():
    resolver = resolved(TWO)
    assert pickle.loads(pickle.dumps(resolver)) == resolver == resolved(TWO)
    assert hash(resolver) == hash(resolved(TWO))
    assert resolver != resolved(TWO, {"TPU_WORKER_ID": "0"})
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


@pytest.mark.parametrize("tpu", [None, "", "local"])
def test_tpu_of_this_host_has_several_names(tpu):
    assert resolved(TWO, tpu=tpu) == resolved(TWO)


def test_facts_of_the_hardware_are_attributes():
    resolver = resolved(TWO, {"TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_TOPOLOGY": "2x4"})
    assert (resolver.accelerator_type, resolver.topology, resolver.num_accelerators()) == (
        "v5litepod-8",
        "2x4",
        {"TPU": 4},
    )
    assert (resolver.num_slices, resolver.slice_id, resolver.task_type) == (1, 0, "worker")


@pytest.mark.parametrize(
    "variables, chips",
    [
        ({"TPU_TOPOLOGY": "2x2x2"}, 4),
        ({"TPU_TOPOLOGY": "4x4x8_untwisted"}, 64),
        ({"TPU_TOPOLOGY": "2x4", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1"}, 1),
        ({"TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1"}, 4),
    ],
)
def test_chips_of_a_process_are_those_of_its_bounds_or_its_part_of_the_topology(variables, chips):
    assert resolved(TWO, variables).num_accelerators() == {"TPU": chips}


@pytest.mark.parametrize("variables", [{}, {"TPU_TOPOLOGY": "twisted"}, {"TPU_TOPOLOGY": "0x4"}, {"TPU_TOPOLOGY": " "}])
def test_chips_that_nothing_says_are_not_guessed(variables):
    with pytest.raises(RuntimeError, match=r"neither by TPU_TOPOLOGY nor by .*ask `jax\.local_device_count\(\)`"):
        resolved(TWO, variables).num_accelerators()


def test_several_processes_on_a_host_are_told_apart_by_their_task():
    each = {"TPU_PROCESS_ADDRESSES": "localhost:8476,localhost:8477", "CLOUD_TPU_TASK_ID": "1", "TPU_WORKER_ID": "0"}
    resolver = resolved({"TPU_WORKER_HOSTNAMES": "localhost"}, each)
    assert (resolver.process_id, resolver.num_processes) == (1, 2)
    assert resolver.coordinator_address == "localhost:8482"


def test_worker_comes_before_task_where_the_list_is_of_hosts():
    assert resolved(TWO, {"CLOUD_TPU_TASK_ID": "0"}).process_id == 1


def test_notebook_with_one_process_is_alone():
    resolver = resolved({"TPU_PROCESS_ADDRESSES": "local", "CLOUD_TPU_TASK_ID": "0"})
    assert (resolver.num_processes, resolver.process_id) == (1, 0)


def test_addresses_in_a_file_come_first(tmp_path):
    file = tmp_path / "addresses"
    file.write_text("a:1,b:1,c:1\n")
    assert resolved(TWO, {"TPU_PROCESS_ADDRESSES_PATH": str(file)}).addresses == ("a:1", "b:1", "c:1")


@pytest.mark.parametrize(
    "content, says", [(b"", "where a name is missing"), (b"\xff", "cannot be read"), (None, "cannot be")]
)
def test_file_without_addresses_is_refused_by_its_name(tmp_path, content, says):
    file = tmp_path / "addresses"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=f"TPU_PROCESS_ADDRESSES_PATH.*{says}") as error:
        resolved(TWO, {"TPU_PROCESS_ADDRESSES_PATH": str(file)})
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    "host, address",
    [
        ("h", "h:8482"),
        ("h:1", "h:8482"),
        ("fd00::1", "[fd00::1]:8482"),
        ("[fd00::1]:1", "[fd00::1]:8482"),
        ("[::1]", "[::1]:8482"),
    ],
)
def test_coordinator_has_a_port_of_its_own(host, address):
    assert resolved({"TPU_WORKER_HOSTNAMES": host}).coordinator_address == address


@pytest.mark.parametrize(
    "variables, options, address",
    [
        ({"JAX_COORDINATOR_PORT": "7"}, {}, "first:7"),
        ({"JAX_COORDINATOR_PORT": "7", "JAX_COORDINATOR_ADDRESS": "b:2"}, {}, "b:2"),
        ({"JAX_COORDINATOR_ADDRESS": "b:2"}, {"coordinator_address": "[::1]:3"}, "[::1]:3"),
    ],
)
def test_coordinator_is_that_which_is_said_most_explicitly(variables, options, address):
    assert resolved(TWO, SLICES, variables, **options).coordinator_address == address


# What is refused


@pytest.mark.parametrize(
    "variables, says",
    [
        (
            {"TPU_WORKER_ID": "2"},
            "TPU_WORKER_ID is 2, but TPU_WORKER_HOSTNAMES names 2 processes: it is a number from 0 to 1",
        ),
        ({"TPU_WORKER_ID": "-1"}, "TPU_WORKER_ID is '-1', which is no whole number"),
        ({"TPU_WORKER_ID": "one"}, "TPU_WORKER_ID is 'one', which is no whole number"),
        ({"TPU_WORKER_ID": "1.0"}, "TPU_WORKER_ID is '1.0', which is no whole number"),
        ({"TPU_WORKER_ID": "٣"}, "TPU_WORKER_ID is '٣', which is no whole number"),
        (
            {"TPU_WORKER_ID": ""},
            "TPU_WORKER_HOSTNAMES names 2 processes, and nothing says .* Set TPU_WORKER_ID on each",
        ),
        ({"TPU_WORKER_HOSTNAMES": "a,,b"}, "TPU_WORKER_HOSTNAMES is 'a,,b', where a name is missing"),
        ({"TPU_WORKER_HOSTNAMES": "a,b,"}, "TPU_WORKER_HOSTNAMES is 'a,b,', where a name is missing"),
        ({"TPU_WORKER_HOSTNAMES": "a,b,c, b,a"}, "TPU_WORKER_HOSTNAMES is 'a,b,c, b,a', which has a, b twice"),
        (
            {"TPU_WORKER_HOSTNAMES": "a,b,c", "TPU_TOPOLOGY": "4x4"},
            r"names 3 processes.* 16 chips .*TPU_TOPOLOGY says \('4x4'\)",
        ),
        ({**SLICES, "MEGASCALE_NUM_SLICES": "0"}, "MEGASCALE_NUM_SLICES is 0: there is at least one"),
        ({**SLICES, "MEGASCALE_NUM_SLICES": "two"}, "MEGASCALE_NUM_SLICES is 'two', which is no whole number"),
        (
            {**SLICES, "MEGASCALE_SLICE_ID": "2"},
            "MEGASCALE_SLICE_ID is 2, but MEGASCALE_NUM_SLICES means slices: 2.* 0 to 1",
        ),
        (
            {**SLICES, "MEGASCALE_NUM_SLICES": ""},
            "MEGASCALE_SLICE_ID is 1, but MEGASCALE_NUM_SLICES, which is not set, means",
        ),
        (
            {**SLICES, "MEGASCALE_SLICE_ID": ""},
            "MEGASCALE_NUM_SLICES means slices: 2, and nothing says .*MEGASCALE_SLICE_ID",
        ),
        (
            {**SLICES, "MEGASCALE_COORDINATOR_ADDRESS": ""},
            "2 slices, and nothing says where process 0 is: 10.0.0.1 is the first",
        ),
        ({"JAX_COORDINATOR_PORT": "http"}, "JAX_COORDINATOR_PORT is 'http', which is no port"),
        ({"JAX_COORDINATOR_ADDRESS": "10.0.0.1"}, "JAX_COORDINATOR_ADDRESS is a host with a port.*got '10.0.0.1'"),
        ({"JAX_COORDINATOR_ADDRESS": "::1:80"}, "JAX_COORDINATOR_ADDRESS is a host with a port.*got '::1:80'"),
    ],
)
def test_variables_that_do_not_fit_are_refused_by_name(variables, says):
    with pytest.raises(ValueError, match=says):
        resolved(TWO, variables)


@pytest.mark.parametrize("address", ["10.0.0.1", "a:b", ":80", "http://a:80"])
def test_coordinator_without_host_and_port_is_refused(address):
    with pytest.raises(ValueError, match=rf"`coordinator_address` is a host with a port.*got '{address}'"):
        resolved(TWO, coordinator_address=address)


def test_tpu_of_another_host_is_refused_with_how_to_run_there():
    with pytest.raises(
        ValueError, match=r"connecting to the TPU 'pod'.*gcloud compute tpus tpu-vm ssh pod --worker=all"
    ):
        resolved(TWO, tpu="pod")


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_waiting_for_ever_is_refused(seconds):
    with pytest.raises(ValueError, match=f"`timeout_seconds` is a number of seconds above 0, got {seconds}"):
        resolved(TWO, timeout_seconds=seconds)


def test_nothing_found_says_what_was_looked_for_and_what_to_do():
    with pytest.raises(
        ValueError, match=r"Found no TPU.*Looked for TPU_WORKER_HOSTNAMES and TPU_PROCESS_ADDRESSES"
    ) as error:
        resolved()
    says = str(error.value)
    assert "it was not asked, since TPU_SKIP_MDS_QUERY is set" in says
    assert "What there is: nothing of a TPU." in says
    assert "set TPU_WORKER_HOSTNAMES and TPU_WORKER_ID on each" in says


def test_nothing_found_says_what_there_is():
    with pytest.raises(ValueError, match="What there is: TPU_WORKER_ID is '3', TPU_TOPOLOGY is '2x2'"):
        resolved({"TPU_WORKER_ID": "3", "TPU_TOPOLOGY": "2x2"})


# The metadata server


def test_metadata_say_who_the_processes_are(metadata):
    server, variables = metadata(POD)
    resolver = TPUClusterResolver(environ=variables)
    assert resolver.cluster_spec() == {"worker": {0: "10.0.0.1", 1: "10.0.0.2", 2: "10.0.0.3", 3: "10.0.0.4"}}
    assert (resolver.process_id, resolver.num_processes, resolver.master()) == (2, 4, "10.0.0.1:8482")
    assert (resolver.accelerator_type, resolver.topology) == ("v5litepod-16", "4x4")
    assert (resolver.num_accelerators(), resolver.environment) == ({"TPU": 4}, "metadata")
    assert {flavor for _, flavor in server.asked} == {"Google"}
    assert sorted(asked for asked, _ in server.asked) == sorted(POD)


def test_metadata_of_several_slices_are_those_of_the_variables(metadata):
    rows = "".join(f"{name}: '{value}'\n" for name, value in SLICES.items())
    _, variables = metadata(POD | {"tpu-env": POD["tpu-env"] + rows})
    resolver = TPUClusterResolver(environ=variables)
    said = resolved({"TPU_WORKER_HOSTNAMES": POD["worker-network-endpoints"], "TPU_WORKER_ID": "2"}, SLICES)
    assert (resolver.process_id, resolver.num_processes, resolver.num_slices, resolver.slice_id) == (6, 8, 2, 1)
    assert (resolver.cluster_spec(), resolver.coordinator_address) == (said.cluster_spec(), said.coordinator_address)
    assert resolver.coordinator_address == "first:8482"


def test_metadata_of_old_hosts_have_their_name_and_number_before(metadata):
    _, variables = metadata(POD | {"worker-network-endpoints": "a:0:10.0.0.1,b:1:10.0.0.2,c:2:10.0.0.3,d:3:10.0.0.4"})
    assert TPUClusterResolver(environ=variables).addresses == ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4")


def test_metadata_of_hardware_may_be_missing(metadata):
    _, variables = metadata({name: POD[name] for name in ("worker-network-endpoints", "agent-worker-number")})
    resolver = TPUClusterResolver(environ=variables)
    assert (resolver.process_id, resolver.accelerator_type, resolver.topology) == (2, None, None)


@pytest.mark.parametrize("variables", [TWO, {"TPU_WORKER_HOSTNAMES": "localhost"}, {"TPU_PROCESS_ADDRESSES": "local"}])
def test_metadata_are_not_asked_for_what_variables_say(metadata, variables):
    server, address = metadata(POD)
    assert TPUClusterResolver(environ=variables | address).environment == "variables"
    assert not server.asked


def test_metadata_fill_in_what_variables_leave_out(metadata):
    _, address = metadata(POD)
    resolver = TPUClusterResolver(environ=address | {"TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_TOPOLOGY": "2x2x4"})
    assert (resolver.addresses, resolver.process_id, resolver.topology) == (("a", "b", "c", "d"), 2, "2x2x4")


def test_metadata_are_not_looked_for_through_a_proxy(metadata, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    _, variables = metadata(POD)
    assert TPUClusterResolver(environ=variables).process_id == 2


def test_server_that_is_busy_is_asked_again(metadata):
    server, variables = metadata(POD, statuses=[503, 503])
    assert TPUClusterResolver(environ=variables).process_id == 2
    assert len(server.asked) == len(POD) + 2


@pytest.mark.parametrize("statuses, asked", [([503] * 9, 3), ([500], 1), ([403], 1), ([302], 1)])
def test_server_that_answers_an_error_is_not_asked_for_ever(metadata, statuses, asked):
    server, variables = metadata(POD, statuses)
    says = rf"asked for http://{variables['GCE_METADATA_HOST']}/.*worker-network-endpoints.*It answered {statuses[0]}"
    with pytest.raises(RuntimeError, match=says):
        TPUClusterResolver(environ=variables)
    assert len(server.asked) == asked


def test_server_that_knows_of_no_tpu_leaves_nothing_found(metadata):
    _, variables = metadata({})
    says = (
        f"Found no TPU.*'worker-network-endpoints' at the metadata.*: that at {variables['GCE_METADATA_HOST']} has none"
    )
    with pytest.raises(ValueError, match=says):
        TPUClusterResolver(environ=variables)


@pytest.mark.parametrize("flavor", [None, "Other"])
def test_server_of_another_kind_is_not_believed(metadata, flavor):
    _, variables = metadata(POD, flavor=flavor)
    with pytest.raises(RuntimeError, match=f"It answered 200, with {flavor!r} where a metadata server says 'Google'"):
        TPUClusterResolver(environ=variables)


@pytest.mark.parametrize(
    "attributes, kind, says",
    [
        ({"worker-network-endpoints": "a:1,b:2"}, RuntimeError, "list of hosts, or of `name:id:host`, got 'a:1,b:2'"),
        (
            {"worker-network-endpoints": "a,b:2:3:4"},
            RuntimeError,
            "list of hosts, or of `name:id:host`, got 'a,b:2:3:4'",
        ),
        ({"worker-network-endpoints": b"\xff\xfe"}, RuntimeError, "worker-network-endpoints.*UnicodeDecodeError"),
        (
            {"worker-network-endpoints": "a,,b"},
            ValueError,
            "metadata attribute 'worker-network-endpoints' is 'a,,b', where",
        ),
        (
            {"agent-worker-number": "<p>"},
            ValueError,
            "metadata attribute 'agent-worker-number' is '<p>', which is no whole",
        ),
        (
            {"agent-worker-number": "4"},
            ValueError,
            "metadata attribute 'agent-worker-number' is 4, but .* names 4 processes",
        ),
        (
            {"agent-worker-number": ""},
            ValueError,
            "'worker-network-endpoints' names 4 processes, and nothing says which",
        ),
        (
            {"tpu-env": "TOPOLOGY: '3x3'"},
            ValueError,
            r"the 9 chips .*TOPOLOGY of metadata attribute 'tpu-env' says \('3x3'\)",
        ),
        (
            {"tpu-env": "MEGASCALE_NUM_SLICES: '2'"},
            ValueError,
            "MEGASCALE_NUM_SLICES of metadata attribute 'tpu-env' means",
        ),
    ],
)
def test_metadata_that_make_no_sense_are_refused_by_name(metadata, attributes, kind, says):
    _, variables = metadata(POD | attributes)
    with pytest.raises(kind, match=says):
        TPUClusterResolver(environ=variables)


def test_server_that_speaks_another_language_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=talk)
        thread.start()
        with pytest.raises(RuntimeError, match="worker-network-endpoints.*BadStatusLine"):
            TPUClusterResolver(environ={"GCE_METADATA_HOST": f"127.0.0.1:{listener.getsockname()[1]}"})
        thread.join()


def test_server_that_never_answers_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        variables = {"GCE_METADATA_HOST": f"127.0.0.1:{listener.getsockname()[1]}"}
        with pytest.raises(RuntimeError, match=r"It gave no complete answer within 0\.2 seconds.*TPU_SKIP_MDS_QUERY=1"):
            TPUClusterResolver(environ=variables, timeout_seconds=0.2)


def test_server_that_sends_a_byte_now_and_then_is_given_up_at_the_deadline():
    body = b"localhost".rjust(100)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        is_over = threading.Event()

        def answer(connection):
            # A whole answer in the end: a deadline per read would accept it.
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
        with pytest.raises(
            RuntimeError, match=r"It gave no complete answer within 0\.3 seconds, counted from the first"
        ):
            TPUClusterResolver(environ=variables, timeout_seconds=0.3)
        is_over.set()
        socket.create_connection(listener.getsockname()).close()  # so that `accept` returns
        thread.join()


def test_server_that_takes_its_time_for_each_answer_has_one_deadline_for_all(metadata):
    server, variables = metadata(POD)
    answer_at_once = server.answer

    def answer(handler):
        threading.Event().wait(0.4)
        with contextlib.suppress(OSError):  # the client may be gone
            answer_at_once(handler)

    server.answer = answer
    with pytest.raises(RuntimeError, match=r"tpu-env|accelerator-type|agent-worker-number"):
        TPUClusterResolver(environ=variables, timeout_seconds=1)
    assert len(server.asked) < len(POD)


@pytest.mark.parametrize("variable", ["GCE_METADATA_HOST", "GCE_METADATA_IP"])
def test_server_that_is_not_there_is_refused_with_its_address(variable):
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=f"asked for http://{host}/.*ConnectionRefusedError"):
            TPUClusterResolver(environ={variable: host})


@pytest.mark.parametrize("host", ["http://127.0.0.1", "127.0.0.1:http", "a b"])
def test_server_with_an_address_that_is_none_is_refused(host):
    with pytest.raises(RuntimeError, match=f"asked for http://{re.escape(host)}/"):
        TPUClusterResolver(environ={"GCE_METADATA_HOST": host})


# JAX


CHECK = """
import socket
def refuse(*args): raise AssertionError("a connection")
socket.socket.connect = refuse
import jdist.cluster
resolver = jdist.cluster.TPUClusterResolver(environ={"TPU_WORKER_HOSTNAMES": "a"})
resolver.initialize()
from jax._src import xla_bridge
import jax
assert not xla_bridge.backends_are_initialized(), "a backend is up"
assert not jax.distributed.is_initialized(), "one process joined itself"
print("alone", resolver.num_processes)
"""


def test_resolver_of_one_process_starts_no_backend_and_joins_nobody():
    done = subprocess.run([sys.executable, "-W", "error", "-c", CHECK], capture_output=True, text=True, timeout=120)
    assert done.stdout == "alone 1\n", done.stderr


WORKER = """
import os, sys
address, count, number = sys.argv[1], int(sys.argv[2]), sys.argv[3]
host, port = address.split(":")
os.environ |= {
    "TPU_WORKER_HOSTNAMES": host, "TPU_WORKER_ID": "0", "MEGASCALE_NUM_SLICES": str(count), "MEGASCALE_SLICE_ID": number,
    "MEGASCALE_COORDINATOR_ADDRESS": f"{host}:8080", "JAX_COORDINATOR_PORT": port, "JAX_COORDINATOR_BIND_ADDRESS": address,
}
import jdist.cluster
resolver = jdist.cluster.TPUClusterResolver()
resolver.initialize()
resolver.initialize()
import jax
from jax.experimental import multihost_utils
assert (jax.process_count(), jax.process_index()) == (resolver.num_processes, resolver.process_id)
seen = multihost_utils.process_allgather(jax.numpy.int32(resolver.slice_id))
print("seen", seen.ravel().tolist(), len(jax.devices()))
"""


def test_two_slices_join_through_their_resolvers(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    for printed in run_processes(script, 2, 1):
        assert "seen [0, 1] 2" in printed

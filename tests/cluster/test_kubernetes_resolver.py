"""Kubernetes: indexed Jobs and JobSets from the environment, pods from the API, and errors.

The API is tested with a client that returns recorded pods, and, where the package `kubernetes` is installed, with its client and a
server on the loopback interface.
"""

import json
import sys
import types

import pytest

from jdist.cluster import ClusterNotFoundError, KubernetesClusterResolver

from http_servers import http_server
from laws import each_row

JOB = {"JOB_COMPLETION_INDEX": "1", "JOB_COMPLETIONS": "3", "HOSTNAME": "train-1"}
JOBSET = {
    "JOB_COMPLETION_INDEX": "1",
    "JOB_COMPLETIONS": "2",
    "JOBSET_REPLICAS": "2",
    "JOBSET_JOB_INDEX": "1",
    "HOSTNAME": "set-worker-1-1",
}
DOMAIN = "svc.default.svc.cluster.local"
HOSTS = "# comment train-1.wrong\n127.0.0.1\tlocalhost\n10.0.0.5\t{host}.svc.default.svc.cluster.local\t{host}\n"


@pytest.fixture
def make_resolver(tmp_path):
    """Returns a function that makes the resolver of a pod with these variables."""

    def make(settings, hosts=HOSTS, **options):
        environ = {name: text for name, text in settings.items() if text is not None}
        path = tmp_path / "hosts"
        path.write_text(hosts.format(host=environ.get("HOSTNAME")))
        return KubernetesClusterResolver(environ=environ, **{"hosts_file": str(path)} | options)

    return make


# Indexed Jobs and JobSets


def test_pods_of_an_indexed_job_are_processes(make_resolver):
    resolver = make_resolver(JOB)
    assert (resolver.num_processes, resolver.process_id, resolver.master()) == (3, 1, f"train-0.{DOMAIN}:8476")
    assert resolver.cluster_spec() == {"worker": {index: f"train-{index}.{DOMAIN}:8476" for index in range(3)}}
    assert (resolver.task_type, resolver.environment) == ("worker", "variables")
    assert make_resolver(JOB | {"JOB_COMPLETIONS": None}, num_processes=2, port=5).master() == f"train-0.{DOMAIN}:5"


def test_pods_of_the_replicas_of_a_jobset_are_processes(make_resolver):
    resolver = make_resolver(JOBSET)
    assert (resolver.num_processes, resolver.process_id, resolver.master()) == (4, 3, f"set-worker-0-0.{DOMAIN}:8476")
    hosts = ["set-worker-0-0", "set-worker-0-1", "set-worker-1-0", "set-worker-1-1"]
    assert list(resolver.cluster_spec()["worker"].values()) == [f"{host}.{DOMAIN}:8476" for host in hosts]
    one = JOBSET | {"JOBSET_REPLICAS": "1", "JOBSET_JOB_INDEX": "0", "HOSTNAME": "set-worker-0-1"}
    assert make_resolver(one).master() == f"set-worker-0-0.{DOMAIN}:8476"


def test_address_of_the_user_needs_no_service(make_resolver):
    address = {"JAX_COORDINATOR_ADDRESS": "a:1"}
    resolver = make_resolver(JOB | address, hosts="")
    assert (resolver.num_processes, resolver.process_id, resolver.master()) == (3, 1, "a:1")
    assert resolver.cluster_spec() == {"worker": {0: "a:1"}}
    assert make_resolver(JOB | address).cluster_spec()["worker"][2] == f"train-2.{DOMAIN}:8476"


def test_job_of_one_pod_needs_no_service(make_resolver):
    resolver = make_resolver({"JOB_COMPLETION_INDEX": "0", "JOB_COMPLETIONS": "1"}, hosts="")
    assert (resolver.num_processes, resolver.process_id, resolver.master()) == (1, 0, "localhost:8476")


def test_pod_outside_an_indexed_job_is_not_found(make_resolver):
    with pytest.raises(
        ClusterNotFoundError, match=r"JOB_COMPLETION_INDEX is not set\. Write `completionMode: Indexed`"
    ):
        make_resolver({"HOSTNAME": "train-1", "JOB_COMPLETIONS": "3"})


@pytest.mark.parametrize("settings, options, message", [
    (JOB | {"JOB_COMPLETIONS": None}, {}, r"JOB_COMPLETION_INDEX is 1, but the number of pods is unknown.*`env: \[\{name: JOB_COMPLETIONS"),
    (JOB | {"JOB_COMPLETION_INDEX": "3"}, {}, r"JOB_COMPLETION_INDEX is 3, but JOB_COMPLETIONS is 3: the index must be from 0 to 2"),
    (JOB, {"num_processes": 1}, r"JOB_COMPLETION_INDEX is 1, but the number of pods per Job is 1"),
    (JOB | {"JOB_COMPLETIONS": "all"}, {}, r"JOB_COMPLETIONS must be an integer >= 1, got 'all'"),
    (JOB | {"HOSTNAME": "other"}, {}, r"first pod is unknown\. HOSTNAME is 'other', which does not end with '-1'.*`subdomain`"),
    (JOB, {"hosts": "10.0.0.5 train-1"}, r"hosts has no domain of train-1: the pod template has no `subdomain`\. Create a headless"),
    (JOB, {"hosts_file": "/absent"}, r"/absent cannot be read: .*No such file"),
    (JOBSET | {"JOBSET_JOB_INDEX": None}, {}, r"JOBSET_REPLICAS is '2', but JOBSET_JOB_INDEX is not set\. Set both from the annotations"),
    (JOBSET | {"JOBSET_JOB_INDEX": "2"}, {}, r"JOBSET_JOB_INDEX is 2, but JOBSET_REPLICAS is 2"),
    (JOB, {"num_processes": 0}, r"`num_processes` must be >= 1, got 0"),
    (JOBSET, {"num_processes": 3}, r"The number of pods is 3, which JOBSET_REPLICAS 2 does not divide"),
])  # fmt: skip
def test_incomplete_or_contradicting_settings_are_errors(make_resolver, settings, options, message):
    with pytest.raises(ValueError, match=message) as error:
        make_resolver(settings, **options)
    assert not isinstance(error.value, ClusterNotFoundError)


# The API


def pod(name, ip, phase="Running", index=None, hostname=None):
    labels = {} if index is None else {"batch.kubernetes.io/job-completion-index": str(index)}
    return types.SimpleNamespace(
        metadata=types.SimpleNamespace(name=name, labels=labels or None),
        status=types.SimpleNamespace(phase=phase, pod_ip=ip),
        spec=types.SimpleNamespace(hostname=hostname),
    )


class Client:
    """Returns the next recorded answer of each selector, the last one again and again."""

    def __init__(self, **answers):
        self.answers = {selector.replace("_", "="): answer for selector, answer in answers.items()}
        self.requests = []

    def list_namespaced_pod(self, namespace, *, label_selector, _request_timeout):
        assert 0 < _request_timeout <= 30
        self.requests.append((namespace, label_selector))
        answers = self.answers[label_selector]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return types.SimpleNamespace(items=answer)


THREE = [pod("tf-abc123", "10.1.2.4"), pod("tf-def456", "10.1.2.3"), pod("tf-999999", "10.1.2.5")]


def request_pods(client, environ=(), mapping=None, **options):
    defaults = {"num_processes": 3, "port": 8470, "namespace": "ns", "timeout_seconds": 0}
    environ = {"HOSTNAME": "tf-abc123"} | dict(environ)
    return KubernetesClusterResolver(
        mapping or {"worker": ["job=tf"]}, client=client, environ=environ, **defaults | options
    )


def test_cr26_pods_are_ordered_by_name_and_selectors_are_concatenated():
    resolver = request_pods(Client(job_tf=[THREE]))
    assert resolver.cluster_spec() == {"worker": {0: "10.1.2.5:8470", 1: "10.1.2.4:8470", 2: "10.1.2.3:8470"}}
    assert (resolver.process_id, resolver.num_processes, resolver.environment) == (1, 3, "api")
    client = Client(b_2=[THREE[:1]], a_1=[THREE[1:]])
    resolver = request_pods(client, mapping={"worker": ["b=2", "a=1"]})
    assert list(resolver.cluster_spec()["worker"].values()) == ["10.1.2.4:8470", "10.1.2.5:8470", "10.1.2.3:8470"]
    assert client.requests == [("ns", "b=2"), ("ns", "a=1")]


def test_cr27_pod_that_failed_is_an_error():
    failed = [pod("tf-abc123", "10.1.2.4", "Failed")]
    with pytest.raises(
        RuntimeError, match=r'Pod "tf-abc123" is not running; phase: "Failed"\. See `kubectl logs tf-abc123 -n ns`'
    ):
        request_pods(Client(job_tf=[failed]))


def test_cr27_selector_without_pods_is_not_found():
    with pytest.raises(
        ClusterNotFoundError, match=r"namespace 'ns' has no pods with the labels \{'worker': \['job=tf'\]\}"
    ):
        request_pods(Client(job_tf=[[]]))


def test_pods_of_an_indexed_job_are_ordered_by_index():
    pods = [pod(f"tf-{index}-x", f"10.0.0.{index}", index=index, hostname=f"tf-{index}") for index in (10, 2, 0)]
    resolver = request_pods(Client(job_tf=[pods]), {"HOSTNAME": "tf-2"})
    assert list(resolver.cluster_spec()["worker"].values()) == ["10.0.0.0:8470", "10.0.0.2:8470", "10.0.0.10:8470"]
    assert resolver.process_id == 1


@pytest.mark.parametrize("environ", [
    {"HOSTNAME": "tf-999999"},
    {"HOSTNAME": "host", "POD_NAME": "tf-999999"},
    {"HOSTNAME": "host", "POD_IP": "10.1.2.5"},
])  # fmt: skip
def test_own_pod_is_found_by_name_host_or_address(environ):
    assert request_pods(Client(job_tf=[THREE]), environ).process_id == 0


def test_jobs_of_pods_are_jobs_of_the_cluster():
    client = Client(a_1=[THREE[:2]], b_2=[THREE[2:]])
    environ = {"POD_NAMESPACE": "space", "JOB_COMPLETIONS": "3"}
    options = {"namespace": None, "num_processes": None, "mapping": {"worker": ["a=1"], "ps": ["b=2"]}}
    resolver = request_pods(client, environ, **options)
    assert (resolver.num_processes, resolver.process_id, sorted(resolver.cluster_spec())) == (2, 0, ["ps", "worker"])
    assert {namespace for namespace, _ in client.requests} == {"space"}


def test_pods_that_do_not_run_yet_are_requested_again():
    answers = [[], THREE[:2], [*THREE[:2], pod("tf-999999", None, "Pending")], THREE]
    client = Client(job_tf=answers)
    assert request_pods(client, timeout_seconds=60).num_processes == 3
    assert len(client.requests) == 4


@each_row("answer, options, kind, message", [
    ([*THREE[:2], pod("tf-9", None, "Pending")], {}, RuntimeError, r"3 of 3 pods exist, and 2 run, tf-9 is Pending\. See `kubectl get"),
    (THREE[:2], {}, RuntimeError, r"2 of 3 pods exist, and 2 run\. See `kubectl get pods -n ns`, or pass a larger `timeout_seconds`"),
    (THREE, {"num_processes": 2}, ValueError, r"select 3 pods, but the number of pods is 2: tf-999999, tf-abc123, tf-def456"),
    (THREE, {"num_processes": None}, ValueError, r"number of pods is unknown, .* Pass `num_processes`, or set JOB_COMPLETIONS"),
    (THREE, {"environ": {"HOSTNAME": "x"}}, ValueError, r"not in one of the pods tf-999999, .*POD_NAME is None, HOSTNAME is 'x', POD_IP"),
    (THREE, {"mapping": {"worker": "job=tf"}}, TypeError, r"selectors of job 'worker' must be a list, such as .*got 'job=tf'"),
    (THREE, {"namespace": None}, ValueError, r"The namespace of the pods is unknown: .*\. Pass `namespace`"),
    (OSError("no route"), {}, RuntimeError, r"API did not list the pods with 'job=tf' in the namespace 'ns': OSError  ?no route\. Test it"),
])  # fmt: skip
def test_pods_that_are_not_the_processes_are_errors(answer, options, kind, message):
    with pytest.raises(kind, match=message):
        request_pods(Client(job_tf=[answer]), **options)


def test_missing_package_is_an_error_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(
        ImportError, match=r'needs the package kubernetes, .*python -m pip install "jdist\[kubernetes\]"'
    ):
        request_pods(None)


def api_pod(index, phase):
    name = f"train-{index}"
    labels = {"batch.kubernetes.io/job-completion-index": str(index)}
    status = {"phase": phase} | ({"podIP": f"10.0.0.{index}"} if phase == "Running" else {})
    container = {"name": "main", "image": "x"}
    spec = {"hostname": name, "subdomain": "svc", "containers": [container]}
    return {"metadata": {"name": f"{name}-abcde", "labels": labels}, "spec": spec, "status": status}


def test_client_of_kubernetes_lists_the_pods_of_a_server():
    kubernetes = pytest.importorskip("kubernetes", reason="The package kubernetes is optional and not installed.")
    pods = lambda *phases: {
        "kind": "PodList",
        "apiVersion": "v1",
        "metadata": {},
        "items": [api_pod(*p) for p in enumerate(phases)],
    }
    forbidden = {"kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403}
    answers = [(200, pods("Running", "Pending")), (200, pods("Running", "Running")), (403, forbidden)]
    requests = []

    def answer(request):
        requests.append(request.path)
        status, contents = answers.pop(0)
        body = json.dumps(contents).encode()
        return status, {"Content-Type": "application/json", "Content-Length": str(len(body))}, body

    with http_server(answer) as host:
        api = kubernetes.client.ApiClient(kubernetes.client.Configuration(host=f"http://{host}"))
        client = kubernetes.client.CoreV1Api(api)
        make = lambda: request_pods(client, {"HOSTNAME": "train-1"}, num_processes=2, timeout_seconds=60)
        resolver = make()
        with pytest.raises(
            RuntimeError, match=r"Exception 403 Forbidden\. Give the service account .* the verb `list` for `pods`"
        ):
            make()
        api.rest_client.pool_manager.clear()
    assert (resolver.process_id, resolver.num_processes, resolver.master()) == (1, 2, "10.0.0.0:8470")
    assert requests == ["/api/v1/namespaces/ns/pods?labelSelector=job%3Dtf"] * 3


def test_process_outside_kubernetes_has_no_service_account(monkeypatch):
    pytest.importorskip("kubernetes", reason="The package kubernetes is optional and not installed.")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(
        ClusterNotFoundError, match=r"not in a pod of Kubernetes: .*pass `client=kubernetes\.client\.CoreV1Api\(\)`"
    ):
        request_pods(None)

"""`TF_CONFIG`: its JSON, the task, overrides, and errors."""

import json

import pytest

from jdist.cluster import ClusterNotFoundError, TFConfigClusterResolver

from laws import each_row

CLUSTER = {"worker": ["worker0:2222", "worker1:2222"], "ps": ["ps0:2222"]}


def make_resolver(config, **options):
    text = config if isinstance(config, str) else json.dumps(config)
    return TFConfigClusterResolver(environ={"TF_CONFIG": text}, **options)


def make_task(task, cluster=CLUSTER, **options):
    return make_resolver({"cluster": cluster, "task": task}, **options)


@pytest.mark.parametrize("text, message", [
    ("", r"TF_CONFIG is not set\. Set it on each process to \{\"cluster\""),
    ("{}", r"TF_CONFIG has neither a cluster nor a task\. Set it to \{\"cluster\""),
    ('{"cluster": {}}', r"The cluster in TF_CONFIG is empty\. Set TF_CONFIG to"),
])  # fmt: skip
def test_cr2_absent_cluster_is_not_found(text, message):
    with pytest.raises(ClusterNotFoundError, match=message):
        make_resolver(text)


def test_cr2_text_that_is_not_json_is_an_error_with_the_position():
    text = '{"cluster":\n {"worker": ["a:1",, "b:1"]}}'
    with pytest.raises(
        ValueError, match=r"not valid JSON: .* at line 2, column 20 \(character 31\), after .*\"a:1\",.*before ', "
    ) as error:
        make_resolver(text)
    assert not isinstance(error.value, ClusterNotFoundError)
    with pytest.raises(ValueError, match=r"TF_CONFIG is not valid JSON: .* at line 1, column 2 \(character 1\)"):
        make_resolver("{bad")


@each_row("text, message", [
    ("null", r"TF_CONFIG must be a JSON object, got null"),
    ("[]", r"TF_CONFIG must be a JSON object, got \[\]"),
    ('{"task": [1]}', r"The task in TF_CONFIG must be a JSON object, got \[1\]"),
])  # fmt: skip
def test_cr2_json_that_is_not_an_object_is_a_type_error(text, message):
    with pytest.raises(TypeError, match=message):
        make_resolver(text)


def test_cr3_master_is_the_coordinator_also_for_a_parameter_server():
    resolver = make_task({"type": "ps", "index": 0})
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("ps", 0, "worker0:2222")
    assert resolver.master("ps", 0) == resolver.cluster_spec()["ps"][0] == "ps0:2222"


def test_cr5_master_of_a_task_is_its_address():
    assert make_task({"type": "worker", "index": 0}).master("worker", 1) == "worker1:2222"


def test_cr6_task_index_may_be_text_and_must_be_in_the_job():
    assert make_task({"type": "worker", "index": "1"}).task_id == 1
    for index in ("x", -1, 1.5, True, None):
        with pytest.raises(ValueError, match=r"task index in TF_CONFIG must be an integer >= 0, got"):
            make_task({"type": "ps", "index": index})
    with pytest.raises(ValueError, match=r"task index 7 of job 'ps' exceeds the maximum index 0: TF_CONFIG has"):
        make_task({"type": "ps", "index": 7})


def test_cr7_task_type_that_is_a_number_is_not_a_job():
    with pytest.raises(ValueError, match=r"Unrecognized task type '123456': the task types are chief"):
        make_task({"type": 123456, "index": 0})


def test_cr8_arguments_replace_the_task():
    resolver = make_task({"type": "ps", "index": 0}, task_type="worker", task_id=1)
    assert (resolver.task_type, resolver.task_id, resolver.process_id) == ("worker", 1, 1)
    assert make_task({"type": "worker", "index": 1}, coordinator_address="c:1").master() == "c:1"


def test_cr9_cluster_of_one_worker_needs_no_task_and_others_do():
    assert make_resolver({"cluster": {"worker": ["a:1"]}}).process_id == 0
    message = (
        r"task of this process is unknown: TF_CONFIG has 2 'worker', 1 'ps'\. Add the task of each process to its TF_CO"
    )
    with pytest.raises(ValueError, match=message):
        make_resolver({"cluster": CLUSTER})


def test_cr10_cluster_that_is_a_list_or_a_job_that_is_text_is_a_type_error():
    with pytest.raises(TypeError, match=r"The cluster in TF_CONFIG must be a JSON object, got \[\"a:1\"\]"):
        make_task({}, cluster=["a:1"])
    with pytest.raises(TypeError, match=r"Job 'worker' of TF_CONFIG must be a list"):
        make_task({}, cluster={"worker": "a:1"})


def test_task_without_a_cluster_is_malformed():
    with pytest.raises(ValueError, match=r"TF_CONFIG has no jobs") as error:
        make_resolver({"task": {"type": "worker", "index": 3}})
    assert not isinstance(error.value, ClusterNotFoundError)


def test_cr11_sparse_job_has_one_process():
    resolver = make_task({"type": "worker", "index": 3}, cluster={"worker": {"3": "w3:1"}})
    assert (resolver.master(), resolver.process_id, resolver.num_processes, resolver.task_id) == ("w3:1", 0, 1, 3)


def test_chief_is_process_0_and_environment_is_that_of_the_variable():
    cluster = {"worker": ["w:1"], "chief": ["c:1"]}
    resolver = make_resolver({"cluster": cluster, "task": {"type": "worker", "index": 0}, "environment": "cloud"})
    assert (resolver.master(), resolver.process_id, resolver.environment) == ("c:1", 1, "cloud")
    assert make_task({"type": "worker", "index": 0}).environment == "variables"


def test_master_of_a_tfjob_is_the_chief():
    cluster = {"master": ["job-master-0.ns.svc:2222"], "worker": ["job-worker-0.ns.svc:2222"]}
    for task, index in (("master", 0), ("worker", 1)):
        resolver = make_resolver({"cluster": cluster, "task": {"type": task, "index": 0}, "environment": "cloud"})
        assert (resolver.master(), resolver.process_id, resolver.num_processes) == (
            "job-master-0.ns.svc:2222",
            index,
            2,
        )


def test_variable_of_the_process_is_the_default(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}}))
    assert TFConfigClusterResolver(num_accelerators={"GPU": 2}).num_accelerators() == {"GPU": 2}

"""SageMaker: hosts from variables and from the file of a job, and errors."""

import pytest

from jdist.cluster import ClusterNotFoundError, SageMakerClusterResolver

from laws import each_row

TWO = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2"}


def make_resolver(settings=(), **options):
    return SageMakerClusterResolver(environ=TWO | dict(settings), **options)


def test_hosts_are_numbered_in_alphabetical_order():
    resolver = make_resolver()
    assert (resolver.num_processes, resolver.process_id, resolver.master()) == (2, 1, "algo-1:2223")
    assert resolver.cluster_spec() == {"worker": {0: "algo-1:2223", 1: "algo-2:2223"}}
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("worker", 1, "variables")
    assert make_resolver({"JAX_COORDINATOR_ADDRESS": "a:1"}).master() == "a:1"
    assert make_resolver(port=5).master() == "algo-1:5"


@pytest.mark.parametrize("count, accelerators", [("8", {"GPU": 8}), ("0", {})])
def test_gpus_are_those_of_the_host(count, accelerators):
    assert make_resolver({"SM_NUM_GPUS": count}).num_accelerators() == accelerators


def test_hosts_are_read_from_the_file_without_variables(tmp_path):
    path = tmp_path / "resourceconfig.json"
    path.write_text('{"current_host": "algo-1", "hosts": ["algo-1", "algo-2", "algo-3"]}')
    resolver = SageMakerClusterResolver(environ={}, resource_config=str(path))
    assert (resolver.num_processes, resolver.process_id, resolver.environment) == (3, 0, "file")
    assert make_resolver(resource_config=str(path)).num_processes == 2


@each_row("settings, message", [
    ({"SM_HOSTS": ""}, r"SM_CURRENT_HOST is 'algo-2', but SM_HOSTS is not set\. Set both on each host"),
    ({"SM_HOSTS": "[1"}, r"SM_HOSTS is not valid JSON: .* at line 1, column 3, got '\[1'\. For example SM_HOSTS="),
    ({"SM_HOSTS": '"algo-1"'}, r"SM_HOSTS must be a list of hosts, got 'algo-1'"),
    ({"SM_HOSTS": "[]"}, r"SM_HOSTS must be a list of hosts, got \[\]"),
    ({"SM_CURRENT_HOST": "algo-3"}, r"SM_CURRENT_HOST is 'algo-3', which is not one of the hosts algo-1, algo-2"),
    ({"SM_NUM_GPUS": "x"}, r"SM_NUM_GPUS must be an integer >= 0, got 'x'"),
])  # fmt: skip
def test_malformed_variables_are_errors(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        make_resolver(settings)
    assert not isinstance(error.value, ClusterNotFoundError)


@pytest.mark.parametrize("text, message", [
    ("{", r"config.json is not valid JSON"),
    ("[]", r"config.json must have a JSON object with `hosts` and `current_host`, got '\[\]'"),
    ("{}", r"`hosts` in .*config.json must be a list of hosts, got None"),
    ('{"hosts": ["a"]}', r"`current_host` in .*config.json is None, which is not one of the hosts a"),
])  # fmt: skip
def test_malformed_file_is_an_error(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        SageMakerClusterResolver(environ={}, resource_config=str(path))


def test_absent_job_is_not_found_and_unreadable_file_is_an_error(tmp_path):
    with pytest.raises(
        ClusterNotFoundError,
        match=r"not a SageMaker job: SM_HOSTS and SM_CURRENT_HOST are not set, and .*none does not",
    ):
        SageMakerClusterResolver(environ={}, resource_config=str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"cannot be read: .*Is a directory"):
        SageMakerClusterResolver(environ={}, resource_config=str(tmp_path))

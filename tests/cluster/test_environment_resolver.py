"""Variables of `jdist run`, of JAX and of torchrun: complete, half-set and absent groups."""

import collections

import pytest

from jdist.cluster import ClusterNotFoundError, EnvironmentClusterResolver

from laws import each_row

JDIST = {"JDIST_COORDINATOR_ADDRESS": "a:1", "JDIST_NUM_PROCESSES": "2", "JDIST_PROCESS_ID": "1"}
JAX = {"JAX_COORDINATOR_ADDRESS": "b:2", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}
TORCH = {"MASTER_ADDR": "c", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "3"}
JAXJOB = {"COORDINATOR_ADDRESS": "job-worker-0", "COORDINATOR_PORT": "6666", "NUM_PROCESSES": "3", "PROCESS_ID": "1"}
TRAINJOB = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "j-node-0-0.j", "PET_MASTER_PORT": "29400", "PET_NPROC_PER_NODE": "auto"}  # fmt: skip
PADDLEJOB = {
    "PADDLE_NNODES": "4",
    "PADDLE_MASTER": "job-worker-0:36543",
    "HOSTNAME": "job-worker-2",
    "PADDLE_JOB_ID": "job",
}
XGBOOSTJOB = {**TORCH, "WORKER_PORT": "9991", "WORKER_ADDRS": "x-worker-0,x-worker-1"}
LOCAL = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def make_resolver(*settings):
    environ = dict(collections.ChainMap(*reversed(settings)))
    return EnvironmentClusterResolver(environ={name: text for name, text in environ.items() if text is not None})


@pytest.mark.parametrize("settings, processes", [
    ([JDIST], (2, 1, "a:1")),
    ([JAX], (3, 2, "b:2")),
    ([TORCH], (4, 3, "c:29500")),
    ([TORCH, {"MASTER_ADDR": "fe80::1"}], (4, 3, "[fe80::1]:29500")),
    ([TORCH, {"TORCHELASTIC_USE_AGENT_STORE": "True"}], (4, 3, "c:29501")),  # torchrun listens on 29500
    ([TORCH, {"TORCHELASTIC_USE_AGENT_STORE": "False"}], (4, 3, "c:29500")),
    ([JDIST, JAX, TORCH], (2, 1, "a:1")),
    ([JAX, TORCH], (3, 2, "b:2")),
    ([JAX, {"MASTER_ADDR": "c", "JDIST_COORDINATOR_ADDRESS": ""}], (3, 2, "b:2")),
    ([JDIST, {"JDIST_NUM_PROCESSES": "1", "JDIST_PROCESS_ID": " 0 "}], (1, 0, "a:1")),
    ([JAXJOB], (3, 1, "job-worker-0:6666")),
    ([TRAINJOB], (2, 1, "j-node-0-0.j:29400")),
    ([TRAINJOB, {"TORCHELASTIC_USE_AGENT_STORE": "True"}], (2, 1, "j-node-0-0.j:29400")),
    ([TRAINJOB, TORCH], (4, 3, "c:29500")),  # torchrun in the pod
    ([PADDLEJOB], (4, 2, "job-worker-0:36543")),
    ([XGBOOSTJOB], (4, 3, "c:29500")),
])  # fmt: skip
def test_first_complete_group_describes_the_processes(settings, processes):
    resolver = make_resolver(*settings)
    assert (resolver.num_processes, resolver.process_id, resolver.master()) == processes
    assert resolver.cluster_spec() == {"worker": {0: processes[2]}}
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("worker", processes[1], "variables")


@each_row("settings, message", [
    ([JDIST, {"JDIST_PROCESS_ID": None}], r"JDIST_COORDINATOR_ADDRESS is 'a:1', JDIST_NUM_PROCESSES is '2', but JDIST_PROCESS_ID is not set"),
    ([JAX, {"JAX_COORDINATOR_ADDRESS": " "}], r"but JAX_COORDINATOR_ADDRESS is not set\. Set them on each process, the same except"),
    ([{"WORLD_SIZE": "4"}], r"WORLD_SIZE is '4', but MASTER_ADDR, MASTER_PORT, RANK are not set"),
    ([JDIST, {"JDIST_PROCESS_ID": "2"}], r"JDIST_PROCESS_ID is 2, but JDIST_NUM_PROCESSES is 2: the index must be from 0 to 1"),
    ([JDIST, {"JDIST_PROCESS_ID": "-1"}], r"JDIST_PROCESS_ID must be an integer >= 0, got '-1'"),
    ([JDIST, {"JDIST_NUM_PROCESSES": "0"}], r"JDIST_NUM_PROCESSES must be an integer >= 1, got '0'"),
    ([JAX, {"JAX_COORDINATOR_ADDRESS": "b"}], r"JAX_COORDINATOR_ADDRESS must be a host with a port, such as '10\.0\.0\.1:8476', got 'b'"),
    ([TORCH, {"MASTER_PORT": "http"}], r"MASTER_PORT must be an integer >= 1, got 'http'"),
    ([TORCH, {"MASTER_PORT": "70000"}], r"MASTER_ADDR with MASTER_PORT is 'c:70000', but a port is a number"),
    ([TORCH, {"MASTER_PORT": "65535", "TORCHELASTIC_USE_AGENT_STORE": "True"}], r"MASTER_ADDR with MASTER_PORT \+ 1 is 'c:65536'"),
    ([TORCH, LOCAL, {"LOCAL_RANK": "2"}], r"LOCAL_RANK is 2, but LOCAL_WORLD_SIZE is 2"),
])  # fmt: skip
def test_half_set_or_malformed_group_is_an_error(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        make_resolver(*settings)
    assert not isinstance(error.value, ClusterNotFoundError)


@pytest.mark.parametrize("settings", [
    [JAXJOB, {"PROCESS_ID": None}],
    [{"NUM_PROCESSES": "8"}],  # of another program
    [TRAINJOB, {"PET_NNODES": "1:4"}],  # elastic: torchrun chooses the number
    [PADDLEJOB, {"HOSTNAME": "job-server-0"}],
])  # fmt: skip
def test_incomplete_group_of_an_operator_is_not_a_cluster(settings):
    with pytest.raises(ClusterNotFoundError):
        make_resolver(*settings)


@pytest.mark.parametrize("settings, message", [
    ([], r"No variables of processes are set\. Set one of these groups on each process: JDIST_COORDINATOR_ADDRESS, .*; JAX_.*; MASTER_"),
    ([{"JAX_COORDINATOR_ADDRESS": "a:1"}], r"Only JAX_COORDINATOR_ADDRESS is set\. Set one"),
    ([{"MASTER_ADDR": "a", "MASTER_PORT": "1"}], r"Only MASTER_ADDR, MASTER_PORT are set\. Set one"),
])  # fmt: skip
def test_no_group_or_an_address_alone_is_not_found(settings, message):
    with pytest.raises(ClusterNotFoundError, match=message):
        make_resolver(*settings)


@pytest.mark.parametrize("settings, ids", [
    ([TORCH, LOCAL], (1,)),
    ([TORCH, LOCAL, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}], (2, 3)),
    ([TORCH, LOCAL, {"CUDA_VISIBLE_DEVICES": "1"}], None),
    ([TORCH, {"LOCAL_RANK": "1"}], None),
    ([JDIST, LOCAL], None),
])  # fmt: skip
def test_gpus_are_divided_between_the_processes_of_torchrun(settings, ids):
    assert make_resolver(*settings).local_device_ids == ids


def test_variables_of_the_process_are_the_default(monkeypatch):
    for name, value in JDIST.items():
        monkeypatch.setenv(name, value)
    assert EnvironmentClusterResolver().process_id == 1

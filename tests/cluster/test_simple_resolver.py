"""Cluster specs: process indices, coordinators, tasks, and errors."""

import dataclasses
import pickle

import hypothesis
import hypothesis.strategies as st
import pytest

import jdist
from jdist.cluster import ClusterResolver, SimpleClusterResolver

from laws import each_row

few = hypothesis.settings(max_examples=100, deadline=None, derandomize=True, database=None)
CHIEF = {"chief": ["c:1"], "worker": ["w0:1", "w1:1"], "ps": ["p:1"]}
WORKERS = {"worker": ["w0:1", "w1:1"]}


def make_resolver(spec, task_type=None, task_id=None, **options):
    return SimpleClusterResolver(spec, task_type=task_type, task_id=task_id, **options)


def test_mw20_chief_is_the_chief_or_first_worker_without_chief_or_evaluator():
    evaluator = CHIEF | {"evaluator": ["e:1"]}
    assert make_resolver(CHIEF, "chief", 0).is_chief
    assert not make_resolver(CHIEF, "worker", 0).is_chief
    assert make_resolver(WORKERS, "worker", 0).is_chief
    assert make_resolver(evaluator, "evaluator", 0).is_chief
    assert not make_resolver(WORKERS, "worker", 1).is_chief
    assert not make_resolver(CHIEF, "ps", 0).is_chief


def test_mw21_process_index_is_the_chief_then_the_workers_and_evaluator_is_its_own_cluster():
    tasks = [("chief", 0), ("worker", 0), ("worker", 1)]
    resolvers = [make_resolver(CHIEF, *task) for task in tasks]
    assert [resolver.process_id for resolver in resolvers] == [0, 1, 2]
    assert {(resolver.num_processes, resolver.coordinator_address) for resolver in resolvers} == {(3, "c:1")}
    evaluator = make_resolver(CHIEF | {"evaluator": ["e:1"]}, "evaluator", 0)
    assert (evaluator.process_id, evaluator.num_processes, evaluator.coordinator_address) == (0, 1, "e:1")
    unlisted = make_resolver(CHIEF, "evaluator")
    assert (unlisted.process_id, unlisted.num_processes, unlisted.coordinator_address) == (0, 1, "")
    server = make_resolver(CHIEF, "ps", 0)
    assert (server.num_processes, server.coordinator_address) == (3, "c:1")
    for use in (lambda: server.process_id, server.initialize):
        with pytest.raises(
            ValueError, match=r"no process index for task type 'ps'.*on the chief and the workers; this is ps 0"
        ):
            use()


@each_row(
    "spec, task, message",
    [
        ({"chief": ["a:1", "b:1"]}, ("chief", 0), r"at most one 'chief' task, but `cluster_spec` has 2.*Make the others workers"),
        ({"evaluator": ["a:1", "b:1"]}, ("evaluator", 0), r"at most one 'evaluator' task, but `cluster_spec` has 2"),
        (WORKERS, ("zz", 0), r"Unrecognized task type 'zz': the task types are chief, worker, evaluator, ps"),
        (WORKERS, ("worker", 7), r"task index 7 of job 'worker' exceeds the maximum index 1: .* has the tasks \[0, 1\]"),
    ],
)  # fmt: skip
def test_mw22_bad_cluster_is_an_error(spec, task, message):
    with pytest.raises(ValueError, match=message):
        make_resolver(spec, *task)


@each_row(
    "spec, task, message",
    [
        ({}, (), r"`cluster_spec` has no jobs\. Pass the addresses"),
        (
            {"chief": [], "worker": []},
            ("worker", 0),
            r"`cluster_spec` has no addresses for 'chief' and 'worker'\. Pass the addresses of the processes, such as",
        ),
        ({"zz": ["a:1"]}, (), r"Unrecognized job 'zz' in `cluster_spec`: the jobs are chief, worker, evaluator, ps\. Rename"),
        ({"worker": {"x": "a:1"}}, (), r"A task index of job 'worker' of `cluster_spec` must be an integer >= 0, got 'x'"),
        ({"worker": [""]}, (), r"address of worker 0 in `cluster_spec` must be a host with a port.*got ''"),
        ({"worker": [5]}, (), r"address of worker 0 in `cluster_spec` must be a host with a port.*got 5"),
        ({"worker": ["a b:1"]}, (), r"address of worker 0 in `cluster_spec` must be a host with a port.*got 'a b:1'"),
        ({"worker": ["a", "b:1"]}, ("worker", 0), r"address of worker 0 .*where process 0 listens, must be a host with a port.*'a'"),
        ({"worker": [None, "b:1"]}, ("worker", 1), r"address of worker 0 in `cluster_spec` is unknown.*`coordinator_address`"),
        ({"worker": ["a:99999", "b:1"]}, ("worker", 1), r"is 'a:99999', but a port is a number from 1 to 65535"),
        ({"worker": ["a:1"], "ps": ["a:1"]}, (), r"worker 0 and ps 0 of `cluster_spec` have the same address 'a:1'\. Each process needs"),
        (WORKERS, (None, 1), r"task index is 1, but the task type is not set\. Set it to one of chief"),
        (WORKERS, ("worker", None), r"task index is not set, but `cluster_spec` has 2 tasks of type 'worker'"),
        (WORKERS, ("worker", -1), r"The task index must be an integer >= 0, got -1"),
        (WORKERS, ("ps", 0), r"task type is 'ps', but `cluster_spec` has only 2 'worker'\. Add the job"),
        ({"worker": {3: "a:1", 5: "b:1"}}, ("worker", 4), r"task index 4 of job 'worker' is not in the job.*tasks \[3, 5\]"),
    ],
)  # fmt: skip
def test_spec_or_task_that_is_not_a_cluster_is_an_error(spec, task, message):
    with pytest.raises(ValueError, match=message):
        make_resolver(spec, *task)


@each_row("address", ["a", "a:", ":1", "a:b", "::1:80", "a:1 ", "a:0"])
def test_coordinator_address_without_host_or_port_is_an_error(address):
    with pytest.raises(ValueError, match=r"`coordinator_address`.*(host with a port|from 1 to 65535)"):
        make_resolver(WORKERS, "worker", 0, coordinator_address=address)


def test_coordinator_address_argument_replaces_the_address_of_process_0():
    assert make_resolver({"worker": [None, None]}, "worker", 1, coordinator_address="[::1]:80").master() == "[::1]:80"


def test_sparse_job_has_consecutive_process_indices():
    resolver = make_resolver({"worker": {"7": "b:1", 3: "a:1"}}, "worker", 7)
    assert (resolver.process_id, resolver.num_processes, resolver.master()) == (1, 2, "a:1")
    assert resolver.cluster_spec() == {"worker": {3: "a:1", 7: "b:1"}}


def test_unknown_addresses_are_not_in_the_cluster_spec():
    resolver = make_resolver({"worker": ["a:1", None, None]}, "worker", 2)
    assert resolver.cluster_spec() == {"worker": {0: "a:1"}}
    assert resolver.num_processes == 3


def test_cr5_address_of_a_task_or_an_error():
    resolver = make_resolver(CHIEF, "worker", 0)
    assert resolver.master("worker", 1) == "w1:1"
    assert resolver.master("ps") == "p:1"
    with pytest.raises(
        ValueError, match=r"No address of task 2 of job 'worker': .* \{'chief': \[0\], 'worker': \[0, 1\]"
    ):
        resolver.master("worker", 2)
    with pytest.raises(ValueError, match="No address of task 1 of job None"):
        resolver.master(task_id=1)


def test_cr9_task_may_be_omitted_if_it_is_the_only_one():
    assert make_resolver({"worker": ["a:1"]}).process_id == 0
    resolver = make_resolver(WORKERS)
    for use in (lambda: resolver.process_id, lambda: resolver.task_type, lambda: resolver.task_id, resolver.initialize):
        with pytest.raises(
            ValueError, match=r"task of this process is unknown: `cluster_spec` has 2 'worker'\. Pass `task_type`"
        ):
            use()
    assert resolver.num_processes == 2


@each_row("spec, message", [
    (["a:1"], r"`cluster_spec` must be a mapping from jobs to addresses, .*got list \['a:1'\]"),
    ({"worker": "a:1"}, r"Job 'worker' of `cluster_spec` must be a list of addresses, .*got str 'a:1'"),
    ({"worker": 5}, r"Job 'worker' of `cluster_spec` must be a list of addresses, .*got int 5"),
])  # fmt: skip
def test_cr10_list_as_cluster_or_text_as_job_is_a_type_error(spec, message):
    with pytest.raises(TypeError, match=message):
        make_resolver(spec)


def test_cr12_accelerators_are_those_of_this_process():
    resolver = make_resolver(WORKERS, "worker", 0, num_accelerators={"TPU": 2, "GPU": 2})
    assert resolver.num_accelerators() == {"TPU": 2, "GPU": 2}
    assert make_resolver(WORKERS, "worker", 0, num_accelerators={}).num_accelerators() == {}
    with pytest.raises(
        RuntimeError, match=r"number of accelerators per process is unknown: .*`jax\.local_device_count\(\)`"
    ):
        make_resolver(WORKERS, "worker", 0).num_accelerators()


@st.composite
def specs(draw):
    indices = st.lists(st.integers(0, 20), unique=True, min_size=1, max_size=5)
    jobs = {"worker": draw(indices), "ps": draw(indices)}
    if draw(st.booleans()):
        jobs["chief"] = [0]
    order = draw(st.permutations(list(jobs)))
    return {job: {index: f"{job}-{index}:1" for index in jobs[job]} for job in order}


@few
@hypothesis.given(specs())
def test_every_chief_and_worker_has_one_process_index_and_all_agree_on_the_coordinator(spec):
    tasks = [(job, index) for job in ("chief", "worker") for index in sorted(spec.get(job, {}))]
    resolvers = [make_resolver(spec, *task) for task in tasks]
    assert [resolver.process_id for resolver in resolvers] == list(range(len(tasks)))
    job, index = tasks[0]
    assert {resolver.master() for resolver in resolvers} == {f"{job}-{index}:1"}
    assert [resolver.is_chief for resolver in resolvers] == [True] + [False] * (len(tasks) - 1)


def test_resolver_is_a_frozen_value_that_can_be_pickled():
    resolver = make_resolver(WORKERS, "worker", 1, environment="test", local_device_ids=[2, 3])
    assert isinstance(resolver, ClusterResolver)
    assert pickle.loads(pickle.dumps(resolver)) == resolver
    assert len({resolver, make_resolver(WORKERS, "worker", 1, environment="test", local_device_ids=[2, 3])}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolver.environment = "other"
    assert "w0:1" in repr(resolver) and "local_device_ids=(2, 3)" in repr(resolver)
    resolver.cluster_spec()["worker"].clear()
    assert resolver.cluster_spec() == {"worker": {0: "w0:1", 1: "w1:1"}}


def test_one_process_joins_no_other():
    make_resolver({"worker": ["a:1"]}).initialize()
    make_resolver(CHIEF, "evaluator", 0).initialize()


def test_error_of_an_absent_cluster_is_a_value_error_with_its_public_name():
    assert issubclass(jdist.cluster.ClusterNotFoundError, ValueError)
    assert jdist.cluster.ClusterNotFoundError.__module__ == "jdist.cluster"

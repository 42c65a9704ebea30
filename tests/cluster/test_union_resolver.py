"""Unions: concatenated and merged jobs, the task of this process, and errors."""

import pytest

from jdist.cluster import EnvironmentClusterResolver, SimpleClusterResolver, TPUClusterResolver, UnionResolver

from laws import each_row


def workers(addresses, **options):
    return SimpleClusterResolver({"worker": addresses}, **options)


def sparse(*indices):
    return workers({index: f"s{index}:1" for index in indices})


def test_cr14_lists_of_the_same_job_are_concatenated_in_order():
    union = UnionResolver(workers(["w4:1", "w5:1"]), workers(["w0:1", "w1:1"]), task_type="worker", task_id=2)
    assert union.cluster_spec() == {"worker": {0: "w4:1", 1: "w5:1", 2: "w0:1", 3: "w1:1"}}
    assert (union.master(), union.process_id, union.num_processes) == ("w4:1", 2, 4)


@each_row("first, second, indices", [
    (sparse(7, 9), sparse(3, 6, 7), r"\[7\]"),
    (workers(["a:1", "b:1"]), sparse(1, 5), r"\[1\]"),
])  # fmt: skip
def test_cr15_equal_indices_of_sparse_jobs_are_an_error(first, second, indices):
    with pytest.raises(ValueError, match=rf"Duplicate task indices {indices} of job 'worker'.*Use different indices"):
        UnionResolver(first, second)


def test_cr16_list_and_sparse_job_keep_their_indices():
    union = UnionResolver(workers(["a:1", "b:1"]), sparse(3, 6, 7), task_type="worker", task_id=6)
    assert list(union.cluster_spec()["worker"]) == [0, 1, 3, 6, 7]
    assert union.process_id == 3


def test_cr17_no_resolver_or_other_arguments_are_errors():
    with pytest.raises(ValueError, match=r"`UnionResolver` needs at least one resolver, got none"):
        UnionResolver()
    with pytest.raises(TypeError, match=r"Argument 0 of `UnionResolver` must be a `ClusterResolver`, got 5"):
        UnionResolver(5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        UnionResolver(workers(["a:1"]), other=1)


def test_task_and_accelerators_are_those_of_the_first_resolver():
    servers = SimpleClusterResolver({"ps": ["p:1"]})
    first = workers(["a:1", "b:1"], task_type="worker", task_id=1, environment="x", num_accelerators={"GPU": 2})
    union = UnionResolver(first, servers)
    assert (union.task_type, union.task_id, union.environment, union.num_accelerators()) == (
        "worker",
        1,
        "x",
        {"GPU": 2},
    )
    assert union.cluster_spec() == {"worker": {0: "a:1", 1: "b:1"}, "ps": {0: "p:1"}}
    with pytest.raises(RuntimeError, match="number of accelerators per process is unknown"):
        UnionResolver(servers, first).num_accelerators()


def test_task_of_no_resolver_must_be_passed():
    with pytest.raises(ValueError, match=r"task of this process is unknown: the union has 4 'worker'"):
        _ = UnionResolver(workers(["a:1", "b:1"]), workers(["c:1", "d:1"])).process_id


def test_resolver_of_another_class_is_accepted():
    tpu = TPUClusterResolver(environ={"TPU_PROCESS_ADDRESSES": "a:1,b:1", "TPU_WORKER_ID": "1"})
    union = UnionResolver(tpu, workers(["c:1"]))
    assert (union.num_processes, union.process_id) == (3, 1)


def test_evaluator_of_a_cluster_is_accepted():
    evaluator = SimpleClusterResolver({"worker": ["a:1", "b:1"], "evaluator": ["e:1"]}, task_type="evaluator")
    assert UnionResolver(evaluator).num_processes == 1


def test_resolver_without_all_addresses_is_an_error():
    environ = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "1"}
    with pytest.raises(
        ValueError, match=r"Argument 1 of `UnionResolver` contains the addresses of 1 of its 4 processes"
    ):
        UnionResolver(workers(["c:1"]), EnvironmentClusterResolver(environ=environ))

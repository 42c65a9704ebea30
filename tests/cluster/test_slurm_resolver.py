"""Slurm: host lists, tasks per node, distributions, GPUs, jobs, and errors."""

import itertools

import hypothesis
import hypothesis.strategies as st
import pytest

from jdist._src.cluster.hostlist import expand_hostlist
from jdist.cluster import ClusterNotFoundError, SlurmClusterResolver

from laws import each_row

few = hypothesis.settings(max_examples=200, deadline=None, derandomize=True, database=None)
# Five tasks on three nodes.
FIVE = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "t02n13,t02n41,t02n43",
}


def make_resolver(settings=(), jobs=None, **options):
    environ = {name: text for name, text in (FIVE | dict(settings)).items() if text is not None}
    return SlurmClusterResolver(jobs, environ=environ, **{"port_base": 8888} | options)


# Host lists


@pytest.mark.parametrize("text, hosts", [
    ("n[1-2],m5,o[3-4,6,7-9]", "n1 n2 m5 o3 o4 o6 o7 o8 o9"),
    ("login", "login"),
    ("a, b", "a b"),
])  # fmt: skip
def test_cr18_hostlist_is_expanded_in_order(text, hosts):
    assert expand_hostlist(text) == hosts.split()


def test_cr19_numbers_keep_their_leading_zeros():
    hosts = "n0001 n0002 n0003 m5 o009 o010 o011"
    assert expand_hostlist("n[0001-0003],m5,o[009-011]") == hosts.split()


def test_cr20_empty_hostlist_has_no_hosts_and_a_final_comma_is_ignored():
    assert expand_hostlist("") == []
    assert expand_hostlist("n[1-2],") == ["n1", "n2"]
    with pytest.raises(ValueError, match=r"Invalid Slurm host list 'n\[3-1\]': the range 3-1 is empty \(character 0\)"):
        expand_hostlist("n[3-1]")


def test_cr21_suffixes_and_several_brackets_are_expanded():
    assert expand_hostlist("n[1-2]m[3-4]") == ["n1m3", "n1m4", "n2m3", "n2m4"]
    assert expand_hostlist("node-[1-2]-ib") == ["node-1-ib", "node-2-ib"]
    assert expand_hostlist("[1-2],r[0-1]-[08-10].x") == [
        "1",
        "2",
        *(f"r{r}-{n}.x" for r in "01" for n in ("08", "09", "10")),
    ]


@each_row("text, problem", [
    ("a,n[1-", r"an opening bracket without a closing bracket \(character 3\)"),
    ("n1]", r"a closing bracket without an opening bracket \(character 2\)"),
    ("n[1[2]]", r"a bracket inside a bracket \(character 3\)"),
    ("n[]", r"'' in a bracket is not a number or a range such as 1-3 \(character 0\)"),
    ("m,n[a-b]", r"'a-b' in a bracket is not a number or a range such as 1-3 \(character 2\)"),
    ("n[1-]", r"'1-' in a bracket is not a number"),
    ("a b", r"the host 'a b' contains a space"),
    ("n[0-99999]", r"it has more than 65536 hosts"),
    ("n[0-999][0-999]", r"it has more than 65536 hosts"),
])  # fmt: skip
def test_cr21_malformed_hostlist_is_an_error_with_the_position(text, problem):
    with pytest.raises(ValueError, match=rf"Invalid Slurm host list .*: {problem}.*`scontrol show hostnames`"):
        expand_hostlist(text)


@st.composite
def hostlists(draw):
    """A host list and its hosts, built piece by piece."""
    name = st.text("abz-.", min_size=1, max_size=3)
    texts, hosts = [], []
    for _ in range(draw(st.integers(1, 3))):
        text, pieces = "", []
        for _ in range(draw(st.integers(1, 3))):
            literal = draw(name)
            width = draw(st.integers(1, 3))
            ranges = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=0, max_size=3))
            items = [f"{a:0{width}}" if n == 0 else f"{a:0{width}}-{a + n:0{width}}" for a, n in ranges]
            text += literal + (f"[{','.join(items)}]" if items else "")
            pieces.append([literal])
            pieces.append([f"{i:0{width}}" for a, n in ranges for i in range(a, a + n + 1)] or [""])
        texts.append(text)
        hosts += ["".join(parts) for parts in itertools.product(*pieces)]
    return ",".join(texts), hosts


@few
@hypothesis.given(hostlists())
def test_hostlist_is_the_product_of_its_pieces(case):
    text, hosts = case
    assert expand_hostlist(text) == hosts


@few
@hypothesis.given(st.text("ab01-,[] ", max_size=12))
def test_hostlist_of_any_text_is_expanded_or_a_value_error(text):
    try:
        hosts = expand_hostlist(text)
    except ValueError as error:
        assert "Invalid Slurm host list" in str(error)
    else:
        assert all(host and not set(host) & set("[], ") for host in hosts)


# Resolvers


@pytest.mark.parametrize("gpus, ids", [((2, 1), (1,)), ((4, 2), (2, 3))])
def test_cr23_tasks_are_assigned_to_jobs_nodes_ports_and_gpus(gpus, ids):
    resolver = make_resolver(jobs={"ps": 1, "worker": 4}, gpus_per_node=gpus[0], gpus_per_task=gpus[1])
    assert resolver.cluster_spec() == {
        "worker": {0: "t02n13:8889", 1: "t02n41:8888", 2: "t02n41:8889", 3: "t02n43:8888"},
        "ps": {0: "t02n13:8888"},
    }
    assert (resolver.task_type, resolver.task_id, resolver.process_id, resolver.num_processes) == ("worker", 0, 0, 4)
    assert resolver.master() == "t02n13:8889"
    assert resolver.local_device_ids == ids
    assert resolver.num_accelerators() == {"GPU": gpus[1]}


@each_row("settings, options, message", [
    ({}, {"jobs": {"worker": 4}}, r"`jobs` \{'worker': 4\} has 4 tasks, but SLURM_STEP_NUM_TASKS is 5\. Correct"),
    ({"SLURM_PROCID": None}, {}, r"SLURM_STEP_NUM_TASKS is '5', .*but SLURM_PROCID is not set\. `srun` sets all of them"),
    ({}, {"gpus_per_node": 2, "gpus_per_task": 2}, r"2 processes per host with 2 GPUs each need 4 GPUs, but the host has 2"),
])  # fmt: skip
def test_cr24_wrong_number_of_tasks_half_set_variables_and_too_many_gpus_are_errors(settings, options, message):
    with pytest.raises(ValueError, match=message) as error:
        make_resolver(settings, **options)
    assert not isinstance(error.value, ClusterNotFoundError)


@pytest.mark.parametrize("environ, message", [
    ({}, r"This process was not started by `srun`: SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST, .* are not set"),
    ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, r"in Slurm job 7, but was not started by `srun`.*`srun python"),
])  # fmt: skip
def test_cr24_process_outside_a_job_step_is_not_found(environ, message):
    with pytest.raises(ClusterNotFoundError, match=message):
        SlurmClusterResolver(environ=environ)


def test_cr25_gpus_without_detected_ones_and_tasks_per_node_as_list_work():
    resolver = make_resolver({"SLURM_STEP_TASKS_PER_NODE": None}, tasks_per_node=[2, 2, 1], gpus_per_node=2)
    assert resolver.local_device_ids == (1,)
    assert (
        make_resolver({"SLURM_STEP_NUM_TASKS": "6", "SLURM_PROCID": "5"}, tasks_per_node=2).master("worker", 5)
        == "t02n43:8889"
    )


@each_row("settings, options, message", [
    ({"SLURM_STEP_NODELIST": " "}, {}, r"but SLURM_STEP_NODELIST is not set"),
    ({"SLURM_PROCID": "5"}, {}, r"SLURM_PROCID is 5, but SLURM_STEP_NUM_TASKS is 5: the index must be from 0 to 4"),
    ({"SLURM_PROCID": "x"}, {}, r"SLURM_PROCID must be an integer >= 0, got 'x'"),
    ({"SLURM_STEP_NUM_TASKS": "0"}, {}, r"SLURM_STEP_NUM_TASKS must be an integer >= 1, got '0'"),
    ({"SLURM_STEP_TASKS_PER_NODE": "2(y)"}, {}, r"SLURM_STEP_TASKS_PER_NODE must have numbers such as '2\(x3\),1', got '2\(y\)'"),
    ({"SLURM_STEP_TASKS_PER_NODE": "5"}, {}, r"is '5', for 1 nodes, but SLURM_STEP_NODELIST has 3: t02n13, t02n41, t02n43"),
    ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, {}, r"is '2\(x3\)', 6 tasks, but SLURM_STEP_NUM_TASKS is 5"),
    ({}, {"tasks_per_node": 2}, r"`tasks_per_node` is 2, 6 tasks, but SLURM_STEP_NUM_TASKS is 5"),
    ({"SLURM_STEP_NODELIST": "n[1-"}, {}, r"Invalid Slurm host list"),
    ({"SLURM_DISTRIBUTION": "arbitrary"}, {}, r"SLURM_DISTRIBUTION is 'arbitrary', so the node of each task is unknown.*--distribution=block"),
    ({"SLURM_GPUS_ON_NODE": "gpu:x"}, {}, r"SLURM_GPUS_ON_NODE must be an integer >= 0, got 'x'"),
    ({}, {"gpus_per_task": -1}, r"The number of GPUs must be >= 0, got -1"),
    ({}, {"jobs": {"zz": 5}}, r"Unrecognized job 'zz' in the Slurm job step"),
    ({"JAX_COORDINATOR_ADDRESS": "a"}, {}, r"JAX_COORDINATOR_ADDRESS must be a host with a port"),
])  # fmt: skip
def test_settings_that_contradict_each_other_are_errors(settings, options, message):
    with pytest.raises(ValueError, match=message):
        make_resolver(settings, **options)


@pytest.mark.parametrize("distribution, nodes", [
    ({}, "1 1 2 2 3"),
    ({"SLURM_DISTRIBUTION": "block:cyclic"}, "1 1 2 2 3"),
    ({"SLURM_DISTRIBUTION": "block,NoPack"}, "1 1 2 2 3"),
    ({"SLURM_DISTRIBUTION": "cyclic"}, "1 2 3 1 2"),
    ({"SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "1"}, "1 2 3 1 2"),
    ({"SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "2"}, "1 1 2 2 3"),
])  # fmt: skip
def test_distribution_assigns_tasks_to_nodes(distribution, nodes):
    resolver = make_resolver({"SLURM_STEP_NODELIST": "n[1-3]"} | distribution)
    assert [address[1] for address in resolver.cluster_spec()["worker"].values()] == nodes.split()
    assert resolver.process_id == 1


@pytest.mark.parametrize("settings, ids, accelerators", [
    ({}, (1,), None),  # unknown: one GPU per task, as in JAX
    ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (2, 3), {"GPU": 2}),
    ({"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0"}, None, {"GPU": 1}),  # bound by Slurm
    ({"SLURM_GPUS_ON_NODE": "2", "SLURM_GPUS_PER_TASK": "gpu:a100:1", "CUDA_VISIBLE_DEVICES": "0,1"}, (1,), {"GPU": 1}),
    ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (2, 3), {"GPU": 2}),
    ({"CUDA_VISIBLE_DEVICES": ""}, None, {}),
    ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, None, {}),
    ({"ROCR_VISIBLE_DEVICES": "0,1"}, (1,), {"GPU": 1}),
    ({"SLURM_PROCID": "4", "SLURM_GPUS_ON_NODE": "4"}, None, {"GPU": 4}),  # alone on its node
    ({"SLURM_PROCID": "4", "SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_TASK": "2"}, (0, 1), {"GPU": 2}),
    ({"SLURM_PROCID": "4"}, None, None),
    ({"SLURM_GPUS_PER_TASK": "2"}, (2, 3), {"GPU": 2}),
    ({"SLURM_GPUS_PER_TASK": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, None, {"GPU": 2}),  # bound by Slurm
])  # fmt: skip
def test_gpus_of_a_node_are_divided_between_its_tasks(settings, ids, accelerators):
    resolver = make_resolver(settings)
    assert resolver.local_device_ids == ids
    if accelerators is not None:
        assert resolver.num_accelerators() == accelerators


def test_default_port_depends_on_the_job_and_the_step_and_is_the_same_on_all_tasks():
    make = lambda job, step, task: make_resolver(
        {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step, "SLURM_PROCID": task}, port_base=None
    )
    ports = [[int(make(job, step, task).master().split(":")[1]) for task in "01"] for job, step in ("70", "71", "80")]
    assert all(first == second and 61440 <= first < 65280 for first, second in ports)
    assert len({first for first, _ in ports}) == 3


def test_address_of_jax_or_jdist_replaces_the_first_node():
    both = {"JAX_COORDINATOR_ADDRESS": "a:1", "JDIST_COORDINATOR_ADDRESS": "b:2"}
    assert make_resolver({"JAX_COORDINATOR_ADDRESS": "a:1"}).master() == "a:1"
    assert make_resolver(both).master() == "b:2"
    assert make_resolver(both, coordinator_address="c:3").master() == "c:3"


@few
@hypothesis.given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.sampled_from(["block", "cyclic"]))
def test_tasks_of_a_step_have_different_addresses_and_agree(counts, distribution):
    settings = {
        "SLURM_STEP_NODELIST": f"n[1-{len(counts)}]",
        "SLURM_STEP_NUM_TASKS": str(sum(counts)),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, counts)),
        "SLURM_DISTRIBUTION": distribution,
    }
    resolvers = [make_resolver(settings | {"SLURM_PROCID": str(task)}) for task in range(sum(counts))]
    assert [resolver.process_id for resolver in resolvers] == list(range(sum(counts)))
    assert len({str(resolver.cluster_spec()) for resolver in resolvers}) == 1
    assert len(set(resolvers[0].cluster_spec()["worker"].values())) == sum(counts)
    assert {resolver.master() for resolver in resolvers} == {"n1:8888"}


def test_task_without_gpus_uses_none():
    resolver = make_resolver({"SLURM_GPUS_ON_NODE": "4"}, gpus_per_task=0)
    assert (resolver.local_device_ids, resolver.num_accelerators()) == (None, {})

"""MPI: variables of Open MPI, MPICH and Intel MPI, the host of process 0, GPUs, and errors."""

import pytest

from jdist.cluster import ClusterNotFoundError, MPIClusterResolver

from laws import each_row

OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
ONE_HOST = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
MPICH = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "3"}
CRAY = {"PMI_SIZE": "4", "PMI_RANK": "3", "PMI_LOCAL_SIZE": "4", "PMI_LOCAL_RANK": "3"}
SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}


def make_resolver(*settings, **options):
    environ = {name: text for setting in settings for name, text in setting.items()}
    return MPIClusterResolver(environ=environ, **{"port": 8476} | options)


@pytest.mark.parametrize("settings, host", [
    ([ONE_HOST], "localhost"),
    ([MPICH], "localhost"),
    ([CRAY], "localhost"),
    ([OPEN_MPI, {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}], "10.96.0.1"),
    ([OPEN_MPI, {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911"}], "10.96.0.1"),
    ([OPEN_MPI, {"OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp6://[fe80::b9b:5d,2620:10d::2]:43370"}], "[fe80::b9b:5d]"),
    ([OPEN_MPI, {"PMIX_NAMESPACE": "prterun-node-01-2711@1"}], "node-01"),
    ([OPEN_MPI, {"SLURM_JOB_NODELIST": "n[7,9]", "PMIX_NAMESPACE": "prterun-login-2711@1"}], "n7"),
    ([OPEN_MPI, {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NODELIST": "n[7,9]"}], "n7"),
])  # fmt: skip
def test_host_of_process_0_is_this_host_or_that_of_the_job(settings, host):
    resolver = make_resolver(*settings)
    assert (resolver.num_processes, resolver.process_id, resolver.master()) == (4, 3, f"{host}:8476")
    assert (resolver.task_type, resolver.task_id, resolver.cluster_spec()) == (
        "worker",
        3,
        {"worker": {0: f"{host}:8476"}},
    )


def test_host_of_process_0_is_the_first_of_the_node_file_of_pbs(tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("n5\nn5\nn6\nn6\n")
    assert make_resolver(OPEN_MPI, {"PBS_NODEFILE": str(nodes)}).master() == "n5:8476"
    with pytest.raises(ValueError, match=r"PBS_NODEFILE is '.*absent', which cannot be read: .*No such file"):
        make_resolver(OPEN_MPI, {"PBS_NODEFILE": str(tmp_path / "absent")})
    nodes.write_text("")
    with pytest.raises(ValueError, match="the host of process 0 is unknown"):
        make_resolver(OPEN_MPI, {"PBS_NODEFILE": str(nodes)})


def test_address_of_the_user_replaces_the_host():
    address = {"JAX_COORDINATOR_ADDRESS": "a:1"}
    assert make_resolver(OPEN_MPI, address).master() == "a:1"
    assert make_resolver(ONE_HOST, address, coordinator_address="b:2").master() == "b:2"


@pytest.mark.parametrize("job, is_default", [
    ({}, True),
    ({"PMIX_NAMESPACE": "prterun-node-01-2711@1"}, False),
    ({"PBS_JOBID": "77.server"}, False),
])  # fmt: skip
def test_default_port_depends_on_the_job(job, is_default):
    ports = {make_resolver(ONE_HOST, job, {"OMPI_COMM_WORLD_RANK": rank}, port=None).master() for rank in "0123"}
    assert len(ports) == 1
    assert (ports == {"localhost:8476"}) == is_default


@each_row("settings, message", [
    ([{"OMPI_COMM_WORLD_SIZE": "4"}], r"OMPI_COMM_WORLD_SIZE is '4', but OMPI_COMM_WORLD_RANK is not set\. The launcher sets both"),
    ([{"PMI_RANK": "0"}], r"PMI_RANK is '0', but PMI_SIZE is not set"),
    ([OPEN_MPI, {"OMPI_COMM_WORLD_RANK": "4"}], r"OMPI_COMM_WORLD_RANK is 4, but OMPI_COMM_WORLD_SIZE is 4"),
    ([OPEN_MPI, {"OMPI_COMM_WORLD_SIZE": "x"}], r"OMPI_COMM_WORLD_SIZE must be an integer >= 1, got 'x'"),
    ([{"PMIX_RANK": "2"}], r"PMIX_RANK is '2', but PMIx does not pass the number of processes\. Start the program with `mpirun`"),
    ([OPEN_MPI], r"MPI started 4 processes, and some are on other hosts.*`mpirun -x JAX_COORDINATOR_ADDRESS=HOST:8476"),
    ([ONE_HOST, {"CUDA_VISIBLE_DEVICES": "0,1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}], r"4 processes per host with 1 GPUs each need 4 GPUs, but the host has 2"),
])  # fmt: skip
def test_incomplete_or_contradicting_variables_are_errors(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        make_resolver(*settings, gpus_per_process=1)
    assert not isinstance(error.value, ClusterNotFoundError)


@pytest.mark.parametrize("settings, message", [
    ([], r"not started by an MPI launcher: OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK \(Open MPI\); PMI_SIZE, PMI_RANK \(PMI\) are not set"),
    ([SRUN, {"PMI_SIZE": "4", "PMI_RANK": "3"}], r"PMI_RANK is set, but `srun` started this process.*`SlurmClusterResolver`"),
    ([SRUN, {"PMIX_RANK": "3"}], r"PMIX_RANK is set, but `srun` started this process"),
])  # fmt: skip
def test_process_of_another_launcher_is_not_found(settings, message):
    with pytest.raises(ClusterNotFoundError, match=message):
        make_resolver(*settings)


@pytest.mark.parametrize("settings, options, ids", [
    ([ONE_HOST], {}, (3,)),
    ([ONE_HOST, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}], {}, (6, 7)),
    ([ONE_HOST, {"CUDA_VISIBLE_DEVICES": "5"}], {}, None),
    ([ONE_HOST], {"gpus_per_process": 2}, (6, 7)),
    ([MPICH], {}, (3,)),
    ([{"PMI_SIZE": "1", "PMI_RANK": "0"}], {}, None),
])  # fmt: skip
def test_gpus_of_a_host_are_divided_between_its_processes(settings, options, ids):
    assert make_resolver(*settings, **options).local_device_ids == ids

"""`resolve` and `resolve_each`: the order of the resolvers, absent and malformed settings, and the reasons."""

import itertools

import pytest

from jdist.cluster import ClusterNotFoundError, ClusterResolver, resolve, resolve_each

from laws import each_row

# The settings of a process in each environment, in the order of `resolve`.
SETTINGS = {
    "EnvironmentClusterResolver": {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
    "TFConfigClusterResolver": {"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'},
    "MPIClusterResolver": {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"},
    "SlurmClusterResolver": {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_PROCID": "1",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    },
    "SageMakerClusterResolver": {"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "b"},
    "TPUClusterResolver": {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"},
    "KubernetesClusterResolver": {"JOB_COMPLETION_INDEX": "1", "JOB_COMPLETIONS": "2", "HOSTNAME": "train-1"},
}  # fmt: skip
ADDRESS = {"JAX_COORDINATOR_ADDRESS": "c:7"}  # used by the resolvers that find no address, and so in all cases
MALFORMED = {
    "EnvironmentClusterResolver": {"WORLD_SIZE": "2"},
    "TFConfigClusterResolver": {"TF_CONFIG": "{"},
    "MPIClusterResolver": {"PMI_SIZE": "2"},
    "SlurmClusterResolver": {"SLURM_STEP_NUM_TASKS": "2"},
    "SageMakerClusterResolver": {"SM_HOSTS": "[]"},
    "TPUClusterResolver": {"TPU_WORKER_HOSTNAMES": "a,b"},
    "KubernetesClusterResolver": {"JOB_COMPLETION_INDEX": "1"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_resolver_with_settings_is_returned(name):
    resolver = resolve(ADDRESS | SETTINGS[name])
    assert type(resolver).__name__ == name
    assert isinstance(resolver, ClusterResolver)
    assert resolver.process_id == 1
    explicit = name in ("EnvironmentClusterResolver", "TFConfigClusterResolver")
    assert resolver.coordinator_address == ("a:1" if explicit else "c:7")


@pytest.mark.parametrize("first, second", list(itertools.pairwise(SETTINGS)))
def test_first_of_two_resolvers_is_returned(first, second):
    environ = SETTINGS[first] | SETTINGS[second]
    assert type(resolve(environ)).__name__ == first


@each_row("name", MALFORMED)
def test_malformed_settings_are_an_error_also_if_a_later_resolver_has_settings(name):
    later = [
        settings for other, settings in SETTINGS.items() if list(SETTINGS).index(other) > list(SETTINGS).index(name)
    ]
    for settings in [{}, *later[:1]]:
        with pytest.raises(ValueError) as error:
            resolve(ADDRESS | settings | MALFORMED[name])
        assert not isinstance(error.value, ClusterNotFoundError)


def test_no_settings_are_an_error_with_the_reason_of_each_resolver():
    with pytest.raises(
        ClusterNotFoundError, match=r"No cluster found\. Start the program with a launcher such as `jdist run`"
    ) as error:
        resolve({})
    lines = str(error.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == list(SETTINGS)
    assert "TF_CONFIG is not set" in lines[1]


def test_address_alone_is_an_error_that_names_the_missing_variables():
    with pytest.raises(
        ValueError, match=r"JAX_COORDINATOR_ADDRESS is 'c:7', but JAX_NUM_PROCESSES, JAX_PROCESS_ID are not set"
    ) as error:
        resolve(ADDRESS)
    assert not isinstance(error.value, ClusterNotFoundError)
    with pytest.raises(ClusterNotFoundError, match="Only MASTER_ADDR is set"):
        resolve({"MASTER_ADDR": "a"})


@pytest.mark.parametrize("mpi", [{}, {"PMI_SIZE": "4", "PMI_RANK": "1"}, {"PMIX_RANK": "1"}])
def test_tasks_of_srun_with_variables_of_pmi_are_those_of_slurm(mpi):
    assert type(resolve(SETTINGS["SlurmClusterResolver"] | mpi)).__name__ == "SlurmClusterResolver"


def test_each_resolver_is_returned_or_its_error():
    environ = SETTINGS["SlurmClusterResolver"] | MALFORMED["SageMakerClusterResolver"] | {"TF_CONFIG": "[]"}
    outcomes = resolve_each(environ)
    assert list(outcomes) == list(SETTINGS)
    assert outcomes["SlurmClusterResolver"].num_processes == 4
    for name in ("SageMakerClusterResolver", "TFConfigClusterResolver"):
        assert type(outcomes[name]) is ValueError
    for name in ("EnvironmentClusterResolver", "TPUClusterResolver", "KubernetesClusterResolver"):
        assert type(outcomes[name]) is ClusterNotFoundError


def test_variables_of_the_process_are_the_default(monkeypatch):
    for name, value in SETTINGS["EnvironmentClusterResolver"].items():
        monkeypatch.setenv(name, value)
    assert resolve().process_id == resolve_each()["EnvironmentClusterResolver"].process_id == 1

"""Rows MW19 and CR29 of `rows.txt`: a process without a cluster, and TPU strategies without a TPU."""

import jax
import pytest

import jdist


def default_strategy():
    strategy = jdist.auto_strategy()
    return strategy.num_replicas_in_sync, strategy.mesh.devices.flat[0].platform, jax.process_count()


def test_mw19_process_without_a_cluster_has_one_replica_on_its_device():
    with jdist.testing.processes(1) as one:
        assert one.run(f"{__name__}:default_strategy") == [(1, "cpu", 1)]


def test_cr29_tpu_strategy_without_a_tpu_is_an_error_with_the_alternatives():
    with pytest.raises(RuntimeError, match=r"There is no TPU: JAX has the devices cpu:0.*`jdist\.auto_strategy\(\)`"):
        jdist.TPUStrategy()


def test_cr29_resolver_of_a_tpu_by_name_is_an_error_with_the_command_for_its_hosts():
    with pytest.raises(ValueError, match=r"TPU 'nope'.*gcloud compute tpus tpu-vm ssh nope"):
        jdist.cluster.TPUClusterResolver("nope")

"""`MultiWorkerMirroredStrategy` in one process, and its arguments. `tests/processes` runs it in several."""

import pickle

import jax
import numpy as np
import pytest

import jdist
from jdist.cluster import SimpleClusterResolver

ONE_WORKER = SimpleClusterResolver({"worker": ["localhost:8476"]})
EVALUATOR = SimpleClusterResolver(
    {"worker": ["10.0.0.1:8476", "10.0.0.2:8476"], "evaluator": ["10.0.0.3:8476"]}, task_type="evaluator", task_id=0
)


def test_one_process_without_a_cluster_uses_its_devices():
    strategy = jdist.MultiWorkerMirroredStrategy()
    assert strategy.devices == tuple(jax.devices())
    assert strategy.cluster_resolver is None
    rows = strategy.put(jdist.PerReplica(np.arange(8, dtype=np.float32)))
    assert float(strategy.run(lambda x: jdist.all_reduce("sum", x), (rows,))) == 28


@pytest.mark.parametrize("resolver", [ONE_WORKER, EVALUATOR], ids=["worker", "evaluator"])
def test_cluster_of_one_process_joins_nothing(resolver):
    strategy = jdist.MultiWorkerMirroredStrategy(resolver)
    assert strategy.num_replicas_in_sync == len(jax.devices())
    assert strategy.cluster_resolver is resolver
    assert not jax.distributed.is_initialized()


def test_cluster_in_the_environment_is_found(monkeypatch):
    monkeypatch.setenv(
        "TF_CONFIG", '{"cluster": {"worker": ["localhost:8476"]}, "task": {"type": "worker", "index": 0}}'
    )
    assert isinstance(jdist.MultiWorkerMirroredStrategy().cluster_resolver, jdist.cluster.TFConfigClusterResolver)


def test_malformed_cluster_in_the_environment_is_an_error(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": ')
    with pytest.raises(ValueError, match="TF_CONFIG"):
        jdist.MultiWorkerMirroredStrategy()


def test_cluster_of_several_processes_after_the_start_of_jax_is_an_error():
    pair = SimpleClusterResolver({"worker": ["localhost:8476", "localhost:8477"]}, task_type="worker", task_id=1)
    with pytest.raises(
        RuntimeError, match=r"Process 1 of 2 cannot join the others: JAX has started.*before the first use of JAX"
    ):
        jdist.MultiWorkerMirroredStrategy(pair)


def test_resolver_of_another_class_is_an_error():
    with pytest.raises(
        TypeError, match=r"`cluster_resolver` must be such as `jdist\.cluster\.TFConfig.*got 'localhost'"
    ):
        jdist.MultiWorkerMirroredStrategy("localhost")


def test_options_are_those_of_mirrored_strategy_and_are_pickled():
    options = jdist.CommunicationOptions(bytes_per_pack=1000)
    ops = jdist.HierarchicalAllReduce(4)
    strategy = jdist.MultiWorkerMirroredStrategy(ONE_WORKER, cross_device_ops=ops, communication_options=options)
    assert strategy.mesh.shape == {"group": 2, "replica": 4}
    again = pickle.loads(pickle.dumps(strategy))
    assert (again.mesh, again.cluster_resolver) == (strategy.mesh, None)
    virtual = jdist.MultiWorkerMirroredStrategy(virtual_replicas=16)
    assert (virtual.num_replicas_in_sync, pickle.loads(pickle.dumps(virtual)).num_replicas_in_sync) == (16, 16)


@pytest.mark.parametrize(
    "strategy",
    [jdist.OneDeviceStrategy(), jdist.MirroredStrategy(), jdist.CentralStorageStrategy(), jdist.ShardedStrategy()],
    ids=lambda strategy: type(strategy).__name__,
)
def test_sc17_strategies_of_one_process_have_no_resolver(strategy):
    assert strategy.cluster_resolver is None

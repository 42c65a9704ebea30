"""Scheduled functions: results, errors, cancellation, lost workers, threads, and wrong arguments."""

import contextvars
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist._src.core import exit_work
from jdist._src.parameter_server.closure_queue import WorkerLostError
from jdist.coordinator import (
    CancelledError,
    ClusterCoordinator,
    EndOfDataError,
    PerWorkerValues,
    RemoteValue,
    get_current_worker_index,
)

from laws import each_row
from local_workers import PATIENCE, Workers, ends, in_thread, until, worker_threads


@pytest.fixture
def coordinator():
    return ClusterCoordinator(Workers())


class _FunctionError(Exception):
    pass


def _failing():
    raise _FunctionError("wrong")


class Gate:
    """A function that waits in its worker until it is opened, and counts its calls."""

    def __init__(self):
        self.begun, self._opened, self.calls = threading.Semaphore(0), threading.Event(), 0

    def __call__(self, value=None):
        self.calls += 1
        self.begun.release()
        assert self._opened.wait(PATIENCE)
        return value

    def wait_until_called(self, times=1):
        for _ in range(times):
            assert self.begun.acquire(timeout=PATIENCE)

    def open(self):
        self._opened.set()


# Results.


def test_ps2_all_scheduled_functions_have_run_after_join(coordinator):
    total, lock = [0], threading.Lock()

    def add(n):
        with lock:
            total[0] += n

    coordinator.join()
    for _ in range(20):
        coordinator.schedule(add, (1,))
    coordinator.join()
    coordinator.join()
    assert total == [20]
    assert coordinator.done()


def test_ps3_result_is_a_tree(coordinator):
    x = jnp.int32(1)
    value = coordinator.schedule(lambda x: (x + 1, (x + 2, x + 3), [x + 4], {"v": x}), (x,))
    assert value.fetch() == (2, (3, 4), [5], {"v": 1})
    assert {type(leaf) for leaf in jax.tree.leaves(value.fetch())} == {np.ndarray}
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value.get()))


def test_ps4_fetch_returns_results_in_place_and_other_leaves_unchanged(coordinator):
    value = coordinator.schedule(jnp.arange, (3,))
    first, second, five, none = coordinator.fetch([value, {"a": value}, 5, coordinator.schedule(lambda: None)])
    np.testing.assert_array_equal(first, [0, 1, 2])
    np.testing.assert_array_equal(second["a"], [0, 1, 2])
    assert (type(first), five, none) == (np.ndarray, 5, None)
    assert coordinator.fetch(value).shape == (3,)


def test_ps5_any_callable_is_scheduled(coordinator):
    functions = [jax.jit(lambda x: x + 1), lambda x: x + 1, jnp.int32(1).__add__, (1).__add__]
    assert [int(coordinator.schedule(fn, (1,)).fetch()) for fn in functions] == [2, 2, 2, 2]


def test_ps7_coordinator_of_a_strategy_is_one_object():
    strategy = Workers()
    coordinator = ClusterCoordinator(strategy)
    assert ClusterCoordinator(strategy) is coordinator
    assert coordinator.strategy is strategy
    assert ClusterCoordinator(Workers()) is not coordinator


def test_arguments_are_passed_by_position_and_name(coordinator):
    value = coordinator.schedule(lambda a, b, *, c: (a, b, c), (1, None), {"c": {"d": 3}})
    assert value.fetch() == (1, None, {"d": 3})


def test_remote_value_is_an_array_if_its_result_is_one(coordinator):
    value = coordinator.schedule(jnp.arange, (3,))
    assert np.asarray(value, dtype=np.float64).tolist() == [0.0, 1.0, 2.0]
    assert np.add(value, 1).tolist() == [1, 2, 3]
    assert np.asarray(coordinator.schedule(lambda: 2)) == 2


def test_random_keys_and_objects_are_fetched_unchanged(coordinator):
    class Thing:
        pass

    thing, key = Thing(), jax.random.key(3)
    fetched = coordinator.schedule(lambda: {"thing": thing, "key": key, "number": 2.5}).fetch()
    assert fetched["thing"] is thing
    assert fetched["number"] == 2.5
    assert jnp.array_equal(jax.random.key_data(fetched["key"]), jax.random.key_data(key))


def test_repr_of_values_and_of_the_coordinator(coordinator):
    gate = Gate()
    value = coordinator.schedule(gate)
    gate.wait_until_called()
    assert (repr(value), value.is_done) == ("RemoteValue(Gate, not done)", False)
    assert repr(coordinator) == "ClusterCoordinator(3 workers; functions: 0 waiting, 1 running)"
    gate.open()
    coordinator.join()
    assert (repr(value), value.is_done) == ("RemoteValue(Gate, done)", True)
    failed = coordinator.schedule(_failing)
    with pytest.raises(_FunctionError):
        coordinator.join()
    assert repr(failed) == "RemoteValue(_failing, failed)"


# Workers.


def test_functions_run_on_the_devices_of_their_workers_at_the_same_time(coordinator):
    barrier = threading.Barrier(3)

    def compute():
        barrier.wait(PATIENCE)
        (device,) = jnp.ones(2).devices()
        return get_current_worker_index(), device.id, threading.current_thread().name

    results = coordinator.fetch([coordinator.schedule(compute) for _ in range(3)])
    assert sorted(results) == [(i, jax.devices()[i].id, f"jdist worker {i}") for i in range(3)]


def test_function_has_the_context_and_the_precision_of_its_caller(coordinator):
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(5)
    with jax.enable_x64(True):
        wide = coordinator.schedule(lambda: (variable.get(), jnp.zeros((), np.float64).dtype))
    variable.set(6)
    narrow = coordinator.schedule(lambda: (variable.get(), jax.dtypes.canonicalize_dtype(np.float64)))
    assert (wide.fetch(), narrow.fetch()) == ((5, np.float64), (6, np.float32))


def test_scheduled_function_is_in_the_scope_of_its_caller(coordinator, two):
    with two.scope():
        value = coordinator.schedule(lambda: jdist.get_strategy() is two)
    assert value.fetch()


def test_worker_index_is_not_defined_while_jax_traces_a_function(coordinator):
    traced = coordinator.schedule(jax.jit(lambda: jnp.zeros(get_current_worker_index())))
    with pytest.raises(RuntimeError, match="was called while JAX traces a function: the index would be a constant"):
        traced.fetch()


def test_scheduled_function_cannot_schedule_or_wait(coordinator):
    gate = Gate()
    waiting = coordinator.schedule(gate)
    gate.wait_until_called()
    calls = {
        "schedule another one": lambda: coordinator.schedule(print),
        "wait for all others": coordinator.join,
        "wait for the result of another one": waiting.fetch,
        "create per-worker values": lambda: coordinator.per_worker_values(list),
    }
    for action, call in calls.items():
        with pytest.raises(RuntimeError, match=rf"^A scheduled function cannot {action}: it occupies a worker"):
            coordinator.schedule(call).fetch()
        with pytest.raises(RuntimeError, match="^A scheduled function cannot"):
            coordinator.done()
    gate.open()
    assert waiting.fetch() is None
    assert coordinator.schedule(lambda: waiting.fetch()).fetch() is None  # available, so it does not wait


def test_arrays_are_computed_when_the_function_has_run(coordinator, caplog):
    caplog.set_level(logging.CRITICAL, "jax._src.callback")  # its record would reference the coordinator

    def fail(x):
        raise ValueError("in a callback")

    compute = jax.jit(lambda x: jax.pure_callback(fail, jax.ShapeDtypeStruct((), np.float32), x))
    coordinator.schedule(compute, (np.float32(1),))
    with pytest.raises(jax.errors.JaxRuntimeError, match="in a callback"):
        coordinator.join()


# Errors.


@pytest.mark.parametrize("fn, outcome", [(int, "set_result"), (_failing, "set_exception")])
def test_who_fetches_an_outcome_finds_the_function_ended_and_removes_its_report_at_exit(
    coordinator, monkeypatch, fn, outcome
):
    set_outcome, conditions = getattr(Future, outcome), []

    def record(*args):
        is_reported = any(isinstance(key, Future) for key in exit_work._work)
        conditions.append((coordinator._queue._lock.locked(), is_reported))
        set_outcome(*args)

    monkeypatch.setattr(Future, outcome, record)
    value = coordinator.schedule(fn)
    if fn is int:
        value.fetch()
        assert coordinator.done()
    else:
        with pytest.raises(_FunctionError):
            value.fetch()
        assert not any(isinstance(key, Future) for key in exit_work._work)
        with pytest.raises(_FunctionError):
            coordinator.done()
    assert conditions == [(True, fn is _failing)]  # nothing runs between the outcome and the end of the function


def test_ps10_error_is_raised_once_and_functions_that_wait_are_cancelled():
    coordinator = ClusterCoordinator(Workers(1))
    gate = Gate()
    first = coordinator.schedule(gate, (1,))
    gate.wait_until_called()
    failing, waiting = coordinator.schedule(_failing), coordinator.schedule(lambda: 2)
    gate.open()
    with pytest.raises(_FunctionError, match="wrong"):
        coordinator.join()
    coordinator.join()
    assert coordinator.done()
    assert first.fetch() == 1
    for value in (failing.fetch, failing.get):
        with pytest.raises(_FunctionError, match="wrong"):
            value()
    message = r"^`<lambda>` was cancelled, because `_failing` failed before it ran\. Schedule it again\.$"
    for value in (waiting.fetch, waiting.get, lambda: coordinator.fetch([waiting])):
        with pytest.raises(CancelledError, match=message):
            value()
    assert coordinator.schedule(lambda: 3).fetch() == 3
    coordinator.join()


def test_error_names_the_function_and_the_worker():
    coordinator = ClusterCoordinator(Workers(1))
    coordinator.schedule(_failing)
    (device,) = coordinator.strategy.worker_devices
    with pytest.raises(_FunctionError) as raised:
        coordinator.join()
    assert raised.value.__notes__ == [f"Raised by the scheduled function `_failing` on worker 0 ({device})."]
    assert "_failing" in [entry.name for entry in raised.traceback]


def test_error_of_a_result_that_is_never_fetched_is_raised_by_the_next_call(coordinator):
    for call in (lambda: coordinator.schedule(print), coordinator.done, coordinator.join):
        coordinator.schedule(_failing)
        until(lambda: "0 waiting, 0 running" in repr(coordinator))
        with pytest.raises(_FunctionError):
            call()
    coordinator.join()


def test_exit_of_a_function_is_raised_where_it_ends_the_program(coordinator):
    coordinator.schedule(sys.exit, (3,))
    with pytest.raises(SystemExit):
        coordinator.join()
    assert coordinator.schedule(lambda: 1).fetch() == 1


def test_result_that_is_not_referenced_is_freed():
    coordinator = ClusterCoordinator(Workers(1))

    class Result:
        pass

    references, functions = [], []

    def make(argument):
        result = Result()
        references.append(weakref.ref(result))
        return result

    argument = Result()
    references.append(weakref.ref(argument))
    functions.append(weakref.ref(make))
    coordinator.schedule(make, (argument,))
    coordinator.join()
    del argument, make
    until(lambda: all(reference() is None for reference in (*references, *functions)))


# Lost workers.


def test_ft3_functions_of_lost_workers_are_run_again(coordinator):
    lost, lock, runs = [], threading.Lock(), []

    def run(number):
        with lock:
            if len(lost) < 5:
                lost.append(get_current_worker_index())
                raise WorkerLostError("killed")
            runs.append(number)
        return number

    values = [coordinator.schedule(run, (i,)) for i in range(10)]
    coordinator.join()
    assert coordinator.fetch(values) == list(range(10))
    assert sorted(runs) == list(range(10))
    assert len(lost) == 5


def test_ft4_error_of_the_user_is_raised_and_the_function_of_a_lost_worker_is_cancelled(coordinator):
    gate = Gate()

    def lose():
        gate()
        raise WorkerLostError("killed")

    long_running = coordinator.schedule(lose)
    gate.wait_until_called()
    failing = coordinator.schedule(_failing)
    until(lambda: failing.is_done)
    gate.open()
    with pytest.raises(_FunctionError):
        coordinator.join()
    with pytest.raises(CancelledError, match="^`lose` was cancelled, because its worker was lost"):
        long_running.fetch()
    assert gate.calls == 1


# Threads.


def test_threads_start_at_the_first_schedule():
    coordinator = ClusterCoordinator(Workers())
    coordinator.join()
    assert coordinator.done()
    assert not worker_threads()
    coordinator.schedule(lambda: None)
    assert len(worker_threads()) == 3
    assert all(thread.daemon for thread in worker_threads())
    coordinator.schedule(lambda: None)
    assert len(worker_threads()) == 3


def test_ft10_ft11_threads_end_when_coordinator_and_strategy_are_deleted_and_results_remain():
    strategy = Workers()
    coordinator = ClusterCoordinator(strategy)
    values = [coordinator.schedule(lambda i=i, _=strategy: jnp.arange(i)) for i in range(4)]
    coordinator.join()
    references = [weakref.ref(coordinator), weakref.ref(strategy)]
    del coordinator, strategy
    gc.collect()
    until(lambda: not worker_threads())
    until(lambda: [reference() for reference in references] == [None, None])
    assert [len(value.fetch()) for value in values] == [0, 1, 2, 3]


def test_threads_end_although_an_error_that_references_the_coordinator_was_not_raised_by_join():
    def run():
        coordinator = ClusterCoordinator(Workers())
        with pytest.raises(_FunctionError):
            coordinator.schedule(_failing).fetch()  # the traceback of the error has this frame
        return weakref.ref(coordinator), weakref.ref(coordinator.strategy)

    references = run()
    until(lambda: not worker_threads())
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_functions_of_a_deleted_coordinator_run_and_the_next_one_waits_for_them():
    strategy, gate = Workers(1), Gate()
    value = ClusterCoordinator(strategy).schedule(gate, (1,))
    second = ClusterCoordinator(strategy).schedule(lambda: 2)
    gc.collect()
    gate.wait_until_called()
    assert not second.is_done
    gate.open()
    ClusterCoordinator(strategy).join()
    assert (value.fetch(), second.fetch()) == (1, 2)
    ClusterCoordinator(strategy).schedule(_failing)
    gc.collect()
    until(lambda: not worker_threads())
    with pytest.raises(_FunctionError):
        ClusterCoordinator(strategy).join()


def test_many_functions_of_several_threads_are_all_run(coordinator):
    def schedule_all():
        return [coordinator.schedule(lambda i=i: i) for i in range(200)]

    threads = [in_thread(schedule_all) for _ in range(4)]
    assert all(ends(thread) for thread, _ in threads)
    coordinator.join()
    assert [coordinator.fetch(values) for _, (values,) in threads] == [list(range(200))] * 4


@pytest.mark.parametrize("wait", ["coordinator.join()", pytest.param("value.fetch()", marks=pytest.mark.slow)])
def test_waiting_is_interrupted_by_ctrl_c_and_the_program_exits_while_a_worker_is_busy(wait):
    program = f"""
import jax, signal, threading, time, jdist
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job of a shell
coordinator = jdist.coordinator.ClusterCoordinator(jdist.ParameterServerStrategy(workers=1))
begun, end = threading.Event(), threading.Event()
value = coordinator.schedule(lambda: (begun.set(), end.wait({PATIENCE})))
begun.wait()
try:
    print("waiting", flush=True)
    {wait}
except KeyboardInterrupt:
    print("interrupted")
end.set()
coordinator.join()
late = coordinator.schedule(time.sleep, (0.2,))
"""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "waiting\n", process.communicate()
        time.sleep(0.2)  # it is then likely to wait
        os.kill(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE * 3)
    finally:
        process.kill()
    assert (process.returncode, output, errors) == (0, "interrupted\n", "")


# Per-worker values.


def _batches(*elements):
    return lambda: iter(elements)


def _on_each_worker(coordinator, fn, *args):
    """Returns the results of `fn` on all workers, in their order."""
    barrier = threading.Barrier(coordinator.strategy.num_workers)

    def run(*args):
        barrier.wait(PATIENCE)
        return get_current_worker_index(), fn(*args)

    values = [coordinator.schedule(run, args) for _ in range(coordinator.strategy.num_workers)]
    return [result for _, result in sorted(coordinator.fetch(values))]


@pytest.mark.parametrize("source", [lambda: range(1, 4), range(1, 4), [1, 2, 3], _batches(1, 2, 3)])
def test_ps12_each_worker_reads_the_data_set_from_its_beginning(coordinator, source):
    iterator = iter(coordinator.create_per_worker_dataset(source))
    assert _on_each_worker(coordinator, next, iterator) == [1, 1, 1]
    assert _on_each_worker(coordinator, next, iterator) == [2, 2, 2]
    assert _on_each_worker(coordinator, next, iter(coordinator.create_per_worker_dataset(source))) == [1, 1, 1]


def test_ps12_distributed_dataset_is_read_by_each_worker(coordinator):
    dataset = jdist.OneDeviceStrategy("cpu:0").distribute_dataset(np.arange(1, 4), batch_size=1)
    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    assert _on_each_worker(coordinator, lambda batches: int(next(batches).tree[0, 0]), iterator) == [1, 1, 1]


def test_ps13_end_of_the_data_set_is_an_error_at_join():
    coordinator = ClusterCoordinator(Workers(1))
    iterator = iter(coordinator.create_per_worker_dataset([1, 2]))
    values = [coordinator.schedule(next, (iterator,)) for _ in range(4)]
    with pytest.raises(
        EndOfDataError, match=r"^`next` raised StopIteration: .* data set of worker 0\. `next\(iterator, None\)`"
    ):
        coordinator.join()
    assert coordinator.fetch(values[:2]) == [1, 2]
    assert coordinator.schedule(next, (iterator, None)).fetch() is None
    assert coordinator.schedule(lambda batches: sum(batches), (iterator,)).fetch() == 0


def test_ps14_data_set_is_divided_by_the_worker_index():
    coordinator = ClusterCoordinator(Workers(5))
    dataset = coordinator.create_per_worker_dataset(lambda: range(10)[get_current_worker_index() :: 5])
    assert _on_each_worker(coordinator, sum, iter(dataset)) == [5, 7, 9, 11, 13]


def test_function_of_a_data_set_that_returns_no_iterable_is_an_error_at_join(coordinator):
    def wrong():
        return 5

    iterator = iter(coordinator.create_per_worker_dataset(wrong))
    coordinator.join()
    coordinator.schedule(next, (iterator,))
    with pytest.raises(ValueError, match=r"^`wrong` must return an iterable of batches, got int on worker \d\."):
        coordinator.join()


def test_ps17_workers_read_a_shuffled_data_set_in_different_orders(coordinator):
    dataset = jdist.OneDeviceStrategy("cpu:0").distribute_dataset(np.arange(30), batch_size=1, shuffle=True)
    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    orders = _on_each_worker(coordinator, lambda batches: [int(batch.tree[0, 0]) for batch in batches], iterator)
    assert [sorted(order) for order in orders] == [list(range(30))] * 3
    assert len(set(map(tuple, orders))) == 3


def test_ps21_each_worker_changes_its_own_value(coordinator):
    counts = coordinator.per_worker_values(lambda: {"count": jnp.int32(0)})

    def increment(own):
        own["count"] += 1

    for _ in range(10):
        coordinator.schedule(increment, (counts,))
    coordinator.join()
    assert sum(int(value["count"]) for value in counts.values) == 10
    dataset = coordinator.create_per_worker_dataset([1])
    names = ["PerWorkerValues(3 workers)", "PerWorkerDataset(list)", "PerWorkerIterator(3 workers)"]
    assert [repr(value) for value in (counts, dataset, iter(dataset))] == names


def test_per_worker_values_are_created_on_their_workers(coordinator):
    values = coordinator.per_worker_values(lambda: (get_current_worker_index(), jnp.zeros(()).devices()))
    assert values.values == tuple((i, {jax.devices()[i]}) for i in range(3))


def test_per_worker_values_in_a_tree_of_arguments(coordinator):
    rates = PerWorkerValues([0.1, 0.2, 0.3])
    barrier = threading.Barrier(3)

    def run(tree, *, rate):
        barrier.wait(PATIENCE)
        return tree["rate"][0], rate

    results = [coordinator.schedule(run, ({"rate": [rates]},), {"rate": rates}) for _ in range(3)]
    assert sorted(coordinator.fetch(results)) == [(0.1, 0.1), (0.2, 0.2), (0.3, 0.3)]


def test_error_of_the_function_of_per_worker_values(coordinator):
    values = coordinator.per_worker_values(_failing)
    with pytest.raises(_FunctionError):
        values.values  # noqa: B018
    coordinator.join()
    coordinator.schedule(print, (values,))
    with pytest.raises(_FunctionError):
        coordinator.join()


def test_ft5_values_of_a_lost_worker_are_created_again():
    coordinator = ClusterCoordinator(Workers(1))
    created, lost = [], []

    def batches():
        created.append(get_current_worker_index())
        if len(created) == 1:
            raise WorkerLostError("killed while it creates the data set")
        return iter([1, 2, 3])

    def read(batches):
        if next(batches) == 2 and not lost:
            lost.append(2)
            raise WorkerLostError("killed")
        return len(created)

    iterator = iter(coordinator.create_per_worker_dataset(batches))
    values = [coordinator.schedule(read, (iterator,)) for _ in range(3)]
    coordinator.join()
    assert coordinator.fetch(values) == [2, 3, 3]


# Wrong calls.

READ_ONCE = r"which can be read only once, and every worker reads it\. Pass"
REFUSED = [
    (lambda c: c.schedule(5), TypeError, r"^`fn` must be a function, got int\.$"),
    (lambda c: c.per_worker_values(3), TypeError, "`fn` must be a function, got int"),
    (lambda c: c.schedule(print, 3), TypeError, r"`args` is a tuple of arguments, got int: write `schedule\(fn, \(value,\)\)`"),
    (lambda c: c.schedule(print, kwargs=[3]), TypeError, r"`kwargs` must be a mapping.*`schedule\(fn, kwargs="),
    (
        lambda c: c.schedule(print, ({"x": [1, c.schedule(int)]},)), ValueError,
        r"^`args\[0\]\['x'\]\[1\]` is a RemoteValue.*Pass its result: `value.fetch\(\)`",
    ),
    (
        lambda c: c.schedule(print, kwargs={"y": c.schedule(int)}), ValueError,
        r"^`kwargs\['y'\]` is a RemoteValue, which a scheduled function cannot receive",
    ),
    (
        lambda c: np.asarray(c.schedule(dict)), TypeError,
        r"The result of `dict` is a dict, not an array\. Use `fetch\(\)`",
    ),
    (
        lambda c: get_current_worker_index(), RuntimeError,
        "^`get_current_worker_index` can only be called in a function that a worker runs",
    ),
    (
        lambda c: c.create_per_worker_dataset(5), ValueError,
        r"^`create_per_worker_dataset` got int, which is not a data set\. Pass a `DistributedDataset`, a list",
    ),
    (lambda c: c.create_per_worker_dataset(iter([1])), ValueError, rf"^The source is a list_iterator, {READ_ONCE}"),
    (lambda c: c.create_per_worker_dataset(x for x in [1]), ValueError, rf"^The source is a generator, {READ_ONCE}"),
    (
        lambda c: c.create_per_worker_dataset((np.zeros(3), np.zeros(3))), ValueError,
        r"cannot divide tuple into batches\. Pass `strategy.distribute_dataset\(arrays, batch",
    ),
    (lambda c: c.create_per_worker_dataset({"x": np.zeros(3)}), ValueError, "cannot divide dict into batches"),
    (lambda c: c.create_per_worker_dataset(jnp.zeros(3)), ValueError, r"cannot divide float32\[3\] into batches"),
    (lambda c: c.create_per_worker_dataset("text"), ValueError, "cannot divide str into batches"),
    (
        lambda c: c.create_per_worker_dataset(
            jdist.OneDeviceStrategy("cpu:0").distribute_dataset(iter(range(4)), batch_size=2)
        ), ValueError, "^The data set can be read only once, and every worker reads it",
    ),
    (
        lambda c: next(iter(c.create_per_worker_dataset([1]))), RuntimeError,
        r"is read by the workers\. Pass the iterator to a scheduled function.*args=\(iterator,\)",
    ),
    (lambda c: list(c.create_per_worker_dataset([1])), RuntimeError, "is read by the workers"),
    (
        lambda c: c.schedule(next, (c.create_per_worker_dataset([1]),)), ValueError,
        r"^`args\[0\]` is a per-worker data set\. Call `iter` once, and pass the result",
    ),
    (
        lambda c: c.schedule(print, (PerWorkerValues([1, 2]),)), ValueError,
        r"has values of 2 workers, but the strategy has 3 workers\. Pass one value per",
    ),
    (lambda c: PerWorkerValues([]), ValueError, r"`values` is empty\. Pass one value per worker"),
    *(
        (lambda c, wrong=wrong: PerWorkerValues(wrong), TypeError,
         rf"must be a sequence of one value per worker, got {type(wrong).__name__}\. For equal values")
        for wrong in (5, "abc", iter([1]))
    ),
    (
        lambda c: ClusterCoordinator(jdist.OneDeviceStrategy("cpu:0")), TypeError,
        "needs the workers of a `jdist.ParameterServerStrategy`, got OneDeviceStrategy",
    ),
    (lambda c: ClusterCoordinator(3), TypeError, "got int"),
]  # fmt: skip


@each_row("call, error, message", REFUSED, ids=[message for _, _, message in REFUSED])
def test_ps6_ps15_wrong_calls_are_refused(coordinator, call, error, message):
    with pytest.raises(error, match=message):
        call(coordinator)


def test_public_errors_have_public_names():
    assert f"{CancelledError.__module__}.{CancelledError.__qualname__}" == "jdist.coordinator.CancelledError"
    assert f"{EndOfDataError.__module__}.{EndOfDataError.__qualname__}" == "jdist.coordinator.EndOfDataError"
    assert isinstance(ClusterCoordinator(Workers()).schedule(lambda: None), RemoteValue)


def test_scheduled_functions_that_call_a_step_first_at_the_same_time_update_one_state():
    strategy, num_workers = jdist.ParameterServerStrategy(workers=4), 4
    coordinator, together = ClusterCoordinator(strategy), threading.Barrier(num_workers)

    @strategy.step
    def add(total, x):
        return {"sum": total["sum"] + jdist.all_reduce("mean", x)}, total["sum"]

    state = strategy.init(lambda: {"sum": jnp.zeros(3)})

    def train(x):
        nonlocal state
        together.wait(PATIENCE)
        state, _ = add(state, x)

    for number in range(3 * num_workers):
        coordinator.schedule(train, (np.float32(number),))
    coordinator.join()
    assert state["sum"].tolist() == [66, 66, 66]


UNREAD = """
import contextlib, jdist, numpy as np
strategy = jdist.ParameterServerStrategy(workers=2, non_finite="stop")

@strategy.step
def step(total, x):
    return total + jdist.all_reduce("mean", x), None

def fail(message):
    raise KeyError(message)

def get(result):
    with contextlib.suppress(KeyError):
        result.fetch()

def train():
    strategy = jdist.ParameterServerStrategy(workers=2, non_finite="stop")
    strategy.step(step.__wrapped__)(strategy.put(1.0), np.float32(np.nan))

schedule = jdist.coordinator.ClusterCoordinator(strategy).schedule
{calls}
print("end")
"""
READ, OF_A_FUNCTION = "get(schedule(fail, ('read',)))", "schedule(fail, ('the only batch',))"
OF_A_STEP, OF_A_DROPPED_STRATEGY = "step(strategy.put(1.0), np.float32(np.nan))", "train()"
NOT_FINITE = "FloatingPointError: Worker 0 computed values that are not finite in call 1"


@pytest.mark.slow
@pytest.mark.parametrize(
    "calls, messages",
    [
        ([READ], []),
        ([OF_A_FUNCTION], ["KeyError: 'the only batch'"]),
        ([f"state = {OF_A_STEP}"], [NOT_FINITE]),
        ([OF_A_STEP, OF_A_DROPPED_STRATEGY], [NOT_FINITE] * 2),
    ],
    ids=["read", "of_a_function", "of_a_step", "of_a_step_without_reference"],
)
def test_errors_that_nobody_read_are_printed_at_exit(calls, messages):
    program = UNREAD.replace("{calls}", "\n".join(calls))
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (run.stdout, run.returncode) == ("end\n", int(bool(messages))), run.stderr
    assert re.findall("KeyError: '.*'|FloatingPointError: .* in call 1", run.stderr) == messages, run.stderr

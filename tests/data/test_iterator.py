"""The iterator of a data set: positions, prefetching, closing, and errors."""

import gc
import itertools
import json
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist._src.data.sources import Arrays

from input_threads import PATIENCE, input_threads, until, until_no_thread_is_left
from laws import (
    STRATEGIES,
    among,
    arrays,
    assert_resumes_at_every_batch,
    each_row,
    example_numbers,
    resumed,
    traces_of_a_step,
)

few = hypothesis.settings(max_examples=30, deadline=None, derandomize=True, database=None)
REPLICAS = {name: STRATEGIES[name]() for name in ("one_device", "mirrored_1", "mirrored_2", "mirrored_3")}
every_strategy = each_row("strategy", REPLICAS.values(), ids=REPLICAS)
SIZE, COUNT = 6, 27


class _Source:
    """A stream of examples that counts the examples read and the iterators that ended."""

    def __init__(self, count=COUNT, fails_at=None, error=None):
        self.count, self.fails_at, self.error = count, fails_at, error
        self.given, self.ended = 0, 0

    def __iter__(self):
        return self._examples_of_this_source()

    def _examples_of_this_source(self):
        try:
            for i in range(self.count):
                if i == self.fails_at:
                    raise self.error
                self.given += 1
                yield {"number": np.int32(i), "x": np.full(2, i, np.float32)}
        finally:
            self.ended += 1


def _arrays(count=COUNT):
    return {"number": np.arange(count, dtype=np.int32), "x": np.arange(count, dtype=np.float32)[:, None] * np.ones(2)}


class _Batches:
    """Yields batches, the last one partial."""

    def __iter__(self):
        return (jax.tree.map(lambda x, i=i: x[i : i + SIZE], _arrays()) for i in range(0, COUNT, SIZE))


SOURCES = {
    "arrays": lambda: (_arrays(), SIZE),
    "stream": lambda: (_Source(), SIZE),
    "batches": lambda: (_Batches(), None),
    "files": lambda: (jdist.data.Files([0, 9, 18], lambda i: jax.tree.map(lambda x: x[i : i + 9], _arrays())), SIZE),
}
every_source = pytest.mark.parametrize("kind", SOURCES)


def _dataset(strategy, kind, **options):
    source, size = SOURCES[kind]()
    return strategy.distribute_dataset(source, size, **{"remainder": "pad", **options})


def _epoch(count=COUNT):
    return [list(range(i, min(i + SIZE, count))) for i in range(0, count, SIZE)]


# Positions


@every_source
@pytest.mark.parametrize("prefetch", [0, 2])
def test_position_resumes_exactly_on_any_number_of_replicas(kind, prefetch):
    make = lambda strategy: _dataset(strategy, kind, epochs=2, prefetch=prefetch)  # more batches are prefetched
    assert assert_resumes_at_every_batch(make, REPLICAS["mirrored_2"], REPLICAS.values()) == _epoch() * 2


@few
@hypothesis.given(
    st.sampled_from(list(REPLICAS)),
    st.sampled_from(list(REPLICAS)),
    st.integers(1, 40),
    st.integers(0, 2**64 - 1),
    st.sampled_from(["drop", "pad"]),
    st.integers(0, 3),
    st.data(),
)
def test_position_of_shuffled_arrays_resumes_exactly_on_any_number_of_replicas(
    one, other, count, seed, remainder, prefetch, data
):
    hypothesis.assume(remainder == "pad" or count >= SIZE)
    options = dict(shuffle=True, seed=seed, epochs=3, remainder=remainder, prefetch=prefetch)
    dataset = REPLICAS[one].distribute_dataset(_arrays(count), SIZE, **options)
    whole = example_numbers(dataset)
    taken = data.draw(st.integers(0, len(whole)))
    first = iter(dataset)
    assert example_numbers(itertools.islice(first, taken)) == whole[:taken]
    second = resumed(REPLICAS[other].distribute_dataset(_arrays(count), SIZE, **options), first.get_state())
    assert example_numbers(second) == whole[taken:]
    assert example_numbers(first) == whole[taken:]


@every_source
def test_position_may_be_set_backward_and_forward(kind, two):
    iterator = iter(_dataset(two, kind))
    start = iterator.get_state()
    next(iterator)
    second = iterator.get_state()
    assert example_numbers(iterator) == _epoch()[1:]
    iterator.set_state(second)
    assert example_numbers([next(iterator)]) == _epoch()[1:2]
    iterator.set_state(start)
    assert example_numbers(iterator) == _epoch()
    iterator.set_state(second)
    assert example_numbers(iterator) == _epoch()[1:]


@every_source
def test_position_after_the_last_batch_continues_with_the_next_epoch_if_any(kind, two):
    iterator = iter(_dataset(two, kind))
    assert example_numbers(iterator) == _epoch()
    for epochs, rest in ((1, []), (2, _epoch())):
        assert example_numbers(resumed(_dataset(two, kind, epochs=epochs), iterator.get_state())) == rest


def test_position_in_an_endless_data_set_resumes(two):
    iterator = iter(_dataset(two, "stream", epochs=None))
    assert example_numbers(itertools.islice(iterator, 12)) == (_epoch() * 3)[:12]
    later = resumed(_dataset(REPLICAS["mirrored_3"], "stream", epochs=None), iterator.get_state())
    assert example_numbers(itertools.islice(later, 4)) == (_epoch() * 4)[12:16]
    iterator.close()
    later.close()


def test_position_is_small_and_excludes_prefetched_batches(two):
    iterator = iter(two.distribute_dataset(_arrays(), SIZE, shuffle=True, seed=4, remainder="pad"))
    next(iterator)
    state = iterator.get_state()
    assert {"epoch": 0, "batch": 1, "batch_size": SIZE, "examples": COUNT, "shuffle": True, "seed": 4}.items() <= (
        state.items()
    )
    assert len(json.dumps(state)) < 300
    state["batch"] = 99  # a copy
    assert iterator.get_state()["batch"] == 1


def test_position_of_numpy_integers_is_json(two):
    dataset = two.distribute_dataset(
        _arrays(), np.int64(SIZE), seed=np.uint64(3), epochs=np.int32(2), prefetch=np.int16(1), shuffle=np.bool_(True)
    )
    iterator = iter(dataset)
    next(iterator)
    same = two.distribute_dataset(_arrays(), SIZE, seed=3, epochs=2, shuffle=True)
    assert example_numbers(resumed(same, iterator.get_state())) == example_numbers(iterator)


SHUFFLED = dict(shuffle=True, seed=1, remainder="pad")
NAMES = ("epoch", "batch", "batch_size", "shards", "source", "examples", "shuffle", "seed", "remainder")
VALUES = [("epoch", -1), ("epoch", "0"), ("epoch", 1), ("epoch", 99), ("source", {"position": 3})]
VALUES += [("batch", -1), ("batch", None), ("batch", 1.5), ("batch", "1"), ("batch", 6)]
NO_POSITION = r"is not a position\. Pass the result of `get_state"
# What replaces the state, and the error.
WRONG = {
    **{str(value): (lambda _, value=value: value, NO_POSITION) for value in (None, "{}", [], 3, {})},
    **{
        f"no_{name}": (lambda state, name=name: {key: state[key] for key in state if key != name}, NO_POSITION)
        for name in NAMES
    },
    **{
        f"{name}_{value}": (lambda state, name=name, value=value: {**state, name: value}, name)
        for name, value in VALUES
    },
}


@each_row("wrong, says", WRONG.values(), ids=WRONG)
def test_invalid_position_is_refused_and_the_iterator_continues(wrong, says, two):
    dataset = two.distribute_dataset(_arrays(), SIZE, **SHUFFLED)
    iterator = iter(dataset)
    next(iterator)
    with pytest.raises(ValueError, match=says):
        iterator.set_state(wrong(iterator.get_state()))
    assert example_numbers(iterator) == example_numbers(dataset)[1:]


# What the position of shuffled arrays is passed to, and the values that the error names.
OTHER = {
    "seed": (dict(seed=2), "with seed=1, but this data set has seed=2"),
    "shuffle": (dict(shuffle=False), "with shuffle=True, but this data set has shuffle=False"),
    "remainder": (dict(remainder="drop"), "with remainder='pad', but this data set has remainder='drop'"),
    "batch_size": (dict(batch_size=12), "with batch_size=6, but this data set has batch_size=12"),
    "examples": (dict(source=_arrays(28)), "with examples=27, but this data set has examples=28"),
    "stream": (dict(source=_Source(), shuffle=False), "with examples=27, but this data set has examples=None"),
}


@each_row("options, says", OTHER.values(), ids=OTHER)
def test_position_of_other_data_or_order_is_refused_with_both_values(options, says, two):
    state = iter(two.distribute_dataset(_arrays(), SIZE, **SHUFFLED)).get_state()
    dataset = two.distribute_dataset(**{"source": _arrays(), "batch_size": SIZE, **SHUFFLED, **options})
    iterator = iter(dataset)
    with pytest.raises(ValueError, match=f"The position was taken {says}.*examples would differ"):
        iterator.set_state(state)
    assert example_numbers(iterator) == example_numbers(dataset)


# The data set, what changes in its state, and the error.
OUTSIDE = {
    "epoch": (
        dict(source=_arrays(), batch_size=SIZE, epochs=3),
        dict(epoch=3),
        r"epoch=3, which must be an integer from 0 to 2\. The data set has epochs=3\.",
    ),
    "full_batch": (  # there are four full batches and three examples
        dict(source=_arrays(), batch_size=SIZE),
        dict(batch=5),
        r"batch=5, which must be an integer from 0 to 4\.",
    ),
    **{
        f"batch_size_{size}": (
            dict(source=_Batches(), batch_size=None, remainder="pad"),
            dict(batch=1, batch_size=size),
            r"The position has batch_size=.*, which must be an integer >= 1",
        )
        for size in (None, 0, -6, "6", True)
    },
    "state_of_another_source": (
        dict(source=_Source(), batch_size=SIZE, prefetch=0),
        dict(batch=1, source={"value": 6}),
        r"contains a position of the source, and this source \(\w+\) has no `set_state`",
    ),
}


@each_row("options, change, says", OUTSIDE.values(), ids=OUTSIDE)
def test_position_that_the_data_set_does_not_have_is_refused_with_its_limits(options, change, says, two):
    dataset = two.distribute_dataset(**options)
    with pytest.raises(ValueError, match=says):
        next(resumed(dataset, {**iter(dataset).get_state(), **change}))


def test_position_may_be_the_end_of_the_last_epoch_or_any_epoch_of_an_endless_data_set(two):
    dataset = two.distribute_dataset(_arrays(), SIZE, epochs=3)
    state = {**iter(dataset).get_state(), "epoch": 2, "batch": 4}
    assert example_numbers(resumed(dataset, state)) == []
    resumed(dataset.repeated(None), {**state, "epoch": 99})


class StatefulLoader:
    """A loader with the interface of torchdata's `StatefulDataLoader`, in a random order that only its state repeats."""

    def __init__(self, seed, count=12, rows=None):
        self.generator, self.count, self.rows = np.random.default_rng(seed), count, rows
        self.read, self._state = 0, None

    def __iter__(self):
        state, self._state = self._state, None
        if state is None:
            state = {"order": self.generator.permutation(self.count), "at": {0: 0}, "name": ("a", b"b", None)}
        order, self._at = state["order"], state["at"][0]
        self._order = order
        while self._at < self.count:
            i, step = self._at, self.rows or 1
            self._at += step
            self.read += 1
            yield order[i : i + step].astype(np.int32) if self.rows else np.int32(order[i])

    def state_dict(self):
        return {"order": self._order, "at": {0: self._at}, "name": ("a", b"b", None)}

    def load_state_dict(self, state):
        assert state["name"] == ("a", b"b", None)
        self._state = state


@pytest.mark.parametrize("rows", [None, 4], ids=["examples", "batches"])
def test_loader_with_a_state_dict_resumes_from_it(rows, two):
    batch_size = None if rows else 4
    dataset = lambda loader: two.distribute_dataset(loader, batch_size, epochs=2, remainder="pad")
    whole = example_numbers(dataset(StatefulLoader(1, rows=rows)))
    assert sorted(sum(whole[:3], [])) == list(range(12))
    first = iter(dataset(StatefulLoader(1, rows=rows)))
    for taken in range(1, 4):
        next(first)
        loader = StatefulLoader(99, rows=rows)  # another order
        later = resumed(dataset(loader), first.get_state())
        assert example_numbers(itertools.islice(later, 3 - taken)) == whole[taken:3]
        later.close()
        assert taken == 3 or loader.read <= (3 - taken + 2) * (1 if rows else 4) + 4


def test_loader_resumed_at_the_end_of_an_epoch_continues_with_the_next_one(two):
    """A partial batch is read until the loader ends; the loader's state is then that of its next epoch."""
    dataset = lambda loader: two.distribute_dataset(loader, 4, epochs=2, remainder="pad")
    first = iter(dataset(StatefulLoader(1, count=6)))
    list(itertools.islice(first, 2))
    assert (first.get_state()["epoch"], first.get_state()["batch"]) == (0, 2)
    later = resumed(dataset(StatefulLoader(5, count=6)), first.get_state())
    assert sum(np.asarray(weights.tree).sum() for _, weights in later) == 6
    assert later.get_state()["epoch"] == 1


@pytest.mark.parametrize("prefetch", [0, 2])
def test_second_iterator_over_a_loader_with_one_position_ends_the_first(prefetch, two):
    dataset = two.distribute_dataset(StatefulLoader(1), 4, prefetch=prefetch)
    first = iter(dataset)
    next(first)
    whole = lambda: sorted(np.concatenate([np.ravel(batch.tree) for batch in dataset]).tolist())
    assert whole() == list(range(12))
    with pytest.raises(ValueError, match="a StatefulLoader, whose iterators share one position, and a later iterator"):
        list(first)
    assert whole() == list(range(12))


def test_state_dict_that_cannot_be_stored_is_refused_with_its_path(two):
    loader = StatefulLoader(1)
    loader.state_dict = lambda: {"workers": [{"sampler": object()}]}
    with pytest.raises(
        TypeError, match=r"state_dict\(\)\['workers'\]\[0\]\['sampler'\] of the source is object, which cannot"
    ):
        next(iter(two.distribute_dataset(loader, 4)))


# The number of batches


def test_length_of_an_endless_data_set_is_refused(two):
    with pytest.raises(TypeError, match="With epochs=None the data set is endless"):
        len(two.distribute_dataset(_arrays(), SIZE, epochs=None))


@each_row("kind", ["stream", "batches", "files"])
def test_unknown_length_is_refused(kind, two):
    dataset = _dataset(two, kind)
    with pytest.raises(TypeError, match="unknown before the source is read"):
        len(dataset)
    assert len(list(dataset)) == 5  # `list` calls `len` as well


@every_source
@pytest.mark.parametrize("prefetch", [0, 2])
def test_exhausted_iterator_stays_exhausted(kind, prefetch, two):
    iterator = iter(_dataset(two, kind, prefetch=prefetch))
    assert iter(iterator) is iterator
    assert len(list(iterator)) == 5
    assert [next(iterator, None) for _ in range(3)] == [None] * 3


@every_source
def test_iterators_of_a_data_set_are_independent(kind, two):
    dataset = _dataset(two, kind)
    pairs = [example_numbers(pair) for pair in zip(dataset, dataset, strict=True)]
    assert pairs == [[batch, batch] for batch in _epoch()]
    assert example_numbers(dataset) == _epoch()


# Prefetching


@every_source
@every_strategy
def test_batches_do_not_depend_on_prefetch(kind, strategy):
    expected = list(_dataset(strategy, kind, prefetch=0, epochs=2))
    for prefetch in (1, 2, 5, 100):
        received = list(_dataset(strategy, kind, prefetch=prefetch, epochs=2))
        for ours, theirs in zip(received, expected, strict=True):
            chex.assert_trees_all_equal(arrays(ours), arrays(theirs), strict=True)


@pytest.mark.parametrize("kind, prefetch", [("arrays", 2), *((kind, 0) for kind in SOURCES)])
def test_arrays_and_prefetch_0_do_not_start_a_thread(kind, prefetch, two):
    iterator = iter(_dataset(two, kind, prefetch=prefetch))
    next(iterator)
    assert input_threads() == []
    iterator.close()


def test_source_is_not_read_before_the_first_batch_is_requested(two):
    source = _Source()
    iterator = iter(two.distribute_dataset(source, SIZE))
    iterator.get_state()
    assert (source.given, input_threads()) == (0, [])
    iterator.close()


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_at_most_prefetch_batches_are_read_ahead(prefetch, two):
    class Counted:
        given = 0
        late = threading.Event()

        def __call__(self, step):
            Counted.given += 1
            if step > taken + prefetch:  # the last received batch has the number `taken`
                Counted.late.set()
            return {"number": np.arange(SIZE, dtype=np.int32) + SIZE * step}

    source, taken = Counted(), 0
    iterator = iter(two.distribute_dataset(source, None, epochs=None, prefetch=prefetch))
    for number in range(12):
        taken = number
        next(iterator)
        until(lambda given=number + 1 + prefetch: source.given == given)  # the limit of prefetching
    time.sleep(0.05)
    assert source.given == 12 + prefetch
    assert not Counted.late.is_set()  # and it is never exceeded
    iterator.close()


@pytest.mark.parametrize("kind", ["arrays", "stream"])
def test_batches_are_transferred_under_a_transfer_guard(kind, two):
    with jax.transfer_guard("disallow"):
        batches = list(_dataset(two, kind))
    assert example_numbers(batches) == _epoch()


WIDE = {"number": np.arange(24), "x": np.arange(24) / 3}
WIDE_SOURCES = {
    "arrays": lambda: (WIDE, SIZE),
    "stream": lambda: ((jax.tree.map(lambda x, i=i: x[i], WIDE) for i in range(24)), SIZE),
    "batches": lambda: ((jax.tree.map(lambda x, i=i: x[i : i + SIZE], WIDE) for i in range(0, 24, SIZE)), None),
    "files": lambda: (jdist.data.Files([0], lambda i: WIDE), SIZE),
}


@pytest.mark.parametrize("kind", WIDE_SOURCES)
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("keeps", [True, False])
def test_x64_setting_of_the_loop_applies_to_the_batches(kind, prefetch, keeps, two):
    source, size = WIDE_SOURCES[kind]()
    with jax.enable_x64(keeps):
        batches = [arrays(batch) for batch in two.distribute_dataset(source, size, prefetch=prefetch)]
    dtypes = {"number": np.int64, "x": np.float64} if keeps else {"number": np.int32, "x": np.float32}
    for name, dtype in dtypes.items():
        assert {batch[name].dtype for batch in batches} == {np.dtype(dtype)}
        received = np.concatenate([np.asarray(batch[name]).ravel() for batch in batches])
        np.testing.assert_array_equal(received, WIDE[name].astype(dtype))


@pytest.mark.parametrize("remainder", ["drop", "pad"])
@pytest.mark.parametrize("kind", ["arrays", "stream"])
def test_training_loop_over_batches_traces_once(kind, remainder, two):
    traces = []

    @two.step
    def step(total, element):
        traces.append(None)
        batch, weights = element if remainder == "pad" else (element, jnp.ones(SIZE // 2))
        return total + jdist.all_reduce("sum", (batch["number"] * weights).sum()), None

    total, epochs = two.put(jnp.zeros(())), 3
    for element in _dataset(two, kind, epochs=epochs, remainder=remainder):
        total, _ = step(total, element)
    assert len(traces) == traces_of_a_step(two)
    assert float(total) == epochs * sum(range(COUNT if remainder == "pad" else 24))


# Closing


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("taken", [0, 1, 3])
def test_closed_iterator_has_neither_batches_nor_thread_nor_open_source(taken, prefetch, two):
    source = _Source(10**6)
    iterator = iter(two.distribute_dataset(source, SIZE, epochs=None, prefetch=prefetch))
    for _ in range(taken):
        next(iterator)
    state = iterator.get_state()
    iterator.close()
    assert input_threads() == []
    assert source.ended == (taken > 0)
    assert [next(iterator, None) for _ in range(2)] == [None, None]
    assert iterator.get_state() == state
    iterator.close()
    iterator.set_state(state)  # a new loop opens the source again
    assert example_numbers([next(iterator)]) == _epoch(24)[taken : taken + 1]
    iterator.close()
    assert input_threads() == []


def test_iterator_closed_by_another_thread_releases_a_waiting_one(two):
    asked, release, received = threading.Event(), threading.Event(), []

    def source(step):
        asked.set()
        release.wait(PATIENCE)
        return np.arange(SIZE)

    iterator = iter(two.distribute_dataset(source, None, epochs=None))
    loop = threading.Thread(target=lambda: received.extend(iterator), daemon=True)
    loop.start()
    assert asked.wait(PATIENCE)
    closing = threading.Thread(target=iterator.close, daemon=True)
    closing.start()
    release.set()
    closing.join(PATIENCE)
    loop.join(PATIENCE)
    assert not (closing.is_alive() or loop.is_alive())


def _break(iterator):
    for _ in iterator:
        break


def _raise(iterator):
    with pytest.raises(ArithmeticError):
        for _ in iterator:
            raise ArithmeticError("the step")


def _delete_a_cycle(iterator):
    holder = {"iterator": iterator}
    holder["self"] = holder
    next(iterator)


@each_row("prefetch", [0, 1, 5])
@each_row("leave", [_break, _raise, _delete_a_cycle])
def test_loops_left_early_end_their_threads_and_sources(leave, prefetch, two):
    sources = [_Source(10**6) for _ in range(8)]
    for source in sources:
        leave(iter(two.distribute_dataset(source, SIZE, epochs=None, prefetch=prefetch)))
    gc.collect()
    until_no_thread_is_left()
    assert [source.ended for source in sources] == [1] * 8


def test_referenced_exhausted_iterator_does_not_have_a_thread(two):
    iterator = iter(two.distribute_dataset(_Source(24), SIZE))
    assert example_numbers(iterator) == _epoch(24)
    until_no_thread_is_left()
    assert next(iterator, None) is None


# Errors


class _SourceError(Exception):
    pass


@each_row("prefetch", [0, 1, 2, 50])
@each_row("error", [_SourceError("at 20"), OSError(5, "disk"), KeyError("x"), SystemExit(3)])
def test_error_in_the_source_follows_the_batches_before_it_with_its_own_traceback(error, prefetch, two):
    iterator = iter(two.distribute_dataset(_Source(fails_at=20, error=error), SIZE, prefetch=prefetch))
    assert example_numbers(itertools.islice(iterator, 3)) == _epoch()[:3]
    with pytest.raises(type(error)) as caught:
        next(iterator)
    assert caught.value is error
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-1] == "_examples_of_this_source"
    assert next(iterator, None) is None
    until_no_thread_is_left()


@each_row("prefetch", [0, 2])
def test_error_in_a_function_of_the_step_is_raised_at_its_step_and_can_be_retried(prefetch, two):
    broken = [True]

    def read_the_step(step):
        if step == 2 and broken[0]:
            raise _SourceError(f"step {step}")
        return {"number": np.arange(step * SIZE, (step + 1) * SIZE, dtype=np.int32)}

    iterator = iter(two.distribute_dataset(read_the_step, None, epochs=None, prefetch=prefetch))
    assert example_numbers([next(iterator), next(iterator)]) == _epoch()[:2]
    with pytest.raises(_SourceError, match="step 2") as caught:
        next(iterator)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "read_the_step"
    assert iterator.get_state()["batch"] == 2
    broken[0] = False
    iterator.set_state(iterator.get_state())
    assert example_numbers([next(iterator)]) == _epoch()[2:3]
    iterator.close()


def test_step_that_fails_does_not_end_the_iterator(two):
    iterator = iter(two.distribute_dataset(_Source(), SIZE))
    with pytest.raises(ArithmeticError):
        for _ in iterator:
            raise ArithmeticError("the step")
    assert example_numbers(iterator) == _epoch()[1:4]


@pytest.fixture
def interruptible():
    """Handles the signal in Python, even if the parent process ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_loop_interrupted_while_it_waits_continues_without_losing_a_batch(two):
    asked, interrupted = threading.Event(), threading.Event()

    def source(step):
        if step == 2:
            assert asked.wait(PATIENCE)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            assert interrupted.wait(PATIENCE)
        return {"number": np.arange(step * SIZE, (step + 1) * SIZE, dtype=np.int32)}

    iterator = iter(two.distribute_dataset(source, None, epochs=None))
    assert example_numbers([next(iterator), next(iterator)]) == _epoch()[:2]
    try:
        asked.set()
        next(iterator)
        pytest.fail("nothing interrupted the loop")
    except KeyboardInterrupt:
        interrupted.set()
    assert iterator.get_state()["batch"] == 2
    assert example_numbers([next(iterator)]) == _epoch()[2:3]
    iterator.close()


@pytest.mark.parametrize("position_set", [True, False])
def test_loop_interrupted_in_the_source_without_a_thread_is_not_exhausted(position_set, two):
    interrupted = []

    def source(step):
        if step == 2 and not interrupted:
            interrupted.append(step)
            raise KeyboardInterrupt
        return {"number": np.arange(step * SIZE, (step + 1) * SIZE, dtype=np.int32)}

    iterator = iter(two.distribute_dataset(source, None, epochs=None, prefetch=0))
    assert example_numbers([next(iterator), next(iterator)]) == _epoch()[:2]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    if position_set:
        iterator.set_state(iterator.get_state())
    assert example_numbers([next(iterator)]) == _epoch()[2:3]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("read", [1, 2, 4])
def test_loop_interrupted_while_arrays_are_read_continues_without_losing_a_batch(read, prefetch, two, monkeypatch):
    iterator = iter(two.distribute_dataset(_arrays(30), SIZE, prefetch=prefetch))
    reads, take = itertools.count(1), Arrays.take

    def interrupted(self, numbers, where):
        if next(reads) == read:
            raise KeyboardInterrupt
        return take(self, numbers, where)

    monkeypatch.setattr(Arrays, "take", interrupted)
    batches = []
    with pytest.raises(KeyboardInterrupt):
        batches.extend(iterator)  # a list keeps its elements after an interrupt, as a loop does
    assert iterator.get_state()["batch"] == len(batches)
    batches.extend(iterator)
    assert example_numbers(batches) == _epoch(30)


def test_stats_of_an_object_that_is_not_an_iterator_is_refused_with_the_fix(two):
    dataset = two.distribute_dataset(_arrays(), SIZE)
    with pytest.raises(TypeError, match="iter"):
        jdist.data.stats(dataset)


# Process exit

PROGRAMS = {
    "held": """
        held = [iter(distribute(Source(), 4, epochs=None, prefetch=prefetch)) for prefetch in (0, 2, 2)]
        exhausted = iter(distribute(Source(), 4))
        [next(x) for x in held], list(exhausted)
    """,
    "held_and_forgotten_with_large_batches": """
        large = np.zeros((2, 8_000_000), np.float32)
        held = [iter(distribute(lambda step: large, None)) for _ in range(6)]
        [next(x) for x in held]
        del held[:3]
    """,
    # The thread frees what it has made when the interpreter exits.
    "in_a_loop_that_ends_with_much_ahead": """
        for _ in distribute(Source(), 4, epochs=None, prefetch=1000): time.sleep(0.5); break
        time.sleep(0.002)
    """,
    # Threads that do not react get 2 seconds together.
    "many_asleep": """
        held = [iter(distribute(Asleep(), 4, epochs=None)) for _ in range(12)]
        [next(x) for x in held]
    """,
}


@pytest.mark.parametrize("program", among(PROGRAMS, "held", "in_a_loop_that_ends_with_much_ahead", "many_asleep"))
def test_process_with_an_unfinished_iterator_exits_without_output(program):
    setup = """
        import time
        import numpy as np
        import jdist

        class Source:
            def __iter__(self):
                return (np.full(8, i, np.float32) for i in range(1000))

        class Asleep:
            def __iter__(self):
                yield from [np.zeros(8, np.float32)] * 6
                while True:
                    time.sleep(0.01)

        distribute = jdist.MirroredStrategy(["cpu:0", "cpu:1"]).distribute_dataset
    """
    text = "".join(map(textwrap.dedent, (setup, PROGRAMS[program], "print('end', flush=True)")))
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")

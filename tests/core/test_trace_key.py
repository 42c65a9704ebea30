"""The context around a trace is part of JAX's cache key."""

import asyncio
import threading

import jax

from jdist._src.core.trace_key import is_keyed, keyed, set_outermost_key, unkeyed


def counted():
    """Returns a jitted identity, and a list to which every trace of it appends."""
    traces = []
    return jax.jit(lambda x: (traces.append(1), x)[1]), traces


def test_function_is_traced_once_per_key_and_reused_for_equal_keys():
    fn, traces = counted()
    for part in ("a", "b", "a", "b"):
        with keyed(part):
            fn(1.0)
    fn(1.0)
    assert len(traces) == 3


def test_nested_keys_add_up_and_unkeyed_removes_them():
    fn, traces = counted()
    fn(1.0)
    with keyed("a"):
        with keyed("b"):
            fn(1.0)
        with unkeyed():
            assert not is_keyed()
            fn(1.0)
        assert is_keyed()
    assert len(traces) == 2


def test_outermost_key_applies_to_all_threads_outside_any_block():
    is_keyed_in_thread = []
    set_outermost_key("a")
    try:
        thread = threading.Thread(target=lambda: is_keyed_in_thread.append(is_keyed()))
        thread.start()
        thread.join()
        assert is_keyed()
    finally:
        set_outermost_key(None)
    assert is_keyed_in_thread == [True] and not is_keyed()


def test_blocks_of_tasks_that_are_left_in_the_order_of_entry_leave_no_key():
    async def task(first, second):
        with keyed("a"):
            first.set()
            await second.wait()

    async def both():
        one, two, end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(task(one, two)), asyncio.create_task(task(two, end))]
        await asyncio.wait([tasks[0]])
        end.set()
        await tasks[1]

    asyncio.run(both())
    assert not is_keyed()
    set_outermost_key("b")
    assert is_keyed()
    set_outermost_key(None)
    assert not is_keyed()

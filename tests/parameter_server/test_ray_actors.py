"""The actors of workers and servers, called without Ray: updates are applied once and in order; parts are sent as bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist._src.parameter_server.exported_parts import export_part, from_numbers, load_part, to_host
from jdist._src.parameter_server.ray_actors import MissingUpdateError, ServerActor, ServerBinding, ServerPart, Update

VECTOR = jax.ShapeDtypeStruct((2,), jnp.float32)
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


@pytest.fixture
def server():
    """A server with one array, of which an update subtracts a value divided by `1 + staleness`."""
    update = lambda arrays, values, staleness: [arrays[0] - values[0] / (1 + staleness)]
    actor = ServerActor({"jax_enable_x64": False})
    actor.load(0, ServerPart(export_part(update, ([VECTOR], [VECTOR], SCALAR), "cpu"), [0], (1, 2), None))
    actor.bind(0, ServerBinding(part=0, updated=[(7, 0)], read=[(7, 0)], tables=[]))
    actor.set((7, 0), np.float32([8, 8]))
    return actor


def exchange(server, *sequences, read=True, staleness=0):
    values = [[np.float32([9, 9]), np.float32([1, 2])]] * len(sequences)  # the first is for another server of the node
    message = server.exchange(
        [Update(number, 0, staleness) for number in sequences], 0 if read else None, None, *values
    )
    return message if message is None else message[0].tolist()


def test_message_contains_the_updates_of_the_same_call(server):
    assert exchange(server) == [8, 8]
    assert exchange(server, 1) == [7, 6]
    assert exchange(server, 2, 3) == [5, 2]
    assert exchange(server, 4, read=False) is None
    assert exchange(server, 5, staleness=1) == [3.5, -1] and server.get((7, 0)).tolist() == [3.5, -1]


def test_repeated_update_has_no_effect(server):
    assert exchange(server, 1, 1) == [7, 6]
    assert exchange(server, 1) == [7, 6]


def test_missing_update_is_an_error_of_all_later_calls(server):
    exchange(server, 1)
    with pytest.raises(MissingUpdateError, match="has received update 3 after update 1"):
        exchange(server, 3)
    for call in (server.check, lambda: server.get((7, 0)), lambda: exchange(server, 2)):
        with pytest.raises(MissingUpdateError):
            call()


def test_restored_server_continues_with_the_next_update(server):
    server.start_sequence(41)
    assert exchange(server, 41) == [8, 8]
    assert exchange(server, 42) == [7, 6]
    server.delete([(7, 0), (8, 0)])
    with pytest.raises(KeyError):
        server.get((7, 0))


def test_exported_part_has_the_results_of_the_function_with_keys_and_small_dtypes():
    def draw(key, x, scale):
        key, noise = jax.random.split(key)
        return {"key": key, "x": x + jax.random.normal(noise, (3,), jnp.bfloat16), "count": scale + 1}

    arguments = jax.random.key(3), jnp.ones(3, jnp.bfloat16), jnp.int8(4)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments]
    program = load_part(export_part(draw, shapes, "cpu"), donated=[1])
    count, key, x = program(*map(to_host, arguments))
    expected = draw(*arguments)
    assert int(count) == 5 and x.dtype == jnp.bfloat16 and (x == expected["x"]).all()
    key = from_numbers(np.asarray(key), expected["key"].dtype)
    assert key.dtype == expected["key"].dtype and to_host(key).tolist() == to_host(expected["key"]).tolist()


def test_part_with_a_callback_is_refused():
    def show(x):
        jax.debug.print("{}", x)
        return x

    with pytest.raises(
        ValueError, match=r"cannot be sent to other processes(.|\n)*`jax.debug.print`, run in one process"
    ):
        export_part(show, [VECTOR], "cpu")

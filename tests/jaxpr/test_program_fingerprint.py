"""Lines and constants of a jaxpr are equal on all processes that trace the same code, and differ if the jaxprs differ."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist._src.jaxpr.program_fingerprint import constants_of, crc_of, lines_of

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np, zlib
from jdist._src.jaxpr.program_fingerprint import constants_of, lines_of

table = jnp.arange(4.0)

def loss(w, x):
    w = jax.nn.relu(w) @ x.reshape(4, -1)
    w = jax.checkpoint(jnp.sin)(w) + jax.lax.cond(w.sum() > 0, lambda: 1.0, lambda: 2.0)
    jax.debug.print("{}", w.sum())
    return jax.lax.psum((w * table).sum(), ("a", "b"))

program = jax.make_jaxpr(jax.value_and_grad(loss), axis_env=[("a", 2), ("b", 2)])(jnp.ones((4, 4)), jnp.ones(16))
print(zlib.crc32("".join(line.text for line in lines_of(program)).encode()), [one[:2] for one in constants_of(program)])
"""


@pytest.mark.slow
def test_lines_do_not_depend_on_the_hash_seed_of_the_process():
    printed = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT], env={**os.environ, "PYTHONHASHSEED": seed}, text=True, capture_output=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1]
    assert "float32[4]" in printed[0]


def lines(fn, *args):
    return [line.text for line in lines_of(jax.make_jaxpr(fn)(*args))]


DIFFERENT = {
    "number": (lambda x: x * 0.1, lambda x: x * 0.2),
    "primitive": (jnp.sin, jnp.cos),
    "parameter": (lambda x: x.reshape(2, 2), lambda x: x.reshape(4, 1)),
    "inside_a_loop": (
        lambda x: jax.lax.fori_loop(0, 2, lambda i, x: x + 1, x),
        lambda x: jax.lax.fori_loop(0, 2, lambda i, x: x + 2, x),
    ),
    "order_of_results": (lambda x: (x + 1, x), lambda x: (x, x + 1)),
    "operand": (lambda x: (x + 1) * x, lambda x: (y := x + 1) * y),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_different_programs_have_different_lines(case):
    first, second = DIFFERENT[case]
    assert lines(first, np.ones(4, np.float32)) == lines(first, np.ones(4, np.float32))
    assert lines(first, np.ones(4, np.float32)) != lines(second, np.ones(4, np.float32))


def test_constant_names_the_line_that_uses_it():
    table = jnp.arange(3.0)
    program = jax.make_jaxpr(jax.jit(lambda x: jnp.sin(x) * table))(1.0)
    (constant,) = constants_of(program)
    assert constant.dtype_and_shape == "float32[3]" and constant.crc == crc_of(np.arange(3.0, dtype=np.float32))
    assert "test_program_fingerprint.py:" in constant.place


def test_line_names_the_place_of_its_equation():
    (line, _) = lines_of(jax.make_jaxpr(lambda x: jnp.sin(x))(1.0))
    assert line.text == "1:float32[] = sin[accuracy=None] 0:float32[]"
    assert "test_program_fingerprint.py:" in line.place


def test_crc_of_key_is_that_of_its_data():
    assert crc_of(jax.random.key(1)) == crc_of(jax.random.key_data(jax.random.key(1))) != crc_of(jax.random.key(2))

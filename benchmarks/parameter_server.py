"""Steps of `ParameterServerStrategy`, against a loop over `jax.jit` on one device, and against TensorFlow's strategy.

    python benchmarks/parameter_server.py [--quick] [--json] [--case dense-1M] [--servers 1 2]
    ray start --head --num-cpus 4 && python benchmarks/parameter_server.py --engine ray

Two workers, one or two servers. A step of `no-op` sends nothing; `dense-N` reads N parameters and sends N gradients, in four
arrays, which the servers subtract; `sparse` looks up 1,024 rows of a table of 100,000 x 64 numbers. TensorFlow
runs where it is installed, with workers and servers in processes on loopback, as it requires. Both schedule all steps of a
measurement, and then wait for them.
"""

import json
import os
import subprocess
import sys

import sidebyside

options = sidebyside.parser(__doc__)
options.add_argument("--case", help="one case only")
options.add_argument("--engine", default="local", choices=("local", "ray"), help="where the workers and servers run")
options.add_argument("--servers", type=int, nargs="+", default=[1, 2])
args = options.parse_args()

import jax  # noqa: E402  # after the options: `--help` does not import it
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import jdist  # noqa: E402

WORKERS, LEAVES = 2, 4
CASES = {
    "no-op": (1, 500),
    "dense-1M": (1_000_000, 100),
    "dense-20M": (20_000_000, 10),
    "sparse": (0, 100),
}  # parameters, steps
RATE = 1e-3
ROWS, WIDTH, IDS = 100_000, 64, 1024


def dense_step(params, x):
    """A step of one replica that changes all parameters."""
    grads = jax.grad(lambda params: sum(0.5 * jnp.sum((w - x) ** 2) for w in params))(params)
    return jax.tree.map(lambda w, g: w - RATE * g, params, jdist.all_reduce("mean", grads)), None


def no_step(params, x):
    """A step of one replica that does nothing."""
    return params, None


def sparse_step(params, ids):
    """A step of one replica that changes rows of a table."""
    grads = jax.grad(lambda params: 0.5 * jnp.sum((jdist.lookup(params[0], ids) - 1) ** 2))(params)
    return [params[0] - RATE * jdist.all_reduce("mean", grads)[0]], None


def make_candidates(size: int, steps: int, servers: int):
    """Returns functions that run the steps of a case under the strategy, and in a loop over `jax.jit`."""
    strategy = jdist.ParameterServerStrategy(workers=WORKERS, servers=servers, engine=args.engine)
    one_replica = (dense_step if size >= LEAVES else no_step) if size else sparse_step
    x = np.ones((1, 1), np.float32) if size else np.random.default_rng(0).integers(0, ROWS, IDS).astype(np.int32)
    shapes = [(size // LEAVES,)] * LEAVES if size else [(ROWS, WIDTH)]
    make = lambda: list(map(jnp.zeros, shapes))

    def measured(step, params, x, wait):
        state = [params]

        def work() -> None:
            for _ in range(steps):
                state[0], _ = step(state[0], x)
            wait(state[0])

        return lambda: sidebyside.seconds(work)

    asynchronous = strategy.step(one_replica), strategy.init(make), strategy.split(x)
    sequential = jax.jit(one_replica, donate_argnums=0), make(), jnp.asarray(x)
    return {
        "jdist": measured(*asynchronous, lambda _: strategy.join()),
        "jit": measured(*sequential, jax.block_until_ready),
    }


class TensorFlow:
    """TensorFlow's strategy, in processes of its own. Mutable: it holds the process of the coordinator."""

    def __init__(self, servers: int):
        program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tensorflow_parameter_server.py")
        command = [sys.executable, program, str(WORKERS), str(servers)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, text=True, **pipes)
        self._ask("ready")

    def steps(self, size: int, steps: int):
        """Returns a function that runs the steps, and returns the seconds they take."""
        return lambda: self._ask(json.dumps([size, steps]))

    def close(self) -> None:
        """Ends the processes."""
        self._process.stdin.close()
        self._process.wait(60)

    def _ask(self, question: str) -> float:
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


def main():
    """Runs the cases."""
    sidebyside.versions(args.json)
    rounds = args.rounds or (3 if args.quick else 9)
    has_tensorflow = sidebyside.has("tensorflow", args.json)
    for servers in args.servers:
        tensorflow = TensorFlow(servers) if has_tensorflow else None
        for name, (size, steps) in CASES.items():
            if args.case not in (None, name):
                continue
            candidates = make_candidates(size, steps, servers)
            if tensorflow is not None:
                candidates["TensorFlow"] = tensorflow.steps(size, steps)
            taken = sidebyside.rounds(candidates, rounds)
            sidebyside.report(f"{name}, {servers} servers", taken, args.json, steps)
        if tensorflow is not None:
            tensorflow.close()


if __name__ == "__main__":
    main()

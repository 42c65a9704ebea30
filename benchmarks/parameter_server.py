"""Steps of `ParameterServerStrategy`, against TensorFlow's on the same machine.

    python benchmarks/parameter_server.py [--quick] [--json] [--case dense-1M] [--servers 1 2]

Two workers, one or two servers. A step of `no-op` sends nothing; `dense-N` reads N parameters and sends N gradients, in four
arrays, which the servers subtract; `sparse` looks up 1,024 rows of a table of 100,000 x 64 numbers. TensorFlow
runs where it is installed, with workers and servers in processes on loopback, as it requires. Both schedule all steps of a
measurement, and then wait for them.
"""

import importlib.util
import json
import os
import subprocess
import sys

import sidebyside

options = sidebyside.parser(__doc__)
options.add_argument("--case", help="one case only")
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


def jdist_steps(size: int, steps: int, servers: int):
    """Returns a function that runs the steps, and returns the seconds they take."""
    strategy = jdist.ParameterServerStrategy(workers=WORKERS, servers=servers)

    @strategy.step
    def step(params, x):
        grads = jax.grad(lambda params: sum(0.5 * jnp.sum((w - x) ** 2) for w in params))(params)
        return jax.tree.map(lambda w, g: w - RATE * g, params, jdist.all_reduce("mean", grads)), None

    @strategy.step
    def sparse_step(table, ids):
        grad = jax.grad(lambda table: 0.5 * jnp.sum((jdist.lookup(table, ids) - 1) ** 2))(table)
        return table - RATE * jdist.all_reduce("mean", grad), None

    if not size:
        step = sparse_step
        x = strategy.split(np.random.default_rng(0).integers(0, ROWS, IDS))
        state = [strategy.init(lambda: jnp.zeros((ROWS, WIDTH)))]
        return lambda: sidebyside.seconds(lambda: run_steps(strategy, step, state, x, steps))
    x = strategy.split(jnp.ones((1, 1)))
    state = [strategy.init(lambda: [jnp.zeros(size // LEAVES) for _ in range(LEAVES)])]

    return lambda: sidebyside.seconds(lambda: run_steps(strategy, step, state, x, steps))


def run_steps(strategy, step, state, x, steps):
    """Schedules the steps, and waits for them; `state` is a list with the state."""
    for _ in range(steps):
        state[0], _ = step(state[0], x)
    strategy.join()


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
    rounds = 3 if args.quick else 9
    for servers in args.servers:
        tensorflow = TensorFlow(servers) if importlib.util.find_spec("tensorflow") else None
        for name, (size, steps) in CASES.items():
            if args.case not in (None, name):
                continue
            candidates = {"jdist": jdist_steps(size, steps, servers)}
            if tensorflow is not None:
                candidates["TensorFlow"] = tensorflow.steps(size, steps)
            taken = sidebyside.rounds(candidates, rounds)
            sidebyside.report(f"{name}, {servers} servers", taken, args.json, steps)
        if tensorflow is None:
            print("TensorFlow is not installed: pip install tensorflow-cpu")
        else:
            tensorflow.close()


if __name__ == "__main__":
    main()

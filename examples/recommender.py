"""Factorizes preferences of users for items with parameter servers. Each step reads and updates a few rows of two tables.

    python examples/recommender.py                        # 4 workers, 2 servers
    python examples/recommender.py --workers 2 --users 20000 --record run.log
    jdist replay run.log                                  # the same run again, bitwise equal
    ray start --head --num-cpus 6 && python examples/recommender.py --engine ray --chaos   # kills a worker every 500 steps

The data are generated: a rating is the product of a user's and an item's factors, plus noise. So the answer is known: no model
predicts ratings with a smaller error than the noise, which the script prints next to the error of the trained model.
"""

import argparse
import os
import random
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.live import Live
from rich.table import Table

import jdist

NOISE = 0.1


def make_ratings(num_users, num_items, num_factors, num_ratings, seed):
    """Returns `(users, items)` and their ratings, each `[rating]`."""
    rng = np.random.default_rng(seed)
    user_factors = rng.normal(size=(num_users, num_factors)).astype(np.float32)
    item_factors = rng.normal(size=(num_items, num_factors)).astype(np.float32)
    users, items = rng.integers(0, num_users, num_ratings), rng.integers(0, num_items, num_ratings)
    ratings = (user_factors[users] * item_factors[items]).sum(1) / num_factors**0.5
    noise = NOISE * rng.normal(size=num_ratings)
    return (users.astype(np.int32), items.astype(np.int32)), (ratings + noise).astype(np.float32)


def predict(params, users, items):
    """Returns the ratings of pairs of users and items, `[pair]`."""
    factors = jdist.lookup(params["users"], users), jdist.lookup(params["items"], items)
    return (factors[0] * factors[1]).sum(-1) / factors[0].shape[-1] ** 0.5


class WorkerTable:
    """A table of the workers. Mutable: it holds the last numbers, for the rates."""

    def __init__(self, strategy, rows_per_update):
        self._strategy, self._rows_per_update = strategy, rows_per_update
        self._time, self._last = time.perf_counter(), strategy.worker_progress()

    def draw(self, step, error):
        """Returns the table after a step."""
        table = Table(title=f"step {step}, error {error:.3f}")
        for name in ("worker", "updates", "version read", "staleness", "rows per second", "calls started again"):
            table.add_column(name, justify="right")
        seconds = time.perf_counter() - self._time
        workers = self._strategy.worker_progress()
        for number, (worker, last) in enumerate(zip(workers, self._last, strict=True)):
            rate = (worker.updates - last.updates) * self._rows_per_update / seconds
            cells = number, worker.updates, worker.version, worker.staleness, f"{rate:,.0f}", worker.restarts
            table.add_row(*map(str, cells))
        self._time, self._last = time.perf_counter(), workers
        return table


def kill_worker(strategy):
    """Ends the process of a random worker."""
    pids = [worker.pid for worker in strategy.worker_progress() if worker.pid]
    if pids:
        os.kill(random.choice(pids), signal.SIGKILL)


def main():
    """Trains, and prints the error on ratings that were not used for training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="default: 4")
    parser.add_argument("--servers", type=int, default=2, help="default: 2")
    parser.add_argument("--users", type=int, default=50_000, help="rows of the larger table; default: 50000")
    parser.add_argument("--epochs", type=int, default=10, help="default: 10")
    parser.add_argument("--batch-size", type=int, default=4096, help="default: 4096")
    parser.add_argument("--record", help="a file for the order of updates")
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="default: local")
    parser.add_argument("--chaos", action="store_true", help="kill a worker every 500 steps, with --engine ray")
    args = parser.parse_args()
    if args.chaos and args.engine != "ray":
        parser.error("--chaos kills processes of workers, which exist with --engine ray only")

    num_items, num_factors = args.users // 50, 4
    (users, items), ratings = make_ratings(args.users, num_items, num_factors, 40 * args.users, seed=0)
    num_train = len(ratings) * 9 // 10
    train_data = (users[:num_train], items[:num_train]), ratings[:num_train]
    test_pairs, test_ratings = (users[num_train:], items[num_train:]), ratings[num_train:]

    strategy = jdist.ParameterServerStrategy(
        workers=args.workers,
        servers=args.servers,
        engine=args.engine,
        variable_partitioner=lambda shape, dtype: [args.servers, 1],
        record=args.record,
    )
    optimizer = optax.chain(jdist.sync.sum(), optax.adagrad(0.3))

    def make_state(key):
        keys = jax.random.split(key)
        params = {
            "users": 0.5 * jax.random.normal(keys[0], (args.users, num_factors)),
            "items": 0.5 * jax.random.normal(keys[1], (num_items, num_factors)),
        }
        return params, optimizer.init(params)

    @strategy.step
    def train_step(state, batch):
        params, opt_state = state
        pairs, targets = batch
        loss_fn = lambda params: jnp.sum((predict(params, *pairs) - targets) ** 2)
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), jdist.all_reduce("sum", loss) / len(targets)

    state = strategy.init(make_state, jax.random.key(0))
    batches = strategy.distribute_dataset(train_data, args.batch_size, shuffle=True, epochs=args.epochs)
    table = WorkerTable(strategy, rows_per_update=2 * args.batch_size)
    with Live(refresh_per_second=4) as live:
        for step, batch in enumerate(batches, start=1):
            state, loss = train_step(state, batch)
            if step % 100 == 0:
                live.update(table.draw(step, float(loss) ** 0.5))
            if args.chaos and step % 500 == 0:
                kill_worker(strategy)

    params = jax.device_get(jdist.read_values(state)[0])
    error = float(np.sqrt(np.mean((np.asarray(predict(params, *test_pairs)) - test_ratings) ** 2)))
    print(
        f"\nerror on {len(test_ratings):,} other ratings: {error:.3f} (noise: {NOISE}, always 0: {test_ratings.std():.3f})"
    )
    print(f"updates by staleness: {strategy.staleness_counts()}")


if __name__ == "__main__":
    main()

"""A small regression, and a loop of real steps that tells callbacks of it, as the one of the trainer does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdist
from jdist._src.training.events import Event, Moment
from jdist._src.training.history import History

from laws import STRATEGIES

ROWS = 4  # a step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    step: object
    params: object
    opt_state: object


ADAM = optax.adam(0.1)
place = functools.cache(lambda name: STRATEGIES[name]())


def plain(params):
    """Parameters in no wrapper."""
    return params


@functools.cache
def _compiled(strategy, optimizer, wrap):
    def make():
        params = {"w": jnp.arange(32.0).reshape(8, 4) / 32, "b": jnp.zeros((), jnp.bfloat16), "n": jnp.int32(0)}
        floats = {name: params[name] for name in "wb"}
        return State(jnp.int32(0), wrap(params), optimizer.init(floats))

    def step(state, x):
        params = {name: state.params[name] for name in "wb"}
        loss = lambda p: jnp.mean((x @ p["w"] + p["b"].astype(jnp.float32) - 1.0) ** 2)
        value, grads = jax.value_and_grad(loss)(params)
        value, grads = jdist.all_reduce("mean", (value, grads))
        updates, opt_state = optimizer.update(grads, state.opt_state, params)
        params = {**optax.apply_updates(params, updates), "n": state.params["n"] + 1}
        return State(state.step + 1, params, opt_state), value

    return make, strategy.step(step)


def regression(strategy, optimizer=ADAM, wrap=plain):
    """A state and a step, `step(state, number of the batch) -> (state, loss)`."""
    make, step = _compiled(strategy, optimizer, wrap)

    def call(state, number):
        x = np.random.default_rng(number).normal(size=(strategy.num_replicas_in_sync, ROWS, 8)).astype(np.float32)
        return step(state, strategy.put(jdist.PerReplica(x)))

    return strategy.init(make), call


@dataclasses.dataclass
class Run:
    """What a run came to, and what it told."""

    state: object
    stop: str = ""
    step: int = 0
    events: list = dataclasses.field(default_factory=list)
    states: list = dataclasses.field(default_factory=list)  # the parameters after each call
    reads: int = 0
    saved: dict = dataclasses.field(default_factory=dict)  # by step, what callbacks wanted kept


def train(strategy, callbacks, *, epochs=2, steps=3, a_call=1, start=0, state=None, call=None, saved=None, validation=None,
          logs=None, seconds=0.1, total=..., stalled=0.0):  # fmt: skip
    """Trains, and tells `callbacks`.

    `validation`: from the epoch to what was found. `logs`: from the step to the metrics, in place of the loss. A step takes
    `seconds`. `saved`: what callbacks wanted kept of the run that this one resumes, at step `start`.
    """
    if call is None:
        fresh, call = regression(strategy)
        state = fresh if state is None else state
    run, losses, rows = Run(state, step=start), [], []
    total = epochs * steps if total is ... else total
    for number, tree in (saved or {}).get("callbacks", {}).items():
        callbacks[int(number)].set_state(jax.device_get(tree))

    def read():
        run.reads += 1
        return logs(run.step) if logs else {"loss": float(losses[-1])} if losses else {}

    def tell(moment, epoch, found=None):
        number = run.step - start
        answers = []
        for callback in callbacks:
            event = Event(
                moment=moment, step=run.step, epoch=epoch, state=run.state, position={"batch": run.step},
                rows=number * ROWS * strategy.num_replicas_in_sync, seconds=number * seconds, stalled=stalled,
                total_steps=total, validation=found or {}, strategy=strategy, history=History(tuple(rows)), read=read,
                kept=kept, is_sound=lambda: True,
            )  # fmt: skip
            run.events.append(event)
            answers.append(callback(event))
        for answer in filter(None, answers):
            run.stop = run.stop or answer.stop or ""
            run.state = run.state if answer.state is None else answer.state

    def kept():
        return {
            "callbacks": {str(i): one.get_state() for i, one in enumerate(callbacks) if hasattr(one, "get_state")},
            "history": [dict(row) for row in rows],
        }

    epoch = first = start // steps
    try:
        tell(Moment.START, first)
        for epoch in range(first, epochs):
            while run.step < (epoch + 1) * steps and not run.stop:
                for _ in range(min(a_call, (epoch + 1) * steps - run.step)):
                    run.state, loss = call(run.state, run.step)
                    losses.append(loss)
                    run.step += 1
                run.states.append((run.step, jax.device_get(getattr(run.state, "params", run.state))))
                tell(Moment.STEP, epoch)
                run.saved[run.step] = jax.device_get(kept())
            if run.stop:
                break
            rows.append({"epoch": epoch, "step": run.step, **read()})
            tell(Moment.EPOCH, epoch, validation(epoch) if validation else None)
            run.saved[run.step] = jax.device_get(kept())
            if run.stop:
                break
        tell(Moment.END, epoch)
    finally:
        for callback in callbacks:
            getattr(callback, "close", lambda: None)()
    return run

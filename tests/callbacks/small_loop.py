"""A small regression, and a training loop that sends events to callbacks as `Trainer.fit` does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdist
from jdist._src.training.events import Callback, Event, Moment, as_callbacks
from jdist._src.training.history import History

from laws import STRATEGIES

EXAMPLES = 4  # per replica and step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    step: object
    params: object
    opt_state: object


ADAM = optax.adam(0.1)
place = functools.cache(lambda name: STRATEGIES[name]())


def plain(params):
    """Returns the parameters without a wrapper."""
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
    """Returns a state and a step, `step(state, batch number) -> (state, loss)`."""
    make, step = _compiled(strategy, optimizer, wrap)

    def call(state, number):
        x = np.random.default_rng(number).normal(size=(strategy.num_replicas_in_sync, EXAMPLES, 8)).astype(np.float32)
        return step(state, strategy.put(jdist.PerReplica(x)))

    return strategy.init(make), call


@dataclasses.dataclass
class Run:
    """The result of a run, and its events."""

    state: object
    stop_reason: str = ""
    step: int = 0
    events: list = dataclasses.field(default_factory=list)
    states: list = dataclasses.field(default_factory=list)  # the parameters after each call
    reads: int = 0
    saved: dict = dataclasses.field(default_factory=dict)  # the resume data, by step


def idle(state, number):
    """A step that does not change the state."""
    return state, 0.0


def train(strategy, callbacks, *, epochs=2, steps=3, steps_per_call=1, start=0, state=None, call=None, saved=None,
          validation=None, logs=None, seconds=0.1, total=..., stalled_fraction=0.0):  # fmt: skip
    """Trains, and sends the events to `callbacks`.

    `validation`: from the epoch to its metrics. `logs`: from the step to the metrics, instead of the loss. A step takes
    `seconds`. `saved`: the resume data of the run that this one resumes, at step `start`.
    """
    callbacks = as_callbacks(callbacks)
    if call is None:
        new_state, call = regression(strategy)
        state = new_state if state is None else state
    run, losses, rows = Run(state, step=start), [], []
    total = epochs * steps if total is ... else total
    for number, tree in (saved or {}).get("callbacks", {}).items():
        callbacks[int(number)].set_state(jax.device_get(tree))

    def read_metrics():
        run.reads += 1
        return logs(run.step) if logs else {"loss": float(losses[-1])} if losses else {}

    def notify(moment, epoch, validation_metrics=None):
        number = run.step - start
        results = []
        for callback in callbacks:
            event = Event(
                moment=moment, step=run.step, epoch=epoch, read_state=functools.partial(getattr, run, "state"), position={"batch": run.step},
                examples=number * EXAMPLES * strategy.num_replicas_in_sync, seconds=number * seconds,
                stalled_fraction=stalled_fraction, total_steps=total, validation=validation_metrics or {},
                strategy=strategy, history=History(tuple(rows)), read_metrics=read_metrics, resume_data=resume_data,
                is_finite=lambda: True,
            )  # fmt: skip
            run.events.append(event)
            results.append(callback(event))
        for result in filter(None, results):
            run.stop_reason = run.stop_reason or result.stop_reason or ""
            run.state = run.state if result.state is None else result.state

    def resume_data():
        return {
            "callbacks": {
                str(i): callback.get_state()
                for i, callback in enumerate(callbacks)
                if type(callback).get_state is not Callback.get_state
            },
            "history": [dict(row) for row in rows],
        }

    epoch = first = start // steps
    try:
        notify(Moment.START, first)
        for epoch in range(first, epochs):
            while run.step < (epoch + 1) * steps and not run.stop_reason:
                for _ in range(min(steps_per_call, (epoch + 1) * steps - run.step)):
                    run.state, loss = call(run.state, run.step)
                    losses.append(loss)
                    run.step += 1
                run.states.append((run.step, jax.device_get(getattr(run.state, "params", run.state))))
                notify(Moment.STEP, epoch)
                run.saved[run.step] = jax.device_get(resume_data())
            if run.stop_reason:
                break
            rows.append({"epoch": epoch, "step": run.step, **read_metrics()})
            notify(Moment.EPOCH, epoch, validation(epoch) if validation else None)
            run.saved[run.step] = jax.device_get(resume_data())
            if run.stop_reason:
                break
        notify(Moment.END, epoch)
    finally:
        for callback in callbacks:
            callback.close()
    return run

"""Reinforcement learning: an nnx policy learns to balance a pole by PPO, in a custom loop without a data set.

    python examples/cartpole.py                 # all accelerators, or 4 CPU devices
    python examples/cartpole.py --replicas 2 --updates 50

Each replica simulates its own environments. Their states are a part of the training state that differs between the replicas
(`jdist.PerReplica`); the policy and its optimizer, an `nnx.Module` and an `nnx.Optimizer`, are replicated, which jdist proves.
One call of the step simulates, and updates the policy several times.
"""

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console

import jdist

MAX_STEPS = 200  # of an episode
PASSES = 8  # updates of the policy per call of the step
DISCOUNT, TRACE_DECAY, CLIP = 0.99, 0.95, 0.2


class ActorCritic(nnx.Module):
    """A policy and a value function: `[batch, 4]` to logits `[batch, 2]` and values `[batch]`."""

    def __init__(self, rngs: nnx.Rngs):
        self.actor = nnx.Sequential(nnx.Linear(4, 64, rngs=rngs), nnx.tanh, nnx.Linear(64, 2, rngs=rngs))
        self.critic = nnx.Sequential(nnx.Linear(4, 64, rngs=rngs), nnx.tanh, nnx.Linear(64, 1, rngs=rngs))

    def __call__(self, observations: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the logits of the two actions, and the expected discounted reward."""
        return self.actor(observations), self.critic(observations)[..., 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The state of training: a step returns the next one.

    Attributes:
        step: The number of calls of the step.
        policy: The policy; replicated.
        optimizer: Its optimizer; replicated.
        key: The random key from which each step and each replica derives its own.
        poles: `[environment, 4]` and the number of steps of the episode `[environment]`; of each replica.
    """

    step: Any
    policy: ActorCritic
    optimizer: nnx.Optimizer
    key: Any
    poles: Any


def reset(key, num_environments):
    """Returns poles at the start of an episode: positions, velocities, angles, angular velocities near 0."""
    return jax.random.uniform(key, (num_environments, 4), minval=-0.05, maxval=0.05), jnp.zeros(
        num_environments, jnp.int32
    )


def simulate(poles, actions, key):
    """Returns the poles after 0.02 seconds, new ones for those that ended, and whether each fell or ended.

    The physics are from Barto, Sutton and Anderson, "Neuronlike adaptive elements that can solve difficult learning control
    problems" (1983), as in OpenAI Gym's CartPole.
    """
    (x, speed, angle, rotation), lengths = poles[0].T, poles[1] + 1
    force = jnp.where(actions == 1, 10.0, -10.0)
    push = (force + 0.05 * rotation**2 * jnp.sin(angle)) / 1.1
    turn = (9.8 * jnp.sin(angle) - jnp.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * jnp.cos(angle) ** 2 / 1.1))
    drive = push - 0.05 * turn * jnp.cos(angle) / 1.1
    new = jnp.stack([x + 0.02 * speed, speed + 0.02 * drive, angle + 0.02 * rotation, rotation + 0.02 * turn], axis=1)
    fell = (jnp.abs(new[:, 0]) > 2.4) | (jnp.abs(new[:, 2]) > 0.2095)
    ended = fell | (lengths >= MAX_STEPS)
    started = reset(key, len(new))
    next_poles = jnp.where(ended[:, None], started[0], new), jnp.where(ended, 0, lengths)
    return next_poles, fell, ended, lengths


@nnx.jit
def balance(policy, key):
    """Returns the number of steps before the first fall of 100 poles, with the most likely actions."""

    def act(poles, key):
        next_poles, fell, _, _ = simulate(poles, policy(poles[0])[0].argmax(axis=1), key)
        return next_poles, fell

    _, fell = jax.lax.scan(act, reset(key, 100), jax.random.split(key, MAX_STEPS))
    return jnp.where(fell.any(axis=0), fell.argmax(axis=0), MAX_STEPS)


def advantages_of(values, last_value, fell, ended):
    """Returns generalized advantage estimates `[time, environment]` (Schulman et al., 2015) for a reward of 1 per step."""

    def backward(carry, step):
        advantage, next_value = carry
        value, fell, ended = step
        error = 1.0 + DISCOUNT * jnp.where(fell, 0, next_value) - value
        advantage = error + DISCOUNT * TRACE_DECAY * jnp.where(ended, 0, advantage)
        return (advantage, value), advantage

    return jax.lax.scan(backward, (jnp.zeros_like(last_value), last_value), (values, fell, ended), reverse=True)[1]


def losses_of(policy, observations, actions, old_log_probs, advantages, returns):
    """Returns the loss of PPO for each observation (Schulman et al., 2017)."""
    logits, values = policy(observations)
    log_probs = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(log_probs, actions[:, None], axis=1)[:, 0]
    ratio = jnp.exp(chosen - old_log_probs)
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
    entropy = -(jnp.exp(log_probs) * log_probs).sum(axis=1)
    return -gain + 0.5 * optax.squared_error(values, returns) / 100 - 0.01 * entropy


@jdist.step(static_argnames="horizon")
def train_step(state, *, horizon):
    """Returns the next state, and the mean length of the episodes that ended: the training step of one replica."""
    key = jdist.replica_key(jax.random.fold_in(state.key, state.step))  # different actions on each replica

    def act(poles, key):
        action_key, reset_key = jax.random.split(key)
        logits, values = state.policy(poles[0])
        actions = jax.random.categorical(action_key, logits)
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[:, None], axis=1)[:, 0]
        next_poles, fell, ended, lengths = simulate(poles, actions, reset_key)
        return next_poles, (poles[0], actions, log_probs, values, fell, ended, lengths)

    poles, steps = jax.lax.scan(act, state.poles, jax.random.split(key, horizon))
    observations, actions, log_probs, values, fell, ended, lengths = steps
    advantages = advantages_of(values, state.policy(poles[0])[1], fell, ended)
    returns = advantages + values
    mean = jdist.global_mean(advantages)  # over the environments of all replicas
    deviation = jnp.sqrt(jdist.global_mean(jnp.square(advantages - mean)))
    batch = observations, actions, log_probs, (advantages - mean) / (deviation + 1e-8), returns
    batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)

    def update(modules, _):
        policy, optimizer = modules
        loss, grads = jdist.value_and_grad(losses_of)(policy, *batch)
        optimizer.update(policy, grads)
        return (policy, optimizer), jdist.all_reduce("mean", loss)

    (policy, optimizer), losses = jax.lax.scan(update, (state.policy, state.optimizer), length=PASSES)
    episodes = jdist.metrics.Mean().update(lengths, weights=ended)
    mean_length = jdist.all_reduce("sum", episodes).compute()
    new_state = State(state.step + 1, policy, optimizer, state.key, poles)
    return new_state, {"length": mean_length, "loss": losses[-1]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, help="number of devices (default: all accelerators, or 4 CPU devices)")
    parser.add_argument("--updates", type=int, default=40, help="calls of the step (default: %(default)s)")
    parser.add_argument("--environments", type=int, default=32, help="on all replicas (default: %(default)s)")
    parser.add_argument("--horizon", type=int, default=64, help="simulated steps per call (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights, actions and environments (default: %(default)s)"
    )
    args = parser.parse_args()
    jdist.use_cpu_devices(args.replicas or 4)  # before JAX starts; no effect on accelerators

    strategy = jdist.MirroredStrategy(jax.devices()[: args.replicas])
    replicas = strategy.num_replicas_in_sync
    if args.environments % replicas:
        raise SystemExit(f"{args.environments} environments cannot be split over {replicas} replicas.")
    schedule = optax.linear_schedule(3e-3, 0.0, args.updates * PASSES)
    transformation = optax.chain(jdist.sync.mean(), optax.clip_by_global_norm(0.5), optax.adam(schedule))

    def make(key):
        policy = ActorCritic(nnx.Rngs(args.seed))
        optimizer = nnx.Optimizer(policy, transformation, wrt=nnx.Param)
        poles = reset(jdist.replica_key(key), args.environments // replicas)
        return State(jnp.int32(0), policy, optimizer, key, jdist.PerReplica(poles))

    state = strategy.init(make, jax.random.key(args.seed))
    step = train_step.on(strategy, horizon=args.horizon)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    results = []
    for number in range(1, args.updates + 1):
        state, result = step(state)
        results.append(result)
        if number % 10 == 0 or number == args.updates:
            lengths = np.array([result["length"] for result in results[-10:]])
            console.print(
                f"update {number:>3}  mean length of the episodes that ended {lengths[lengths > 0].mean():6.1f}"
            )
    proof = step.proof
    console.print(
        f"Proved while tracing: {len(proof.replicated)} leaves are replicated; per replica: {proof.per_replica}"
    )
    lengths = balance(state.policy, jax.random.key(args.seed + 1))
    console.print(
        f"Without chance the policy balances for {lengths.mean():.1f} of {MAX_STEPS} steps, trained on {replicas} replicas"
    )


if __name__ == "__main__":
    main()

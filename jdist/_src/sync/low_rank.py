"""A policy that sends matrices of low rank."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist._src.core.tree import PyTree, dtype_and_shape, named_leaves
from jdist._src.replica.context import ReplicaContext
from jdist._src.sync.error_feedback import CompressedMean, with_feedback
from jdist._src.sync.policy import Policy, check_integer, check_transformation, is_float, policy_of
from jdist._src.sync.reduction import mean
from jdist._src.values.reduce_op import ReduceOp


def power_sgd(rank: int, inner: optax.GradientTransformation | None = None, *, seed: int = 0) -> Policy:
    """The mean over the replicas, each matrix sent as the product of two of `rank` columns.

    One step of power iteration, beginning where the last one ended, and two all-reduces. A leaf `[..., n]` is taken as a
    matrix of `n` columns. What the product lacks is added to the next gradient (error feedback).

    Args:
        rank: How many columns, from 1 up.
        inner: The policy for leaves that would not become smaller: vectors, small matrices; `mean()` by default.
        seed: Of the columns to begin with.

    Returns:
        A transformation of each replica's gradients `[...]` into an approximation of their mean; mirrored.

    Raises:
        ValueError: `rank` is less than 1; or, by the policy's `init`, it is larger than every matrix there is.
        TypeError: `rank` is no whole number, or `inner` no gradient transformation.

    Source:
        T. Vogels, S. P. Karimireddy and M. Jaggi, "PowerSGD: practical low-rank gradient compression for distributed
        optimization", arXiv:1905.13727.

    Example:
        >>> tx = optax.chain(jdist.sync.power_sgd(rank=4), optax.adamw(1e-3))
    """
    rank = check_integer("power_sgd", "rank", rank, 1)
    inner = check_transformation("power_sgd", mean() if inner is None else inner)

    def chosen(leaf: Any) -> bool:
        rows, columns = _sides(leaf)
        return is_float(leaf) and rank * (rows + columns) < rows * columns

    def init(leaves: list[Any]) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(seed), max(len(leaves), 1))
        return [jax.random.normal(key, (_sides(leaf)[1], rank)) for key, leaf in zip(keys, leaves, strict=False)]

    def send(context: ReplicaContext, leaves: list[jax.Array], columns: list[jax.Array]) -> CompressedMean:
        if not leaves:
            return CompressedMean([], [], columns)
        matrices = [leaf.reshape(_sides(leaf)).astype(jnp.float32) for leaf in leaves]
        left = [matrix @ q for matrix, q in zip(matrices, columns, strict=True)]
        left = [jnp.linalg.qr(p)[0] for p in context.all_reduce(ReduceOp.MEAN, left)]
        right = [matrix.T @ p for matrix, p in zip(matrices, left, strict=True)]
        right = context.all_reduce(ReduceOp.MEAN, right)
        products = [(p @ q.T).reshape(leaf.shape) for p, q, leaf in zip(left, right, leaves, strict=True)]
        lost = [
            (leaf - x.astype(leaf.dtype)) / context.num_replicas_in_sync
            for leaf, x in zip(leaves, products, strict=True)
        ]
        return CompressedMean(products, lost, right)

    policy = with_feedback("power_sgd", inner, chosen, init, send)

    def first(params: PyTree) -> Any:
        matrices = [(name, leaf) for name, leaf in named_leaves("params", params) if min(_sides(leaf)) > 1]
        if matrices and all(rank > min(_sides(leaf)) for _, leaf in matrices):
            found = ", ".join(f"{name} {dtype_and_shape(leaf)}" for name, leaf in matrices[:3])
            raise ValueError(
                f"`jdist.sync.power_sgd(rank={rank})`: the rank is larger than every matrix among the parameters ({found}). "
                f"Take one of at most {max(min(_sides(leaf)) for _, leaf in matrices)}."
            )
        return policy.init(params)

    return policy_of(first, policy.update)


def _sides(leaf: Any) -> tuple[int, int]:
    """Rows and columns of a leaf `[..., n]` as a matrix; one row of a vector."""
    columns = leaf.shape[-1] if leaf.ndim > 1 else leaf.size
    return leaf.size // max(columns, 1), columns

"""PowerSGD: compression of gradients by low-rank matrices."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist._src.core.call_errors import explains_arguments
from jdist._src.core.tree import PyTree, dtype_and_shape, is_float, named_leaves
from jdist._src.replica.context import ReplicaContext
from jdist._src.sync.error_feedback import CompressedMean, with_feedback
from jdist._src.sync.policy import (
    Policy,
    check_integer,
    check_transformation,
    make_policy,
)
from jdist._src.sync.reduction import mean
from jdist._src.values.reduce_op import ReduceOp


@explains_arguments()
def power_sgd(rank: int, *, fallback: optax.GradientTransformation | None = None, seed: int = 0) -> Policy:
    """Averages the gradients over the replicas, with each matrix sent as the product of two matrices of `rank` columns.

    One step of power iteration, which starts from the result of the last step, and two all-reduces. A leaf `[..., n]` is
    compressed as a matrix of `n` columns. The approximation error is added to the next gradient (error feedback).

    Args:
        rank: The number of columns, at least 1.
        fallback: The policy of leaves that would not become smaller: vectors and small matrices; `mean()` by default.
        seed: The seed of the initial columns.

    Returns:
        A transformation of each replica's gradients `[...]` into an approximation of their mean; replicated.

    Raises:
        ValueError: `rank` is less than 1; or, raised by the policy's `init`, larger than every matrix of the parameters.
        TypeError: `rank` is not an integer, or `fallback` is not a gradient transformation.

    Source:
        T. Vogels, S. P. Karimireddy and M. Jaggi, "PowerSGD: practical low-rank gradient compression for distributed
        optimization", arXiv:1905.13727.

    Example:
        >>> tx = optax.chain(jdist.sync.power_sgd(rank=4), optax.adamw(1e-3))
    """
    rank = check_integer("power_sgd", "rank", rank, 1)
    fallback = check_transformation("power_sgd", "fallback", mean() if fallback is None else fallback)

    def is_compressed(leaf: Any) -> bool:
        rows, columns = _matrix_shape(leaf)
        return is_float(leaf) and rank * (rows + columns) < rows * columns

    def init_codec(leaves: list[Any]) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(seed), max(len(leaves), 1))
        return [jax.random.normal(key, (_matrix_shape(leaf)[1], rank)) for key, leaf in zip(keys, leaves, strict=False)]

    def send(context: ReplicaContext, leaves: list[jax.Array], columns: list[jax.Array]) -> CompressedMean:
        if not leaves:
            return CompressedMean([], [], columns)
        matrices = [leaf.reshape(_matrix_shape(leaf)).astype(jnp.float32) for leaf in leaves]
        left = [matrix @ q for matrix, q in zip(matrices, columns, strict=True)]
        left = [jnp.linalg.qr(p)[0] for p in context.all_reduce(ReduceOp.MEAN, left)]
        right = [matrix.T @ p for matrix, p in zip(matrices, left, strict=True)]
        right = context.all_reduce(ReduceOp.MEAN, right)
        products = [(p @ q.T).reshape(leaf.shape) for p, q, leaf in zip(left, right, leaves, strict=True)]
        residual = [
            (leaf - x.astype(leaf.dtype)) / context.num_replicas_in_sync
            for leaf, x in zip(leaves, products, strict=True)
        ]
        return CompressedMean(products, residual, right)

    policy = with_feedback("power_sgd", fallback, is_compressed, init_codec, send)

    def init(params: PyTree) -> Any:
        matrices = [(name, leaf) for name, leaf in named_leaves("params", params) if min(_matrix_shape(leaf)) > 1]
        if matrices and all(rank > min(_matrix_shape(leaf)) for _, leaf in matrices):
            examples = ", ".join(f"{name} {dtype_and_shape(leaf)}" for name, leaf in matrices[:3])
            raise ValueError(
                f"`jdist.sync.power_sgd(rank={rank})`: the rank is larger than every matrix of the parameters ({examples}). "
                f"Use a rank of at most {max(min(_matrix_shape(leaf)) for _, leaf in matrices)}."
            )
        return policy.init(params)

    return make_policy(init, policy.update)


def _matrix_shape(leaf: Any) -> tuple[int, int]:
    """Returns the numbers of rows and columns of a leaf `[..., n]` as a matrix; a vector has one row."""
    columns = leaf.shape[-1] if leaf.ndim > 1 else leaf.size
    return leaf.size // max(columns, 1), columns

"""`pipeline`: the stages of a model on the devices of one replica, which compute different micro-batches at the same time."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jdist._src.collectives.ops import check_unwrapped
from jdist._src.core import jax_compat
from jdist._src.core.arguments import as_int, function_name
from jdist._src.core.tree import PyTree, describe_tree, dtype_and_shape, named_leaves, one_line

_SCHEDULES = "gpipe", "1f1b"


def pipeline(
    stage_fn: Callable[..., PyTree],
    stage_params: PyTree,
    x: PyTree,
    *,
    num_micro_batches: int,
    axis: str = "stage",
    first: tuple[Any, ...] | None = None,
    last: tuple[Any, ...] | None = None,
    schedule: Literal["gpipe", "1f1b"] = "gpipe",
    key: jax.Array | None = None,
) -> Any:
    """Applies stages one after the other to micro-batches; the stages are spread over a mesh axis and run at the same time.

    Called in a step, or under `jax.jit` with `jax.set_mesh`, for a mesh with the axis `axis`. Each device of this axis
    computes a part of the stages, and sends its results to the next device. Without such an axis one device computes all
    stages, with the same numbers to rounding, so that the same step runs under every strategy. The loss and its gradients
    equal the loss and the gradients of the complete batch, if no function combines examples of a batch.

    With `p` devices along the axis and `m` micro-batches, each device is idle for a fraction `(p - 1) / (m + p - 1)` of the
    time, the pipeline bubble, in both schedules: use several times more micro-batches than devices. The backward pass computes
    each stage again from its input, so a device stores inputs of stages, each of one micro-batch:

    * `"gpipe"`: all forward passes, then all backward passes; `m + p - 1` inputs. It has derivatives of every order.
    * `"1f1b"`: a forward and a backward pass alternately, from the first micro-batch on that has a loss; `2 p - 3` inputs (one
      if `p` is 2), for any `m`. It requires `last`. `jax.grad` computes the gradients together with the loss and sums them in
      float32 or wider; a loss scale is applied to the sum. It has first derivatives in reverse mode only.

    Args:
        stage_fn: A function `(params, h)` of the parameters of one stage and its input `[batch / num_micro_batches, ...]`.
            It returns a tree with the shapes and dtypes of `h`. Neither it nor the functions in `first` and `last` may use
            collectives over `axis`, or with `"1f1b"` close over values that are differentiated.
        stage_params: `[stage, ...]`, sharded or replicated. The number of stages is a multiple of the size of the axis: each
            device computes the same number of consecutive stages.
        x: `[batch, ...]`: the input of the first stage, or of the function in `first`.
        num_micro_batches: The number of parts of the batch. Each has every `num_micro_batches`-th example.
        axis: The mesh axis of the stages.
        first: `(fn, params)`: `fn(params, x)` is computed before the first stage, on its device, such as an embedding.
        last: `(fn, params, *inputs)`: `fn(params, h, *inputs)` is computed after the last stage, on its device, and returns
            losses, `[]` or `[batch / num_micro_batches, ...]`. The inputs are `[batch, ...]`, such as labels.
        schedule: `"gpipe"` or `"1f1b"`.
        key: A random key. Each function then receives a keyword argument `key`, which differs for each micro-batch and stage
            and does not depend on the number of devices.

    Returns:
        With `last`, the mean of the losses, `[]`, float32 or wider. Otherwise the result of the last stage, `[batch, ...]`.

    Raises:
        ValueError: The micro-batches do not divide the batch, or the devices do not divide the stages; the result
            of a stage does not have the shapes of its input; `schedule` is unknown, or requires `last`; `axis` is an axis of
            the replicas; or with `"1f1b"`, when JAX differentiates: a function closes over a value that is differentiated.
        TypeError: `first` or `last` is not a tuple that begins with a function; an argument is a distributed value.

    Source:
        Y. Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", arXiv:1811.06965.
        D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
        arXiv:2104.04473, section 2.2: the bubble, and 1F1B with a flush, where a device stores at most `p` micro-batches. Here
        the devices run one program, in which each computes a forward and then a backward pass per tick. A result is used one
        tick later, so a device stores nearly twice as many, but does not wait while another one computes a longer pass.

    Example:
        >>> stage = lambda w, h: jnp.tanh(h @ w)
        >>> weights, x = jnp.full((4, 2, 2), 0.5), jnp.ones((6, 2))  # 4 stages
        >>> square = lambda scale, h, y: scale * (h - y) ** 2
        >>> loss = lambda w: jdist.pipeline(
        ...     stage, w, x, num_micro_batches=3, last=(square, 2.0, 0 * x), schedule="1f1b"
        ... )
        >>> round(float(loss(weights)), 4)
        0.5255
        >>> mesh = jax.sharding.Mesh(
        ...     jax.devices()[:2], "stage", axis_types=(jax.sharding.AxisType.Auto,)
        ... )
        >>> with jax.set_mesh(mesh):  # two stages per device
        ...     value, grads = jax.jit(jax.value_and_grad(loss))(weights)
        >>> round(float(value), 4), grads.addressable_shards[0].data.shape
        (0.5255, (2, 2, 2))
    """
    num_micro_batches = as_int("`num_micro_batches`", num_micro_batches, 1)
    if schedule not in _SCHEDULES:
        raise ValueError(f"`schedule` must be {' or '.join(map(repr, _SCHEDULES))}, got {one_line(schedule)}.")
    if schedule == "1f1b" and last is None:
        raise ValueError(
            '`schedule="1f1b"` computes gradients before the last micro-batch has entered, so the loss must be inside: pass '
            '`last=(loss_fn, params, labels)`, or use `schedule="gpipe"`.'
        )
    first_fn, first_params, *others = _function_tuple("first", "(fn, params)", first)
    if others:
        raise TypeError(f"`first` must be `(fn, params)`, got {len(first or ())} values. Pass the input as `x`.")
    last_fn, last_params, *last_inputs = _function_tuple("last", "(fn, params, *inputs)", last)
    check_unwrapped((stage_params, first_params, last_params, x, last_inputs))
    arrays = _Arrays(
        stages=jax.tree.map(jnp.asarray, stage_params),
        first=jax.tree.map(jnp.asarray, first_params),
        last=jax.tree.map(jnp.asarray, last_params),
        x=_split("x", x, num_micro_batches),
        inputs=_split("inputs of `last`", last_inputs, num_micro_batches),
        key=key,
    )
    num_devices = _axis_size(axis)
    num_stages = _num_stages(stage_params, axis, num_devices)
    functions = _Functions(stage_fn, first_fn, last_fn, num_stages, num_micro_batches)
    if num_devices == 1:
        compute = functools.partial(_sequential, functions)
    else:
        compute = functools.partial(_gpipe, functions, axis=axis, num_devices=num_devices)
    if schedule == "gpipe":
        results = compute(arrays)
        return results if last else jax.tree.map(_merge_micro_batches, results)
    if num_devices == 1:
        return _loss_with_grads(compute, functools.partial(_value_and_grads, compute), arrays)
    compute_both = functools.partial(_one_forward_one_backward, functions, axis=axis, num_devices=num_devices)
    return _loss_with_grads(compute, compute_both, arrays)


class _Arrays(NamedTuple):
    """The arrays of a pipeline: parameters of the stages, and of the functions before and after them; data; a random key.

    `x` and `inputs` are `[micro_batch, batch / micro_batches, ...]`.
    """

    stages: PyTree
    first: PyTree
    last: PyTree
    x: PyTree
    inputs: PyTree
    key: jax.Array | None


class _Functions(NamedTuple):
    """The functions of a pipeline, for one micro-batch."""

    stage_fn: Callable[..., PyTree]
    first_fn: Callable[..., PyTree] | None
    last_fn: Callable[..., Any] | None
    num_stages: int
    num_micro_batches: int

    def enter(self, arrays: _Arrays, x: PyTree, micro_batch: Any) -> PyTree:
        """Returns the input of the first stage."""
        if self.first_fn is None:
            return x
        return jax.tree.map(jnp.asarray, self.first_fn(arrays.first, x, **_key(arrays.key, micro_batch, 0)))

    def stages(self, arrays: _Arrays, h: PyTree, micro_batch: Any, start: Any) -> PyTree:
        """Returns the result of consecutive stages from `start` on; `arrays.stages` has their parameters."""

        def stage(h: PyTree, inputs: tuple[PyTree, Any]) -> tuple[PyTree, None]:
            params, index = inputs
            result = self.stage_fn(params, h, **_key(arrays.key, micro_batch, index + 1))
            _check_result(self.stage_fn, h, result)
            return result, None

        number = jax.tree.leaves(arrays.stages)[0].shape[0]
        if number == 1:
            return stage(h, (jax.tree.map(lambda leaf: leaf[0], arrays.stages), start))[0]
        return lax.scan(stage, h, (arrays.stages, start + jnp.arange(number)))[0]

    def loss(self, arrays: _Arrays, h: PyTree, inputs: PyTree, micro_batch: Any) -> jax.Array:
        """Returns the mean loss of a micro-batch, divided by their number, so that the sum is the mean."""
        assert self.last_fn is not None
        losses = self.last_fn(arrays.last, h, *inputs, **_key(arrays.key, micro_batch, self.num_stages + 1))
        losses = jnp.asarray(losses)
        return jnp.mean(losses.astype(jnp.promote_types(losses.dtype, jnp.float32))) / self.num_micro_batches


def _sequential(functions: _Functions, arrays: _Arrays) -> PyTree:
    """Returns the mean loss, or the result of the last stage for each micro-batch, computed on one device."""

    @functools.partial(jax.checkpoint, prevent_cse=False)  # a loop does not need the barriers
    def micro_batch(arrays: _Arrays, index: Any) -> PyTree:
        h = functions.stages(arrays, functions.enter(arrays, arrays.x, index), index, 0)
        return h if functions.last_fn is None else functions.loss(arrays, h, arrays.inputs, index)

    results = lax.map(
        lambda part: micro_batch(arrays._replace(x=part[0], inputs=part[1]), part[2]),
        (arrays.x, arrays.inputs, jnp.arange(functions.num_micro_batches)),
    )
    return results if functions.last_fn is None else jnp.sum(results)


def _gpipe(functions: _Functions, arrays: _Arrays, axis: str, num_devices: int) -> PyTree:
    """Returns the mean loss, or the result of the last stage for each micro-batch.

    In tick `t`, device `d` computes its stages for micro-batch `t - d`.
    """
    fill, num_ticks = num_devices - 1, functions.num_micro_batches + num_devices - 1

    def on_device(arrays: _Arrays) -> PyTree:
        device = lax.axis_index(axis)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def compute(arrays: _Arrays, received: PyTree, t: Any) -> tuple[PyTree, Any]:
            h, index = _stages_on_device(functions, arrays, received, t - device, device)
            if functions.last_fn is None:
                return h, h
            return h, _loss_on_last(functions, arrays, h, index, (device == fill) & (t >= fill))

        def tick(received: PyTree, inputs: tuple[PyTree, PyTree, Any]) -> tuple[PyTree, Any]:
            x, last_inputs, t = inputs
            h, result = compute(arrays._replace(x=x, inputs=last_inputs), received, t)
            return _shift(h, axis, num_devices), result

        # The micro-batches reach a device after its first ticks. Until then it computes with numbers as they are in training:
        # zeros can have infinite derivatives, which times a cotangent of zero are NaN.
        example = _micro_batch(arrays.x, 0)
        start = lax.stop_gradient(functions.enter(arrays, example, 0))
        # Only the first device reads `x`, and only the last one `inputs`, so the micro-batch depends on the tick only.
        x = _repeat_ends(arrays.x, np.arange(num_ticks))
        inputs = _repeat_ends(arrays.inputs, np.arange(num_ticks) - fill)
        _, results = lax.scan(tick, start, (x, inputs, jnp.arange(num_ticks)))
        results = jnp.sum(results) if functions.last_fn else jax.tree.map(lambda leaf: leaf[fill:], results)
        return jax.tree.map(lambda leaf: leaf[None], results)

    return jax.tree.map(lambda leaf: leaf[-1], _map_devices(on_device, arrays, axis, PartitionSpec(axis)))


def _loss_with_grads(
    compute: Callable[[_Arrays], jax.Array],
    compute_both: Callable[[_Arrays], tuple[jax.Array, list[jax.Array]]],
    arrays: _Arrays,
) -> jax.Array:
    """Returns the mean loss, whose gradients are computed with it if they are needed.

    The functions may close over values of the program that is being traced. `jax.custom_vjp` calls its functions later, when
    JAX differentiates this program, so these values have to be arguments.
    """
    leaves, others, merge = _split_inexact(arrays)
    programs = [
        jax.make_jaxpr(lambda *parts, fn=fn: fn(merge(*parts)))(leaves, others) for fn in (compute, compute_both)
    ]

    def run(index: int, *arguments: PyTree) -> list[jax.Array]:
        *parts, captured = arguments
        program = programs[index].replace(consts=captured[index])
        return jax_compat.jaxpr_function(program)(*jax.tree.leaves(parts))

    @jax.custom_vjp
    def loss(*arguments: PyTree) -> jax.Array:
        return run(0, *arguments)[0]

    def loss_and_grads(*arguments: PyTree) -> tuple[jax.Array, list[jax.Array]]:
        value, *grads = run(1, *arguments)
        return value, grads

    def scaled_grads(grads: list[jax.Array], cotangent: jax.Array) -> tuple[list[jax.Array], None, None]:
        scaled = [(grad * cotangent).astype(dtype) for grad, dtype in zip(grads, dtypes, strict=True)]
        return scaled, None, None

    dtypes = [leaf.dtype for leaf in leaves]
    loss.defvjp(loss_and_grads, scaled_grads)
    captured = [list(map(_without_gradient, program.consts)) for program in programs]
    return loss(leaves, others, captured)


@jax.custom_jvp
def _without_gradient(value: Any) -> Any:
    """Returns a value, which must not be differentiated."""
    return value


@_without_gradient.defjvp
def _refuse_gradient(*_: Any) -> Any:
    raise ValueError(
        'With `schedule="1f1b"` a function of the pipeline closes over a value that is differentiated, and its gradient is not '
        "computed. Pass the value in `stage_params`, `x`, or the parameters or inputs of `first` and `last`; apply "
        '`jax.lax.stop_gradient` to it; or use `schedule="gpipe"`.'
    )


def _value_and_grads(compute: Callable[[_Arrays], jax.Array], arrays: _Arrays) -> tuple[jax.Array, list[jax.Array]]:
    leaves, others, merge = _split_inexact(arrays)
    return jax.value_and_grad(lambda leaves: compute(merge(leaves, others)))(leaves)


def _one_forward_one_backward(
    functions: _Functions, arrays: _Arrays, axis: str, num_devices: int
) -> tuple[jax.Array, list[jax.Array]]:
    """Returns the mean loss, and its gradients with respect to the floats of `arrays`, in float32 or wider.

    In tick `t`, device `d` computes the forward pass of micro-batch `t - d` and the backward pass of micro-batch
    `t - 2 (p - 1) + d`. The first `p - 1` ticks have a forward pass only, and the last `p - 1` a backward pass only.
    """
    fill, num_micro_batches = num_devices - 1, functions.num_micro_batches
    num_saved = max(2 * fill - 1, 1)  # the second device needs the most: the first one computes its input again

    def on_device(arrays: _Arrays) -> tuple[jax.Array, list[jax.Array]]:
        device = lax.axis_index(axis)
        params = arrays._replace(x=None, inputs=None)

        def forward(t: Any, received: PyTree, saved: PyTree) -> tuple[PyTree, PyTree]:
            saved = jax.tree.map(
                lambda ring, leaf: lax.dynamic_update_index_in_dim(ring, leaf, (t - device) % num_saved, 0),
                saved,
                received,
            )
            parts = params._replace(x=_micro_batch(arrays.x, t))
            h, _ = _stages_on_device(functions, parts, received, t - device, device)
            return _shift(h, axis, num_devices), saved

        def backward(t: Any, cotangent: list[jax.Array], saved: PyTree, sums: PyTree) -> Any:
            number = t - 2 * fill + device
            parts = params._replace(
                x=_micro_batch(arrays.x, t - 2 * fill), inputs=_micro_batch(arrays.inputs, t - fill)
            )
            received = jax.tree.map(lambda ring: ring[number % num_saved], saved)
            leaves, others, merge = _split_inexact((parts, received))

            def results(leaves: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
                parts, received = merge(leaves, others)
                h, index = _stages_on_device(functions, parts, received, number, device)
                return _loss_on_last(functions, parts, h, index, device == fill), _split_inexact(h)[0]

            (loss, _), pull_back = jax.vjp(results, leaves)
            is_used = (number >= 0) & (number < num_micro_batches)
            (grads,) = pull_back((jnp.ones_like(loss), cotangent))
            loss, grads = jax.tree.map(lambda value: jnp.where(is_used, value, 0), (loss, grads))
            grads, received_grads = merge(grads, [None] * len(others))
            sums = jax.tree.map(lambda s, value: s + value.astype(s.dtype), sums, (loss, grads[:3]))
            return _shift(_split_inexact(received_grads)[0], axis, num_devices, -1), sums, (grads.x, grads.inputs)

        def forward_tick(carry: PyTree, t: Any) -> tuple[PyTree, None]:
            received, cotangent, saved, sums = carry
            received, saved = forward(t, received, saved)
            return (received, cotangent, saved, sums), None

        def backward_tick(carry: PyTree, t: Any) -> tuple[PyTree, PyTree]:
            received, cotangent, saved, sums = carry
            cotangent, sums, grads = backward(t, cotangent, saved, sums)
            return (received, cotangent, saved, sums), grads

        def tick(carry: PyTree, t: Any) -> tuple[PyTree, PyTree]:
            return backward_tick(forward_tick(carry, t)[0], t)

        h = jax.eval_shape(lambda arrays: functions.enter(arrays, _micro_batch(arrays.x, 0), 0), arrays)
        loss = jax.eval_shape(lambda arrays, h: functions.loss(arrays, h, _micro_batch(arrays.inputs, 0), 0), arrays, h)
        zeros = lambda leaf, *shape: jnp.zeros((*shape, *leaf.shape), leaf.dtype)
        wide_zeros = lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))
        param_sums = jax.tree.map(lambda leaf: wide_zeros(leaf) if _is_inexact(leaf) else None, params[:3])
        carry = (
            jax.tree.map(zeros, h),
            [zeros(leaf) for leaf in jax.tree.leaves(h) if _is_inexact(leaf)],
            jax.tree.map(lambda leaf: zeros(leaf, num_saved), h),
            (jnp.zeros_like(loss), param_sums),
        )
        ticks = jnp.arange(num_micro_batches + 2 * fill)
        carry, _ = lax.scan(forward_tick, carry, ticks[:fill])
        carry, steady = lax.scan(tick, carry, ticks[fill:-fill])
        carry, drain = lax.scan(backward_tick, carry, ticks[-fill:])
        loss, (stages, first, last) = carry[-1]
        # The first device has gradients of `x` from tick 2 (p - 1) on, the last device gradients of `inputs` from p - 1 on.
        x_grads = jax.tree.map(lambda a, b: jnp.concatenate([a, b])[fill:], steady[0], drain[0])
        # Each is zero on the devices that do not compute it.
        replicated = jax.tree.map(lambda leaf: lax.psum(leaf, axis), (loss, first, last, x_grads, steady[1]))
        return stages, replicated

    stages, (loss, first, last, x, inputs) = _map_devices(
        on_device, arrays, axis, (PartitionSpec(axis), PartitionSpec())
    )
    return loss, jax.tree.leaves(_Arrays(stages, first, last, x, inputs, None))


def _stages_on_device(
    functions: _Functions, arrays: _Arrays, received: PyTree, micro_batch: Any, device: Any
) -> tuple[PyTree, Any]:
    """Returns the result of the stages of a device, and the index of the micro-batch, which is in range."""
    index = jnp.clip(micro_batch, 0, functions.num_micro_batches - 1)
    if functions.first_fn is None:
        h = jax.tree.map(lambda x, y: jnp.where(device == 0, x, y), arrays.x, received)
    else:
        h = lax.cond(
            device == 0, lambda arrays, _: functions.enter(arrays, arrays.x, index), lambda _, h: h, arrays, received
        )
    start = device * jax.tree.leaves(arrays.stages)[0].shape[0]
    return functions.stages(arrays, h, index, start), index


def _loss_on_last(functions: _Functions, arrays: _Arrays, h: PyTree, index: Any, is_last: Any) -> jax.Array:
    """Returns the loss of a micro-batch on the last device, and zero on the others."""
    loss = lambda arrays, h: functions.loss(arrays, h, arrays.inputs, index)
    zero = jnp.zeros((), jax.eval_shape(loss, arrays, h).dtype)
    return lax.cond(is_last, loss, lambda *_: zero, arrays, h)


def _map_devices(fn: Callable[[_Arrays], Any], arrays: _Arrays, axis: str, out_specs: Any) -> Any:
    """Returns the results of `fn` on all devices along `axis`."""
    specs: Any = _Arrays(*[PartitionSpec()] * len(arrays))._replace(stages=PartitionSpec(axis))  # type: ignore
    return jax.shard_map(fn, in_specs=(specs,), out_specs=out_specs, axis_names={axis}, check_vma=False)(arrays)


def _shift(tree: PyTree, axis: str, num_devices: int, step: int = 1) -> PyTree:
    """Returns the values of the previous device, or of the next one if `step` is -1; zeros where there is none."""
    pairs = [(i, i + step) for i in range(num_devices) if 0 <= i + step < num_devices]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, pairs), tree)


def _split_inexact(tree: PyTree) -> tuple[list[Any], list[Any], Callable[[list[Any], list[Any]], PyTree]]:
    """Returns the leaves that are floats, the other leaves, and the function that makes the tree of both."""
    leaves, treedef = jax.tree.flatten(tree)
    are_inexact = list(map(_is_inexact, leaves))

    def merge(inexact: list[Any], others: list[Any]) -> PyTree:
        iterators = iter(others), iter(inexact)
        return treedef.unflatten([next(iterators[is_inexact]) for is_inexact in are_inexact])

    parts = [[leaf for leaf, one in zip(leaves, are_inexact, strict=True) if one is part] for part in (True, False)]
    return parts[0], parts[1], merge


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _key(key: jax.Array | None, micro_batch: Any, index: Any) -> dict[str, jax.Array]:
    return {} if key is None else {"key": jax.random.fold_in(jax.random.fold_in(key, micro_batch), index)}


def _split(name: str, tree: PyTree, parts: int) -> PyTree:
    """Returns a batch `[batch, ...]` as `[micro_batch, batch / micro_batches, ...]`.

    A micro-batch has every `parts`-th example: if the batch is sharded, so is each micro-batch.

    Raises:
        ValueError: A leaf has no examples, or their number is not divisible by the number of micro-batches.
    """
    for leaf_name, leaf in named_leaves(name, tree):
        if not jnp.ndim(leaf) or jnp.shape(leaf)[0] % parts:
            examples = f"{jnp.shape(leaf)[0]} examples" if jnp.ndim(leaf) else "no examples"
            raise ValueError(
                f"{leaf_name} is {dtype_and_shape(leaf)}, with {examples}, and cannot be split into {parts} micro-batches. "
                "Use a divisor of the number of examples per replica as `num_micro_batches`."
            )
    return jax.tree.map(lambda leaf: _rows(jnp.asarray(leaf), parts), tree)


def _rows(leaf: jax.Array, parts: int) -> jax.Array:
    return leaf.reshape(leaf.shape[0] // parts, parts, *leaf.shape[1:]).swapaxes(0, 1)


def _merge_micro_batches(leaf: jax.Array) -> jax.Array:
    return leaf.swapaxes(0, 1).reshape(-1, *leaf.shape[2:])


def _micro_batch(tree: PyTree, index: Any) -> PyTree:
    """Returns one micro-batch; the first or the last one if the index is out of range."""
    return jax.tree.map(
        lambda leaf: lax.dynamic_index_in_dim(leaf, jnp.clip(index, 0, leaf.shape[0] - 1), 0, False), tree
    )


def _repeat_ends(tree: PyTree, indices: np.ndarray) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[np.clip(indices, 0, leaf.shape[0] - 1)], tree)


def _function_tuple(name: str, form: str, value: Any) -> tuple[Any, ...]:
    """Returns the tuple of a function, its parameters and its inputs; of None if `value` is None.

    Raises:
        TypeError: `value` is not such a tuple.
    """
    if value is None:
        return None, None
    if not isinstance(value, (tuple, list)) or len(value) < 2 or not callable(value[0]):
        raise TypeError(f"`{name}` must be `{form}`, got {describe_tree(value)}.")
    return tuple(value)


def _axis_size(axis: str) -> int:
    """Returns the size of `axis` in the mesh of the context; 1 if it does not have the axis.

    Raises:
        ValueError: The code runs in a `shard_map` over the axis.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if axis not in mesh.axis_names:
        return 1
    if dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[axis] == AxisType.Manual:
        raise ValueError(
            f"The axis {axis!r} of `jdist.pipeline` is an axis of the replicas, or of a `shard_map` around the call, so "
            "its devices already run this code separately. Use another axis of the mesh for the stages: "
            '`jdist.MirroredStrategy(mesh=Mesh(devices, ("replica", "stage")))`.'
        )
    return mesh.shape[axis]


def _num_stages(stage_params: PyTree, axis: str, num_devices: int) -> int:
    """Returns the number of stages.

    Raises:
        ValueError: A leaf does not have the stages as its first dimension, or the devices do not divide them.
    """
    leaves = named_leaves("stage_params", stage_params)
    if not leaves:
        raise ValueError("`stage_params` has no arrays, whose first dimension is the number of stages.")
    number = next((jnp.shape(leaf)[0] for _, leaf in leaves if jnp.ndim(leaf)), None)
    for name, leaf in leaves:
        if jnp.shape(leaf)[:1] != (number,):
            raise ValueError(
                "The first dimension of each leaf of `stage_params` must be the number of stages, but "
                f"{name} is {dtype_and_shape(leaf)}, and another leaf has {number} stages. Stack the parameters of the stages: "
                "`jax.tree.map(lambda *leaves: jnp.stack(leaves), *params_of_stages)`."
            )
    if not number or number % num_devices:
        raise ValueError(
            f"{number} stages ({leaves[0][0]} is {dtype_and_shape(leaves[0][1])}) cannot be divided over "
            f"{num_devices} devices, the size of the mesh axis {axis!r}. Use a multiple of {num_devices} stages."
        )
    return number


def _check_result(stage_fn: Callable[..., PyTree], h: PyTree, result: PyTree) -> None:
    """Raises ValueError if the result of a stage does not have the structure, shapes and dtypes of its input."""
    shapes = lambda tree: [(jnp.shape(leaf), jax.dtypes.result_type(leaf)) for leaf in jax.tree.leaves(tree)]
    if jax.tree.structure(h) != jax.tree.structure(result) or shapes(h) != shapes(result):
        raise ValueError(
            f"The stage function `{function_name(stage_fn)}` returned {describe_tree(result)} for {describe_tree(h)}. The next "
            "stage receives the result, so both must have the same structure, shapes and dtypes. Convert the result to the "
            "dtype of the input, and move operations that change the shape to `first` or `last`."
        )

"""Random data-parallel programs from integer seeds, and whether N replicas compute the results of one replica.

`random_program(seed)` returns a `Program`: a function of replicated parameters and of a batch, which runs once per replica on its part of
the batch, or once with the global batch, where collectives are the identity. All choices depend on the seed and on symbolic shapes only,
so both traces apply the same operations. `Comparison` runs both without devices: replicas are a `jax.vmap` with an axis name.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import partial_eval

from jdist._src.jaxpr.numpy_evaluation import evaluate

AXIS = "replica"
FEATURES, CLASSES = 3, 4
REPLICATED_INPUTS, BATCHES = 4, 4  # the inputs of a program
Dims = tuple[
    int | str, ...
]  # the name of a size that depends on the number of replicas: products of `b` and of numbers, `n`, `g`


class Value(NamedTuple):
    """A value of a program.

    Attributes:
        array: The traced array.
        dims: Its shape, with names for the sizes that depend on the number of replicas.
        bound: An estimate of its largest absolute value.
        role: A guess of its relation to the global batch, which guides the choice of collectives: "param" (a function of the replicated
            inputs), "rep" (replicated, computed from the batch), "split" along the examples, "sum", "mean", "max" or "min" of the examples
            of a replica, or "other". Values with the first two are certainly replicated.
    """

    array: Any
    dims: Dims
    bound: float
    role: str

    @property
    def is_float(self) -> bool:
        return self.array.dtype.kind == "f"

    @property
    def is_replicated(self) -> bool:
        return self.role in ("rep", "param")

    @property
    def batch_axes(self) -> list[int]:
        return [axis for axis, dim in enumerate(self.dims) if isinstance(dim, str) and "b" in dim]


class Sizes(NamedTuple):
    """The sizes of one trace.

    Attributes:
        replicas: The number of replicas in this trace.
        batch: The number of examples per replica in this trace.
        local_batch: The number of examples per replica if there are several replicas.
        global_batch: The number of examples of all replicas.
    """

    replicas: int
    batch: int
    local_batch: int
    global_batch: int

    def of(self, dim: int | str) -> int:
        if not isinstance(dim, str):
            return dim
        base, *factors = dim.split("*")
        size = {"b": self.batch, "n": self.replicas, "g": self.global_batch, "b/m": self.batch // self.micro_batches}[
            base
        ]
        return size * math.prod(map(int, factors))

    def shape(self, dims: Dims) -> tuple[int, ...]:
        return tuple(map(self.of, dims))

    @property
    def micro_batches(self) -> int:
        return 3 if self.local_batch == 3 else 2


class Program(NamedTuple):
    """A random program.

    Attributes:
        seed: The seed that it was made from.
        num_replicas: The number of replicas of the local trace.
        batch: The number of examples per replica.
    """

    seed: int
    num_replicas: int
    batch: int

    def sizes(self, replicas: int) -> Sizes:
        """Returns the sizes of the trace of `replicas` replicas."""
        examples = self.num_replicas * self.batch
        return Sizes(replicas, examples // replicas, self.batch, examples)

    def function(self, replicas: int, log: list[str] | None = None) -> Callable[..., tuple[jax.Array, ...]]:
        """Returns the function that runs on each of `replicas` replicas: `num_replicas`, or one with the global batch."""
        sizes = self.sizes(replicas)

        def fn(w, m, s, v, x, y, labels, mask):
            values = [
                Value(w, (FEATURES,), 1.5, "param"),
                Value(m, (FEATURES, CLASSES), 1.5, "param"),
                Value(s, (), 1.5, "param"),
                Value(v, (CLASSES,), 1.5, "param"),
                Value(x, ("b", FEATURES), 2.0, "split"),
                Value(y, ("b",), 2.0, "split"),
            ]
            builder = Builder(
                np.random.default_rng(self.seed), sizes, values, labels, mask, log if log is not None else []
            )
            builder.steps(int(builder.rng.integers(3, 11)))
            return tuple(value.array for value in builder.outputs(int(builder.rng.integers(1, 5))))

        return fn

    def inputs(self, samples: int, seed: int) -> list[np.ndarray]:
        """Returns random inputs `[sample, ...]` and batches `[sample, example, ...]`."""
        rng = np.random.default_rng((self.seed, seed))
        examples = self.num_replicas * self.batch
        # Of different scales, so that the branches of comparisons are all taken.
        scales = rng.choice([0.3, 0.6, 0.9], size=samples)
        normal = lambda *shape: np.clip(
            rng.normal(size=(samples, *shape)) * scales.reshape(-1, *[1] * len(shape)), -1.5, 1.5
        )
        return [
            normal(FEATURES),
            normal(FEATURES, CLASSES),
            normal(),
            normal(CLASSES),
            normal(examples, FEATURES) + 0.3 * normal(1, 1),
            normal(examples) + 0.3 * normal(1),
            rng.integers(0, CLASSES, size=(samples, examples)).astype(np.int32),
            rng.random((samples, examples)) < rng.choice([0.15, 0.5, 0.8], size=(samples, 1)),
        ]

    def trace(self, replicas: int, log: list[str] | None = None):
        """Returns the closed jaxpr of `function(replicas)`."""
        batch = self.num_replicas * self.batch // replicas
        shapes = [(FEATURES,), (FEATURES, CLASSES), (), (CLASSES,), (batch, FEATURES), (batch,), (batch,), (batch,)]
        dtypes = [np.float32] * 6 + [np.int32, np.bool_]
        args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        return jax.make_jaxpr(self.function(replicas, log), axis_env=[(AXIS, replicas)])(*args)


def random_program(seed: int) -> Program:
    """Returns the program of `seed`."""
    return Program(seed, (2, 4)[seed % 2], (2, 3, 4)[seed // 2 % 3])


class Builder:
    """Applies random operations to values. Each choice is a draw of `rng` that depends on symbolic shapes only."""

    def __init__(self, rng, sizes, values, labels, mask, log, *, depth=0, smooth=False, collectives=True, batched=True):
        self.rng, self.sizes, self.values, self.labels, self.mask, self.log = (
            rng,
            sizes,
            list(values),
            labels,
            mask,
            log,
        )
        self.depth, self.smooth, self.collectives, self.batched = depth, smooth, collectives, batched
        self.inputs = len(self.values)

    # Choices.

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def one_of(self, options: Sequence[Any]) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def pick(self, is_wanted: Callable[[Value], bool] = lambda value: True, floats: bool = True) -> Value:
        """Returns a value, which is often one of the newest."""
        candidates = [value for value in self.values if is_wanted(value) and (value.is_float or not floats)]
        if not candidates:
            raise NotApplicable
        position = self.rng.integers(len(candidates))
        if self.chance(0.6):
            position = max(position, self.rng.integers(len(candidates)))
        return candidates[position]

    def split(self, rank: int | None = None) -> Value:
        """Returns a value whose first dimension is the examples."""
        return self.pick(lambda value: value.dims[:1] == ("b",) and rank in (None, len(value.dims)))

    # Construction.

    def steps(self, count: int) -> None:
        done = 0
        while done < count:
            name = self.one_of(_SMOOTH_NAMES if self.smooth else _NAMES)
            operation = OPERATIONS[name]
            if operation.is_collective and not self.collectives:
                continue
            if operation.is_nested and (self.depth >= 2 or self.chance(0.3 * self.depth)):
                continue
            if operation.is_batched and not self.batched:
                continue
            try:
                results = operation.apply(self)
            except NotApplicable:
                continue
            for value in results if isinstance(results, list) else [results]:
                self.add(value, name)
            done += 1

    def add(self, value: Value, name: str) -> None:
        assert value.array.shape == self.sizes.shape(value.dims), (name, value)
        self.log.append(f"{'  ' * self.depth}{name} -> {value.array.dtype}{list(value.dims)}, {value.role}")
        if len(value.dims) > 3:
            return
        self.values.append(self.tame(value))

    def tame(self, value: Value) -> Value:
        """Scales a large value down."""
        if value.is_float and value.bound > 60:
            return value._replace(array=value.array * 0.03125, bound=value.bound * 0.03125)
        return value

    def outputs(self, count: int) -> list[Value]:
        outputs = []
        for _ in range(count):
            new = self.values[self.inputs :]
            finished = [value for value in new if value.role == "rep"]
            if finished and self.chance(0.45):
                outputs.append(self.one_of(finished))
                continue
            from_batch = [value for value in new if value.role != "param"]
            value = self.one_of(from_batch if from_batch and self.chance(0.95) else new)
            if value.role == "split" and value.is_float and value.batch_axes and self.chance(0.93):
                value = _reduce(
                    self, value, tuple(value.batch_axes), self.one_of(["sum", "mean", "mean", "max", "var"])
                )
            elif not value.is_replicated and value.is_float and value.dims and self.chance(0.7):
                axes = [axis for axis, dim in enumerate(value.dims) if isinstance(dim, str) and dim != "g"]
                value = _reduce(self, value, tuple(axes), self.one_of(["sum", "mean"])) if axes else value
            if not value.is_replicated and self.chance(0.8):
                value = _collective(self, value)
            if value.dims == (FEATURES,) and value.is_float and self.chance(0.3):
                w = self.values[0]
                decay = self.one_of([0.0, 0.01, 0.1])
                value = value._replace(array=w.array - 0.1 * (value.array + decay * w.array))
            self.log.append(f"output {value.array.dtype}{list(value.dims)}, {value.role}")
            outputs.append(value)
        return outputs

    def block(
        self, size: int = 3, smooth: bool = False, collectives: bool = True, batched: bool = True, closure: int = 3
    ):
        """Returns a random function of values to a value of the first argument's dims, or of any dims.

        Each call of the function starts a generator of the same seed, so JAX may trace it any number of times.
        """
        seed = int(self.rng.integers(1 << 31))
        captured = [self.pick(floats=False) for _ in range(closure)] if closure else []
        smooth, collectives, batched = smooth or self.smooth, collectives and self.collectives, batched and self.batched

        def run(*arguments: Value, dims: Dims | None) -> Value:
            rng = np.random.default_rng(seed)
            options = {"depth": self.depth + 1, "smooth": smooth, "collectives": collectives, "batched": batched}
            inner = Builder(rng, self.sizes, [*captured, *arguments], self.labels, self.mask, self.log, **options)
            inner.steps(1 + int(rng.integers(size)))
            result = inner.values[-1]
            if not result.is_float:
                result = result._replace(array=result.array.astype(arguments[0].array.dtype), bound=20.0)
            return result if dims is None else _fit(inner, result, arguments[0], dims)

        return run


class NotApplicable(Exception):
    """The values so far do not have the shapes that an operation needs."""


class Operation(NamedTuple):
    apply: Callable[[Builder], Value | list[Value]]
    weight: int = 1
    is_smooth: bool = True
    is_collective: bool = False
    is_nested: bool = False
    is_batched: bool = False


OPERATIONS: dict[str, Operation] = {}


def operation(weight: int = 1, **flags: bool):
    def register(apply):
        OPERATIONS[apply.__name__.removeprefix("op_")] = Operation(apply, weight, **flags)
        return apply

    return register


collective = functools.partial(operation, is_collective=True)
nested = functools.partial(operation, is_nested=True)
batched = functools.partial(operation, is_batched=True)


def _fit(builder: Builder, value: Value, like: Value, dims: Dims) -> Value:
    """Returns a value with `dims` that depends on `value`, and on `like`, which has `dims`."""
    if value.dims != dims:
        axes = tuple(range(len(value.dims)))
        scalar = builder.one_of([jnp.mean, jnp.sum])(value.array, axis=axes)
        value = Value(0.5 * jnp.tanh(scalar) + like.array, dims, like.bound + 0.5, _join(value, like))
    if value.bound > 5:
        value = value._replace(array=jnp.tanh(value.array * 0.2), bound=1.0, role=_nonlinear(value))
    return value


# Roles.


def _nonlinear(value: Value) -> str:
    return value.role if value.role in ("rep", "param", "split") else "other"


def _join(*values: Value) -> str:
    roles = {value.role for value in values} - {"param"}
    if not roles:
        return "param"
    if len(roles) == 1:
        (role,) = roles
        return role if role in ("rep", "split") else "other"
    return "split" if roles == {"rep", "split"} else "other"


def _added(a: Value, b: Value) -> str:
    if a.role == b.role and a.role in ("sum", "mean"):
        return a.role
    return "mean" if "mean" in (a.role, b.role) and (a.is_replicated or b.is_replicated) else _join(a, b)


def _multiplied(a: Value, b: Value) -> str:
    for one, other in ((a, b), (b, a)):
        if one.is_replicated and other.role in ("sum", "mean"):
            return other.role
    return _join(a, b)


# Elementwise operations.


@operation(4)
def op_linear(b: Builder):
    a = b.pick()
    kind, sizes = b.one_of(["scale", "shift", "negate", "divide", "divide by batch"]), b.sizes
    number = b.one_of([0.5, 2.0, 3.0, -1.0, 0.1, 4.0, 0.3, 1 / 3])
    if kind == "scale":
        return a._replace(array=a.array * number, bound=a.bound * abs(number))
    if kind == "shift":
        role = "other" if a.role == "sum" else a.role
        return a._replace(array=a.array + number, bound=a.bound + abs(number), role=role)
    if kind == "negate":
        return a._replace(array=-a.array, role={"max": "min", "min": "max"}.get(a.role, a.role))
    if kind == "divide":
        return a._replace(array=a.array / number, bound=a.bound / abs(number))
    size = b.one_of([sizes.batch, sizes.local_batch, sizes.global_batch, sizes.replicas])
    return a._replace(array=a.array / size, role="mean" if a.role == "sum" else a.role)


NONLINEAR = {
    "tanh": (jnp.tanh, 1),
    "sin": (jnp.sin, 1),
    "sigmoid": (jax.nn.sigmoid, 1),
    "relu": (jax.nn.relu, None),
    "leaky relu": (jax.nn.leaky_relu, None),
    "gelu": (jax.nn.gelu, None),
    "softplus": (jax.nn.softplus, None),
    "abs": (jnp.abs, None),
    "square": (lambda a: jnp.square(0.2 * a), None),
    "power": (lambda a: (0.2 * a) ** 3, None),
    "exp": (lambda a: jnp.exp(jnp.tanh(a)), 3),
    "log": (lambda a: jnp.log1p(jnp.abs(a)), None),
    "root": (lambda a: jnp.sqrt(jnp.square(a) + 0.1), None),
    "rsqrt": (lambda a: lax.rsqrt(jnp.square(a) + 0.5), 2),
    "clip": (lambda a: jnp.clip(a, -0.7, 0.9), 1),
    "step": (lambda a: (a > 0.13).astype(a.dtype), 1),
    "sign": (lambda a: jnp.sign(a - 0.07), 1),
    "round": (lambda a: jnp.round(a * 2 + 0.31), 100),
    "stop": (lax.stop_gradient, None),
    "barrier": (lax.optimization_barrier, None),
    "reciprocal": (lambda a: 1 / (1 + jnp.abs(a)), 1),
}
LINEAR = {"stop", "barrier"}


@operation(5)
def op_nonlinear(b: Builder):
    a = b.pick()
    name = b.one_of(list(NONLINEAR))
    apply, bound = NONLINEAR[name]
    if a.bound > 30 and name in ("square", "power"):
        raise NotApplicable
    return Value(apply(a.array), a.dims, bound or a.bound * 1.1 + 0.7, a.role if name in LINEAR else _nonlinear(a))


def _pair(b: Builder) -> tuple[Value, Value]:
    """Returns two values of the same dims; the second is broadcast."""
    a = b.pick()
    rank = len(a.dims)
    other = b.pick(
        lambda value: (
            len(value.dims) <= rank
            and (value.dims in (a.dims, a.dims[rank - len(value.dims) :], a.dims[: len(value.dims)]) or not value.dims)
        )
    )
    array, missing = other.array, rank - len(other.dims)
    if missing and other.dims and other.dims != a.dims[missing:]:
        array = array.reshape(array.shape + (1,) * missing)
    if b.chance(0.3):
        array = jnp.broadcast_to(array, a.array.shape)
    return a, other._replace(array=array)


@operation(8)
def op_binary(b: Builder):
    a, c = _pair(b)
    name = b.one_of(["add", "add", "sub", "sub", "mul", "mul", "mul", "div", "max", "min", "where", "hypot", "compare"])
    if name in ("add", "sub"):
        return Value(
            (a.array + c.array) if name == "add" else (a.array - c.array), a.dims, a.bound + c.bound, _added(a, c)
        )
    if name == "mul":
        return Value(a.array * c.array, a.dims, a.bound * c.bound, _multiplied(a, c))
    if name == "div":
        role = a.role if c.is_replicated and a.role in ("sum", "mean") else _join(a, c)
        return Value(a.array / (0.5 + jnp.abs(c.array)), a.dims, a.bound * 2, role)
    bound = max(a.bound, c.bound)
    if name in ("max", "min"):
        role = name if name in (a.role, c.role) and {a.role, c.role} <= {name, "rep", "param"} else _join(a, c)
        return Value((jnp.maximum if name == "max" else jnp.minimum)(a.array, c.array), a.dims, bound, role)
    if name == "where":
        return Value(jnp.where(a.array > c.array + 0.03, a.array, c.array * 0.5), a.dims, bound, _join(a, c))
    if name == "hypot":
        return Value(jnp.sqrt(a.array**2 + c.array**2 + 0.1), a.dims, bound * 2, _join(a, c))
    return Value((a.array > c.array + 0.05).astype(a.array.dtype), a.dims, 1.0, _join(a, c))


@batched(3)
def op_masked(b: Builder):
    a = b.split()
    mask = b.mask.reshape(b.mask.shape + (1,) * (len(a.dims) - 1))
    kind = b.one_of(["where", "mul", "select other"])
    if kind == "where":
        return a._replace(array=jnp.where(mask, a.array, 0.0), role=_nonlinear(a))
    if kind == "mul":
        return a._replace(array=a.array * mask, role=_nonlinear(a))
    return a._replace(array=jnp.where(mask, a.array, -a.array), role=_nonlinear(a))


@batched(1)
def op_mask_or_labels(b: Builder):
    return Value(b.one_of([b.mask, b.labels]).astype(b.values[0].array.dtype), ("b",), 3.0, "split")


@operation(1)
def op_constant(b: Builder):
    dims = b.one_of([(), (FEATURES,), (CLASSES,), ("b",) if b.batched else ()])
    kind = b.one_of(["ones", "linspace", "iota", "zeros"])
    size = math.prod(b.sizes.shape(dims))
    if kind == "iota":
        array = jnp.arange(size, dtype=jnp.float32).reshape(b.sizes.shape(dims)) * 0.3
    elif kind == "linspace":
        array = jnp.linspace(-1, 1, size).reshape(b.sizes.shape(dims))
    else:
        array = jnp.full(b.sizes.shape(dims), kind == "ones", jnp.float32)
    role = "split" if "b" in dims and kind in ("ones", "zeros") else "param" if "b" not in dims else "other"
    return Value(array.astype(b.values[0].array.dtype), dims, 5.0, role)


@operation(1)
def op_noise(b: Builder):
    if b.chance(0.5):
        raise NotApplicable
    dims = b.one_of([(FEATURES,), ("b",) if b.batched else (CLASSES,)])
    key = jax.random.key(b.one_of([0, 1]))
    if b.collectives and b.chance(0.3):
        key = jax.random.fold_in(key, lax.axis_index(AXIS))
    array = jax.random.uniform(key, b.sizes.shape(dims), minval=-1.0).astype(b.values[0].array.dtype)
    return Value(array, dims, 1.0, "other")


# Contractions.


@operation(4)
def op_matmul(b: Builder):
    a = b.pick(lambda value: len(value.dims) in (1, 2))
    c = b.pick(lambda value: len(value.dims) in (1, 2) and value.dims[0] == a.dims[-1])
    over_batch = "b" in str(a.dims[-1])
    dims = a.dims[:-1] + c.dims[1:]
    role = (
        "sum"
        if over_batch and {a.role, c.role} <= {"split", "rep", "param"}
        else "other"
        if over_batch
        else _multiplied(a, c)
    )
    size = 16 if isinstance(a.dims[-1], str) else a.dims[-1]
    return Value(a.array @ c.array, dims, a.bound * c.bound * size * 0.5, role)


@operation(3)
def op_einsum(b: Builder):
    a = b.pick(lambda value: len(value.dims) in (1, 2))
    c = b.pick(lambda value: len(value.dims) in (1, 2))
    names, letters = {}, iter("ijklmn")
    subscripts = []
    for value in (a, c):
        part = ""
        for dim in value.dims:
            if dim in names and b.chance(0.7) and names[dim] not in part:
                part += names[dim]
            else:
                names[dim] = next(letters)
                part += names[dim]
        subscripts.append(part)
    dim_of = dict(zip("".join(subscripts), a.dims + c.dims, strict=True))
    result = "".join(sorted(letter for letter in dim_of if b.chance(0.5)))[:3]
    if b.chance(0.2):
        result = result[::-1]
    reduced = [str(dim) for letter, dim in dim_of.items() if letter not in result]
    over_batch = any("b" in dim for dim in reduced)
    role = (
        "sum"
        if over_batch and {a.role, c.role} <= {"split", "rep", "param"}
        else "other"
        if over_batch
        else _multiplied(a, c)
    )
    array = jnp.einsum(f"{','.join(subscripts)}->{result}", a.array, c.array)
    return Value(array, tuple(dim_of[letter] for letter in result), a.bound * c.bound * 4 ** len(reduced), role)


# Shapes.


@operation(2)
def op_transpose(b: Builder):
    a = b.pick(lambda value: len(value.dims) >= 2)
    order = tuple(int(axis) for axis in b.rng.permutation(len(a.dims)))
    return a._replace(array=jnp.transpose(a.array, order), dims=tuple(a.dims[axis] for axis in order))


def _product(*dims: int | str) -> int | str:
    """Returns the name of the size of merged dims; raises `NotApplicable` if it has none."""
    names = [dim for dim in dims if isinstance(dim, str)]
    if not names:
        return math.prod(dims)
    if len(names) > 1 or "*" in names[0]:
        raise NotApplicable
    number = math.prod(dim for dim in dims if not isinstance(dim, str))
    return names[0] if number == 1 else f"{names[0]}*{number}"


@operation(2)
def op_merge_dims(b: Builder):
    a = b.pick(lambda value: len(value.dims) >= 2)
    axis = int(b.rng.integers(len(a.dims) - 1))
    dims = a.dims[:axis] + (_product(a.dims[axis], a.dims[axis + 1]),) + a.dims[axis + 2 :]
    return a._replace(array=a.array.reshape(b.sizes.shape(dims)), dims=dims)


@operation(2)
def op_split_dim(b: Builder):
    a = b.pick(lambda value: any("*" in str(dim) for dim in value.dims) and len(value.dims) <= 2)
    axis = next(axis for axis, dim in enumerate(a.dims) if "*" in str(dim))
    base, factor = a.dims[axis].split("*")
    pair = (base, int(factor)) if b.chance(0.7) else (int(factor), base)
    dims = a.dims[:axis] + pair + a.dims[axis + 1 :]
    return a._replace(array=a.array.reshape(b.sizes.shape(dims)), dims=dims)


@batched(1)
def op_micro_batches(b: Builder):
    a = b.split()
    if len(a.dims) > 2:
        raise NotApplicable
    dims = (b.sizes.micro_batches, "b/m", *a.dims[1:])
    array = a.array.reshape(b.sizes.shape(dims))
    if b.chance(0.5):
        array = jnp.mean(array, 1)
        return Value(array, (dims[0], *dims[2:]), a.bound, "other")
    return Value(array, dims, a.bound, "split")


@operation(1)
def op_broadcast(b: Builder):
    a = b.pick(lambda value: len(value.dims) <= 2)
    dim = b.one_of([1, 2, FEATURES, "b" if b.batched else 1])
    array = jnp.broadcast_to(a.array, b.sizes.shape((dim, *a.dims)))
    role = "split" if dim == "b" and a.is_replicated else _nonlinear(a) if dim == "b" else a.role
    return Value(array, (dim, *a.dims), a.bound, "other" if dim == "b" and a.role == "split" else role)


@operation(1)
def op_expand_or_squeeze(b: Builder):
    a = b.pick(lambda value: len(value.dims) <= 2)
    if 1 in a.dims:
        axis = a.dims.index(1)
        return a._replace(array=jnp.squeeze(a.array, axis), dims=a.dims[:axis] + a.dims[axis + 1 :])
    axis = int(b.rng.integers(len(a.dims) + 1))
    return a._replace(array=jnp.expand_dims(a.array, axis), dims=a.dims[:axis] + (1,) + a.dims[axis:])


@operation(2)
def op_concatenate(b: Builder):
    a = b.pick(lambda value: len(value.dims) >= 1 and not isinstance(value.dims[-1], str))
    c = b.pick(lambda value: len(value.dims) == len(a.dims) and value.dims[:-1] == a.dims[:-1])
    if isinstance(c.dims[-1], str) or a.dims[-1] + c.dims[-1] > 8:
        raise NotApplicable
    array = jnp.concatenate([a.array, c.array], -1)
    role = a.role if a.role == c.role else _join(a, c)
    return Value(array, (*a.dims[:-1], a.dims[-1] + c.dims[-1]), max(a.bound, c.bound), role)


@operation(1)
def op_stack(b: Builder):
    a = b.pick(lambda value: len(value.dims) <= 2)
    c = b.pick(lambda value: value.dims == a.dims)
    axis = b.one_of([0, len(a.dims)])
    dims = a.dims[:axis] + (2,) + a.dims[axis:]
    role = a.role if a.role == c.role else _join(a, c)
    return Value(jnp.stack([a.array, c.array], axis), dims, max(a.bound, c.bound), role)


@batched(1)
def op_concatenate_examples(b: Builder):
    a = b.split()
    c = b.pick(lambda value: value.dims == a.dims)
    array = jnp.concatenate([a.array, c.array], 0)
    return Value(array, ("b*2", *a.dims[1:]), max(a.bound, c.bound), "split")


@operation(2)
def op_slice(b: Builder):
    a = b.pick(lambda value: any(not isinstance(dim, str) and dim > 1 for dim in value.dims))
    axis = b.one_of([axis for axis, dim in enumerate(a.dims) if not isinstance(dim, str) and dim > 1])
    kind = b.one_of(["index", "prefix", "reverse", "roll", "pad"])
    before = (slice(None),) * axis
    if kind == "index":
        return a._replace(array=a.array[(*before, b.one_of([0, 1, -1]))], dims=a.dims[:axis] + a.dims[axis + 1 :])
    if kind == "prefix":
        array = a.array[(*before, slice(1, None))]
        return a._replace(array=array, dims=a.dims[:axis] + (a.dims[axis] - 1,) + a.dims[axis + 1 :])
    if kind == "reverse":
        return a._replace(array=jnp.flip(a.array, axis))
    if kind == "roll":
        return a._replace(array=jnp.roll(a.array, 1, axis))
    array = jnp.pad(a.array, [(1, 0) if i == axis else (0, 0) for i in range(len(a.dims))])
    return a._replace(array=array, dims=a.dims[:axis] + (a.dims[axis] + 1,) + a.dims[axis + 1 :])


@batched(1)
def op_slice_examples(b: Builder):
    a = b.split()
    kind = b.one_of(["first", "last", "prefix", "reverse", "roll", "shift"])
    if kind in ("first", "last"):
        return Value(a.array[0 if kind == "first" else -1], a.dims[1:], a.bound, "other")
    if kind == "prefix":
        return Value(a.array[:2], (2, *a.dims[1:]), a.bound, "other")
    if kind == "reverse":
        return Value(a.array[::-1], a.dims, a.bound, "split")
    if kind == "roll":
        return Value(jnp.roll(a.array, 1, 0), a.dims, a.bound, "split")
    return Value(jnp.concatenate([jnp.zeros_like(a.array[:1]), a.array[:-1]], 0), a.dims, a.bound, "split")


# Reductions, and operations along a dim.


def _reduce(b: Builder, a: Value, axes: tuple[int, ...], kind: str) -> Value:
    dims = tuple(dim for axis, dim in enumerate(a.dims) if axis not in axes)
    over_batch = any(axis in a.batch_axes for axis in axes)
    count = math.prod(16 if isinstance(a.dims[axis], str) else a.dims[axis] for axis in axes)
    size = math.prod(a.array.shape[axis] for axis in axes)
    role = a.role if a.role in ("rep", "param", "split") or kind in ("sum", "mean", "sum/size") else "other"
    if a.role in ("max", "min") and kind == a.role:
        role = kind
    if over_batch and a.role == "split":
        role = {"sum/size": "mean", "std": "other", "var": "other", "logsumexp": "other", "norm": "other"}.get(
            kind, kind
        )
        if kind in ("any", "count", "sum/local batch"):
            role = {"any": "max", "count": "sum", "sum/local batch": "sum"}[kind]
    array, dtype = a.array, a.array.dtype
    if kind in ("sum", "mean", "max", "min"):
        if kind == "sum" and b.chance(0.2):
            array = jnp.sum(array, axes, keepdims=True).reshape(b.sizes.shape(dims))
        else:
            array = getattr(jnp, kind)(array, axis=axes)
    elif kind == "sum/size":
        array = jnp.sum(array, axes) / size
    elif kind == "sum/local batch":
        array = jnp.sum(array, axes) / b.sizes.local_batch
    elif kind == "var":
        array = jnp.var(array, axes) if b.chance(0.5) else jnp.mean(array**2, axes) - jnp.mean(array, axes) ** 2
    elif kind == "std":
        array = jnp.sqrt(jnp.var(array, axes) + 0.01)
    elif kind == "logsumexp":
        array = jax.nn.logsumexp(array, axes)
    elif kind == "norm":
        array = jnp.sqrt(jnp.sum(array**2, axes) + 0.01)
    elif kind == "any":
        array = jnp.any(array > 0.4, axes).astype(dtype)
    else:
        array = jnp.sum(array > 0.4, axes)
    bound = a.bound**2 if kind == "var" else a.bound * count * 0.6 if kind in ("sum", "count") else a.bound * 2 + 3
    return Value(array, dims, bound, role)


KINDS = [
    "sum",
    "sum",
    "mean",
    "mean",
    "max",
    "min",
    "sum/size",
    "sum/local batch",
    "var",
    "std",
    "logsumexp",
    "norm",
    "any",
    "count",
]


@operation(8)
def op_reduce(b: Builder):
    a = b.pick(lambda value: len(value.dims) >= 1)
    axes = [axis for axis in range(len(a.dims)) if b.chance(0.4)] or [0]
    if a.batch_axes and b.chance(0.5):
        axes = a.batch_axes
    return _reduce(b, a, tuple(axes), b.one_of(KINDS))


ALONG = {
    "softmax": (jax.nn.softmax, 1.0),
    "log_softmax": (jax.nn.log_softmax, None),
    "cumsum": (jnp.cumsum, None),
    "sort": (jnp.sort, None),
    "cummax": (lax.cummax, None),
    "center": (lambda a, axis: a - jnp.mean(a, axis, keepdims=True), None),
    "standardize": (
        lambda a, axis: (a - a.mean(axis, keepdims=True)) / jnp.sqrt(a.var(axis, keepdims=True) + 0.1),
        None,
    ),
    "normalize": (lambda a, axis: a / (0.1 + jnp.sum(jnp.abs(a), axis, keepdims=True)), 1.0),
    "divide by sum": (lambda a, axis: jnp.exp(0.1 * a) / jnp.sum(jnp.exp(0.1 * a), axis, keepdims=True), 1.0),
    "argmax": (lambda a, axis: jax.nn.one_hot(jnp.argmax(a, axis), a.shape[axis], axis=axis, dtype=a.dtype), 1.0),
    "diff": (
        lambda a, axis: jnp.concatenate([jnp.diff(a, axis=axis), lax.slice_in_dim(a, 0, 1, axis=axis)], axis),
        None,
    ),
}


@operation(4)
def op_along(b: Builder):
    a = b.pick(lambda value: len(value.dims) >= 1)
    axis = int(b.rng.integers(len(a.dims)))
    name = b.one_of(list(ALONG))
    if name in ("divide by sum",) and a.bound > 60:
        raise NotApplicable
    apply, bound = ALONG[name]
    count = 16 if isinstance(a.dims[axis], str) else a.dims[axis]
    role = "other" if axis in a.batch_axes else _nonlinear(a)
    if name == "sort" and axis in a.batch_axes and len(a.dims) == 1:
        role = a.role
    return Value(apply(a.array, axis), a.dims, bound or a.bound * (count if name == "cumsum" else 2) + 2, role)


@operation(1)
def op_top_k(b: Builder):
    a = b.pick(lambda value: len(value.dims) >= 1 and not isinstance(value.dims[-1], str) and value.dims[-1] >= 3)
    values, indices = lax.top_k(a.array, 2)
    return Value(values + 0.1 * indices.astype(values.dtype), (*a.dims[:-1], 2), a.bound + 1, _nonlinear(a))


# Labels.


@batched(3)
def op_lookup(b: Builder):
    table = b.pick(lambda value: CLASSES in value.dims)
    axis = table.dims.index(CLASSES)
    if len(table.dims) > 2:
        raise NotApplicable
    kind = b.one_of(["take", "index", "one hot", "along"])
    role = "split" if table.role in ("rep", "param", "split") else "other"
    if table.dims == ("b", CLASSES):
        rows = jnp.arange(b.sizes.batch)
        if kind in ("take", "along"):
            array = jnp.take_along_axis(table.array, b.labels[:, None], 1)[:, 0]
        elif kind == "index":
            array = table.array[rows, b.labels]
        else:
            array = jnp.sum(table.array * jax.nn.one_hot(b.labels, CLASSES), -1)
        return Value(array, ("b",), table.bound, role)
    if table.batch_axes:
        raise NotApplicable
    rest = table.dims[:axis] + table.dims[axis + 1 :]
    moved = jnp.moveaxis(table.array, axis, 0)
    if kind == "one hot":
        array = jnp.tensordot(jax.nn.one_hot(b.labels, CLASSES, dtype=moved.dtype), moved, 1)
    else:
        array = jnp.take(moved, b.labels, axis=0, mode="clip") if kind == "take" else moved[b.labels]
    return Value(array, ("b", *rest), table.bound, role)


@batched(3)
def op_scatter(b: Builder):
    a = b.split()
    zeros = jnp.zeros((CLASSES, *a.array.shape[1:]), a.array.dtype)
    kind = b.one_of(["add", "segment", "max", "mean", "matrix", "rows"])
    dims = (CLASSES, *a.dims[1:])
    if kind == "rows":
        array = jnp.zeros((b.sizes.batch, CLASSES), a.array.dtype).at[jnp.arange(b.sizes.batch), b.labels].set(0.7)
        return Value(array, ("b", CLASSES), 1.0, "split")
    role = "sum" if a.role == "split" else "other"
    if kind == "add":
        array = zeros.at[b.labels].add(a.array)
    elif kind == "segment":
        array = jax.ops.segment_sum(a.array, b.labels, CLASSES)
    elif kind == "matrix":
        array = jnp.tensordot(jax.nn.one_hot(b.labels, CLASSES, axis=0, dtype=a.array.dtype), a.array, 1)
    elif kind == "max":
        if b.smooth:
            raise NotApplicable
        array, role = zeros.at[b.labels].max(a.array), "max" if a.role == "split" else "other"
    else:
        counts = jnp.zeros(CLASSES).at[b.labels].add(1.0).reshape(-1, *[1] * (len(a.dims) - 1))
        array, role = zeros.at[b.labels].add(a.array) / jnp.maximum(counts, 1), "other"
    return Value(array, dims, a.bound * 10, role)


@batched(1)
def op_count(b: Builder):
    kind = b.one_of(["mask", "float mask", "class", "histogram"])
    if kind == "histogram":
        return Value(jnp.bincount(b.labels, length=CLASSES), (CLASSES,), 16.0, "sum")
    counted = {"mask": b.mask, "float mask": b.mask.astype(b.values[0].array.dtype), "class": b.labels == 1}[kind]
    return Value(jnp.sum(counted), (), 16.0, "sum")


@batched(2)
def op_accuracy_or_loss(b: Builder):
    logits = b.pick(lambda value: value.dims == ("b", CLASSES)) if b.chance(0.4) else op_logits(b)
    if b.chance(0.3):
        hits = (jnp.argmax(logits.array, -1) == b.labels).astype(logits.array.dtype)
    else:
        hits = -jnp.sum(jax.nn.log_softmax(logits.array) * jax.nn.one_hot(b.labels, CLASSES), -1)
    return _reduce(
        b, Value(hits, ("b",), logits.bound + 2, _nonlinear(logits)), (0,), b.one_of(["sum", "mean", "sum/size"])
    )


@batched(2)
def op_logits(b: Builder):
    x = b.pick(lambda value: value.dims == ("b", FEATURES))
    m = b.pick(lambda value: value.dims == (FEATURES, CLASSES))
    return Value(x.array @ m.array + b.values[0].array.sum(), ("b", CLASSES), x.bound * m.bound * 3 + 5, _join(x, m))


# Collectives.

RIGHT = {"sum": "psum", "mean": "pmean", "max": "pmax", "min": "pmin"}


def _collective(b: Builder, a: Value, name: str | None = None) -> Value:
    if name is None and a.role in RIGHT and b.chance(0.75):
        name = RIGHT[a.role]
    name = name or b.one_of(
        ["psum", "pmean", "pmean", "psum/n", "psum/number", "gather mean", "gather sum"]
        + ["pmax", "pmin"] * (not b.smooth)
    )
    if b.smooth and name in ("pmax", "pmin"):
        name = "pmean"
    array, n = a.array, b.sizes.replicas
    if not a.is_float and name not in ("psum", "pmax", "pmin"):
        array = array.astype(b.values[0].array.dtype)
    if name in ("psum", "pmean", "pmax", "pmin"):
        if b.chance(0.1):
            array = getattr(lax, name)({"a": array, "b": jnp.ones(2)}, AXIS)["a"]
        else:
            array = getattr(lax, name)(array, AXIS)
    elif name == "psum/n":
        array = lax.psum(array, AXIS) / b.one_of([lax.axis_size(AXIS), lax.psum(1, AXIS), lax.psum(jnp.ones(()), AXIS)])
    elif name == "psum/number":
        array = lax.psum(array, AXIS) / b.one_of([2, 4, n])
    elif name == "gather mean":
        array = jnp.mean(lax.all_gather(array, AXIS), 0)
    elif name == "gather sum":
        array = jnp.sum(lax.all_gather(array, AXIS), 0)
    return Value(array, a.dims, a.bound * (4 if name in ("psum", "gather sum") else 1), "rep")


@collective(7)
def op_collective(b: Builder):
    return _collective(b, b.pick(lambda value: not value.is_replicated, floats=False))


@collective(1)
def op_collective_of_any(b: Builder):
    return _collective(b, b.pick(floats=False))


@collective(2)
def op_gather(b: Builder):
    a = b.pick(lambda value: 1 <= len(value.dims) <= 2 and (value.dims[0] == "b" or value.role != "split"))
    if a.dims[0] == "b" and b.chance(0.7):
        return Value(lax.all_gather(a.array, AXIS, tiled=True), ("g", *a.dims[1:]), a.bound, "rep")
    array = lax.all_gather(a.array, AXIS)
    if a.dims[0] == "b" and b.chance(0.5):
        return Value(array.reshape(-1, *a.array.shape[1:]), ("g", *a.dims[1:]), a.bound, "rep")
    return Value(array, ("n", *a.dims), a.bound, "rep")


def _gathered(b: Builder) -> Value:
    """Returns a value of all examples."""
    if b.chance(0.5):
        return b.pick(lambda value: value.dims[:1] == ("g",))
    a = b.split()
    return Value(lax.all_gather(a.array, AXIS, tiled=True), ("g", *a.dims[1:]), a.bound, "rep")


@collective(1)
def op_own_part(b: Builder):
    """The examples of this replica from an array of all examples."""
    a = _gathered(b)
    start = lax.axis_index(AXIS) * b.sizes.batch
    return Value(lax.dynamic_slice_in_dim(a.array, start, b.sizes.batch), ("b", *a.dims[1:]), a.bound, "split")


@collective(1)
def op_scatter_sum(b: Builder):
    a = _gathered(b)
    array = lax.psum_scatter(a.array, AXIS, tiled=True)
    if b.chance(0.5):
        array = array / lax.axis_size(AXIS)
    return Value(array, ("b", *a.dims[1:]), a.bound * 4, "split")


@collective(2)
def op_scatter_and_gather(b: Builder):
    a = b.pick(lambda value: not any(isinstance(dim, str) for dim in value.dims))
    flat = a.array.ravel()
    size, n = flat.shape[0], b.sizes.replicas
    padded = jnp.pad(flat, (0, -size % 4))
    part = lax.psum_scatter(padded, AXIS, tiled=True)
    if a.role == "mean" or b.chance(0.3):
        part = part / n
    array = lax.all_gather(part, AXIS, tiled=True)[:size].reshape(a.array.shape)
    return Value(array, a.dims, a.bound * 4, "rep")


@collective(1)
def op_replica_index(b: Builder):
    a = b.pick()
    index = lax.axis_index(AXIS)
    kind = b.one_of(["add", "first", "first sum", "zero", "only several"])
    if kind == "add":
        return Value(a.array + 0.1 * index, a.dims, a.bound + 1, "other")
    if kind == "first":
        return Value(jnp.where(index == 0, a.array, 0.0), a.dims, a.bound, "other")
    if kind == "first sum":
        return Value(lax.psum(jnp.where(index == 0, a.array, 0.0), AXIS), a.dims, a.bound, "rep")
    if kind == "zero":
        return Value(a.array + 0 * index, a.dims, a.bound, a.role)
    return Value(a.array * (index < lax.axis_size(AXIS)), a.dims, a.bound, a.role)


@collective(1)
def op_number_of_replicas(b: Builder):
    a = b.pick()
    size = b.one_of([lax.axis_size(AXIS), lax.psum(1, AXIS), lax.psum(jnp.ones((), a.array.dtype), AXIS)])
    return a._replace(array=a.array / size if b.chance(0.6) else a.array * size, bound=a.bound * 4)


@collective(1)
def op_permute(b: Builder):
    a, n = b.pick(), b.sizes.replicas
    array = lax.ppermute(a.array, AXIS, [(i, (i + 1) % n) for i in range(n)])
    return Value(
        array,
        a.dims,
        a.bound,
        a.role if a.role in ("sum", "mean", "max", "min") else "split" if a.role == "split" else "other",
    )


@collective(1)
def op_all_to_all(b: Builder):
    a, c = _gathered(b), b.split()
    # `jax.vmap` of an `all_to_all` of a replicated array has a wrong shape in jax 0.12, so the operand varies.
    array = lax.all_to_all(a.array * jnp.mean(c.array), AXIS, 0, 0, tiled=True)
    return Value(array, a.dims, a.bound * c.bound, "other")


@operation(3, is_collective=True, is_batched=True)
def op_global_mean(b: Builder):
    a = b.split(1)
    mask = b.mask.astype(a.array.dtype)
    weights = b.one_of([mask, jnp.abs(b.split(1).array) + 0.1, jnp.ones_like(a.array)])
    total, count = jnp.sum(a.array * weights), jnp.sum(weights)
    kind = b.one_of(
        ["right", "right", "count of one replica", "mean of quotients", "sum of counts only", "two means", "batch size"]
    )
    guard = b.one_of([lambda c: jnp.maximum(c, 1), lambda c: c + 0.5, lambda c: jnp.where(c > 0.05, c, 1.0)])
    if kind == "right":
        array = lax.psum(total, AXIS) / guard(lax.psum(count, AXIS))
    elif kind == "count of one replica":
        array = lax.psum(total, AXIS) / guard(count)
    elif kind == "mean of quotients":
        array = lax.pmean(total / guard(count), AXIS)
    elif kind == "sum of counts only":
        array = total / guard(lax.psum(count, AXIS))
    elif kind == "two means":
        array = lax.pmean(total, AXIS) / guard(lax.pmean(count, AXIS) * (lax.axis_size(AXIS) if b.chance(0.5) else 1))
    else:
        array = lax.psum(total, AXIS) / lax.psum(a.array.shape[0], AXIS)
    return Value(
        array, (), a.bound * 3, "rep" if kind not in ("sum of counts only", "count of one replica") else "other"
    )


@operation(2, is_collective=True, is_batched=True)
def op_batch_norm(b: Builder):
    a = b.pick(lambda value: value.dims[:1] == ("b",) and len(value.dims) == 2 and value.role == "split")
    kind = b.one_of(["right", "right", "moments", "local", "only mean"])
    reduce = (lambda value: value) if kind == "local" else lambda value: lax.pmean(value, AXIS)
    mean = reduce(jnp.mean(a.array, 0))
    if kind == "moments":
        var = reduce(jnp.mean(a.array**2, 0)) - mean**2
    elif kind == "only mean":
        var = jnp.mean((a.array - mean) ** 2, 0)
    else:
        var = reduce(jnp.mean((a.array - mean) ** 2, 0))
    role = "rep" if kind in ("right", "moments") else "other"
    return [
        Value((a.array - mean) / jnp.sqrt(var + 0.1), a.dims, a.bound * 3, "split" if role == "rep" else "other"),
        Value(0.9 * jnp.mean(b.values[0].array) + 0.1 * b.one_of([mean, var]), a.dims[1:], a.bound**2, role),
    ]


# Equal expressions that look different.


@operation(5)
def op_disguise(b: Builder):
    a = b.pick()
    c = b.pick(lambda value: value.dims == a.dims)
    x, y = a.array, c.array
    zero = {
        "x-x": lambda: x - x,
        "0*x": lambda: 0 * x,
        "sum-sum": lambda: (x + y) - (y + x),
        "centered": lambda: (
            jnp.sum(x - jnp.mean(x, 0, keepdims=True), 0, keepdims=True) * jnp.ones_like(x) if x.ndim else x * 0
        ),
        "min": lambda: jnp.minimum(jnp.abs(x), 0.0),
        "distributive": lambda: 0.5 * (x + y) - 0.5 * x - 0.5 * y,
        "product": lambda: x * y - y * x,
        "hinge": lambda: jax.nn.relu(-jnp.square(x) - 0.1),
        "compare": lambda: (x > x + 1).astype(x.dtype),
    }
    one = {
        "exp": lambda: jnp.exp(x - x),
        "ratio": lambda: (1 + jnp.abs(x)) / (1 + jnp.abs(x)),
        "softmax": lambda: jnp.sum(jax.nn.softmax(x, 0), 0, keepdims=True) * jnp.ones_like(x) if x.ndim else x**0,
        "power": lambda: x**0,
        "equals": lambda: (x == x).astype(x.dtype),
        "mean": lambda: jnp.mean(jnp.ones_like(x)) * jnp.ones_like(x),
        "trigonometry": lambda: jnp.sin(x) ** 2 + jnp.cos(x) ** 2,
    }
    same = {
        "where": lambda: jnp.where(y > 0.1, x, x),
        "max": lambda: jnp.maximum(x, x),
        "there and back": lambda: x + y - y,
        "negate": lambda: jnp.negative(-x),
        "transpose": lambda: x.T.T,
        "wide clip": lambda: jnp.clip(x, -1e4, 1e4),
        "concatenate": lambda: jnp.concatenate([x, y], -1)[..., : x.shape[-1]] if x.ndim else x,
        "swap": lambda: jnp.stack([y, x])[1],
        "guard": lambda: jnp.where(jnp.isfinite(x), x, 0.0),
        "parts": lambda: jax.nn.relu(x) - jax.nn.relu(-x),
        "select true": lambda: lax.select(jnp.full(x.shape, True), x, y),
    }
    positive = {
        "square": lambda: (jnp.square(0.3 * x), jnp.abs(jnp.square(0.3 * x))),
        "root": lambda: (jnp.abs(x), jnp.sqrt(jnp.square(x) + 1e-12) if b.smooth else jnp.sqrt(jnp.square(x))),
        "abs sum": lambda: (jnp.square(0.3 * x) + jnp.abs(y), jnp.abs(jnp.square(0.3 * x) + jnp.abs(y))),
        "relu": lambda: (jnp.exp(0.1 * jnp.tanh(x)), jax.nn.relu(jnp.exp(0.1 * jnp.tanh(x)))),
    }
    kind = b.one_of(["zero", "one", "same", "same", "positive"])
    bound = a.bound + c.bound + 1
    if kind == "zero":
        value = zero[b.one_of(list(zero))]()
        if b.chance(0.5):
            other = b.pick(lambda value: value.dims == a.dims)
            return Value(other.array + value, a.dims, other.bound, other.role)
        return Value(value, a.dims, 1.0, "split" if a.batch_axes else a.role if a.is_replicated else "other")
    if kind == "one":
        value = one[b.one_of(list(one))]()
        other = b.pick(lambda value: value.dims == a.dims)
        return Value(other.array * value, a.dims, other.bound, other.role)
    if kind == "same":
        return Value(same[b.one_of(list(same))](), a.dims, a.bound, a.role)
    value = positive[b.one_of(list(positive))]()[int(b.rng.integers(2))]
    return Value(value, a.dims, bound * bound, _nonlinear(a) if a.role == c.role else _join(a, c))


@batched(2)
def op_disguised_sum(b: Builder):
    a = b.split()
    kind = b.one_of(
        [
            "sorted",
            "cumsum",
            "reverse",
            "matmul",
            "scan",
            "non-negative",
            "merged",
            "two sums",
            "centered",
            "softmax",
            "abs",
        ]
    )
    x = a.array
    role = "sum" if a.role == "split" else "other"
    rest, bound = a.dims[1:], a.bound * 10
    if kind == "sorted":
        array = jnp.sum(jnp.sort(x, 0), 0)
    elif kind == "cumsum":
        array = jnp.cumsum(x, 0)[-1]
    elif kind == "reverse":
        array = x[::-1].sum(0)
    elif kind == "matmul":
        array = jnp.tensordot(jnp.ones(x.shape[0], x.dtype), x, 1)
    elif kind == "scan":
        array, _ = lax.scan(lambda total, row: (total + row, None), jnp.zeros_like(x[0]), x)
    elif kind == "non-negative":
        array = jnp.abs(jnp.sum(jnp.square(0.3 * x), 0))
    elif kind == "merged":
        array = jnp.sum(x, 0) if x.ndim == 1 else jnp.sum(x.reshape(x.shape[0], -1), 0).reshape(x.shape[1:])
    elif kind == "two sums":
        array = jnp.sum(x[:1], 0) + jnp.sum(x[1:], 0)
    elif kind == "centered":
        array, role = jnp.sum(x - jnp.mean(x, 0), 0), "rep"
    elif kind == "softmax":
        array, role = jnp.sum(jax.nn.softmax(x, 0), 0), "other"
    else:
        array = jnp.sum(jnp.abs(x), 0) + jnp.abs(jnp.sum(jnp.abs(x), 0))
    return Value(array, rest, bound, "other" if role == "rep" else role)


# Transformations.


@nested(7)
def op_grad(b: Builder):
    wrt = b.pick(lambda value: value.is_replicated and len(value.dims) <= 2 and not value.batch_axes)
    block = b.block(4, smooth=True)
    reduction = b.one_of(["mean", "mean", "sum"])
    data, scaled = b.pick(), b.chance(0.8)
    result_role = []

    def loss(parameters):
        value = block(data, wrt._replace(array=parameters), dims=None)
        if value.is_replicated or reduction == "sum":
            result_role.append(value.role if value.is_replicated else "sum")
        else:
            result_role.append("mean")
        if not value.batch_axes and value.role in ("sum", "mean"):
            result_role[-1] = value.role
        # Most blocks do not use the parameters.
        scale = 1 + 0.3 * jnp.tanh(jnp.sum(parameters)) if scaled else 1.0
        return getattr(jnp, reduction)(value.array * scale)

    kind = b.one_of(["grad", "value_and_grad", "vjp", "checkpoint", "jvp"])
    if kind == "grad":
        results = [jax.grad(loss)(wrt.array)]
    elif kind == "value_and_grad":
        value, grad = jax.value_and_grad(loss)(wrt.array)
        results = [grad, value]
    elif kind == "vjp":
        value, pull_back = jax.vjp(loss, wrt.array)
        results = [pull_back(jnp.ones_like(value))[0], value]
    elif kind == "checkpoint":
        results = [jax.grad(jax.checkpoint(loss))(wrt.array)]
    else:
        value, tangent = jax.jvp(loss, (wrt.array,), (jnp.ones_like(wrt.array),))
        results = [tangent, value]
    role = result_role[-1]
    # The gradient of a loss that is reduced inside is one value per replica.
    role = "mean" if role == "rep" else role
    return [Value(array, wrt.dims if array.shape == wrt.array.shape else (), 20.0, role) for array in results]


@nested(3)
def op_call(b: Builder):
    a = b.pick()
    block = b.block(3)
    kind = b.one_of(["jit", "checkpoint"])
    info = []

    def fn(array):
        value = block(a._replace(array=array), dims=None)
        info.append(value)
        return value.array

    array = (jax.jit if kind == "jit" else jax.checkpoint)(fn)(a.array)
    return info[-1]._replace(array=array)


@nested(2)
def op_custom_vjp(b: Builder):
    """The gradient of an identity that changes cotangents."""
    wrt = b.pick(lambda value: value.is_replicated and len(value.dims) <= 2 and not value.batch_axes)
    data = b.pick()
    block = b.block(3, smooth=True)
    kind = b.one_of(["pmean", "psum", "scale", "clip"] if b.collectives else ["scale", "clip"])
    backward = {
        "pmean": lambda g: lax.pmean(g, AXIS),
        "psum": lambda g: lax.psum(g, AXIS),
        "scale": lambda g: 0.5 * g,
        "clip": lambda g: jnp.clip(g, -0.5, 0.5),
    }[kind]
    identity = jax.custom_vjp(lambda a: a)
    identity.defvjp(lambda a: (a, None), lambda _, g: (backward(g),))
    reduction = b.one_of(["mean", "sum"])

    def loss(array):
        parameters = identity(array)
        value = block(data, wrt._replace(array=parameters), dims=None)
        return getattr(jnp, reduction)(value.array * jnp.sum(jnp.sin(parameters)))

    role = {"pmean": "rep", "psum": "rep", "scale": reduction, "clip": "other"}[kind]
    return Value(jax.grad(loss)(wrt.array), wrt.dims, 20.0, role)


@nested(2)
def op_vmap(b: Builder):
    a = b.pick(lambda value: 1 <= len(value.dims) <= 2)
    axis = int(b.rng.integers(len(a.dims)))
    other = b.pick(lambda value: value.dims[:1] == (a.dims[axis],))
    row_dims = a.dims[:axis] + a.dims[axis + 1 :]
    block = b.block(3, batched=False, closure=1, collectives=b.chance(0.2))
    info = []

    def fn(row, other_row):
        value = block(
            other._replace(array=other_row, dims=other.dims[1:]), a._replace(array=row, dims=row_dims), dims=None
        )
        info.append(value)
        return value.array

    array = jax.vmap(fn, in_axes=(axis, 0))(a.array, other.array)
    role = _join(a, other)
    return Value(
        array,
        (a.dims[axis], *info[-1].dims),
        info[-1].bound,
        role if info[-1].role in ("split", "rep", "param") else "other",
    )


@batched(1)
def op_per_example_grads(b: Builder):
    x = b.split(2)
    w = b.pick(lambda value: value.dims == (x.dims[1],))
    loss = lambda w, row, y: jnp.tanh(jnp.dot(w, row) - y) ** 2
    grads = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(w.array, x.array, x.array[:, 0])
    if b.chance(0.3):
        grads = grads / jnp.maximum(1.0, jnp.sqrt(jnp.sum(grads**2, -1, keepdims=True) + 1e-3) / 0.3)
    return Value(grads, x.dims, x.bound * 4, _join(x, w))


@nested(2)
def op_cond(b: Builder):
    a = b.pick()
    predicate = b.pick(floats=False)
    is_replicated = predicate.is_replicated
    blocks = [b.block(2, collectives=is_replicated) for _ in range(2)]
    branches = [lambda array, block=block: block(a._replace(array=array), dims=a.dims).array for block in blocks]
    condition = predicate.array if not predicate.dims else jnp.mean(predicate.array)
    if b.chance(0.3):
        array = lax.switch(jnp.clip((condition * 3).astype(jnp.int32), 0, 1), branches, a.array)
    else:
        array = lax.cond(condition > 0.11, *branches, a.array)
    return Value(array, a.dims, max(a.bound, 6.0), _nonlinear(a) if is_replicated else "other")


def _carry(b: Builder) -> Value:
    carry = b.pick(lambda value: len(value.dims) <= 2)
    return _fit(b, carry, carry, carry.dims)


@nested(3)
def op_scan(b: Builder):
    """Over features, micro-batches or examples."""
    xs = b.pick(lambda value: 1 <= len(value.dims) <= 3)
    if xs.dims[0] == "b" and b.chance(0.6) and len(xs.dims) <= 2:
        dims = (b.sizes.micro_batches, "b/m", *xs.dims[1:])
        xs = xs._replace(array=xs.array.reshape(b.sizes.shape(dims)), dims=dims)
    over_examples = xs.dims[0] == "b"
    carry = _carry(b)
    block = b.block(2, closure=2, batched=False, collectives=b.chance(0.3))
    is_sum = b.chance(0.5)
    zeros = b.chance(0.5)
    start = jnp.zeros_like(carry.array) if zeros else carry.array
    row_dims = xs.dims[1:]

    def body(state, row):
        row_value = xs._replace(array=row, dims=row_dims)
        if is_sum:
            value = block(carry, row_value, dims=carry.dims)
            return state + value.array, jnp.sum(row)
        value = block(carry._replace(array=state), row_value, dims=carry.dims)
        return value.array, jnp.mean(row)

    total, ys = lax.scan(body, start, xs.array)
    role = "sum" if is_sum and xs.role == "split" and carry.is_replicated else "other"
    results = [Value(total, carry.dims, 80.0, role)]
    if b.chance(0.5):
        results.append(
            Value(ys, (xs.dims[0],), xs.bound * 16, "split" if over_examples and xs.role == "split" else "other")
        )
    return results


@nested(1)
def op_fori(b: Builder):
    carry = _carry(b)
    block = b.block(2, closure=2, collectives=b.chance(0.3))
    body = lambda i, state: block(carry._replace(array=state), dims=carry.dims).array
    array = lax.fori_loop(0, 3, body, carry.array)
    return Value(array, carry.dims, 6.0, "other")


@operation(1, is_nested=True, is_smooth=False, is_batched=True)
def op_fori_examples(b: Builder):
    a = b.split()
    block = b.block(1, closure=1, batched=False, collectives=False)
    start = a._replace(array=jnp.zeros_like(a.array[0]), dims=a.dims[1:], role="other")

    def body(i, total):
        row = a._replace(array=lax.dynamic_index_in_dim(a.array, i, keepdims=False), dims=a.dims[1:])
        return total + block(row, dims=row.dims).array

    return Value(
        lax.fori_loop(0, a.array.shape[0], body, start.array), a.dims[1:], 80.0, "sum" if a.role == "split" else "other"
    )


@operation(1, is_nested=True, is_smooth=False)
def op_while(b: Builder):
    carry = _carry(b)
    limit = b.pick()
    block = b.block(2, closure=1, collectives=False)
    limit_array = jnp.mean(limit.array)

    def more(state):
        i, array = state
        return (i < 4) & (jnp.mean(array) + 0.5 * i < limit_array + 1.03)

    body = lambda state: (state[0] + 1, block(carry._replace(array=state[1]), dims=carry.dims).array)
    count, array = lax.while_loop(more, body, (0, carry.array))
    return [Value(array, carry.dims, 6.0, "other"), Value(count, (), 4.0, "other")]


@operation(2)
def op_count_guard(b: Builder):
    a = op_count(b) if b.batched and b.chance(0.5) else b.pick(lambda value: not value.is_float, floats=False)
    if b.collectives and not a.is_replicated and b.chance(0.6):
        a = _collective(b, a, b.one_of(["psum", "psum", "pmax"]) if not b.smooth else "psum")
    kind = b.one_of(["max", "float", "inverse"])
    if kind == "max":
        return a._replace(array=jnp.maximum(a.array, 1), role=_nonlinear(a))
    if kind == "float":
        return a._replace(array=a.array.astype(b.values[0].array.dtype))
    return a._replace(array=1.0 / jnp.maximum(a.array, 1), bound=1.0, role=_nonlinear(a))


_NAMES = [name for name, one in OPERATIONS.items() for _ in range(one.weight)]
_SMOOTH_NAMES = [name for name in _NAMES if OPERATIONS[name].is_smooth]


# The relation of both programs, by running them.


def on_replicas(trace: Any, replicas: int) -> Callable[..., list[jax.Array]]:
    """Returns the function of a trace on all replicas at once: of batches `[replica, example, ...]` to results `[replica, ...]`."""
    jaxpr, _ = partial_eval.dce_jaxpr(trace.jaxpr, [True] * len(trace.jaxpr.outvars), instantiate=True)
    fn = jaxpr_as_fun(trace.replace(jaxpr=jaxpr))
    return jax.vmap(fn, in_axes=(None,) * REPLICATED_INPUTS + (0,) * BATCHES, axis_name=AXIS, axis_size=replicas)


def arguments(inputs: Sequence[np.ndarray], replicas: int, sample: int) -> list[np.ndarray]:
    """Returns the arguments of `on_replicas` for one sample of `Program.inputs`."""
    return [
        value[sample] if i < REPLICATED_INPUTS else value[sample].reshape(replicas, -1, *value.shape[2:])
        for i, value in enumerate(inputs)
    ]


class Comparison:
    """Compares the results of a program on N replicas with those of one replica with the global batch, in float64.

    A result is read as "replicated", as "split" along its first dim, or as the "sum" or the "mean" of the values of the replicas.
    """

    def __init__(self, program: Program, local: Any, single: Any):
        """`local` and `single` are the traces of `program` for its number of replicas, and for one."""
        self._program = program
        self._programs = [(n, self._batched(trace, n)) for n, trace in ((program.num_replicas, local), (1, single))]
        self._results: dict[Any, Any] = {}

    def error(
        self, output: int, kind: str = "replicated", samples: int = 3, seed: int = 0, regrouped: bool = False
    ) -> float:
        """Returns the largest difference to the one replica relative to the largest value, for a few random inputs.

        `inf` if the shapes differ, `nan` if a value is not finite.

        Args:
            output: The number of the output.
            kind: How the values of the replicas are read.
            samples: The number of inputs.
            seed: The seed of the inputs.
            regrouped: Whether the examples of the global batch are ordered so that its micro-batches are those of the replicas.
        """
        key = samples, seed, regrouped
        if key not in self._results:
            self._results[key] = self.results(self._program.inputs(samples, seed), regrouped)
        many, one = ([sample[output] for sample in results] for results in self._results[key])
        return _difference([_READ[kind](values) for values in many], one)

    def _error_at(self, scale: float, output: int, kind: str) -> float:
        """Returns the `error` for inputs of another scale, some of which pass a threshold."""
        scaled = [x * scale if x.dtype.kind == "f" else x for x in self._program.inputs(20, 2)]
        inputs = [np.abs(x) if x.dtype.kind == "f" and scale in (0.1, 100.0) else x for x in scaled]
        many, one = ([sample[output] for sample in results] for results in self.results(inputs))
        return _difference([_READ[kind](values) for values in many], one)

    def truth(self, output: int, kind: str = "replicated") -> str:
        """Returns "equal", "differs", "shape" or "undefined"."""
        error = self.error(output, kind)
        if math.isnan(error):
            return "undefined"
        return "shape" if math.isinf(error) else "differs" if error > TOLERANCE else "equal"

    def problem(self, output: int, verdict: str, kind: str = "replicated") -> str | None:
        """Returns why a verdict on an output is wrong, or `None`."""
        truth = self.truth(output, kind)
        if verdict == "equivalent" and truth in ("differs", "shape"):
            # An analysis may not know the order of the examples.
            is_equal = self.error(output, kind, regrouped=True) <= TOLERANCE
            if not is_equal and not self._is_ill_conditioned(output):
                return f"differs by {self.error(output, kind):.2g}"
        if verdict == "not equivalent" and truth == "equal" and self.error(output, kind, 60, 1) <= TOLERANCE:
            if any(self._error_at(scale, output, kind) > TOLERANCE for scale in (0.01, 0.1, 10.0, 100.0)):
                return None
            many, _ = self._results[60, 1, False]
            is_zero = not any(sample[output].any() for sample in many)
            return f"is equal for all of 63 inputs{' and is always 0' if is_zero else ''}"
        return None

    def _batched(self, trace: Any, replicas: int) -> Any:
        return jax.make_jaxpr(on_replicas(trace, replicas))(*arguments(self._program.inputs(1, 0), replicas, 0))

    def results(self, inputs: Sequence[np.ndarray], regrouped: bool = False) -> list[list[list[np.ndarray]]]:
        """Returns the outputs `[replica, ...]` for each sample, for each program."""
        orders = [inputs, self._regrouped(inputs) if regrouped else inputs]
        return [
            [evaluate(jaxpr, arguments(order, replicas, sample)) for sample in range(len(inputs[0]))]
            for order, (replicas, jaxpr) in zip(orders, self._programs, strict=True)
        ]

    def _regrouped(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        program = self._program
        examples = np.arange(program.num_replicas * program.batch)
        order = examples.reshape(program.num_replicas, program.sizes(1).micro_batches, -1).swapaxes(0, 1).ravel()
        return [value if i < REPLICATED_INPUTS else value[:, order] for i, value in enumerate(inputs)]

    def _is_ill_conditioned(self, output: int) -> bool:
        """Whether rounding decides the result, such as in `x - x > 0`: changes in the last digits of the inputs change it."""
        inputs = self._program.inputs(3, 0)
        rng = np.random.default_rng(0)
        moved = [a * (1 + 1e-12 * rng.uniform(-1, 1, a.shape)) if a.dtype.kind == "f" else a for a in inputs]
        pairs = zip(self.results(inputs), self.results(moved), strict=True)
        return any(
            _difference([sample[output] for sample in results], [sample[output] for sample in moved_results])
            > TOLERANCE
            for results, moved_results in pairs
        )


_READ: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "replicated": lambda values: values,
    "split": lambda values: values.reshape(1, -1, *values.shape[2:]) if values.ndim > 1 else values,
    "sum": lambda values: values.sum(0, keepdims=True, dtype=np.float64),
    "mean": lambda values: values.mean(0, keepdims=True, dtype=np.float64),
}


def part_of(trace: Any, output: int) -> Any:
    """Returns the jaxpr of one output of a trace."""
    return partial_eval.dce_jaxpr(
        trace.jaxpr, [i == output for i in range(len(trace.jaxpr.outvars))], instantiate=True
    )[0]


TOLERANCE = 1e-9


def _difference(many: Sequence[np.ndarray], one: Sequence[np.ndarray]) -> float:
    """Returns the largest difference relative to the largest value, for results `[replica, ...]` of each sample."""
    if many[0].shape[1:] != one[0].shape[1:]:
        return math.inf
    many, one = np.stack(many).astype(np.float64), np.stack(one).astype(np.float64)
    if not (np.isfinite(many).all() and np.isfinite(one).all()):
        return math.nan
    scale = max(np.abs(many).max(initial=0), np.abs(one).max(initial=0), 1e-3)
    return float(np.abs(many - one).max(initial=0) / scale)

"""The one module that knows which JAX is installed, and how its programs are written down.

JAX's public API is the same on every version that jdist supports. The parameters of its equations are not: the proof
(`jdist._src.jaxpr.replication`) reads equations through the functions below, and nothing else in jdist looks inside one.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

Jaxpr = core.Jaxpr
Equation = core.JaxprEqn
Literal = core.Literal

# Over several CPU devices this JAX ends the process, by a segmentation fault, where it should refuse memory that was given
# away before, or that is given away twice in one call.
CRASHES_ON_DONATED_MEMORY = jax.__version_info__ < (0, 11)


def is_tracing() -> bool:
    """Whether JAX traces a function here, so that nothing is computed yet."""
    from jax._src import core as private  # no public name for it

    return not private.trace_state_clean()


def is_deleted_memory_error(error: BaseException) -> bool:
    """Whether JAX raised `error` because an argument was deleted, or donated before, or donated twice in one call."""
    first_line = str(error).partition("\n")[0]  # the text of a callback's own error follows on further lines
    return any(phrase in first_line for phrase in _DELETED) and "allback" not in first_line


_DELETED = ("has been deleted", "deleted or donated", "donate the same buffer", "previously donated in the same call")


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of an operand or a result of an equation."""
    return atom.aval.shape


def trace_state() -> Any:
    """What is equal in two places if, and only if, JAX traces them in one go."""
    return core.get_opaque_trace_state(convention="flax")


def open_jaxpr(program: Any) -> Jaxpr:
    """The jaxpr of a program that may or may not be closed over constants."""
    return getattr(program, "jaxpr", program)


def shard_map_body(program: Any) -> Any:
    """Returns the body of a closed jaxpr that is one `shard_map`, closed over the values that the body captures."""
    (equation,) = (equation for equation in program.eqns if equation.primitive.name == "shard_map")
    body = open_jaxpr(equation.params["jaxpr"])
    num_captured = len(body.invars) - len(program.jaxpr.invars)
    values = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    constants = [values[var] for var in equation.invars[:num_captured]]
    captured, inputs = body.invars[:num_captured], body.invars[num_captured:]
    debug_info = body.debug_info.with_unknown_names()
    return core.ClosedJaxpr(body.replace(constvars=captured, invars=inputs, debug_info=debug_info), constants)


def sub_jaxpr(program: Jaxpr, equations: Sequence[Equation], inputs: Sequence[Any], outputs: Sequence[Any]) -> Jaxpr:
    """Some equations of `program` as one from the variables `inputs` to the variables `outputs`."""
    return program.replace(
        constvars=[],
        invars=list(inputs),
        outvars=list(outputs),
        eqns=list(equations),
        debug_info=program.debug_info.with_unknown_names(),
    )


def close_jaxpr(program: Jaxpr) -> Any:
    """A program without constants, as a closed one."""
    return core.ClosedJaxpr(program, ())


def consts_as_inputs(program: Any) -> Jaxpr:
    """The jaxpr of a closed program with its constants as the first inputs."""
    jaxpr = program.jaxpr
    return sub_jaxpr(jaxpr, jaxpr.eqns, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars)


def lower_hi_primitives(program: Any, axis_sizes: Iterable[tuple[str, int]] = ()) -> Any:
    """A closed program, in which the axes have these sizes, without primitives that are Python code until they are lowered.

    jax 0.12 traces `custom_root`, `jnp.nonzero` and others to such primitives, whose equations do not have the program that
    they stand for. All derivatives were taken before, so the program that JAX lowers them to has the same results.
    """
    if not getattr(open_jaxpr(program), "is_high", False):
        return program
    from jax._src import core as private  # no public name for it
    from jax._src.interpreters import partial_eval

    # Constants may be values of a trace around this one, which JAX's cache of lowered programs must not hold: they are inputs.
    num_consts = len(program.consts)
    with private.extend_axis_env_nd(list(axis_sizes)):
        low = partial_eval.lower_jaxpr2(close_jaxpr(consts_as_inputs(program)))
    jaxpr = low.jaxpr
    constants, inputs = jaxpr.invars[:num_consts], jaxpr.invars[num_consts:]
    body = sub_jaxpr(jaxpr, jaxpr.eqns, inputs, jaxpr.outvars).replace(constvars=[*jaxpr.constvars, *constants])
    return core.ClosedJaxpr(body, [*low.consts, *program.consts])


def compute_on_host(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` of arrays in the memory of the host, computed by its processors; the results stay there."""
    from jax.experimental import compute_on

    # jax 0.10 has the new form under a name of its own.
    on: Any = getattr(compute_on, "compute_on2", compute_on.compute_on)
    return on(compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)(fn)


def evaluate_one(program: Jaxpr, equation: Equation) -> Callable[..., list[Any]]:
    """An equation of `program` as a function of the values of its operands."""
    # Literals are operands too, so that it does not matter what an operand is.
    names: list[Any] = [core.Var(atom.aval) if isinstance(atom, Literal) else atom for atom in equation.invars]
    one = sub_jaxpr(program, [equation.replace(invars=names)], list(dict.fromkeys(names)), equation.outvars)

    def run(*values: Any) -> list[Any]:
        given = dict(zip(names, values, strict=True))
        return core.jaxpr_as_fun(core.ClosedJaxpr(one, ()))(*given.values())

    return run


def with_variables(equation: Equation, values: dict[Any, Any]) -> Equation:
    """`equation` with variables for the numbers in it, whose values are added to `values`."""
    operands = [core.Var(atom.aval) if isinstance(atom, Literal) else atom for atom in equation.invars]
    values.update(
        (new, old.val) for new, old in zip(operands, equation.invars, strict=True) if isinstance(old, Literal)
    )
    return equation.replace(invars=operands)  # pyright: ignore[reportArgumentType]


def bind_with_program(equation: Equation, program: Any, operands: Sequence[Any]) -> list[Any]:
    """`equation` with another program, a closed one, in the place of its own."""
    params = {**equation.params, "jaxpr": consts_as_inputs(program)}
    return equation.primitive.bind(*program.consts, *operands, **params)


def follow(
    program: Jaxpr,
    consts: Sequence[Any],
    arguments: Sequence[Any],
    rule: Callable[[Equation, list[Any]], Sequence[Any] | None],
) -> list[Any]:
    """The results of a program, equation by equation: what `rule` makes of it and its operands, or, for None, what it says."""
    known: dict[Any, Any] = dict(zip([*program.constvars, *program.invars], [*consts, *arguments], strict=True))
    read = lambda atom: atom.val if isinstance(atom, Literal) else known[atom]
    for equation in program.eqns:
        operands = [read(atom) for atom in equation.invars]
        results = rule(equation, operands)
        if results is None:
            results = evaluate_one(program, equation)(*operands)
        known.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in program.outvars]


def jaxpr_function(program: Any) -> Callable[..., list[Any]]:
    """A closed program as a function of its inputs, leaf by leaf."""
    return core.jaxpr_as_fun(program)


class Contents(NamedTuple):
    """What the parameters of an equation say, under whatever key, that may matter beyond its operands.

    Attributes:
        names: The strings; the axes of a collective are among them.
        programs: The programs that it holds, in order.
        opaque: Whether it stands for Python code that only runs when it is lowered.
    """

    names: frozenset[str]
    programs: tuple[Jaxpr, ...]
    opaque: bool


def contents(equation: Equation) -> Contents:
    """What the parameters of `equation` hold."""
    params = equation.params
    higher_order = params.get("_prim")  # jax 0.12: a primitive that keeps its parameters to itself
    found = _collect(higher_order.params.values() if higher_order else params.values(), [])
    if not found and not higher_order:
        return _NOTHING
    programs = tuple(open_jaxpr(value) for value in found if type(value) is not str)
    names = frozenset(value for value in found if type(value) is str)
    return Contents(names, programs, opaque=bool(higher_order) and not programs)


def closed_programs(equation: Equation) -> list[Any]:
    """The closed jaxprs among the parameters of `equation`, with their constants."""
    return [value for value in _collect(equation.params.values(), []) if isinstance(value, core.ClosedJaxpr)]


def uses_axes(equation: Equation, axes: frozenset[str]) -> bool:
    """Whether `equation`, or a program in it, names one of these axes, or may do so out of sight."""
    held = contents(equation)
    inner = (one for program in held.programs for one in program.eqns)
    return bool(axes & held.names) or held.opaque or any(uses_axes(one, axes) for one in inner)


def _collect(values: Iterable[Any], found: list[Any]) -> list[Any]:
    for value in values:
        if type(value) in _PLAIN:
            continue
        if isinstance(value, (tuple, list, frozenset)):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)
        elif isinstance(value, (str, core.Jaxpr, core.ClosedJaxpr)):
            found.append(value)
    return found


_NOTHING = Contents(frozenset(), (), False)
_PLAIN = frozenset((int, bool, float, type(None)))  # most parameters, and no more to see in them


def scan_counts(equation: Equation) -> tuple[int, int]:
    """How many operands of a `scan` are constants, and how many are its carry."""
    if "num_carry" in equation.params:  # jax < 0.12
        return equation.params["num_consts"], equation.params["num_carry"]
    consts, carry, _ = equation.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def may_vary_between_replicas(effect: Any) -> bool:
    """Whether an equation with this effect may give each replica another value.

    Axis names are read from an equation's parameters, because not every collective has the effect, and printing gives
    no value. What is left (callbacks with side effects, mutable references, infeeds) may.
    """
    return type(effect).__name__ not in ("DebugEffect", "NamedAxisEffect")


def num_signatures(compiled: Any) -> int:
    """For how many kinds of arguments (arrays on devices or host values, dtypes, shapes) a `jax.jit` has been called.

    0 where JAX does not count: the private counter is gone, or every call goes through Python.
    """
    count = getattr(compiled, "_cache_size", None)
    return count() if count else 0


def key_value_store() -> Any:
    """Keys and values that all processes which joined through `jax.distributed.initialize` can read and write.

    It has `key_value_set(key, text)`, `blocking_key_value_get(key, milliseconds)`, which raises if there is no such key after
    that time, and `key_value_delete(key)`. No device takes part, so any thread may use it.

    Raises:
        RuntimeError: This process has not joined any others.
    """
    from jax._src import distributed  # no public name for it

    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            "The processes do not know each other: call `jax.distributed.initialize` at the start of each."
        )
    return client


def flags_are_read(variable: str) -> bool:
    """Whether it is too late for flags in this environment variable: who reads them has read them."""
    from jax._src import xla_bridge  # no public name for it
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    # Compiling for a TPU that is not there loads libtpu, and starts no backend.
    loaded = variable == "LIBTPU_INIT_ARGS" and xla_client.pjrt_plugin_loaded("tpu")
    return loaded or xla_bridge.backends_are_initialized()

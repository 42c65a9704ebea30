"""Everything that depends on the version of JAX: its private functions, and the structure of its equations.

JAX's public API is the same on every version that jdist supports; the parameters of its equations are not. The package
`jaxpr` reads equations through the functions below, and no other package looks inside one.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.interpreters import mlir

from jdist._src.core.partition_specs import axes_of

Jaxpr = core.Jaxpr
Equation = core.JaxprEqn
Literal = core.Literal
_ClosedJaxpr: Any = core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]  # the same as `Jaxpr` since jax 0.12

# On several CPU devices this version of JAX ends the process with a segmentation fault where it should refuse memory that was
# donated before, or that is donated twice in one call.
CRASHES_ON_DONATED_MEMORY = jax.__version_info__ < (0, 11)
# On several CPU devices this version of JAX ends the process if many calls with collectives are dispatched without waiting, as
# Keras does.
KERAS_ABORTS_ON_CPU = jax.__version_info__ < (0, 11)


# The state of JAX.


def has_backend() -> bool:
    """Whether JAX has started: it has created its devices, and their number is fixed."""
    from jax._src import xla_bridge  # no public name for it

    return xla_bridge.backends_are_initialized()


def on_backend_start(callback: Callable[[], None]) -> None:
    """Calls `callback()` before JAX starts a backend, from now on. JAX records no line itself."""
    from jax._src import xla_bridge  # no public hook

    start_backend = getattr(xla_bridge, "_init_backend", None)
    if start_backend is None:
        return

    @functools.wraps(start_backend)
    def start_with_callback(platform: str) -> Any:
        callback()
        return start_backend(platform)

    xla_bridge._init_backend = start_with_callback


@contextlib.contextmanager
def on_host_read(callback: Callable[[jax.Array], None], includes_shared: bool = False) -> Iterator[None]:
    """Calls `callback(array)` when this thread reads the values of an array on the host, while the block runs.

    JAX's transfer guard reports such reads for accelerators only. `jax.device_get` is an explicit transfer, without a callback.

    Args:
        callback: Called with the array.
        includes_shared: Whether to call it also where numpy shares the memory of an array on a single CPU device. This is not
            a transfer, but it waits for the values.
    """
    from jax._src.array import ArrayImpl  # no public hook

    arrays: Any = ArrayImpl
    thread = threading.get_ident()

    def note(array: jax.Array) -> None:
        if threading.get_ident() == thread and not _is_called_by(jax.device_get):
            callback(array)

    def replace(owner: Any, name: str, value: Any) -> None:
        replaced.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    original = arrays._value

    def read(array: jax.Array) -> Any:
        note(array)
        return original.fget(array)

    with contextlib.ExitStack() as replaced:
        replace(arrays, "_value", property(read))
        if includes_shared and sys.version_info >= (3, 12):
            share = arrays.__buffer__

            def share_noted(array: jax.Array, flags: int) -> memoryview:
                buffer = share(array, flags)  # an error for other arrays: numpy reads `_value` then
                note(array)
                return buffer

            replace(arrays, "__buffer__", share_noted)
        elif includes_shared:
            for name in ("asarray", "array"):
                replace(np, name, _with_note(getattr(np, name), ArrayImpl, note))
        yield


def _with_note(convert: Callable[..., Any], kind: type, note: Callable[[Any], None]) -> Callable[..., Any]:
    def convert_noted(value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, kind):
            note(value)
        return convert(value, *args, **kwargs)

    return convert_noted


def _is_called_by(fn: Callable[..., Any]) -> bool:
    """Whether a Python function is on the call stack."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not fn.__code__:
        frame = frame.f_back
    return frame is not None


def add_to_memory_space_errors(advice: str) -> None:
    """Adds a sentence to JAX's errors about arrays in different memories, which functions of JAX raise for the user."""
    from jax._src.lax import utils  # no public hook

    rule = getattr(utils, "_default_memory_space_rule", None)
    if rule is None or hasattr(rule, "__wrapped__"):
        return

    @functools.wraps(rule)
    def rule_with_advice(*args: Any, **kwargs: Any) -> Any:
        try:
            return rule(*args, **kwargs)
        except ValueError as error:
            raise ValueError(f"{error}. {advice}") from None

    utils._default_memory_space_rule = rule_with_advice  # pyright: ignore[reportAttributeAccessIssue]


def is_tracing() -> bool:
    """Whether JAX is tracing a function here, so that values are not computed yet."""
    from jax._src import core as private  # no public name for it

    return not private.trace_state_clean()


def end_interrupted_trace() -> None:
    """Ends a trace that JAX has left open because Ctrl-C interrupted it. All later calls would be a part of that trace.

    It has no effect in a function that JAX traces or calls: JAX ends the traces around that function itself.
    """
    from jax._src import core as private  # no public name for it

    frame: Any = sys._getframe()
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith("jax."):
        frame = frame.f_back
    if frame is None:
        private.reset_trace_state()


def refuse_to_compile(tree: Any, message: str) -> Any:
    """Returns `tree`. A trace that contains it is valid, and compiling the trace raises ValueError."""
    return jax.tree.map(lambda leaf: _refusal().bind(leaf, message=message), tree)


@functools.cache
def _refusal() -> core.Primitive:
    def lower(context: Any, leaf: Any, *, message: str) -> Any:
        raise ValueError(message)

    primitive = core.Primitive("refuse_to_compile")
    primitive.def_abstract_eval(lambda leaf, *, message: leaf)
    mlir.register_lowering(primitive, lower)
    return primitive


def trace_state() -> Any:
    """Returns a value that is equal in two places if and only if they are in one trace."""
    return core.get_opaque_trace_state(convention="flax")


def is_deleted_memory_error(error: BaseException) -> bool:
    """Whether JAX raised `error` because an argument was deleted, or donated before, or donated twice in one call."""
    first_line = str(error).partition("\n")[0]  # the text of a callback's own error follows on further lines
    return any(phrase in first_line for phrase in _DELETED) and "allback" not in first_line


_DELETED = ("has been deleted", "deleted or donated", "donate the same buffer", "previously donated in the same call")


def is_shared_memory_error(error: BaseException) -> bool:
    """Whether JAX refused to donate an argument because a numpy array, or a tensor from dlpack, uses its memory.

    A GPU refuses to donate such memory, on the device and on its host. A CPU device copies the argument instead.
    """
    return "Donation requested for buffer with external reference" in str(error)


def num_signatures(compiled: Any) -> int:
    """Returns the number of signatures (devices or host, dtypes, shapes) that a `jax.jit` was called with.

    It is 0 if JAX does not count them: the private counter does not exist, or every call goes through Python. Do not store
    the counter: in jax 0.10 the garbage collector does not see its reference to `compiled`, and never frees a cycle with it.
    """
    return compiled._cache_size() if hasattr(compiled, "_cache_size") else 0


def key_value_store() -> Any:
    """Returns the key-value store of the processes that have called `jax.distributed.initialize`.

    It has `key_value_set(key, text)`, `key_value_set_bytes(key, bytes)`, `blocking_key_value_get_bytes(key, milliseconds)`,
    which raises if the key is not set within that time, `key_value_increment(key, number)`, `key_value_dir_get(prefix)` and
    `key_value_dir_get_bytes(prefix)`, and `key_value_delete(key)`, which also deletes the keys below it. It does not use a
    device, so any thread may call it.

    Raises:
        RuntimeError: This process has not joined other processes.
    """
    from jax._src import distributed  # no public name for it

    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            "This process has not joined other processes: call `jax.distributed.initialize` at the start of each process."
        )
    return client


def are_recoverable() -> bool:
    """Whether the processes continue if one of them is lost (`jax_enable_recoverability`)."""
    return bool(getattr(jax.config, "jax_enable_recoverability", False))


def live_processes(store: Any, processes: Sequence[int]) -> set[int]:
    """Returns the processes that JAX has not lost. They include this one. Waits until all of them have called it too."""
    return set(store.get_live_nodes(list(processes)))


def on_preemption_check(callback: Callable[[], None]) -> None:
    """Calls `callback()` before each check of JAX's preemption service (`multihost_utils.reached_preemption_sync_point`).

    The service must run: this process has joined others.
    """
    from jax._src import distributed  # no public hook

    class Manager:
        def __init__(self, manager: Any):
            self._manager = manager

        def __getattr__(self, name: str) -> Any:
            if name == "reached_sync_point":
                callback()
            return getattr(self._manager, name)

    state = distributed.global_state
    if state.preemption_sync_manager is not None:
        state.preemption_sync_manager = Manager(state.preemption_sync_manager)


def use_loopback_for_cpu_collectives() -> None:
    """Makes the CPU collectives between the processes of this machine use the loopback interface.

    JAX lets gloo resolve the name of the host. Some hosts cannot resolve their name, and the address may be on a public
    interface. Call it before the backend starts.
    """
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]  # no public option for it

    _jax.make_gloo_tcp_collectives = functools.partial(_jax.make_gloo_tcp_collectives, hostname="127.0.0.1")


def write_compilation_cache(folder: str) -> None:
    """Lets this process write its programs to JAX's persistent compilation cache in `folder`, where only it writes.

    JAX writes on process 0 only, since processes often share a cache. On CPU they read other entries than process 0, so none
    of the others would find an entry. Nothing changes if JAX uses another folder.
    """
    from jax._src import compilation_cache, compiler, distributed  # no public option for it

    config: Any = jax.config
    write_on_process_0 = getattr(compiler, "_cache_write", None)
    if write_on_process_0 is None:
        return

    def write(key: str, seconds: float, name: str, backend: Any, executable: Any, *callbacks: Any) -> None:
        is_own = distributed.global_state.process_id != 0 and config.jax_compilation_cache_dir == folder
        if not is_own or any(callbacks) or seconds < config.jax_persistent_cache_min_compile_time_secs:
            write_on_process_0(key, seconds, name, backend, executable, *callbacks)
            return
        with contextlib.suppress(Exception):  # the next start compiles again
            compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))

    compiler._cache_write = write


@contextlib.contextmanager
def lines_in_cache_key() -> Iterator[None]:
    """Lets the compilation cache return programs of the same source lines only; others have the lines of an older source."""
    before = jax.config.jax_compilation_cache_include_metadata_in_key  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_include_metadata_in_key", before)


def flags_are_read(variable: str) -> bool:
    """Whether the flags in an environment variable have been read, so that setting it has no effect any more."""
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    # Compiling for a TPU topology loads libtpu without starting a backend.
    loaded = variable == "LIBTPU_INIT_ARGS" and xla_client.pjrt_plugin_loaded("tpu")
    return loaded or has_backend()


def compute_on_host(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` of arrays in host memory, computed by the host's processors, with results in host memory."""
    from jax.experimental import compute_on

    # jax 0.10 has the new form under another name.
    on: Any = getattr(compute_on, "compute_on2", compute_on.compute_on)
    return on(compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)(fn)


# Jaxprs.


def open_jaxpr(program: Any) -> Jaxpr:
    """Returns the jaxpr of a closed jaxpr; an open one is returned as it is."""
    return getattr(program, "jaxpr", program)


def close_jaxpr(jaxpr: Jaxpr) -> Any:
    """Returns a jaxpr without constants as a closed jaxpr."""
    return _ClosedJaxpr(jaxpr, ())


def sub_jaxpr(jaxpr: Jaxpr, equations: Sequence[Equation], inputs: Sequence[Any], outputs: Sequence[Any]) -> Jaxpr:
    """Returns some equations of `jaxpr` as a jaxpr from the variables `inputs` to the variables `outputs`."""
    return jaxpr.replace(
        constvars=[],
        invars=list(inputs),
        outvars=list(outputs),
        eqns=list(equations),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def consts_as_inputs(program: Any) -> Jaxpr:
    """Returns the jaxpr of a closed jaxpr, with its constants as the first inputs."""
    jaxpr = program.jaxpr
    return sub_jaxpr(jaxpr, jaxpr.eqns, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars)


def with_current_lines(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn`, whose equations have the lines of the current call stack, also inside a `jax.jit`, which removes them."""
    from jax._src import source_info_util  # no public name for it

    stack = source_info_util.current().traceback

    def traced(*args: Any) -> Any:
        with source_info_util.user_context(stack):
            return fn(*args)

    return traced


def jaxpr_function(program: Any) -> Callable[..., list[Any]]:
    """Returns a closed jaxpr as a function of its inputs."""
    return core.jaxpr_as_fun(program)


def shard_map_body(program: Any) -> Any:
    """Returns the body of a closed jaxpr that is one `shard_map`, closed over the values that the body captures."""
    (equation,) = (equation for equation in program.eqns if equation.primitive.name == "shard_map")
    body = open_jaxpr(equation.params["jaxpr"])
    num_captured = len(body.invars) - len(program.jaxpr.invars)
    values = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    constants = [values[var] for var in equation.invars[:num_captured]]
    captured, inputs = body.invars[:num_captured], body.invars[num_captured:]
    debug_info = body.debug_info.with_unknown_names()
    return _ClosedJaxpr(body.replace(constvars=captured, invars=inputs, debug_info=debug_info), constants)


def manual_axes(equation: Equation) -> frozenset[str]:
    """Returns the mesh axes that a `shard_map` makes manual in its body; none for another equation."""
    return equation.params["newly_manual_axes"] if equation.primitive.name == "shard_map" else frozenset()


def shard_map_like(equation: Equation, body: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Returns `body`, mapped over the devices as the `shard_map` in `equation` maps its jaxpr."""
    params = equation.params
    names = ("in_specs", "out_specs", "check_vma")
    options: Any = {name: params[name] for name in names}
    return jax.shard_map(body, axis_names=manual_axes(equation), **options)


def split_axes(equation: Equation) -> list[frozenset[str]]:
    """Returns for each operand of a `shard_map` the mesh axes that it is split along."""
    return [frozenset(axes_of(spec)) for spec in equation.params["in_specs"]]


def lower_hi_primitives(program: Any, axis_sizes: Iterable[tuple[str, int]] = ()) -> Any:
    """Returns a closed jaxpr without primitives that are Python code until they are lowered.

    jax 0.12 traces `custom_root`, `jnp.nonzero` and others to such primitives. Their equations do not contain the jaxpr that
    they represent. All derivatives were taken before, so the jaxpr that JAX lowers them to has the same results.

    Args:
        program: The closed jaxpr.
        axis_sizes: The names and sizes of the mesh axes that it uses.
    """
    if not getattr(open_jaxpr(program), "is_high", False):
        return program
    from jax._src import core as private  # no public name for it
    from jax._src.interpreters import partial_eval

    # Constants may be tracers of an outer trace, which JAX's cache of lowered jaxprs must not hold: they become inputs.
    num_consts = len(program.consts)
    with private.extend_axis_env_nd(list(axis_sizes)):
        low = partial_eval.lower_jaxpr2(close_jaxpr(consts_as_inputs(program)))
    jaxpr = low.jaxpr
    constants, inputs = jaxpr.invars[:num_consts], jaxpr.invars[num_consts:]
    body = sub_jaxpr(jaxpr, jaxpr.eqns, inputs, jaxpr.outvars).replace(constvars=[*jaxpr.constvars, *constants])
    return _ClosedJaxpr(body, [*low.consts, *program.consts])


# Functions that are mapped over devices.


class MapBinding(NamedTuple):
    """One call of a function that is mapped over devices, by `jax.shard_map` or `jax.pmap`, which is a `shard_map` too.

    Attributes:
        kind: `"shard_map"` or `"pmap"`.
        function: The user's function.
        source: Its name and line, `"step at train.py:12"`, or "".
        names: The names of the operands, which are the leaves of the arguments; empty if unknown.
        operands: The types of the operands; for a `pmap` on one device, without the mapped dimension.
        specs: The `PartitionSpec` of each operand. For a `pmap` the axis at dimension 0 if it is mapped.
        axis_sizes: The mesh axes that the call makes manual, with their sizes.
        check_vma: Whether JAX checks that results without an axis in their `PartitionSpec` are replicated over it.
        donated: Whether the memory of each operand is donated by the `pmap`.
        arguments: The positions of the operands, in the structure of the arguments, of a `pmap`: `(args, kwargs)`.
        trace: Traces the function for operands of these types; with `is_single`, on a mesh whose manual axes have size 1.
    """

    kind: str
    function: Any
    source: str
    names: tuple[str, ...]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    specs: tuple[Any, ...]
    axis_sizes: dict[str, int]
    check_vma: bool
    donated: tuple[bool, ...]
    arguments: Any
    trace: Callable[[Sequence[jax.ShapeDtypeStruct], bool], "TracedBody"]


class TracedBody(NamedTuple):
    """The body of a mapped function.

    Attributes:
        program: The closed jaxpr of one device.
        results: The types of the results in the structure that the function returns; of one device for a `pmap`.
        specs: The `PartitionSpec` of each leaf of the results. For a `pmap` empty if its
            `out_axes` is None, else the axis at dimension 0.
    """

    program: Any
    results: Any
    specs: tuple[Any, ...]


@contextlib.contextmanager
def on_mapped_call(callback: Callable[[Callable[[], MapBinding | None]], None]) -> Iterator[None]:
    """Calls `callback(read)` before JAX binds a function that this thread maps over devices, while the block runs.

    `read()` returns the call. It is None for functions of JAX itself, by which it computes the operations in an eager
    `shard_map`, for functions of jdist, and if JAX evaluates a jaxpr again.
    """
    from jax._src import pmap  # no public hook
    from jax._src.shard_map import shard_map_p

    primitive: Any = shard_map_p
    bind, make_shard_map = primitive.bind, pmap._cached_shard_map
    thread = threading.get_ident()
    donated: dict[Any, tuple[bool, ...]] = {}  # by the function that `pmap` passes to `shard_map`

    def make_noted(*args: Any) -> Any:
        result = make_shard_map(*args)
        if (function := getattr(result.pmapped, "__wrapped__", None)) is not None:
            donated[function] = args[5]
        return result

    def bind_noted(*operands: Any, **params: Any) -> Any:
        if threading.get_ident() == thread:
            callback(lambda: _map_binding(bind, operands, params, donated))
        return bind(*operands, **params)

    primitive.bind, pmap._cached_shard_map = bind_noted, make_noted
    try:
        yield
    finally:
        primitive.bind, pmap._cached_shard_map = bind, make_shard_map


def _map_binding(
    bind: Callable[..., Any], operands: Sequence[Any], params: dict[str, Any], donated: dict[Any, tuple[bool, ...]]
) -> MapBinding | None:
    (traced_function,) = params["subfuns"]
    function = _closure(traced_function).get("f")
    if function is None:
        return None
    axes, mesh = params["newly_manual_axes"], params["mesh"]
    sizes = {axis: size for axis, size in mesh.shape.items() if axis in axes}
    types = tuple(map(_type_of, operands))
    module, debug_info = getattr(function, "__module__", None) or "", params["debug_info"]
    if module == "jax._src.pmap" and "fun" in _closure(function):
        return _pmap_binding(function, types, sizes, mesh, donated.get(function, ()))
    if module.startswith(("jax.", "jdist.")):
        return None

    def trace(types: Sequence[jax.ShapeDtypeStruct], is_single: bool) -> TracedBody:
        changed = {**params, "mesh": _with_size_one(mesh, axes)} if is_single else params
        return _traced_body(lambda *operands: bind(*operands, **changed).unflatten(), types, axes if is_single else ())

    names = tuple(debug_info.arg_names or ()) if debug_info else ()
    source = (debug_info.func_src_info if debug_info else None) or ""
    specs = tuple(params["in_specs"])
    return MapBinding("shard_map", function, source, names, types, specs, sizes, params["check_vma"], (), None, trace)


def _pmap_binding(
    function: Any, types: Sequence[jax.ShapeDtypeStruct], sizes: dict[str, int], mesh: Any, donated: tuple[bool, ...]
) -> MapBinding:
    closure = _closure(function)
    wrapped, tree, in_axes, out_axes = (closure[key] for key in ("fun", "in_tree", "in_axes_flat", "out_axes"))
    (axis,) = sizes
    replicated, split = jax.P(), jax.P(axis)

    def of_one_device(kind: jax.ShapeDtypeStruct, dim: int | None) -> jax.ShapeDtypeStruct:
        shape = kind.shape if dim is None else (*kind.shape[:dim], *kind.shape[dim + 1 :])
        return jax.ShapeDtypeStruct(shape, kind.dtype, weak_type=kind.weak_type)

    def trace(types: Sequence[jax.ShapeDtypeStruct], is_single: bool) -> TracedBody:
        def call(*leaves: Any) -> Any:
            args, kwargs = jax.tree.unflatten(tree, leaves)
            return wrapped.call_wrapped(*args, **kwargs)

        one = _with_size_one(mesh, frozenset(sizes)) if is_single else mesh
        mapped = jax.shard_map(call, mesh=one, in_specs=replicated, out_specs=replicated, check_vma=False)
        body = _traced_body(mapped, types, frozenset(sizes) if is_single else ())
        axes = jax.tree.broadcast(out_axes, body.results, is_leaf=lambda leaf: leaf is None)
        leaves = jax.tree.leaves(axes, is_leaf=lambda leaf: leaf is None)
        return body._replace(specs=tuple(replicated if dim is None else split for dim in leaves))

    debug_info = wrapped.debug_info
    positions = jax.tree.unflatten(tree, range(len(types)))
    parameters = (debug_info.arg_names if debug_info else None) or ()
    args, kwargs = positions
    arguments = [(parameters[i] if i < len(parameters) else f"args[{i}]", arg) for i, arg in enumerate(args)]
    names = [
        f"{name}{jax.tree_util.keystr(path)}"
        for name, argument in [*arguments, *sorted(kwargs.items())]
        for path, _ in jax.tree_util.tree_flatten_with_path(argument)[0]
    ]
    return MapBinding(
        "pmap",
        wrapped.f,
        (debug_info.func_src_info if debug_info else None) or "",
        tuple(names),
        tuple(map(of_one_device, types, in_axes)),
        tuple(replicated if dim is None else split for dim in in_axes),
        sizes,
        False,
        donated or (False,) * len(types),
        positions,
        trace,
    )


@contextlib.contextmanager
def _unhooked() -> Iterator[None]:
    """Binds a `shard_map` without the callback of `on_mapped_call`."""
    from jax._src.shard_map import shard_map_p

    primitive: Any = shard_map_p
    bind = primitive.__dict__.pop("bind", None)
    try:
        yield
    finally:
        if bind is not None:
            primitive.bind = bind


def _closure(function: Any) -> dict[str, Any]:
    """Returns the values that a Python function captures, by name."""
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _type_of(operand: Any) -> jax.ShapeDtypeStruct:
    aval: Any = jax.typeof(operand)
    if type(aval).__name__ == "AbstractRef":
        raise NotImplementedError("An operand is a mutable reference (`jax.Ref`).")
    options = {"manual_axis_type": aval.mat} if getattr(aval, "mat", None) else {}
    sharding = aval.sharding if any(aval.sharding.spec) else None  # of explicit mesh axes
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding, **options)


def _with_size_one(mesh: Any, axes: Iterable[str]) -> Any:
    """Returns an abstract mesh whose `axes` have size 1."""
    sizes = tuple(1 if axis in axes else size for axis, size in mesh.shape.items())
    return jax.sharding.AbstractMesh(sizes, mesh.axis_names, axis_types=mesh.axis_types)


def _on_mesh_of_size_one(kind: jax.ShapeDtypeStruct, axes: Iterable[str]) -> jax.ShapeDtypeStruct:
    sharding: Any = kind.sharding
    if sharding is None:
        return kind
    return kind.update(sharding=jax.sharding.NamedSharding(_with_size_one(sharding.mesh, axes), sharding.spec))


def _traced_body(mapped: Callable[..., Any], types: Sequence[Any], size_one: Iterable[str]) -> TracedBody:
    """Returns the body of the `shard_map` that `mapped` binds, for operands of these types."""
    from jax._src import mesh as meshes  # no public name for it

    context = meshes.get_abstract_mesh()
    is_changed = not context.empty and any(axis in context.axis_names for axis in size_one)
    if size_one:
        types = [_on_mesh_of_size_one(one, size_one) for one in types]
    with contextlib.ExitStack() as changes:
        if is_changed:  # through an empty mesh: JAX refuses to change the size of the mesh in the context
            changes.enter_context(meshes.use_abstract_mesh(meshes.empty_abstract_mesh))
            changes.enter_context(meshes.use_abstract_mesh(_with_size_one(context, size_one)))
        changes.enter_context(_unhooked())
        traced, results = jax.make_jaxpr(mapped, return_shape=True)(*types)
    equation = next(equation for equation in traced.jaxpr.eqns if equation.primitive.name == "shard_map")
    body = shard_map_body(traced)
    with contextlib.suppress(Exception):  # the analyses treat the primitives that remain conservatively
        body = lower_hi_primitives(body, dict(equation.params["mesh"].shape).items())
    return TracedBody(body, results, tuple(equation.params["out_specs"]))


@contextlib.contextmanager
def one_device() -> Iterator[None]:
    """Makes `jax.device_count()` and `jax.local_device_count()` return 1 in this thread while the block runs."""
    thread = threading.get_ident()
    names = ("device_count", "local_device_count")
    originals = {name: getattr(jax, name) for name in names}

    def count_of(original: Callable[..., int]) -> Callable[..., int]:
        return lambda *args, **kwargs: 1 if threading.get_ident() == thread else original(*args, **kwargs)

    try:
        for name, original in originals.items():
            setattr(jax, name, count_of(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(jax, name, original)


def captures_as_inputs(programs: Sequence[Any]) -> tuple[list[Any], int]:
    """Returns closed jaxprs with the values that all of them capture as their first inputs, and the number of these values.

    Constants without dimensions stay constants, and so do arrays that only some of the programs capture.
    """
    captured: dict[int, Any] = {}
    counts: dict[int, int] = {}
    for program in programs:
        for identity, value in {id(value): value for value in program.consts}.items():
            captured[identity] = value
            counts[identity] = counts.get(identity, 0) + 1
    for identity, value in list(captured.items()):
        is_shared = counts[identity] == len(programs) and np.ndim(value) > 0
        if not is_shared and not isinstance(value, Tracer):
            del captured[identity]
    results = []
    for program in programs:
        jaxpr = program.jaxpr
        inputs, constants, values = {}, [], []
        for var, value in zip(jaxpr.constvars, program.consts, strict=True):
            if id(value) in captured and id(value) not in inputs:
                inputs[id(value)] = var
            else:
                constants.append(var)
                values.append(value)
        first = [inputs.get(identity) or core.Var(jax.typeof(value)) for identity, value in captured.items()]
        body = sub_jaxpr(jaxpr, jaxpr.eqns, [*first, *jaxpr.invars], jaxpr.outvars).replace(constvars=constants)
        results.append(_ClosedJaxpr(body, values))
    return results, len(captured)


class JitCall(NamedTuple):
    """A call of a function under `jax.jit`, which JAX has not called with these types before.

    Attributes:
        program: The closed jaxpr.
        name: The name of the function.
        file: The file that defines it, or "".
        line: The line of the definition.
        shardings: The shardings of the arguments that are arrays, and of the arguments and results of `jax.jit`.
    """

    program: Any
    name: str
    file: str
    line: int
    shardings: tuple[Any, ...]


@contextlib.contextmanager
def on_jit_call(callback: Callable[[Callable[[], JitCall]], None]) -> Iterator[None]:
    """Calls `callback(read)` before this thread calls a function under `jax.jit`; `read()` returns the call.

    It is called while JAX traces, and for the first call with some types and shardings.
    """
    from jax._src import pjit  # no public hook

    primitive, thread = pjit.jit_p, threading.get_ident()
    bind, call = primitive.bind, getattr(pjit, "_pjit_call_impl_python", None)

    def with_note(original: Any) -> Any:
        @functools.wraps(original)
        def noted(*operands: Any, **params: Any) -> Any:
            if threading.get_ident() == thread:
                callback(lambda: _jit_call(operands, params))
            return original(*operands, **params)

        return noted

    primitive.bind = with_note(bind)
    if call is not None:
        pjit._pjit_call_impl_python = with_note(call)
    try:
        yield
    finally:
        primitive.bind = bind
        if call is not None:
            pjit._pjit_call_impl_python = call


def _jit_call(operands: Sequence[Any], params: dict[str, Any]) -> JitCall:
    program = params["jaxpr"]
    info = getattr(open_jaxpr(program), "debug_info", None)
    arrays = (one.sharding for one in operands if isinstance(one, jax.Array) and not isinstance(one, Tracer))
    shardings = (*params["in_shardings"], *params["out_shardings"], *arrays)
    return JitCall(
        program,
        params["name"],
        getattr(info, "func_filename", None) or "",
        getattr(info, "func_lineno", None) or 0,
        tuple(one for one in shardings if isinstance(one, jax.sharding.Sharding)),
    )


def jit_program(equation: Equation) -> Any:
    """Returns the closed jaxpr that a `jit` equation calls; None for another equation."""
    return equation.params["jaxpr"] if equation.primitive.name == "jit" else None


def constraint_sharding(equation: Equation) -> Any:
    """Returns the sharding of a `sharding_constraint` or a `reshard`; None for another equation."""
    if equation.primitive.name not in ("sharding_constraint", "reshard"):
        return None
    return equation.params.get("sharding") or equation.params.get("dst_sharding")


# Equations.


def is_function_of(equation: Equation, folders: tuple[str, ...]) -> bool:
    """Whether an equation calls a function that is defined in a file in one of `folders`."""
    call = called_jaxpr(equation)
    info = getattr(open_jaxpr(call.program), "debug_info", None) if call else None
    return (getattr(info, "func_filename", None) or "").startswith(folders)


def shape_of(atom: Any) -> tuple[int, ...]:
    """Returns the shape of an operand or a result of an equation."""
    return atom.aval.shape


def dtype_of(atom: Any) -> Any:
    """Returns the dtype of an operand or a result of an equation."""
    return atom.aval.dtype


def is_ref(atom: Any) -> bool:
    """Whether an operand of an equation is a mutable reference."""
    return type(atom.aval).__name__ == "AbstractRef"


def evaluate_equation(jaxpr: Jaxpr, equation: Equation, operands: Sequence[Any]) -> list[Any]:
    """Returns the results of an equation of `jaxpr` for the values of its operands."""
    # Literals become variables: the values of their operands are passed too.
    names: list[Any] = [core.Var(atom.aval) if isinstance(atom, Literal) else atom for atom in equation.invars]
    values = dict(zip(names, operands, strict=True))  # a variable may be an operand twice
    one = sub_jaxpr(jaxpr, [equation.replace(invars=names)], list(values), equation.outvars)
    return core.jaxpr_as_fun(close_jaxpr(one))(*values.values())


def context_of(equation: Equation) -> contextlib.AbstractContextManager[Any]:
    """Returns the context in which JAX traced `equation`. It contains the mesh, which a callback in a `shard_map` needs."""
    return equation.ctx.manager


def bind_equation(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    """Returns the results of the primitive of `equation`, with its parameters, for other operands."""
    results = equation.primitive.bind(*operands, **equation.params)
    return list(results) if equation.primitive.multiple_results else [results]


def bind_with_jaxpr(equation: Equation, program: Any, operands: Sequence[Any]) -> list[Any]:
    """Returns the results of `equation` with the closed jaxpr `program` instead of the one among its parameters."""
    params = {**equation.params, "jaxpr": consts_as_inputs(program)}
    return equation.primitive.bind(*program.consts, *operands, **params)


def literals_to_variables(equation: Equation, values: dict[Any, Any]) -> Equation:
    """Returns `equation` with new variables for its literals, whose values are added to `values`."""
    operands = [core.Var(atom.aval) if isinstance(atom, Literal) else atom for atom in equation.invars]
    values.update(
        (new, old.val) for new, old in zip(operands, equation.invars, strict=True) if isinstance(old, Literal)
    )
    return equation.replace(invars=operands)  # pyright: ignore[reportArgumentType]


def may_vary_between_replicas(effect: Any) -> bool:
    """Whether an equation with this effect may give each replica another value.

    Axis names are read from an equation's parameters, because not every collective has the effect, and printing does not
    return a value. The other effects (callbacks with side effects, mutable references, infeeds) may.
    """
    return type(effect).__name__ not in ("DebugEffect", "NamedAxisEffect")


def calls_host(equation: Equation) -> bool:
    """Whether an equation has a side effect, or calls a function of the host."""
    has_effect = any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)
    return has_effect or "callback" in equation.primitive.name


def has_debug_effect(equation: Equation) -> bool:
    """Whether an equation, or one inside it, is a callback of `jax.debug`."""
    return any(type(effect).__name__ == "DebugEffect" for effect in equation.effects)


class Contents(NamedTuple):
    """The parts of an equation's parameters, under any key, that may have a meaning beyond its operands.

    Attributes:
        names: The strings; the axes of a collective are among them.
        jaxprs: The jaxprs inside the equation, in order.
        opaque: Whether the equation is Python code that runs when it is lowered.
    """

    names: frozenset[str]
    jaxprs: tuple[Jaxpr, ...]
    opaque: bool


def contents(equation: Equation) -> Contents:
    """Returns the `Contents` of the parameters of `equation`."""
    params = equation.params
    higher_order = params.get("_prim")  # jax 0.12: a primitive that has its parameters as attributes
    values = _names_and_jaxprs(higher_order.params.values() if higher_order else params.values(), [])
    if not values and not higher_order:
        return _NO_CONTENTS
    jaxprs = tuple(open_jaxpr(value) for value in values if type(value) is not str)
    names = frozenset(value for value in values if type(value) is str)
    return Contents(names, jaxprs, opaque=bool(higher_order) and not jaxprs)


def programs(equation: Equation) -> list[Any]:
    """Returns the jaxprs among the parameters of `equation`, closed or open, in order."""
    params = equation.params
    higher_order = params.get("_prim")
    values = _names_and_jaxprs(higher_order.params.values() if higher_order else params.values(), [])
    return [value for value in values if type(value) is not str]


def closed_jaxprs(equation: Equation) -> list[Any]:
    """Returns the closed jaxprs among the parameters of `equation`, with their constants."""
    values = _names_and_jaxprs(equation.params.values(), [])
    return [value for value in values if isinstance(value, _ClosedJaxpr)]


def _names_and_jaxprs(params: Iterable[Any], collected: list[Any]) -> list[Any]:
    for value in params:
        if type(value) in _PLAIN:
            continue
        if isinstance(value, (tuple, list, frozenset)):
            _names_and_jaxprs(value, collected)
        elif isinstance(value, dict):
            _names_and_jaxprs(value.values(), collected)
        elif isinstance(value, (str, core.Jaxpr, _ClosedJaxpr)):
            collected.append(value)
    return collected


_NO_CONTENTS = Contents(frozenset(), (), False)
_PLAIN = frozenset((int, bool, float, type(None)))  # the types of most parameters


# Calls and control flow.


def call_on_host(callback: Callable[..., None], operands: Sequence[Any]) -> None:
    """Calls `callback` with the values of `operands`, as `jax.debug.callback` does. `callback_of` finds the equation."""
    from jax._src import debugging  # `jax.debug.callback` wraps the callback in another function

    debugging.debug_callback_p.bind(*operands, callback=callback, effect=debugging.debug_effect, partitioned=False)


def callback_of(equation: Equation) -> Any:
    """Returns the callback of an equation that `call_on_host` traced, or None."""
    return equation.params.get("callback") if equation.primitive.name == "debug_callback" else None


class Call(NamedTuple):
    """The jaxpr that an equation calls.

    Attributes:
        program: The jaxpr, closed or open. It has the results of the equation.
        positions: For each of its inputs, the position among the operands of the equation.
    """

    program: Any
    positions: Sequence[int]

    def operands(self, values: Sequence[Any]) -> list[Any]:
        """Returns the values of the jaxpr's inputs, given the values of all operands of the equation."""
        return [values[position] for position in self.positions]


def called_jaxpr(equation: Equation) -> Call | None:
    """Returns the jaxpr that an equation of a calling primitive runs; None if its parameters are not recognized."""
    positions = range(len(equation.invars))
    if equation.primitive.name == "custom_linear_solve":
        # The operands are the constants of four jaxprs, one after the other, and the right-hand side.
        program, lengths = equation.params["jaxprs"].solve, equation.params["const_lengths"]
        start = lengths.matvec + lengths.vecmat
        positions = [*positions[start : start + lengths.solve], *positions[sum(lengths) :]]
    else:
        program = next((equation.params[key] for key in _CALLED_KEYS if key in equation.params), None)
    if program is None:
        return None
    jaxpr = open_jaxpr(program)
    fits = len(jaxpr.invars) == len(positions) and len(jaxpr.outvars) == len(equation.outvars)
    return Call(program, positions) if fits else None


_CALLED_KEYS = ("jaxpr", "call_jaxpr", "call", "callee")  # depends on the primitive and on JAX


def cond_branches(equation: Equation) -> Sequence[Any]:
    """Returns the closed jaxprs of the branches of a `cond`, whose first operand is the index."""
    return equation.params["branches"]


def while_parts(equation: Equation) -> tuple[Any, Any, int, int]:
    """Returns the closed jaxprs of the predicate and of the body of a `while`, and the numbers of their constants.

    The operands of the equation are the constants of the predicate, the constants of the body, and the carry.
    """
    keys = ("cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts")
    return tuple(equation.params[key] for key in keys)  # pyright: ignore[reportReturnType]


class ScanParts(NamedTuple):
    """The parts of a `scan`; its operands are constants, the carry, and the arrays that it scans over.

    Attributes:
        body: The closed jaxpr of one iteration.
        num_consts: The number of constants.
        num_carry: The number of values in the carry.
        options: The keyword arguments of `jax.lax.scan`.
    """

    body: Any
    num_consts: int
    num_carry: int
    options: dict[str, Any]


def scan_parts(equation: Equation) -> ScanParts:
    """Returns the parts of a `scan`."""
    params = equation.params
    if "num_carry" in params:  # jax < 0.12
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    else:
        consts, carry, _ = params["ft_in"].unpack()
        num_consts, num_carry = len(list(consts)), len(list(carry))
    options = {key: params[key] for key in ("length", "reverse", "unroll")}
    return ScanParts(params["jaxpr"], num_consts, num_carry, options)


def map_linear_calls() -> None:
    """Lets `jax.vmap` map a `jax.custom_derivatives.linear_call`, for which JAX does not have a rule."""
    from jax._src.custom_derivatives import linear_call_p  # no public names
    from jax._src.interpreters import batching

    def rule(
        axis: Any, args: Any, dims: Any, *, callee: Any, transpose_thunk: Any, num_callee_consts: int, num_res: int
    ):
        fixed, linear = args[: num_callee_consts + num_res], args[num_callee_consts + num_res :]
        fixed_axes = list(dims[: len(fixed)])  # None where a value is not mapped
        values = [batching.bdim_at_front(x, dim, axis.size) for x, dim in zip(linear, dims[len(fixed) :], strict=True)]

        def mapped(fn: Callable[..., Any]) -> Callable[..., Any]:
            return jax.vmap(fn, (fixed_axes, 0), axis_name=axis.name, axis_size=axis.size)

        def transposed(fixed: Sequence[Any], cotangents: Sequence[Any]) -> Any:
            program, consts = transpose_thunk()
            return jaxpr_function(program)(*consts, *fixed[num_callee_consts:], *cotangents)

        call = mapped(lambda fixed, values: jaxpr_function(callee)(*fixed, *values))
        results = jax.custom_derivatives.linear_call(call, mapped(transposed), list(fixed), values)
        return results, [0] * len(results)

    batching.fancy_primitive_batchers.setdefault(linear_call_p, rule)


# Collectives, and `checkpoint_name`.


def name_of(equation: Equation) -> str:
    """Returns the name that a `name` equation gives to its operand (`jax.ad_checkpoint.checkpoint_name`)."""
    return equation.params["name"]


def has_axis_index_groups(equation: Equation) -> bool:
    """Whether a collective combines groups of replicas, and not all of them."""
    return equation.params.get("axis_index_groups") is not None


def has_positional_axes(equation: Equation) -> bool:
    """Whether a collective also reduces dimensions of its operands, as one does that was batched by `jax.vmap`."""
    return any(not isinstance(axis, str) for axis in equation.params.get("axes", ()))


def gather_dimension(equation: Equation) -> tuple[int, bool]:
    """Returns the dimension of an `all_gather`, and whether it is tiled."""
    return equation.params["all_gather_dimension"], equation.params["tiled"]


def scatter_dimension(equation: Equation) -> tuple[int, bool]:
    """Returns the dimension of a `reduce_scatter`, and whether it is tiled."""
    return equation.params["scatter_dimension"], equation.params["tiled"]


def permutation(equation: Equation) -> Sequence[tuple[int, int]]:
    """Returns the pairs of source and destination of a `ppermute`."""
    return equation.params["perm"]

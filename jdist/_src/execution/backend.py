"""`Backend`: traces a replica function, runs its jaxpr on the devices of all replicas, and places the state between steps."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jdist._src.core import jax_compat
from jdist._src.core.partition_specs import axes_of
from jdist._src.core.tree import PyTree
from jdist._src.devices.mesh import Replicas
from jdist._src.execution.stage import Stage
from jdist._src.execution.traced import Arguments, ReplicaResults, Results, UserCall
from jdist._src.replica.context import ReplicaContext
from jdist._src.values.base import is_distributed
from jdist._src.values.per_replica import PerReplica
from jdist._src.values.state_sharding import StateSharding

Equivalence: TypeAlias = Literal["error", "warn", "ignore"]


@dataclasses.dataclass(frozen=True)
class ReplicaFunction:
    """A replica function and its arguments, ready to be traced.

    Attributes:
        fn: Takes the block of each argument that one device holds, and returns the list of the results of one replica.
        items: The arguments. An item is a plain leaf or a complete wrapper.
        num_state: The number of leading items that are the state.
    """

    fn: Callable[..., list[PyTree]]
    items: Sequence[Any]
    num_state: int = 0

    @property
    def unwrapped(self) -> list[PyTree]:
        """The global value of each argument, without its wrapper."""
        return [item.tree if is_distributed(item) else item for item in self.items]

    @property
    def is_varying(self) -> list[bool]:
        """Whether each argument has one value per replica: `[replica * n, ...]`, with blocks `[n, ...]`."""
        return [is_distributed(item) and not item._is_replicated for item in self.items]

    def block_shapes(self, num_replicas: int) -> list[PyTree]:
        """Returns the shapes of the block of each argument that one replica holds."""

        def block_shape(leaf: Any, is_varying: bool) -> jax.ShapeDtypeStruct:
            aval = jax.typeof(leaf)
            shape = (aval.shape[0] // num_replicas, *aval.shape[1:]) if is_varying else aval.shape
            return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))

        pairs = zip(self.unwrapped, self.is_varying, strict=True)
        return [jax.tree.map(lambda leaf, varies=varies: block_shape(leaf, varies), tree) for tree, varies in pairs]


@dataclasses.dataclass(frozen=True)
class ProgramSpec:
    """The function, the backend and the options of a program.

    Attributes:
        name: The name of the program, in profiles and messages.
        user_call: From the arguments of the program, as `jax.jit` gets them, to the call of the user's function.
        as_pair: From the result of the user's function to `(state, outputs)`.
        backend: Runs the program on the devices.
        context: The replica context.
        function_stages: The stages of its kind of program, which wrap the function of one replica.
        user_stages: The stages of the user's function, as `jdist.debug.checked` adds them.
        has_state: Whether the first argument is a state, which the program replaces.
        donates: Whether the memory of that state is reused for the new state.
        compiler_options: The user's options of XLA.
        is_global: Whether the function is in the global view: it is of one replica and written as such.
        equivalence: See `StepOptions`.
    """

    name: str
    user_call: Callable[[Arguments], UserCall]
    as_pair: Callable[[Any], Results]
    backend: "Backend"
    context: ReplicaContext
    function_stages: Sequence[Stage] = ()
    user_stages: Sequence[Stage] = ()
    has_state: bool = False
    donates: bool = False
    compiler_options: Mapping[str, Any] | None = None
    is_global: bool = False
    equivalence: Equivalence = "warn"

    @property
    def varying_axes(self) -> tuple[str, ...]:
        """The mesh axes along which the analysis follows values that may differ; in the global view no value differs."""
        return () if self.is_global else self.context.axes

    def shardings(self, args: Arguments) -> list[NamedSharding]:
        """Returns the sharding of each leaf of the arguments, as the compiled program takes them."""
        state = self.backend.call_shardings(args[0]) if self.has_state else []
        return [*state, *self.backend.input_shardings(args[self.has_state :])]


class Backend(abc.ABC):
    """Runs the jaxpr of one replica on the devices of all replicas. A subclass defines `run`.

    Attributes:
        replicas: The replicas and their mesh.
        state_sharding: The rules that split the leaves of a state over the devices, if the strategy splits them.
    """

    state_sharding: StateSharding | None = None

    def __init__(self, replicas: Replicas):
        self.replicas = replicas

    def trace(self, function: ReplicaFunction) -> Any:
        """Returns the closed jaxpr of one replica, with the mesh axes of the replicas bound."""
        axis_sizes = self.replicas.axis_sizes
        traced = jax.make_jaxpr(function.fn, axis_env=axis_sizes)(*function.block_shapes(self.replicas.size))
        return jax_compat.lower_hi_primitives(traced, axis_sizes)

    @abc.abstractmethod
    def run(self, function: ReplicaFunction, program: Any, results: ReplicaResults) -> list[PyTree]:
        """Runs the closed jaxpr `program` for all replicas, and returns the global value of each result.

        It runs the jaxpr that was analyzed: a second trace of the function could give another jaxpr.
        """

    def stages(self, spec: ProgramSpec) -> Sequence[Stage]:
        """Returns what this backend adds to a program, from the outermost stage to the innermost."""
        return ()

    def input_shardings(self, tree: PyTree) -> list[NamedSharding]:
        """Returns the sharding of each leaf of an argument: replicated, or as specified by the leaf's wrapper."""
        items = jax.tree.leaves(tree, is_leaf=is_distributed)
        return [self._input_sharding(item, leaf) for item in items for leaf in jax.tree.leaves(item)]

    def state_shardings(self, tree: PyTree, is_state: bool = True) -> list[NamedSharding]:
        """Returns the sharding of each leaf of a state between programs.

        Args:
            tree: A tree of arrays or of their shapes, some in wrappers.
            is_state: Whether `tree` is known to be a complete state.
        """
        return self.input_shardings(tree)

    def call_shardings(self, state: PyTree) -> list[NamedSharding]:
        """Returns the sharding of each leaf of a state as the compiled program takes it."""
        return self.state_shardings(state)

    def accepts(self, array: jax.Array) -> bool:
        """Whether a program accepts an array that is placed elsewhere than on the devices of the mesh."""
        return False

    def _input_sharding(self, item: Any, leaf: Any) -> NamedSharding:
        if not is_distributed(item) or item._is_replicated:
            return self.replicas.replicated_sharding
        if isinstance(item, PerReplica):
            return self.replicas.batch_sharding(leaf.shape) if item.spec is None else self._of_spec(item.spec, leaf)
        return NamedSharding(self.replicas.mesh, item._partition_spec(self.replicas.per_replica_axes))

    def _of_spec(self, spec: PartitionSpec, leaf: Any) -> NamedSharding:
        """Returns the sharding of a batch that a layout has split; without a layout if another strategy has split it."""
        mesh = self.replicas.mesh
        is_of_mesh = {*axes_of(spec)} <= {*mesh.axis_names}
        return NamedSharding(mesh, spec) if is_of_mesh else self.replicas.batch_sharding(leaf.shape)

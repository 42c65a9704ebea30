"""`CompiledFunction`: a trace that `jax.jit` compiles, and its call, in which Ctrl-C loses no results."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.tree_util import PyTreeDef

from jdist._src.core import jax_compat
from jdist._src.core.tree import PyTree, named_leaves
from jdist._src.execution.interrupts import uninterrupted
from jdist._src.execution.traced import Arguments, Proof, Results, Traced, TraceFn
from jdist._src.jaxpr.interpreter import all_equations
from jdist._src.values.array_checks import check_array
from jdist._src.values.array_copies import copy_tree

_SMALL_OUTPUTS = 2**16  # elements: outputs that are held until the next call


class ResultStructure(NamedTuple):
    """The structure of the results of a compiled program, a list of arrays.

    Attributes:
        treedef: The structure of `(state, outputs)`.
        num_state: The number of leaves of the state.
        smallest: The index of the smallest leaf, which is held until the next call.
        has_small_outputs: Whether there are outputs, and so few elements that they are held until the next call.
        last_of_children: The index of the last leaf of each child of the state.
    """

    treedef: PyTreeDef
    num_state: int
    smallest: int
    has_small_outputs: bool
    last_of_children: Sequence[int]


class CompiledFunction:
    """A trace compiled by `jax.jit`.

    Mutable: it holds JAX's cache of compiled programs, and the proof of the program that was traced last.

    Args:
        trace: Traces a call of the program, with all stages.
        name: The name of the program in profiles.
        donates: Whether a call reuses the memory of its first argument.
        compiler_options: Options of XLA for the program.
        shardings: From arguments or their shapes to the sharding of each leaf.

    Attributes:
        call: Calls it, from the tuple of arguments to `(state, outputs)`. A call passes its arguments on as one tuple: after
            `fn(*args)` Python 3.11 may handle Ctrl-C before the result has a name, and the caller's state is donated then.
        proof: Of the program that was traced last, or None.
        on_results: Called after each call with the results, their leaves and their structure, before the caller has them.
        on_new_signature: Called with the arguments of the first call of each signature, after it.
        on_trace: Called with each trace of the program, while JAX traces it.
        num_signatures: The number of signatures that steps were called with; 0 if JAX does not count them.
        lowers_apart: Whether the next call traces the program again that `lower` has traced.
    """

    def __init__(
        self,
        trace: TraceFn,
        name: str,
        donates: bool,
        compiler_options: dict[str, Any] | None,
        shardings: Callable[[Arguments], Sequence[Sharding]],
    ):
        def traced(*args: PyTree) -> Results | dict[int, list[Any]]:
            # `jax.jit` builds tuples, lists and dicts in C. It builds other nodes of a tree by Python code, in which an
            # interrupt would lose all of them.
            pair = self.traced_pair(*args)
            if not self.on_results and _is_built_in_c(jax.tree.structure(pair)):
                return pair
            self._structures.append(_structure_of(pair))
            return {len(self._structures) - 1: jax.tree.leaves(pair)}

        self._trace, self._traced, self._name, self._donates = trace, traced, name, donates
        self._compiler_options, self._shardings = compiler_options, shardings
        self._jitted = self._jit(traced)
        self._structures: list[ResultStructure] = []  # of the results of each program that was traced
        self._runs_callbacks = False  # whether one of them runs Python code after it has donated the state
        self._is_first_call = True
        self.proof: Proof | None = None
        self.on_results: list[Callable[[Results, list[Any], ResultStructure], None]] = []
        self.on_new_signature: list[Callable[[Arguments], None]] = []
        self.on_trace: list[Callable[[Traced], None]] = []
        self.num_signatures = 0
        self.lowers_apart = False
        self.call = uninterrupted(self._jitted, self._finish, self._runs_python, self._after_failure)

    def note_signature(self, args: Arguments) -> None:
        """Calls `on_new_signature` if JAX has compiled the program for a new signature in the call with these arguments."""
        num_signatures = jax_compat.num_signatures(self._jitted)
        if num_signatures != self.num_signatures:
            for note in self.on_new_signature:
                note(args)
            self.num_signatures = num_signatures

    def traced_pair(self, *args: PyTree) -> Results:
        """Returns `(state, outputs)` of a call while JAX traces it."""
        traced = self._trace(args)
        self.proof = traced.proof
        for note in self.on_trace:
            note(traced)
        self._runs_callbacks = self._runs_callbacks or _calls_python(traced.jaxpr, traced.pair)
        return traced.pair

    def lower(self, args: Arguments) -> jax.stages.Lowered:
        """Returns the program lowered for arguments of these shapes."""
        jitted = self._jit(lambda *args: self._traced(*args)) if self.lowers_apart else self._jitted
        try:
            lowered = jitted.lower(*self.shapes(args))
        except KeyboardInterrupt:
            jax_compat.end_interrupted_trace()
            raise
        result = jax.tree.unflatten(lowered.out_tree, [0] * lowered.out_tree.num_leaves)
        if isinstance(result, dict):
            lowered.out_tree = self._structures[min(result)].treedef  # it has the leaves of the dict, in this order
        return lowered

    def shapes(self, args: Arguments) -> Arguments:
        """Returns the shape of each leaf of the arguments, with the sharding that the program takes."""
        return _shapes(args, self._shardings(args))

    def _jit(self, fn: Callable[..., Any]) -> Any:
        fn.__name__ = fn.__qualname__ = self._name
        return jax.jit(fn, donate_argnums=(0,) if self._donates else (), compiler_options=self._compiler_options)

    def _runs_python(self) -> bool:
        """Whether `jax.jit` runs Python code in the next call: in every one of this program, or in the first one."""
        return self._donates and (self._runs_callbacks or self._is_first_call)

    def _after_failure(self, error: BaseException, args: Arguments) -> Arguments | None:
        """Returns the arguments of another call, with a copy of the state, if JAX refused to donate memory that is in use.

        It also handles that `jax.jit` runs Python code in all calls of a signature whose first call failed, ten times as slow.
        """
        if self._is_first_call:
            self._jitted.clear_cache()
        else:
            self._runs_callbacks = True
        shares_memory = self._donates and jax_compat.is_shared_memory_error(error)
        return (copy_tree(args[0]), *args[1:]) if shares_memory else None

    def _finish(self, result: Results | dict[int, list[Any]]) -> Results:
        """Returns the results of a call from the results of the compiled program."""
        self._is_first_call = False
        if isinstance(result, tuple):
            return result
        ((number, leaves),) = result.items()
        structure = self._structures[number]
        pair = structure.treedef.unflatten(leaves)
        for record in self.on_results:
            record(pair, leaves, structure)
        return pair


def _is_built_in_c(treedef: PyTreeDef) -> bool:
    """Whether JAX builds a tree of this structure without Python code."""
    node = treedef.node_data()
    return node is None or (node[0] in (tuple, list, dict, type(None)) and all(map(_is_built_in_c, treedef.children())))


def _structure_of(pair: Results) -> ResultStructure:
    leaves, treedef = jax.tree.flatten(pair)
    sizes, num_state = list(map(np.size, leaves)), len(jax.tree.leaves(pair[0]))
    smallest = sizes.index(min(sizes)) if sizes else 0
    counts = [child.num_leaves for child in jax.tree.structure(pair[0]).children()] or [num_state]
    last_of_children = sorted({end - 1 for end in itertools.accumulate(counts)} - {-1})
    has_small_outputs = 0 < sum(sizes[num_state:]) <= _SMALL_OUTPUTS
    return ResultStructure(treedef, num_state, smallest, has_small_outputs, last_of_children)


def _calls_python(jaxpr: Any, pair: Results) -> bool:
    """Whether a call of a program runs Python code: a callback, or the constructor of a random key among its results."""
    has_keys = any(jnp.issubdtype(jax.typeof(leaf).dtype, jax.dtypes.extended) for leaf in jax.tree.leaves(pair))
    equations = all_equations(jax_compat.open_jaxpr(jaxpr))
    return has_keys or any("callback" in equation.primitive.name for equation in equations)


def _shapes(args: Arguments, shardings: Sequence[Sharding]) -> Arguments:
    leaves, treedef = jax.tree.flatten(args)
    for name, leaf in named_leaves("args", args):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            check_array(name, leaf)
    avals = [x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x) for x in leaves]
    pairs = zip(avals, shardings, strict=True)
    return treedef.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x, sharding in pairs])

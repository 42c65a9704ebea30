"""Tables of JAX primitives, by name.

A primitive that is in no table is treated conservatively by the replication analysis, and left to JAX by the rewrites.
"""


def primitive_names(text: str) -> frozenset[str]:
    """Returns the names of primitives in a text, separated by spaces."""
    return frozenset(text.split())


# Primitives that run one of their jaxprs once and return its results. The other jaxprs of `custom_linear_solve`, and the rules
# of `custom_vmap_call` and `linear_call`, are for derivatives and `vmap`, which were applied when the function was traced.
CALLS = primitive_names(
    """
    closed_call composite compute_on core_call custom_jvp_call custom_linear_solve custom_vjp_call custom_vmap_call eval_jaxpr
    jit linear_call remat2 shard_map xla_metadata_call
    """
)
# Calls that carry an instruction for the compiler, which is lost if the called jaxpr is inlined.
ANNOTATED_CALLS = primitive_names("composite compute_on remat2 shard_map xla_metadata_call")

# Collectives whose result is the same on every replica of their axes.
REPLICATING_COLLECTIVES = primitive_names("psum psum_invariant pmax pmin all_gather all_gather_invariant")
# Casts of JAX's varying types (`check_vma=True`): they name an axis, and return their operand on every replica.
VARYING_CASTS = primitive_names("pvary")
# Primitives that name an axis without waiting for the other replicas.
NOT_WAITING = primitive_names("axis_index")
# Collectives that wait for the replicas along their axes only. XLA's `ppermute` on CPU waits for all devices of the mesh.
WAITING_FOR_GROUP = REPLICATING_COLLECTIVES | primitive_names("all_to_all reduce_scatter")
# Primitives whose result depends on the device: a generator or a feed per device.
PER_DEVICE = primitive_names("rng_uniform infeed")

# Primitives that draw random numbers from a key.
RANDOM_BITS = primitive_names("random_bits random_gamma rng_bit_generator")

# Collectives over an axis of size one: those that return their operands, and those that only change the shape.
IDENTITY_ON_ONE = primitive_names("psum pmax pmin pbroadcast")
RESHAPE_ON_ONE = primitive_names("all_gather all_gather_invariant reduce_scatter all_to_all")

# Primitives that write how arrays are partitioned over devices into a program.
PARTITIONING = primitive_names("shard_map sharding_constraint reshard mesh_cast pmap xla_pmap")

# Primitives that add or multiply many elements in an order that the compiler chooses.
ORDERED_REDUCTIONS = primitive_names("reduce_sum reduce_prod dot_general cumsum")

# Primitives that compute each element from the same element of their operands, or from scalars.
ELEMENTWISE = primitive_names(
    """
    abs add add_any and ceil clamp convert_element_type copy copy_p cos div eq erf exp exp2 expm1 floor ge gt integer_pow
    is_finite le log log1p logistic lt max min mul name ne neg nextafter not or pow reduce_precision rem round rsqrt
    select_n sign sin sqrt square stop_gradient sub tanh xor
    """
)
# Primitives that return their operands.
IDENTITIES = primitive_names("copy copy_p name optimization_barrier stop_gradient")
# Primitives that return the elements of their operand in another shape.
RESHAPES = primitive_names("broadcast_in_dim expand_dims reshape squeeze")

"""Rules for random keys and numbers."""

from jdist._src.jaxpr.relation_rules.equation_pair import EquationPair, rule
from jdist._src.jaxpr.relations import AnyRelation, Relation, Split, inherited, is_close


@rule("random_fold_in")
def folded(pair: EquationPair) -> list[AnyRelation]:
    """`random_fold_in`: with the replica's index it is a key of the replica, with positions one of each example."""
    key, data = pair.operands
    for value in (key, data):
        if value.partial or value.extreme or value.stack or value.is_first or not is_close(value.factor, 1):
            return [pair.lost("partial" if value.partial else "no rule", value)]
    is_key = key.is_key or data.is_index or bool(data.offset) and not data.splits
    if data.offset and data.splits:
        return [pair.lost("shared", data)]
    splits = key.splits or data.splits
    if key.splits and data.splits and key.splits != data.splits:
        return [pair.lost("order")]
    return [Relation(splits=splits, is_key=is_key, **inherited(key, data))]


@rule("random_seed")
def seeded(pair: EquationPair) -> list[AnyRelation]:
    (value,) = pair.operands
    if value.offset or value.is_index:
        return [Relation(is_key=True)]
    return pair.without_rule()


@rule("random_bits random_gamma random_split rng_bit_generator random_clone")
def drawn(pair: EquationPair) -> list[AnyRelation]:
    """Random bits, and keys that are split from one key."""
    key = pair.operands[0]
    if any(not value.is_pointwise and not value.is_key for value in pair.operands):
        return pair.every(pair.lost("partial"))
    results = []
    for number in range(len(pair.equation.outvars)):
        local, single = pair.result_shape(number), pair.single_result_shape(number)
        dims = [dim for dim in range(len(local)) if len(local) == len(single) and local[dim] != single[dim]]
        if not key.is_key:
            expected = {split.dim for split in key.splits}
            if set(dims) <= expected:
                results.append(Relation(splits=key.splits, **inherited(*pair.operands)))
            else:
                results.append(pair.lost("shared"))
            continue
        is_of_keys = pair.equation.primitive.name == "random_split"
        if not dims:
            results.append(Relation(is_key=True, **inherited(key)) if is_of_keys else pair.lost("noise"))
            continue
        axes = pair.group_of(local[dims[0]], single[dims[0]]) if len(dims) == 1 else None
        if axes is None or key.splits:
            results.append(pair.lost("no rule"))
            continue
        results.append(
            Relation(splits=(Split(axes, dims[0]),), **{**inherited(*pair.operands), "in_distribution": True})
        )
    return results

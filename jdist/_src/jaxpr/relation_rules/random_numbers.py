"""Rules for random keys and numbers."""

from jdist._src.jaxpr.relation_rules.step import Step, rule
from jdist._src.jaxpr.relations import AnyRelation, Relation, Split, flags, is_close


@rule("random_fold_in")
def folded(step: Step) -> list[AnyRelation]:
    """`random_fold_in`: with the replica's index it is a key of the replica, with positions one of each example."""
    key, data = step.operands
    for value in (key, data):
        if value.partial or value.extreme or value.stack or value.is_first or not is_close(value.factor, 1):
            return [step.lost("partial" if value.partial else "no rule", value)]
    is_key = key.is_key or data.is_index or bool(data.offset) and not data.splits
    if data.offset and data.splits:
        return [step.lost("shared", data)]
    splits = key.splits or data.splits
    if key.splits and data.splits and key.splits != data.splits:
        return [step.lost("order")]
    return [Relation(splits=splits, is_key=is_key, **flags(key, data))]


@rule("random_seed")
def seeded(step: Step) -> list[AnyRelation]:
    (value,) = step.operands
    if value.offset or value.is_index:
        return [Relation(is_key=True)]
    return step.other()


@rule("random_bits random_gamma random_split rng_bit_generator random_clone")
def drawn(step: Step) -> list[AnyRelation]:
    """Random bits, and keys that are split from one key."""
    key = step.operands[0]
    if any(not value.is_pointwise and not value.is_key for value in step.operands):
        return step.every(step.lost("partial"))
    results = []
    for number in range(len(step.equation.outvars)):
        local, single = step.result_shape(number), step.single_result_shape(number)
        dims = [dim for dim in range(len(local)) if len(local) == len(single) and local[dim] != single[dim]]
        if not key.is_key:
            expected = {split.dim for split in key.splits}
            if set(dims) <= expected:
                results.append(Relation(splits=key.splits, **flags(*step.operands)))
            else:
                results.append(step.lost("shared"))
            continue
        is_of_keys = step.equation.primitive.name == "random_split"
        if not dims:
            results.append(Relation(is_key=True, **flags(key)) if is_of_keys else step.lost("noise"))
            continue
        axes = step.group_of(local[dims[0]], single[dims[0]]) if len(dims) == 1 else None
        if axes is None or key.splits:
            results.append(step.lost("no rule"))
            continue
        results.append(Relation(splits=(Split(axes, dims[0]),), **{**flags(*step.operands), "in_distribution": True}))
    return results

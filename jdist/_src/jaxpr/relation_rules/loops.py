"""The relations of the operands, the carry and the results of a `scan`."""

from jdist._src.jaxpr.relation_rules.equation_pair import EquationPair
from jdist._src.jaxpr.relations import AnyRelation, Lost, Split


def accumulated(pair: EquationPair, start: AnyRelation, added: AnyRelation) -> AnyRelation:
    """Returns a carry of a `scan` over the examples, in which every iteration adds one value."""
    if isinstance(added, Lost):
        return pair.lost_again(added)
    if isinstance(start, Lost):
        return pair.lost_again(start)
    if added.is_zero:
        return start
    axes = pair.analysis.groups[0]
    if not start.is_zero or not added.is_plain or added.splits or len(pair.analysis.groups) > 1:
        return pair.lost("no rule")
    return added.replace(partial=frozenset(axes), origin=pair.cause(added))


def without_first_dim(pair: EquationPair, value: AnyRelation, scans_examples: bool) -> AnyRelation:
    """Returns a slice of an operand that a `scan` iterates over."""
    if isinstance(value, Lost):
        return value
    first = [split for split in value.splits if split.dim == 0]
    if first and not scans_examples or value.stack and value.stack[1] == 0:
        return pair.lost("order", value)
    if first and (any(any(x) for _, x in value.offset) or first[0].outer != 1):
        return pair.lost("index", value)
    splits = tuple(split.replace(dim=split.dim - 1) for split in value.splits if split.dim)
    stack = (value.stack[0], value.stack[1] - 1) if value.stack else None
    if first and (value.partial or value.extreme):
        return pair.lost("no rule", value)
    return value.replace(splits=splits, stack=stack)


def with_first_dim(pair: EquationPair, value: AnyRelation, scans_examples: bool) -> AnyRelation:
    """Returns the stacked results of a `scan`."""
    if isinstance(value, Lost):
        return value
    splits = tuple(split.replace(dim=split.dim + 1) for split in value.splits)
    stack = (value.stack[0], value.stack[1] + 1) if value.stack else None
    if scans_examples:
        if value.partial or value.extreme or value.splits or value.is_special:
            return pair.lost("no rule", value)
        splits = (Split(pair.analysis.groups[0], 0),) if len(pair.analysis.groups) == 1 else ()
    return value.replace(splits=splits, stack=stack)

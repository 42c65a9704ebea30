"""Rules for products of matrices, convolutions and linear algebra."""

from jdist._src.jaxpr.dims import dot_general_dims
from jdist._src.jaxpr.relation_rules.arithmetic import product
from jdist._src.jaxpr.relation_rules.equation_pair import EquationPair, rule
from jdist._src.jaxpr.relations import AnyRelation, Lost, Relation, Split


@rule("dot_general")
def contracted(pair: EquationPair) -> list[AnyRelation]:
    """`dot_general`."""
    first, second = pair.operands
    if first.stack or second.stack:
        return [pair.lost("no rule")]
    contracting, batch = pair.params["dimension_numbers"]
    new_dims = dot_general_dims(pair.equation)
    summed: set[str] = set()
    splits: set[Split] = set()
    for k, value in enumerate((first, second)):
        other = (second, first)[k]
        for split in value.splits:
            if split.dim in contracting[k]:
                partner = contracting[1 - k][list(contracting[k]).index(split.dim)]
            elif split.dim in batch[k]:
                partner = batch[1 - k][list(batch[k]).index(split.dim)]
            else:
                splits.add(split.replace(dim=new_dims[k][split.dim]))
                continue
            if split.replace(dim=partner) not in other.splits:
                return [pair.lost("order")]
            if split.dim in contracting[k]:
                summed.update(split.axes)
            else:
                splits.add(split.replace(dim=new_dims[k][split.dim]))
    return [_bilinear(pair, first, second, splits, summed)]


def _bilinear(
    pair: EquationPair, first: Relation, second: Relation, splits: set[Split], summed: set[str]
) -> AnyRelation:
    split_axes = [axis for split in splits for axis in split.axes]
    if len(split_axes) > len(set(split_axes)) or set(split_axes) & summed:
        return pair.lost("pairs")
    both = (first, second)
    axes = [{axis for split in value.splits for axis in split.axes} for value in both]
    for k, value in enumerate(both):
        if value.partial & axes[1 - k]:
            return pair.lost("statistic", value)
    ordered = tuple(sorted(splits, key=lambda s: s.dim))
    result = product(pair, first, second, ordered)
    if isinstance(result, Lost):
        return result
    nonnegative = first.is_nonnegative and second.is_nonnegative
    origin = pair.cause(first, second) if summed else result.origin
    partial = result.partial | summed
    return result.replace(partial=partial, is_nonnegative=nonnegative, origin=origin)


@rule("conv_general_dilated")
def convolved(pair: EquationPair) -> list[AnyRelation]:
    """`conv_general_dilated`. The gradient of a kernel has the examples among the input features."""
    lhs, rhs = pair.operands
    numbers = pair.params["dimension_numbers"]
    groups = pair.params["feature_group_count"], pair.params["batch_group_count"]
    if lhs.stack or rhs.stack:
        return [pair.lost("no rule")]
    splits: set[Split] = set()
    summed: set[str] = set()
    for split in lhs.splits:
        if split.dim == numbers.lhs_spec[0] and groups[1] == 1:
            splits.add(split.replace(dim=numbers.out_spec[0]))
        elif split.dim == numbers.lhs_spec[1] and groups == (1, 1):
            if split.replace(dim=numbers.rhs_spec[1]) not in rhs.splits:
                return [pair.lost("order")]
            summed.update(split.axes)
        else:
            return [pair.lost("no rule")]
    for split in rhs.splits:
        if split.dim == numbers.rhs_spec[0] and groups == (1, 1):
            splits.add(split.replace(dim=numbers.out_spec[1]))
        elif split.dim != numbers.rhs_spec[1] or groups != (1, 1) or not summed:
            return [pair.lost("no rule")]
    return [_bilinear(pair, lhs, rhs, splits, summed)]


@rule("cholesky lu eigh eig svd qr geqrf householder_product tridiagonal_solve schur")
def matrices(pair: EquationPair) -> list[AnyRelation]:
    """Linear algebra on the last two dims."""
    if not all(value.is_pointwise for value in pair.operands):
        return pair.every(pair.lost("no rule"))
    spread = pair.pointwise()
    ranks = [len(pair.shape(i)) for i in range(len(pair.operands))]
    if isinstance(spread, Lost) or any(split.dim >= min(ranks) - 2 for split in spread.splits):
        return pair.every(pair.lost("no rule"))
    return pair.every(spread)


@rule("triangular_solve")
def solved(pair: EquationPair) -> list[AnyRelation]:
    """`triangular_solve`: linear in the second operand."""
    matrix, value = pair.operands
    rank = len(pair.shape(0))
    is_known = matrix.is_plain and matrix.factor > 0 and not (value.stack or value.extreme or value.is_special)
    axes = {axis for split in matrix.splits for axis in split.axes}
    columns = rank - 1 if pair.params["left_side"] else rank - 2
    shared = tuple(split for split in value.splits if split.dim != columns)
    if not is_known or matrix.splits != shared or any(split.dim >= rank - 2 for split in shared):
        return [pair.lost("no rule")]
    if value.partial & axes:
        return [pair.lost("statistic", value)]
    return [value.replace(factor=value.factor / matrix.factor, is_nonnegative=False)]


@rule("fft")
def transformed(pair: EquationPair) -> list[AnyRelation]:
    """A linear transformation of the last dims."""
    value = pair.operands[0]
    first = len(pair.shape(0)) - len(pair.params["fft_lengths"])
    if value.stack or value.extreme or value.is_special or any(split.dim >= first for split in value.splits):
        return [pair.lost("no rule")]
    return [value.replace(is_nonnegative=False)]

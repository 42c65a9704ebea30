"""`RULES`: the rule of each primitive, of all modules of this package."""

from jdist._src.jaxpr.relation_rules import (  # noqa: F401  # they register their rules
    arithmetic,
    collectives,
    elementwise,
    indexing,
    parts,
    products,
    random_numbers,
    reductions,
    shapes,
)
from jdist._src.jaxpr.relation_rules.equation_pair import ELEMENTWISE as ELEMENTWISE
from jdist._src.jaxpr.relation_rules.equation_pair import RULES as RULES

"""The rules of the equivalence analysis: the relation of the results of one equation, from those of its operands."""

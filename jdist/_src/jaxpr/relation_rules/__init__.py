"""The rules of the equivalence analysis: the relation of the results of one equation, from the relations of its operands."""

"""Collectives over named mesh axes, and the algorithms of the all-reduce.

Read `ops` first: it implements the collectives of replica functions for trees, over explicit axes. `cross_device_ops`
defines the public all-reduce algorithms (`AllReduce`, `HierarchicalAllReduce`, `ReductionToOneDevice`) and the packing of small
leaves.
"""

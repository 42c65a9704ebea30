"""Collectives over named mesh axes, and the algorithms that implement the all-reduce.

Read `ops` first: it defines `all_reduce`, `all_gather`, `broadcast` and `reduce_scatter` over explicit axes.
"""

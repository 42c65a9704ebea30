"""Strategies: an execution backend plus defaults.

Read `base` first: it defines `Strategy` with `run`, `step` and `init`. Each strategy is one module.
"""

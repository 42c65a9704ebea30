"""`ParameterServerStrategy`: workers compute gradients at their own speed, and servers apply them to the state.

A step is cut in two (`jaxpr.server_partition`): the part of a worker, and the updates of groups of state leaves, which the
servers run. Read `strategy` first, then `engine`, which decides when a worker starts and when its results are applied.
"""

"""Strategies: an execution backend with its defaults, and the methods of the host program.

Read `base` first: it defines `Strategy` with `run`, `step` and `init`. Each strategy is one module: `mirrored`, `one_device`,
`sharded`, `central_storage`, `multi_worker`, `tpu`. `automatic` chooses one of them, and `current` holds the current one.
"""

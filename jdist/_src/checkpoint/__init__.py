"""Checkpoints: saves a state, and restores it under any strategy and on any number of devices.

Read `checkpointer` first. A save builds a `save_plan`, and `writer` writes it with orbax in the background; a restore builds a
`restore_plan` from the `manifest`, and `storage` reads the arrays. `tree_format` names the leaves of a tree, `fingerprint`
computes their checksums, and `process_sync` compares the calls of several processes.
"""

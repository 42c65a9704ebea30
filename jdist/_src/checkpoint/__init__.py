"""Checkpoints: saving a state, and restoring it under any strategy and number of devices.

Read `checkpointer` first. `tree_format` describes the saved tree, `restore_plan` how each leaf is placed.
"""

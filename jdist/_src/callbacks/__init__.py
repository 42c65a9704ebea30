"""Callbacks of the training loop: checkpoints, logs, early stopping, averages, profiles.

Read `jdist._src.training.events` first: it defines the base class `Callback` and the events that it receives.
"""

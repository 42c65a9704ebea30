"""Callbacks of the training loop.

Read `jdist._src.training.events` first: it defines the events that a callback receives.
"""

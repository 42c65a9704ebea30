"""Starts the processes of a program on this machine, forwards their output and signals, and ends them.

Read `attempt` first: it runs all processes once and returns how each of them ended. `command` is one process. `end_rules` ends
them after a failure or a signal. `child` is the program of each process, and `guard` the program that ends the processes if the
launcher is killed. `ray_engine` starts the processes on a Ray cluster, and `job` starts them again after a failure. No module
of this package imports JAX.
"""

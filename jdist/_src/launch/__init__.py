"""Starts the processes of a program on this machine, forwards their output and signals, and ends them.

Read `attempt` first: it runs all processes once and returns how each of them ended. `child` is the program of each process, and
`guard` the program that ends the processes if the launcher is killed. No module of this package imports JAX.
"""

"""Plans: programs compiled for devices that are not attached, their memory, their collectives and a model of their time.

Read `plan` first. It compiles a step for each number of devices and combines the results of the other modules.
"""

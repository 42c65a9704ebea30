"""Reports of the analyses of a program, and checks at run time.

`explain` reports the analyses of a step of jdist (`explanation`, drawn by `flow_drawing`), and `check` the analyses of
functions under `jax.pmap` and `jax.shard_map` (`check_report`). At run time, `copies` compares the copies of replicated values
by checksums (`checksums`), `printing` prints values per replica in order, `checked` adds the checks of `checkify` to a program
by a stage, and `slow_lines` warns of lines that slow down a loop.
"""

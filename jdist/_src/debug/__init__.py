"""Checks of programs at run time: replicated values, prints of replicas, and operations with an invalid result.

`copies` compares the copies of replicated values by checksums (`checksums`). `printing` prints values per replica in order, and
`checked` adds the checks of `checkify` to a program by a stage.
"""

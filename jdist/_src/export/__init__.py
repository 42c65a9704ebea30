"""Writes a function together with its weights, and weights alone as safetensors files.

Read `export` first; `load` reads what `export` wrote. `weights` writes and reads safetensors files, with the reader of
`tensor_files`.
"""

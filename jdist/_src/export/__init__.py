"""Functions with their weights exported as a directory, and weights as safetensors files.

Read `export` first; `load` reads what it writes.
"""

"""Private modules of jdist, one package per subject, in the order in which data flows. The public API is in `jdist/*.py`."""

"""The version of jdist."""

__version__ = "0.1.0"

"""The version of jdist."""

__version__ = "0.2.0"

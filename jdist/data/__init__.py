"""Data: which replica gets which example, and in which order."""

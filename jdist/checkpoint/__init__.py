"""Checkpoints: what training has come to, kept in files, and brought back onto any devices."""

"""Test kit: strategies by name, assertions, processes."""

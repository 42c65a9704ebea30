"""Strategies: where a step runs. One final class a file, over one base."""

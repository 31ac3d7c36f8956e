"""Benchmarks: each prints a ratio against a peer or a limit, measured in the same run."""

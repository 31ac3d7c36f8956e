"""Simulated users: the contract, the YAML list, and the built-in interactions."""

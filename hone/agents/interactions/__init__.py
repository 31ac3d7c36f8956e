"""Simulated users: the contract, the YAML list, and built-in ones."""

"""Simulated users: the contract and the built-in interactions."""

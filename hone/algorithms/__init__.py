"""Advantages, policy losses, KL, value loss, credit, correction: pure functions.

Nothing here talks to another process or reads a file; only the KL controllers hold state.
"""

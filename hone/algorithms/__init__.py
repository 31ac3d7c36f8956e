"""Advantages, policy losses, KL, value loss, credit, correction: pure functions.

Nothing here talks to another process, reads a file, or holds state beyond a KL controller's value.
"""

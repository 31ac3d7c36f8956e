"""Starts a Ray cluster over several machines for one command: `hone launch` and `hone jobs`."""

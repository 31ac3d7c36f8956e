"""Agents: how one row becomes a trajectory, in one turn or many."""

"""The RL loop, a list of verbs, and what surrounds it."""

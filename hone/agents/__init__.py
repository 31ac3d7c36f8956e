"""Agent loops, which produce trajectories of one or several turns, and their tools."""

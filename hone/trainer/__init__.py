"""Trainers: the loops, and the programs that start them."""

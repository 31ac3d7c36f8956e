"""Supervised fine-tuning on the same engine as RL."""

"""Transfers weights by Hugging Face name from a training engine to rollout engines."""

"""Rollout engines, which implement one contract from token ids to token ids."""

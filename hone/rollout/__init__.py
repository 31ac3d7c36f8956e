"""Rollout engines: each generates response token ids from prompt token ids; all have one contract."""

"""Rollout engines: token ids in, token ids out, behind one contract."""

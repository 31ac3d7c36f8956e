"""Rollout engines, which generate token ids from token ids behind one contract."""

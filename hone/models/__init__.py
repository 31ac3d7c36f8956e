"""Models: loading, heads, LoRA, attention, and tiny models for tests."""

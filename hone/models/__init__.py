"""Models: loading, heads, LoRA, attention and the tiny ones made on the spot."""

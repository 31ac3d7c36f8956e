"""The training engine: packed rows, micro-batches, optimizer, checkpoints."""

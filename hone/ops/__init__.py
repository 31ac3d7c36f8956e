"""Tensor operations without model or config: masked statistics, log-probs, packing, attention."""

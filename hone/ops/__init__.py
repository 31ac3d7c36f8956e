"""Tensor operations without model or config: masked statistics, groups, balancing, log-probs, packing."""

"""Pure tensor maths: masked statistics, groups, balancing, log-probs, packing. No model, no config."""

"""The native engine: continuous batching over the parameters of the training module."""

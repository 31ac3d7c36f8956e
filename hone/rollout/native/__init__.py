"""The native engine: continuous batching over the training module's own parameters."""

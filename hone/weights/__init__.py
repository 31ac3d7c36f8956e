"""From a training engine to a rollout engine: new weights by their Hugging Face names."""

"""Hugging Face checkpoints: configuration, tensors and folders, for any training backend."""

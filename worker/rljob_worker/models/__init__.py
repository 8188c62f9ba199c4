"""Hugging Face checkpoints <-> Megatron GPT models."""

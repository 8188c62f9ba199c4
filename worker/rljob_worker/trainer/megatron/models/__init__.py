"""Megatron's GPT models, and the mapping of their parameters to Hugging Face tensors."""

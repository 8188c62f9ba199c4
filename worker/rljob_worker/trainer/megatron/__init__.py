"""Training with Megatron: tensor, pipeline, expert and data parallelism, and its distributed optimizer."""

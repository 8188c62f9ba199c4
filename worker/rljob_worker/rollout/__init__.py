"""Generation with vLLM: engines, seeds, and the environment that their processes need."""

"""Environments that answer a policy turn by turn in text, and the confined processes that hold them."""

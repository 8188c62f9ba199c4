"""Prompts: reading, rendering, tokenizing, ordering."""

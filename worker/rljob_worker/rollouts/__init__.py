"""Rollouts: prompts become groups of scored samples, and these a batch."""

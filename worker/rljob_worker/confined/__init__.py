"""Processes that run code which nobody checked, and what they can reach."""

"""Copies of the watched objects, and what is read of each."""

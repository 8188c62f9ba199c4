"""Scoring responses: built-in rewards, users' own functions, and what runs them beside generation."""

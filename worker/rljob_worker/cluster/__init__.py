"""Processes of a job: trainers and engines on nodes, how they are placed, called and replaced."""

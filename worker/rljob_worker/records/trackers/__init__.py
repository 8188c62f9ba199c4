"""Experiment trackers: each package in a process of its own, so that nothing it does reaches the driver."""

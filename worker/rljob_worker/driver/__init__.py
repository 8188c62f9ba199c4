"""The driver: the one process that runs the loop and owns the records."""

"""Report for a person after a run."""

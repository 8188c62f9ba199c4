"""State that outlives a driver: checkpoints, the run folder and its owner, the journal, and recovery."""

"""Launch scripts and configurations of other frameworks, read into a manifest; nothing of them is run."""

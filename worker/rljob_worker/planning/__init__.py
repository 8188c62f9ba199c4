"""How much memory a job will need, from its spec and the model's config alone."""

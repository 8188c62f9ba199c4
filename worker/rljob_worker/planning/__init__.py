"""Memory that a job will need, from its spec and the model's config alone."""

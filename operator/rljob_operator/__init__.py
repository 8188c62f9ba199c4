"""The operator: RLJobs become Ray clusters, drivers are followed, and what was seen is written down."""

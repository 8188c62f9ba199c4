"""The API server: access, requests, what is written beside jobs (Events, the Lease), and tokens."""

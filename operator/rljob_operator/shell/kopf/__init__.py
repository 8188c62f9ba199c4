"""Kopf's process: handlers, settings, and the session that it watches with."""

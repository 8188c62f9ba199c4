"""Handing the trainers' weights to the engines of one host, verified: plan -> two shared slots -> vLLM's loader."""

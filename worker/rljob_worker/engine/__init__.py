"""One engine: vLLM in a process of its own, what it is started with and what it is asked for."""

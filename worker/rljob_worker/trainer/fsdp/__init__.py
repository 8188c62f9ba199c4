"""FSDP2 over transformers' models: torch shards parameters row by row and gathers a layer where it computes."""

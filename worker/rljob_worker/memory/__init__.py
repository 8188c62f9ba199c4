"""Memory of colocated processes: the CPU arena, the memory-saver state machine and the ledger."""

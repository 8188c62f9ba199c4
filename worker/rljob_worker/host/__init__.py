"""Access to the machine: processes, files, memory, threads. The standard library alone."""

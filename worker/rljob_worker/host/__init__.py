"""What this project asks of the machine below it: processes, files, memory, threads. The standard library alone."""

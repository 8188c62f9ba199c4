"""Types, numbers and names that cross a process border, each once for writer and reader."""

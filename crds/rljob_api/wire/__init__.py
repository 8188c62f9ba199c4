"""What crosses a process border: each type, number and name once, for who writes it and for who reads it."""

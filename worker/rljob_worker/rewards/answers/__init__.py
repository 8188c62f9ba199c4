"""Final answers of mathematics: finding them in a response, reading them, and comparing two of them.

Time is bounded by what is read, not by a clock: texts beyond a length, nesting beyond a depth and numbers beyond a size
are compared as they are written. There are no signals, and the same two texts give the same score on every machine.
"""

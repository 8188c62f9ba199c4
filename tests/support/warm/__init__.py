"""Processes that tests start with what they import already imported: forked from one that imported it once.

A driver and a trainer import torch, Megatron and Ray for longer than most tests then use them. Here a
process for each of these roles imports them once and is forked for each start (`server.py`). A fork is given what a new
process would have: arguments, environment, folder, standard files, a session of its own. Variables that libraries read
while they are loaded are those of the process that it is forked from; for other values another such process is made.
"""

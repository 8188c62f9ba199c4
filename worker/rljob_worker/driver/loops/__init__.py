"""The modes: a loop for each, over the same objects."""

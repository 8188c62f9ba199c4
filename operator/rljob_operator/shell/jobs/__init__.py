"""The jobs' queue, and what is done with one: observe, reconcile, carry out."""

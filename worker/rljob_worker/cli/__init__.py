"""The `rljob` command."""

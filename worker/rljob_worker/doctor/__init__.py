"""`rljob doctor`: looks at a machine and says what a job would stumble over, before it does."""

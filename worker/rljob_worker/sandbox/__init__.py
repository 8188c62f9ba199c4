"""Programs that a policy wrote, each in a process that can do nothing but compute and answer."""

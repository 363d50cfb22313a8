"""One case, in a process that may die."""

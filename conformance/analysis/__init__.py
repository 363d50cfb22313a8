"""Error bounds of honest results."""
